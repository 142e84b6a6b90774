"""Plans: sources and a target checked against each other, the order of their parts, and the routes. No length, no address.

A copy's way goes on from here to lanes.pyx: `units_to_move` says which units of each part move at a request's marks, and
`emit_bundle` and `emit_part` hand them over as extents, in order, neighbours merged.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport STATE, Error, PartSpec, PlaceSpec, Request
from strata_copy.lineage cimport MAX_KIN, Known
from strata_copy.states cimport StateData

cdef enum:
    MAX_SOURCES = MAX_KIN
    MAX_DEVICES = 16
    SMALL = 16384           # bytes of a part that moves before its layer where others lie evenly beside it

# How bytes travel.
cdef enum Route:
    ROUTE_LOCAL     # within one device
    ROUTE_OUT       # device to host memory
    ROUTE_IN        # host memory to device
    ROUTE_RING      # pinned to pinned, in two hops through chunks on a device
    ROUTE_UNSTAGE   # device to pageable memory, through pinned chunks
    ROUTE_STAGE     # pageable memory to a device, likewise
    ROUTE_HOST      # host memory to host memory where one is pageable, by helpers
    ROUTE_PEER      # device to device by P2P, carried by the source
    ROUTE_RELAY     # device to device without it, in two hops through pinned chunks; carried by the target
    ROUTES

# Whether staging has it: helpers copy, which only the worker asks for.
cdef inline bint is_staged(int32_t route) noexcept nogil:
    return route == ROUTE_STAGE or route == ROUTE_UNSTAGE or route == ROUTE_HOST

# One rectangle of bytes: `rows` of `width`, `target_pitch` and `source_pitch` apart.
cdef struct Extent:
    char *target
    const char *source
    int64_t width, rows, target_pitch, source_pitch

# Where a part goes.
cdef struct PartRoute:
    int32_t route, device
    int32_t other               # the device at the other end of PEER and RELAY, else -1
    int32_t device_number, other_number     # of the copier that carries it
    int32_t lane                # of the device; LOCAL: the first of those that it may take
    StateData *source

# Small parts of many layers, or their patches, that lie evenly spaced on both sides: they move in one copy before the first layer.
# Submitting a copy takes the CPU as long as the device takes for megabytes, and a conversation has a third of its copies in such parts.
cdef struct Bundle:
    int32_t part, last, count   # the first and the latest part, and how many
    bint patches                # the patches of these parts, not the parts
    int64_t target_pitch, source_pitch

# Units [first, end) of a part move, and before them the sinks of a window, [0, sinks).
cdef struct Units:
    int64_t first, end, sinks

cdef struct PlanData:
    int64_t references
    int32_t n_sources
    StateData *sources[MAX_SOURCES]
    StateData *target
    PartRoute *parts            # one for each part of the layout
    Bundle *bundles             # those of a single part are none: it moves with its layer
    int32_t n_bundles
    int32_t *part_bundle        # for each part the bundle that it may move in, or -1
    int32_t *patch_bundle       # the same for its patch
    uint64_t *early             # for each layer and device number the lanes of its parts that move in bundles, as bits
    int32_t n_events            # events that a ticket of this plan takes at most: one for each layer and way in it
    uint64_t copier             # the number of the copier that it was made for

# Takes one extent; a status other than OK ends the emission.
ctypedef int (*ExtentSink)(void *sink, const Extent *extent) noexcept nogil

# Extents on their way to a sink: the last one waits for a neighbour to merge with.
cdef struct Emission:
    ExtentSink take
    void *sink
    Extent pending              # rows == 0: none
    int32_t part                # of the extent that the sink takes; the first one where several were merged
    size_t target_piece, source_piece


cdef PlanData *plan_new(StateData **sources, int32_t n_sources, StateData *target, const int32_t *source_of_group,
                        Error *error) noexcept nogil
cdef void plan_hold(PlanData *plan) noexcept nogil
cdef void plan_drop(PlanData *plan) noexcept nogil

# Every check of a request against a plan's layout and places. OK: units[part] is filled for each part and bytes is their sum. Where the
# request does not name `begin`, they are what the states' lineages do not cover; `known` is for kinship.pxd: handed_on.
cdef int units_to_move(const PlanData *plan, const Request *request, Units *units, int64_t *bytes, Known *known,
                       Error *error) noexcept nogil
# The same but for the room in a target that is an image, which may still be given it.
cdef int units_asked(const PlanData *plan, const Request *request, Units *units, int64_t *bytes, Known *known, Error *error) noexcept nogil

# Banks hold running state; a part that grows and is kept once has only bank 0, whatever bank its group moves.
cdef inline int64_t bank_of(const int64_t *banks, const PartSpec *part, const PlaceSpec *place) noexcept nogil:
    return 0 if banks == NULL or (part.growth.rule != STATE and place.banks == 1) else banks[part.group]

# Bytes of the units of a part that move.
cdef inline int64_t bytes_of(const PartSpec *part, const Units *units) noexcept nogil:
    return (units.sinks + units.end - units.first) * part.growth.unit_bytes * part.rep

# Once the parts have their routes and lanes: fills what follows from them, the bundles and n_events. Once for a plan.
cdef void plan_settle(PlanData *plan) noexcept nogil
# Whether a part moves in a bundle, before its layer.
cdef bint moves_early(const PlanData *plan, int32_t part) noexcept nogil
cdef int emit_bundle(Emission *emission, const PlanData *plan, const Request *request, const Bundle *bundle,
                     const Units *units) noexcept nogil
cdef int emit_part(Emission *emission, const PlanData *plan, const Request *request, int32_t part,
                   const Units *units) noexcept nogil
cdef int emit_end(Emission *emission) noexcept nogil
# The units that exist and do not move.
cdef int emit_unmoved(Emission *emission, const PlanData *plan, const Request *request, int32_t part, const Units *units) noexcept nogil
