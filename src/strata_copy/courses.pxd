"""Courses: what one ticket queues on one device, in order, and how far it is.

A course can be gone on with in as many steps as wanted: the caller of submit takes one without an end, the worker takes many small ones.
It begins with the bundles, goes layer by layer, records behind each layer the events that wait_layer hands out, and ends with the event
and the word behind everything. It is used under the copier's lock.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error, Request
from strata_copy.cudart cimport Guard, cudaEvent_t
from strata_copy.lanes cimport LANES, Budget, CopierData, DeviceLanes, Lane, Ring, Slot, SlotDevice
from strata_copy.plan cimport Emission, PlanData, Units

cdef enum:
    BUNDLES = -1            # the layer before the first
    NO_WAY = -1             # of a step: none yet
    ANY_WAY = 2 * LANES     # lane n through staging is way LANES + n
    WORK_OF_A_HOOK = 4      # entries that a hook adds to its stream for each layer, as far as is counted

# Where a step ends, besides at its budget's end and where everything is queued:
cdef enum:
    STEP_ON                 # nowhere
    STEP_ONE_WAY            # where the next bytes are another way's
    STEP_BESIDE             # likewise; and what a ring would take, helpers take

cdef struct Course:
    CopierData *copier
    const PlanData *plan
    const Request *request
    const Units *units
    Slot *slot
    SlotDevice *share           # the slot's of this device
    DeviceLanes *device
    cudaEvent_t gate            # behind what the request waits for; NULL: its waits themselves are looked at
    # How far it is:
    int32_t layer               # that is being queued; n_layers: the end
    int32_t extent              # extents of the layer that are queued
    int64_t into                # bytes of the next one
    bint entered, started, ended    # the layer was begun; a copy call was made; everything is queued
    int32_t promised            # layers whose events are recorded; told once their bytes are in pageable memory
    # Lanes, as bits:
    uint64_t used               # that this ticket has opened
    uint64_t here               # that have bytes of this layer
    uint64_t unmarked           # that have bytes of earlier layers without events
    int32_t local               # the local lane of this layer, or -1
    int64_t queued[LANES]       # bytes
    cudaEvent_t last[LANES]     # event behind the latest layer; NULL where the hook's latest work is behind it
    cudaEvent_t hooked          # behind the hook's latest work
    uint64_t hook_lanes         # that the hook's stream is behind: their bundles, and layers up to its latest
    int64_t unmarked_bytes
    int32_t first_unmarked      # the first layer without events
    # Of the step under way:
    Budget *budget
    const Guard *guard
    Error *error
    Emission emission
    int32_t skip                # extents that an earlier step has queued
    int32_t lane, route         # where extents go; lane -1: none yet
    Ring *ring                  # through which, or NULL
    Lane *gathering             # a lane that may have copies which are not queued yet, or NULL
    int32_t gathered_layer, gathered_part   # of the latest of them
    int32_t only                # the one way that the step may use
    int32_t step


# Prepares a course on device `d` of a ticket's slot.
cdef void course_begin(Course *course, CopierData *copier, Slot *slot, int32_t d, const Request *request, const Units *units,
                       cudaEvent_t gate) noexcept nogil
cdef int course_go(Course *course, Budget *budget, int32_t step, const Guard *guard, Error *error) noexcept nogil
# The waits that a stream may get of it before its first copy there.
cdef int32_t course_waits(const Course *course) noexcept nogil
# Before a copy call: from here on the target may differ.
cdef void course_touch(Course *course) noexcept nogil
# Tells the layers anew, after bytes have come to pageable memory.
cdef void course_tell(Course *course) noexcept nogil
# Ends it where it is: what was queued still runs, and the ticket's end is behind it. PAUSE while helpers are to copy: again later.
cdef int course_cut(Course *course, const Guard *guard, Error *error) noexcept nogil
# Bytes that the lane of the latest step takes before it changes streams: a step that ends there cuts no copy in two, where it goes on the
# same lane. Through a ring there are slots instead.
cdef int64_t course_room(const Course *course) noexcept nogil
