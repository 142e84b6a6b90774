"""Lanes: the streams of each device, how a chunk leaves a gap for other copies, and the tables that all of it lives in.

Who owns what
-------------
There is one copier in a process (copier.pxd). Its tables are static, so that a ticket can be looked up at any time; its streams, events,
rings and words are made when it opens and destroyed when it closes. `CopierData.lock` guards what is queued on lanes, opening and closing,
the taking and freeing of slots, the jobs of the worker (worker.pxd), and StateData.writer and .readers. The order of locks: the GIL, then
`CopierData.lock`, then `ArenaData.lock` (pieces.pxd) or one of the two that only guard a condition (news.pxd; worker_thread.pxd). None is
taken from the right to the left. Everything else that threads share is atomic, and a slot is kept from being freed by a pin (tickets.pxd).
An arena that was dropped without `close` while a ticket had an image of it is given back when that ticket is swept, by a thread of its
own and under `CopierData.lock`: submits wait for that.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from strata_copy.abi cimport Error
from strata_copy.cudart cimport Guard, cudaEvent_t, cudaStream_t
from strata_copy.plan cimport MAX_DEVICES, Extent, PlanData, Units
from strata_copy.states cimport MAX_TICKETS, TICKET_WORDS
from strata_copy.system cimport pthread_mutex_t


cdef enum:
    LOCAL_LANES = 8         # 1.78 GB within an H200, of its ceiling: 2 lanes 0.77, 4 lanes 0.81, 6 0.85, 8 0.88, 12 0.87
    OUT_LANE = LOCAL_LANES
    IN_LANE
    HOST_LANE
    PEER_LANE               # to each other device by P2P
    RELAY_LANE = PEER_LANE + MAX_DEVICES    # from each other device without it: the second hop
    LANES = RELAY_LANE + MAX_DEVICES        # of one device; sets of lanes are bits of a uint64_t
    STAGING = LANES         # in such a set: the chunks that one ticket has at a time
    MAX_AFTER = 32          # waits of one request
    PEER_CHUNKS = 8         # chunks of other lanes that take as long by P2P as one of them: NVLink is so much faster
    PEER_STEPS = 4          # times that many are a peer lane's chunk: of NVLink both ways at once 1 gives 0.975, 2 0.980, 4 0.985
    CELLS = 256             # words that tell the end of a ticket
    ENDS = LANES - PEER_LANE + 1    # streams of a device that tell it: its own, and those of its lanes between devices
    MAX_RING = 16           # slots of a ring
    RING_PIECES = 64        # pieces of one slot
    ALIGNMENT = 512         # bytes: of slots, of chunks, and of the pieces in them; and of where long rows are cut
    GATHERED = 32           # copies of one call over a link: one by one each takes 2 us of NVLink's time and 3 of PCIe's, in one call 0.5
    ENTRIES_IN_FLIGHT = 960     # on a lane: a stream takes 1,020, then it holds its caller until something on it is done
    PAUSE = 16              # a status of our own: the budget is used up, and there is more

# What streams hold: copies, events and waits that were queued, and how many of them are known to be done.
cdef struct Entries:
    int64_t queued, done

# A way for one route's direction on one device, in order from its first copy to its last. Lanes `out` and `in` are a pair of
# streams: after each chunk the other stream goes on, behind the chunk by event. A copy engine stays with a stream for as long as
# that stream has copies ready, so the change of streams is where other copies get in. A local lane is one stream: copies within a
# device hold no copy engine. Lanes between devices are made for pairs that a plan needs, each for one pair: what holds up copies from a
# device to another one holds up no others.
cdef struct Lane:
    cudaStream_t streams[2]
    cudaEvent_t chain[2]
    int32_t paired, turn        # turn: the stream that takes the next copy
    int64_t chunk, in_chunk     # bytes after which a paired lane changes streams, where a piece ends; bytes since it did
    Entries *entries            # of its streams: `own`, or with a ring between devices the second lane's for both
    Entries own
    Entries ends                # of `finish`
    int32_t tickets             # in flight that may use it
    bint crosses                # it is a peer lane,
    int32_t source, target      # between these devices, as ordinals
    cudaStream_t finish         # of a lane between devices: as DeviceLanes.finish, for tickets that use it
    # Of a lane over a link: copies that are not queued yet, so that one call queues them.
    bint gathers
    int32_t gathered
    bint singly                 # that call was refused, and the copies by themselves were not: none are gathered any more
    void *targets[GATHERED]
    const void *sources[GATHERED]
    size_t sizes[GATHERED]

cdef struct DeviceLanes

# The two-hop ring: one lane fills a slot, another one empties it. With chunks on a device it copies host memory to host memory, by the
# device's lanes `in` and `out`; with pinned chunks it copies from a device to another one, by lanes of its own. What a slot holds is
# queued on both lanes before anything else is, so tickets may share the ring.
cdef struct Ring:
    char *memory
    int32_t slots, at           # at: the slot that is being filled
    int64_t slot_bytes, fill
    DeviceLanes *filler         # the devices of the two lanes
    DeviceLanes *emptier
    Lane *first
    Lane *second
    Lane own                    # the first lane of a ring between devices
    bint shares                 # what it holds at a time, it shares with other rings
    int32_t tickets             # in flight that go through it, of a ring that shares
    int64_t sent                # entries of the first lane that the second one is behind
    cudaEvent_t filled[MAX_RING]
    cudaEvent_t emptied[MAX_RING]
    bint used[MAX_RING]         # emptied[i] was recorded and the first lane is not behind it yet
    int32_t n
    Extent pieces[RING_PIECES]  # from the slot to where they go

# How copies get from a device of the copier to another one.
cdef enum Link:
    LINK_NONE       # not yet: no plan needed it
    LINK_PEER       # on the source's peer lane
    LINK_RELAY      # through the target's ring

# What staging does for a ticket (staging.pxd).
cdef enum:
    STAGE_OUT           # device to pageable memory: a lane fills a chunk, helpers empty it
    STAGE_IN            # pageable memory to device: helpers fill, a lane empties
    STAGE_BESIDE        # pinned to pinned memory, beside a ring: helpers copy from end to end, and the chunk's memory is not used
    STAGE_HOST          # host memory to host memory where one is pageable: likewise

# A chunk of pinned memory between a device and pageable memory.
cdef enum:
    STAGE_FREE
    STAGE_FILLING       # pieces are being added
    STAGE_LANE          # a lane copies
    STAGE_HELPERS       # helpers are to copy
    STAGE_BUSY          # helpers copy
    STAGE_COPIED        # helpers have copied

cdef struct StageChunk:
    char *memory
    cudaEvent_t event           # behind the lane's half
    int32_t state, way, layer, n    # layer: of its first piece
    int64_t fill
    int64_t upto                # entries of the lane that the event is behind
    Extent to_chunk[RING_PIECES]
    Extent from_chunk[RING_PIECES]

cdef struct Staging:
    char *memory
    int32_t slots, at           # at: the chunk that is being filled
    int64_t chunk_bytes
    uint64_t owner              # the ticket that has it, or 0
    int32_t way
    bint may_read               # what the ticket waits for is over, as helpers need it that read its source
    cudaEvent_t opened          # behind what the ticket waits for
    StageChunk chunks[MAX_RING]

cdef struct DeviceLanes:
    int32_t device
    int32_t poisoned            # atomic; the sticky CUDA error that ended the device
    int max_pitch
    Lane lanes[LANES]
    cudaStream_t finish         # joins the lanes of a ticket and tells its end
    cudaStream_t hook           # where a request's hook enqueues
    Entries ends, hooks         # of these two streams
    cudaEvent_t gates[MAX_AFTER]    # recorded on the streams that a request waits for
    Ring ring
    int32_t links[MAX_DEVICES]  # to each device number
    Ring *relays[MAX_DEVICES]   # from each device number, or NULL
    Staging staging
    uint64_t *cells             # on the device: cells[i] == i + 1

# What may be queued before the worker turns to something else.
cdef struct Budget:
    int64_t bytes
    int32_t calls, layers

# A ticket's share of one device. Events are numbers of Slot.events of the device.
cdef struct SlotDevice:
    bint used, involved         # involved: it carries something, or is at the other end of what another one carries
    uint64_t lanes              # that it may use, as bits
    uint32_t relays             # rings that it goes through, from these device numbers, as bits
    uint64_t ended              # lanes of which the end is behind entries up to upto[lane], as bits
    int64_t upto[LANES]         # of the others: how many there were before this ticket
    int64_t ends_upto, hooks_upto   # likewise of the stream that tells the end, `end` of ENDS, and of the hook's; 0: it used none
    int32_t end
    int32_t taken               # events
    int32_t queued              # layers whose events are recorded; n_layers + 1: everything is queued
    uint64_t bundle_lanes       # that bundles moved on, as bits
    int32_t bundle_local        # the local one of them
    int32_t bundle_event[LANES]     # behind the bundles of a lane
    int32_t *first_event        # events [first_event[l], end_event[l]) are behind what moved with layer l,
    int32_t *end_event
    uint64_t *layer_lanes       # on these lanes, as bits
    cudaEvent_t done            # behind everything
    uint64_t *word              # pinned; the device sets it to the slot's `word` when everything on it is done

# One ticket's place. Its events belong to it for as long as the copier is open.
cdef struct Slot:
    uint64_t ticket             # atomic; 0: free
    int32_t pins                # atomic; threads that look at it, negative while it is being freed
    int32_t status              # atomic; QUEUING (endings.pxd), then AGAIN while in flight, then the outcome
    int32_t released, reported  # atomic; the caller is done with it; `finished` has given it out
    int32_t layers_queued       # atomic; layers whose events are recorded on every device; n_layers + 1: everything is queued
    int32_t holding             # under the lock; it still holds source and target
    int32_t verdict             # atomic; how it ends once its word arrives: OK, or why it was cut short
    bint fed                    # the worker queues it
    bint on_lanes               # it counts among the tickets of lanes and rings
    bint touched, counted       # a copy call was made; the target's generation counts the ticket already
    PlanData *plan
    int32_t n_layers
    uint64_t depends[TICKET_WORDS]  # the slots of the earlier tickets that it comes behind
    SlotDevice *devices         # one for each device of the copier
    cudaEvent_t *events         # layer_events of each device, in the order in which they are recorded
    uint64_t *words             # one for each device and each of its streams that tell ends: a late word of an earlier use comes first
    uint64_t word, uses         # of the slot: a late word is another one
    int64_t queued_bytes, landed    # of a fed ticket; landed: atomic, those that are known to have landed
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
    int32_t window              # chunks that a fed ticket has queued ahead on a device; by P2P they are PEER_CHUNKS times as long
    int32_t relays_in_flight    # rings between devices that tickets in flight go through
    int32_t relay_slots         # of each such ring
    int64_t relay_slot_bytes
    int32_t helpers             # threads, beside the worker
    int64_t chunk               # bytes after which a lane between device and host changes streams
    int64_t patience            # ns after which a ticket whose word is missing is asked for
    DeviceLanes *devices
    Slot slots[MAX_TICKETS]
    uint64_t *words             # pinned: n_devices * ENDS for each slot
    Units *units                # scratch of submit, under the lock
    int32_t max_parts


cdef int32_t device_index(const CopierData *copier, int32_t device) noexcept nogil

# Queue the bytes of an extent from `into` on, in chunks where the lane is paired: on a lane, or through the ring. PAUSE where the budget
# ends first; `into` says how far it is.
cdef int lane_copy(const CopierData *copier, DeviceLanes *device, Lane *lane, const Extent *extent, int64_t *into, Budget *budget,
                   const Guard *guard, Error *error) noexcept nogil
cdef int ring_copy(const CopierData *copier, Ring *ring, const Extent *extent, int64_t *into, Budget *budget,
                   const Guard *guard, Error *error) noexcept nogil
# A lane whose chunk is full changes streams. Done before each copy where it was not before.
cdef int lane_ready(DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil
# The first lane waits for the slot that it fills next to be empty. Done by ring_copy where it was not before.
cdef int ring_ready(Ring *ring, const Guard *guard, Error *error) noexcept nogil
# Queues what a lane has gathered: before anything that has to come behind it.
cdef int lane_flush(DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil
# Sends on what the ring's slot holds: before anything else is queued.
cdef int ring_flush(const CopierData *copier, Ring *ring, const Guard *guard, Error *error) noexcept nogil
# One piece: that much of an extent, from byte `into` on, as one CUDA call can express; and onto a lane, at once.
cdef void cut(const Extent *extent, int64_t into, int64_t most, int64_t max_pitch, Extent *piece) noexcept nogil
cdef int copy_piece(DeviceLanes *device, Lane *lane, const Extent *piece, const Guard *guard, Error *error) noexcept nogil
cdef inline void spend(Budget *budget, int64_t *into, int64_t bytes) noexcept nogil:
    into[0] += bytes
    budget.bytes -= bytes
    budget.calls -= 1
# Bytes that a lane takes before it changes streams.
cdef inline int64_t bytes_in(const Lane *lane) noexcept nogil:
    cdef int64_t left = lane.chunk - lane.in_chunk
    if not lane.paired:
        return <int64_t>1 << 62
    return left if left > 0 else lane.chunk
cdef inline cudaStream_t lane_stream(const Lane *lane) noexcept nogil:
    return lane.streams[lane.turn]
# entries: of the stream; NULL where it is not the copier's.
cdef int record(const DeviceLanes *device, cudaEvent_t event, cudaStream_t stream, Entries *entries, const Guard *guard,
                Error *error) noexcept nogil
cdef int wait_event(const DeviceLanes *device, cudaStream_t stream, cudaEvent_t event, Entries *entries, const Guard *guard,
                    Error *error) noexcept nogil
cdef inline int lane_record(const DeviceLanes *device, const Lane *lane, cudaEvent_t event, const Guard *guard,
                            Error *error) noexcept nogil:
    return record(device, event, lane_stream(lane), lane.entries, guard, error)
cdef inline int lane_wait(const DeviceLanes *device, const Lane *lane, cudaEvent_t event, const Guard *guard,
                          Error *error) noexcept nogil:
    return wait_event(device, lane_stream(lane), event, lane.entries, guard, error)
# Takes the lowest lane out of a set that is not empty.
cdef int32_t next_lane(uint64_t *lanes) noexcept nogil
cdef inline int64_t pending(const Entries *entries) noexcept nogil:
    return entries.queued - entries.done
cdef inline void done_to(Entries *entries, int64_t upto) noexcept nogil:
    entries.done = max(entries.done, upto)
# The end of a ticket is behind what a lane has now: after the event.
cdef void ends_behind(const DeviceLanes *device, SlotDevice *share, int32_t lane) noexcept nogil
# Those on the fullest of these lanes, and of the streams that tell ends of tickets that use them.
cdef int64_t most_pending(const DeviceLanes *device, uint64_t lanes) noexcept nogil
cdef int64_t most_ends(const DeviceLanes *device, uint64_t lanes) noexcept nogil
# A stream that tells ends, of ENDS.
cdef inline cudaStream_t end_stream(const DeviceLanes *device, int32_t end) noexcept nogil:
    return device.finish if end == 0 else device.lanes[PEER_LANE + end - 1].finish
cdef inline Entries *end_entries(DeviceLanes *device, int32_t end) noexcept nogil:
    return &device.ends if end == 0 else &device.lanes[PEER_LANE + end - 1].ends
# Bytes that a slot between devices takes while so many of these rings are in flight.
cdef int64_t relay_room(const CopierData *copier, int32_t rings) noexcept nogil
# Waits until nothing that was queued on a device's lanes runs any more, nor on the way to it: before a failure is told.
cdef int device_drain(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil

# A sticky code of a call that is about no device: it may be any of them.
cdef void poison_all(CopierData *copier, int32_t code) noexcept nogil
# As guard_enter, for what has to be done all the same where that fails: FAILED then. Where every device has failed nothing is called: the
# thread stands on none of them.
cdef void guard_to_close(CopierData *copier, Guard *guard, Error *error) noexcept nogil
cdef int64_t now() noexcept nogil
