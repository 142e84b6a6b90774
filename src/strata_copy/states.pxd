"""States: where one session, slot or image keeps the parts of a layout; its generation, validity, and who uses it now.

The engine owns the memory. A StateData is held by its Python object, by plans, and by tickets in flight; `writer` and `readers`
belong to the copier's lock (lanes.pxd), everything else is written once or atomic.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error, PartSpec, PlaceSpec
from strata_copy.layout cimport LayoutData
from strata_copy.lineage cimport Lineage

cdef enum:
    MAX_TICKETS = 256
    TICKET_WORDS = 4        # MAX_TICKETS bits
    TICKET_BITS = 8         # a ticket is a generation, and below it the number of its slot

cdef inline int32_t slot_of(uint64_t ticket) noexcept nogil:
    return <int32_t>(ticket & (MAX_TICKETS - 1))

# Whether processors use host memory by the address that devices use it by.
cdef inline bint one_address(const PlaceSpec *place) noexcept nogil:
    return place.host_base == NULL or place.host_base == place.base

# Chunks of a part that follow each other in one registration.
cdef struct Run:
    int64_t first, units
    char *base
    size_t bytes, piece

# A part that is kept in chunks of `chunk_units`, each with its runs of a unit one after another. A table is never changed: one that is
# longer takes its place, and the old one lives as long as the state, for somebody may be looking at it.
cdef struct Runs:
    int64_t chunk_units, chunk_bytes
    Runs *before
    int32_t n
    Run items[1]

# Who may read an image.
cdef enum Visibility:
    VISIBLE
    UNPUBLISHED                 # being written, or landed and not published yet
    DISCARDED                   # its memory is somebody else's

# The bytes of one place, from its first to behind its last.
cdef struct Extreme:
    size_t start, end
    int32_t part

cdef struct StateData
ctypedef void (*Release)(StateData *state) noexcept nogil

cdef struct StateData:
    int64_t references
    LayoutData *layout
    PlaceSpec *places           # one for each part of the layout
    size_t *piece               # first byte of the allocation or registration that holds the place; 0: not known
    Extreme *extremes           # by start
    uint64_t generation         # atomic; counts what changed the content: submits into it, resets
    Lineage *lineage            # where its rows come from; made with the state
    int32_t invalid             # atomic; 1 from a failed copy into it until the reset
    int32_t holds               # atomic; tickets in flight that read or write it
    # Of images (images.pxd):
    Runs **runs                 # of each part, or NULL: one that is not kept in chunks; atomic
    void *image                 # ImageData; NULL: not an image
    Release release             # gives back what the image has, before the state is freed
    Release forget              # nothing has landed: at a reset, under the copier's lock
    int32_t visibility          # atomic
    uint64_t writer             # the ticket in flight that writes it, or 0
    uint64_t readers[TICKET_WORDS]  # the slots of the tickets in flight that read it


# A state with empty places, for the caller to fill; NULL without memory.
cdef StateData *state_new(LayoutData *layout, Error *error) noexcept nogil
# Bytes from the first to behind the last of a place; 0 without units; -1 where the numbers fit nothing or overlap.
cdef int64_t place_span(const PlaceSpec *place, const PartSpec *part) noexcept nogil
# Looks at the memory of all places once they are filled: OK, or REFUSED with the part named.
cdef int check_places(StateData *state, Error *error) noexcept nogil
cdef void state_hold(StateData *state) noexcept nogil
cdef void state_drop(StateData *state) noexcept nogil

# Where unit `unit` of a part begins, how many units follow it evenly spaced by `stride` (in a ring up to its end, in chunks as far as they
# follow each other), and the first byte of the allocation that holds them (0: not known). Both sides of every copy are asked through this.
cdef void place_run(const StateData *state, int32_t part, int64_t bank, int64_t unit, char **address, int64_t *units_left,
                    size_t *piece) noexcept nogil

# OK, or REFUSED with both parts named where two states (or one, with itself) share bytes.
cdef int check_apart(const StateData *a, const StateData *b, Error *error) noexcept nogil
