"""Lanes: the streams of each device, how a chunk leaves a gap for other copies, and the copier that owns all of it.

Who owns what
-------------
There is one copier in a process. Its tables are static, so that a ticket can be looked up at any time; its streams, events and words are
made in `copier_open` and destroyed in `copier_close`. `CopierData.lock` guards what is queued on lanes, opening and closing, the taking
and freeing of slots, and StateData.writer and .readers. The GIL is outside of it: it is never taken while the lock is held. Everything
else that threads share is atomic, and a slot is kept from being freed by a pin (tickets.pxd).
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error
from strata_copy.cudart cimport Guard, cudaEvent_t, cudaStream_t
from strata_copy.layout cimport MAX_LAYERS
from strata_copy.plan cimport Extent, PlanData, Units
from strata_copy.states cimport MAX_TICKETS


cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *, void *)
    int pthread_mutex_lock(pthread_mutex_t *)
    int pthread_mutex_unlock(pthread_mutex_t *)
    int pthread_mutex_destroy(pthread_mutex_t *)


cdef enum:
    MAX_DEVICES = 16
    LOCAL_LANES = 8         # 1.78 GB within an H200, of its ceiling: 2 lanes 0.77, 4 lanes 0.81, 6 0.85, 8 0.88, 12 0.87
    OUT_LANE = LOCAL_LANES
    IN_LANE
    HOST_LANE
    LANES                   # of one device
    MAX_AFTER = 32          # waits of one request
    CELLS = 256             # words that tell the end of a ticket

# A way for one route's direction on one device, in order from its first copy to its last. Lanes `out` and `in` are a pair of
# streams: after each chunk the other stream goes on, behind the chunk by event. A copy engine stays with a stream for as long as
# that stream has copies ready, so the change of streams is where other copies get in. A local lane is one stream: copies within a
# device hold no copy engine.
cdef struct Lane:
    cudaStream_t streams[2]
    cudaEvent_t chain[2]
    int32_t paired, turn        # turn: the stream that takes the next copy
    int64_t in_chunk            # bytes since the last change of streams
    # Of the ticket that is being queued:
    bint used
    int64_t queued              # bytes
    cudaEvent_t last            # event behind its latest layer

cdef struct DeviceLanes:
    int32_t device
    int32_t poisoned            # atomic; the sticky CUDA error that ended the device
    int max_pitch
    Lane lanes[LANES]
    cudaStream_t finish         # joins the lanes of a ticket and tells its end
    cudaEvent_t gates[MAX_AFTER]    # recorded on the streams that a request waits for
    uint64_t *cells             # on the device: cells[i] == i + 1

# One ticket's place. Its events belong to it for as long as the copier is open.
cdef struct Slot:
    uint64_t ticket             # atomic; 0: free
    int32_t pins                # atomic; threads that look at it, negative while it is being freed
    int32_t status              # atomic; QUEUING, then AGAIN while in flight, then the outcome
    int32_t released, reported  # atomic; the caller is done with it; `finished` has given it out
    int32_t layers_queued       # atomic; layers whose events are recorded
    int32_t holding             # under the lock; it still holds source and target
    PlanData *plan
    int32_t n_layers
    int32_t *first_event        # recorded[first_event[l]] to recorded[end_event[l]] are behind all that layer l needs
    int32_t *end_event
    int32_t bundle_events       # recorded[0] to recorded[bundle_events] are behind the bundles
    cudaEvent_t *recorded       # events in the order in which they were recorded
    cudaEvent_t *events         # layer_events of each device
    cudaEvent_t *done           # of each device: behind everything on it
    int32_t *taken              # of each device: events taken; -1: the ticket does not use the device
    uint64_t *words             # of each device: pinned; the device sets it to `word` when everything on it is done
    uint64_t word, uses         # of the slot: a late word of an earlier use is another one
    int64_t bytes, started, submitted, ended    # bytes; ns on the monotonic clock
    int64_t asked               # when CUDA was last asked for it, for want of its word
    Error error

cdef enum:
    CLOSED
    OPEN
    CLOSING             # tickets may still be looked at, nothing may be submitted

cdef struct CopierData:
    int32_t state               # atomic
    uint64_t number             # counts the copiers of this process
    pthread_mutex_t lock
    int32_t n_devices, n_slots, layer_events
    int64_t chunk               # bytes after which a paired lane changes streams
    int64_t patience            # ns after which a ticket whose word is missing is asked for
    DeviceLanes *devices
    Slot slots[MAX_TICKETS]
    uint64_t *words             # pinned: n_devices for each slot
    Units *units                # scratch of submit, under the lock
    int32_t max_parts


# The copier if it is open, or NULL. A forked child has none.
cdef CopierData *the_copier() noexcept nogil
# Its tables, open or not.
cdef CopierData *the_tables() noexcept nogil
# NULL and `error` filled where something cannot be had; nothing is left behind then. Changes the thread's current device: call it on
# a thread of its own.
cdef CopierData *copier_open(const int32_t *devices, int32_t n_devices, int32_t n_slots, int32_t layer_events, int64_t chunk,
                             int64_t patience, Error *error) noexcept nogil
# Gives everything back, once no slot is taken any more (tickets.pxd: end_all, free_all). Likewise.
cdef void copier_close(CopierData *copier, Error *error) noexcept nogil
# Makes room for plans of so many parts: as plans are made, never in submit.
cdef int copier_reserve(CopierData *copier, int32_t parts, Error *error) noexcept nogil

cdef int32_t device_index(const CopierData *copier, int32_t device) noexcept nogil

# Queues one extent on a lane, in chunks where the lane is paired.
cdef int lane_copy(const CopierData *copier, DeviceLanes *device, Lane *lane, const Extent *extent, const Guard *guard,
                   Error *error) noexcept nogil
cdef inline cudaStream_t lane_stream(const Lane *lane) noexcept nogil:
    return lane.streams[lane.turn]
# Waits until nothing that was queued on a device's lanes runs any more: before a failure is told.
cdef int device_drain(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil

# A sticky code of a call that is about no device: it may be any of them.
cdef void poison_all(CopierData *copier, int32_t code) noexcept nogil

cdef int64_t now() noexcept nogil
