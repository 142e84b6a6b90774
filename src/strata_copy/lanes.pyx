"""Lanes and rings. Declared, with who owns what, in lanes.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from strata_copy.abi cimport FAILED, OK, POISONED, Error
from strata_copy.atomics cimport load_i32, store_i32
from strata_copy.cudart cimport (
    Guard, cudaErrorInvalidValue, cudaErrorNotSupported, cudaEvent_t, cudaMemcpy3DPeerParms, cudaMemcpyAttributes, cudaMemcpyDefault,
    cudaMemcpySrcAccessOrderStream, cudaStreamCaptureModeRelaxed, cudaStream_t, cudaSuccess, cuda_failed, guard_enter, is_sticky, rt,
)
from strata_copy.plan cimport MAX_DEVICES, Extent

cdef extern from *:
    int count_low_zeros "__builtin_ctzll"(unsigned long long) nogil

cdef enum:
    LONG_PIECE = 64 << 10   # bytes from which on a piece may be longer than was asked for, by less than ALIGNMENT
    SHARED_SLOT = 4 << 20   # two H200s, both ways at once by bare streams: 4 slots of 4 MiB 92 GB/s, 2 of 8 91, 2 of 4 87, 4 of 8 71

# Of all copies of one call, from its first on: sources are read when the stream is there.
cdef cudaMemcpyAttributes in_stream_order
cdef size_t from_the_first = 0
memset(&in_stream_order, 0, sizeof(cudaMemcpyAttributes))
in_stream_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream


cdef int32_t device_index(const CopierData *copier, int32_t device) noexcept nogil:
    cdef int32_t d
    for d in range(copier.n_devices):
        if copier.devices[d].device == device:
            return d
    return -1


cdef int lane_copy(const CopierData *copier, DeviceLanes *device, Lane *lane, const Extent *extent, int64_t *into, Budget *budget,
                   const Guard *guard, Error *error) noexcept nogil:
    cdef int64_t bytes = extent.width * extent.rows, most
    cdef Extent piece
    cdef int status
    while into[0] < bytes:
        if budget.bytes <= 0 or budget.calls <= 0:
            return PAUSE
        most = min(bytes_in(lane), budget.bytes)
        if extent.rows > 1 and extent.width <= lane.chunk:
            most = max(most, extent.width)      # rows stay whole
        cut(extent, into[0], most, device.max_pitch, &piece)
        end_on_boundary(extent, into[0], &piece)
        if lane.gathers and not lane.singly:
            status = gather(device, lane, &piece, guard, error)
        else:
            status = copy_piece(device, lane, &piece, guard, error)
        if status != OK:
            return status
        spend(budget, into, piece.width * piece.rows)
    return OK


cdef int ring_copy(const CopierData *copier, Ring *ring, const Extent *extent, int64_t *into, Budget *budget,
                   const Guard *guard, Error *error) noexcept nogil:
    cdef int64_t bytes = extent.width * extent.rows, most = slot_room(copier, ring), room
    cdef int64_t max_pitch = min(ring.filler.max_pitch, ring.emptier.max_pitch)
    cdef Extent piece
    cdef int status = OK
    while into[0] < bytes:
        if budget.bytes <= 0 or budget.calls <= 0:
            return PAUSE
        room = most - ring.fill
        if ring.n == RING_PIECES or room <= 0 or (room < extent.width <= most and extent.rows > 1):
            if budget.bytes < most:     # the rest of it would have a slot by itself
                return PAUSE
            status = ring_flush(copier, ring, guard, error)
            budget.calls -= 1       # for the events behind and before the slot
            room = most
        cut(extent, into[0], min(room, max(budget.bytes, ALIGNMENT)), max_pitch, &piece)
        if status == OK:
            status = ring_fill(ring, &piece, guard, error)
        if status != OK:
            return status
        spend(budget, into, piece.width * piece.rows)
    return OK


cdef int64_t relay_room(const CopierData *copier, int32_t rings) noexcept nogil:
    """Rings between devices are fastest while what they hold together stays in the processor's cache: several in flight share what one has
    alone, in all their slots, or in two where those would be short."""
    cdef int64_t share
    if rings <= 1:
        return copier.relay_slot_bytes
    share = copier.relay_slots * copier.relay_slot_bytes // rings
    return max(min(copier.relay_slot_bytes, max(share // copier.relay_slots, min(share // 2, SHARED_SLOT))) & ~<int64_t>(ALIGNMENT - 1),
               <int64_t>ALIGNMENT)


cdef inline int64_t slot_room(const CopierData *copier, const Ring *ring) noexcept nogil:
    """Bytes that a slot takes."""
    return relay_room(copier, copier.relays_in_flight) if ring.shares else ring.slot_bytes


cdef inline int32_t depth(const CopierData *copier, const Ring *ring) noexcept nogil:
    """Slots in use: two at least, so that one is filled while the other is emptied."""
    if not ring.shares or copier.relays_in_flight <= 1:
        return ring.slots
    return <int32_t>min(ring.slots, max(2, ring.slots * ring.slot_bytes // (copier.relays_in_flight * slot_room(copier, ring))))


cdef int ring_ready(Ring *ring, const Guard *guard, Error *error) noexcept nogil:
    cdef int status
    if not ring.used[ring.at]:
        return OK
    status = lane_wait(ring.filler, ring.first, ring.emptied[ring.at], guard, error)
    if status == OK:
        ring.used[ring.at] = False
    return status


cdef int ring_fill(Ring *ring, const Extent *piece, const Guard *guard, Error *error) noexcept nogil:
    """The first hop of a piece, into the slot."""
    cdef Extent hop = piece[0]
    cdef int status = ring_ready(ring, guard, error)
    if status != OK:
        return status
    hop.target = ring.memory + ring.at * ring.slot_bytes + ring.fill
    hop.target_pitch = hop.width
    ring.pieces[ring.n] = piece[0]
    ring.pieces[ring.n].source, ring.pieces[ring.n].source_pitch = hop.target, hop.width
    ring.n += 1
    ring.fill += (hop.width * hop.rows + ALIGNMENT - 1) & ~<int64_t>(ALIGNMENT - 1)
    return copy_piece(ring.filler, ring.first, &hop, guard, error)


cdef int ring_flush(const CopierData *copier, Ring *ring, const Guard *guard, Error *error) noexcept nogil:
    """The second hop of all pieces in the slot."""
    cdef int32_t i
    cdef int status
    if ring.n == 0:
        return OK
    status = lane_record(ring.filler, ring.first, ring.filled[ring.at], guard, error)
    if status == OK:
        ring.sent = ring.first.entries.queued
        status = lane_wait(ring.emptier, ring.second, ring.filled[ring.at], guard, error)
    for i in range(ring.n):
        if status == OK:
            status = copy_piece(ring.emptier, ring.second, &ring.pieces[i], guard, error)
    if status == OK:
        status = lane_record(ring.emptier, ring.second, ring.emptied[ring.at], guard, error)
    if status != OK:
        return status
    ring.used[ring.at] = True
    ring.at = (ring.at + 1) % depth(copier, ring)
    ring.n, ring.fill = 0, 0
    if not ring.shares:     # a slot is a chunk: both lanes leave a gap behind it
        ring.first.in_chunk, ring.second.in_chunk = ring.first.chunk, ring.second.chunk
    return OK


cdef void cut(const Extent *extent, int64_t into, int64_t most, int64_t max_pitch, Extent *piece) noexcept nogil:
    """The next piece of an extent, of at most so many bytes: whole rows where one begins and CUDA can express the pitches, else a part of
    a row."""
    cdef int64_t row, column
    piece[0] = extent[0]
    if into == 0 and most >= extent.width * extent.rows and (
            extent.rows == 1 or (extent.source_pitch <= max_pitch and extent.target_pitch <= max_pitch)):
        return      # all of it, as nearly always: not a division spent
    row, column = into // extent.width, into % extent.width
    piece.source += row * extent.source_pitch + column
    piece.target += row * extent.target_pitch + column
    if (column == 0 and extent.rows > 1 and most >= extent.width and extent.source_pitch <= max_pitch
            and extent.target_pitch <= max_pitch):
        piece.rows = min(extent.rows - row, most // extent.width)
    else:
        piece.rows = 1
        piece.width = min(extent.width - column, most)


cdef inline void end_on_boundary(const Extent *extent, int64_t into, Extent *piece) noexcept nogil:
    """Makes a piece that ends within a row somewhat longer, so that the next one begins on a boundary. Two H200s that copy to host memory
    and from it at once get 0.92 of what their links give through pieces that begin anywhere, and 0.95 to 0.98 so."""
    cdef int64_t over = <int64_t>(<size_t>piece.target + <size_t>piece.width) % ALIGNMENT
    cdef int64_t left
    if over == 0 or piece.width < LONG_PIECE or piece.width == extent.width:
        return
    left = extent.width - into % extent.width - piece.width
    piece.width += min(ALIGNMENT - over, left)


cdef int gather(DeviceLanes *device, Lane *lane, const Extent *piece, const Guard *guard, Error *error) noexcept nogil:
    """No byte that a ticket writes is another copy's of it: rows need not wait for what is gathered."""
    cdef int status
    if piece.rows > 1:
        return copy_piece(device, lane, piece, guard, error)
    status = lane_ready(device, lane, guard, error)
    if status != OK:
        return status
    lane.in_chunk += piece.width
    lane.targets[lane.gathered], lane.sources[lane.gathered], lane.sizes[lane.gathered] = piece.target, piece.source, piece.width
    lane.gathered += 1
    return lane_flush(device, lane, guard, error) if lane.gathered == GATHERED else OK


cdef int lane_flush(DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil:
    """One by one where the one call for all is refused, as it is for some kinds of memory (alpaka-group/alpaka#1909). It is refused as a
    whole. Not tried where other code's error is pending, which a refusal would take the place of."""
    cdef int32_t i, n = lane.gathered
    cdef int code
    cdef int status = OK
    cdef bint refused = False
    lane.gathered = 0
    if n > 1 and guard.pending == cudaSuccess:
        code = rt.cudaMemcpyBatchAsync(lane.targets, lane.sources, lane.sizes, n, &in_stream_order, &from_the_first, 1, lane_stream(lane))
        if code == 0:
            lane.entries.queued += n
            return OK
        if code != cudaErrorInvalidValue and code != cudaErrorNotSupported:
            return cuda_failed(FAILED, code, "cudaMemcpyBatchAsync", device.device, guard, error)
        rt.cudaGetLastError()
        refused = True
    for i in range(n):
        if status == OK:
            status = copy_row(device, lane, lane.targets[i], lane.sources[i], lane.sizes[i], guard, error)
    if refused and status == OK:        # not so where an address was wrong
        lane.singly = True
    return status


cdef int copy_piece(DeviceLanes *device, Lane *lane, const Extent *piece, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = lane_ready(device, lane, guard, error)
    if code != OK:
        return code
    lane.in_chunk += piece.width * piece.rows
    if piece.rows == 1:
        return copy_row(device, lane, piece.target, piece.source, piece.width, guard, error)
    lane.entries.queued += 1
    if lane.crosses:
        return copy_rows_across(device, lane, piece, guard, error)
    code = rt.cudaMemcpy2DAsync(piece.target, piece.target_pitch, piece.source, piece.source_pitch, piece.width, piece.rows,
                                cudaMemcpyDefault, lane_stream(lane))
    return OK if code == 0 else cuda_failed(FAILED, code, "cudaMemcpy2DAsync", device.device, guard, error)


cdef int copy_row(const DeviceLanes *device, const Lane *lane, void *target, const void *source, size_t bytes, const Guard *guard,
                  Error *error) noexcept nogil:
    cdef int code
    lane.entries.queued += 1
    if lane.crosses:
        code = rt.cudaMemcpyPeerAsync(target, lane.target, source, lane.source, bytes, lane_stream(lane))
    else:
        code = rt.cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, lane_stream(lane))
    if code == 0:
        return OK
    return cuda_failed(FAILED, code, "cudaMemcpyPeerAsync" if lane.crosses else "cudaMemcpyAsync", device.device, guard, error)


cdef int copy_rows_across(const DeviceLanes *device, const Lane *lane, const Extent *piece, const Guard *guard,
                          Error *error) noexcept nogil:
    cdef cudaMemcpy3DPeerParms rows
    cdef int code
    memset(&rows, 0, sizeof(rows))
    rows.srcPtr.ptr, rows.srcPtr.pitch, rows.srcDevice = <void *>piece.source, piece.source_pitch, lane.source
    rows.dstPtr.ptr, rows.dstPtr.pitch, rows.dstDevice = piece.target, piece.target_pitch, lane.target
    rows.srcPtr.xsize = rows.dstPtr.xsize = rows.extent.width = piece.width
    rows.srcPtr.ysize = rows.dstPtr.ysize = rows.extent.height = piece.rows
    rows.extent.depth = 1
    code = rt.cudaMemcpy3DPeerAsync(&rows, lane_stream(lane))
    return OK if code == 0 else cuda_failed(FAILED, code, "cudaMemcpy3DPeerAsync", device.device, guard, error)


cdef int lane_ready(DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil:
    return change_streams(device, lane, guard, error) if lane.paired and lane.in_chunk >= lane.chunk else OK


cdef int change_streams(DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil:
    """The other stream goes on, behind what this one has queued."""
    cdef cudaEvent_t behind = lane.chain[lane.turn]
    cdef int status = lane_flush(device, lane, guard, error)
    if status == OK:
        status = lane_record(device, lane, behind, guard, error)
    if status == OK:
        status = wait_event(device, lane.streams[lane.turn ^ 1], behind, lane.entries, guard, error)
    if status == OK:
        lane.turn ^= 1
        lane.in_chunk = 0
    return status


cdef void ends_behind(const DeviceLanes *device, SlotDevice *share, int32_t lane) noexcept nogil:
    """What is behind the ring's second lane is behind what that took from the first."""
    share.ended |= <uint64_t>1 << lane
    share.upto[lane] = device.lanes[lane].entries.queued
    if lane == OUT_LANE and device.ring.sent > 0:
        share.upto[IN_LANE] = max(share.upto[IN_LANE], device.ring.sent) if (share.ended >> IN_LANE) & 1 else device.ring.sent
        share.ended |= <uint64_t>1 << IN_LANE


cdef int64_t most_pending(const DeviceLanes *device, uint64_t lanes) noexcept nogil:
    """On the lane of host memory are events alone, no more than what staging has in its chunks."""
    cdef int64_t most = 0
    lanes &= ~(<uint64_t>1 << HOST_LANE)
    while lanes != 0:
        most = max(most, pending(device.lanes[next_lane(&lanes)].entries))
    return most


cdef int64_t most_ends(const DeviceLanes *device, uint64_t lanes) noexcept nogil:
    cdef int64_t most = pending(&device.ends)
    lanes = lanes >> PEER_LANE << PEER_LANE
    while lanes != 0:
        most = max(most, pending(&device.lanes[next_lane(&lanes)].ends))
    return most


cdef int record(const DeviceLanes *device, cudaEvent_t event, cudaStream_t stream, Entries *entries, const Guard *guard,
                Error *error) noexcept nogil:
    cdef int code = rt.cudaEventRecord(event, stream)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaEventRecord", device.device, guard, error)
    if entries != NULL:
        entries.queued += 1
    return OK


cdef int wait_event(const DeviceLanes *device, cudaStream_t stream, cudaEvent_t event, Entries *entries, const Guard *guard,
                    Error *error) noexcept nogil:
    cdef int code = rt.cudaStreamWaitEvent(stream, event, 0)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaStreamWaitEvent", device.device, guard, error)
    if entries != NULL:
        entries.queued += 1
    return OK


cdef int device_drain(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    """Synchronizes every stream of the device: nothing of ours may run when a failure is told. A stream that cannot be waited for
    may still write, so the device counts as poisoned then. A dead device at the other end of a ring is called no more."""
    cdef Ring *relay
    cdef int n, s
    for n in range(LANES):
        device.lanes[n].gathered = 0
        for s in range(2 if device.lanes[n].paired else 1):
            if drain_stream(device, device.lanes[n].streams[s], guard, error) != OK:
                return POISONED
        if drain_stream(device, device.lanes[n].finish, guard, error) != OK:
            return POISONED
        device.lanes[n].own.done, device.lanes[n].ends.done = device.lanes[n].own.queued, device.lanes[n].ends.queued
    empty_ring(&device.ring)
    for n in range(MAX_DEVICES):
        relay = device.relays[n]
        for s in range(2 if relay != NULL and load_i32(&relay.filler.poisoned) == 0 else 0):
            if drain_stream(relay.filler, relay.own.streams[s], guard, error) != OK:
                store_i32(&device.poisoned, error.cuda_code)
                return POISONED
        if relay != NULL:
            empty_ring(relay)
    if drain_stream(device, device.hook, guard, error) != OK or drain_stream(device, device.finish, guard, error) != OK:
        return POISONED
    device.ends.done, device.hooks.done = device.ends.queued, device.hooks.queued
    return OK


cdef void empty_ring(Ring *ring) noexcept nogil:
    ring.n, ring.fill = 0, 0
    memset(ring.used, 0, sizeof(ring.used))


cdef int drain_stream(DeviceLanes *device, cudaStream_t stream, const Guard *guard, Error *error) noexcept nogil:
    cdef int code
    if stream == NULL:          # of a copier that could not be opened whole
        return OK
    code = rt.cudaStreamSynchronize(stream)
    if code != 0 and not is_sticky(code):       # it may be told of other work: the second answer counts
        if guard.pending == 0:
            rt.cudaGetLastError()
        code = rt.cudaStreamSynchronize(stream)
    if code != 0:
        store_i32(&device.poisoned, code)
        return cuda_failed(POISONED, code, "cudaStreamSynchronize", device.device, guard, error)
    return OK


cdef int32_t next_lane(uint64_t *lanes) noexcept nogil:
    cdef int32_t n = count_low_zeros(lanes[0])
    lanes[0] &= lanes[0] - 1
    return n


cdef void poison_all(CopierData *copier, int32_t code) noexcept nogil:
    cdef int32_t d
    for d in range(copier.n_devices if copier.devices != NULL else 0):
        if load_i32(&copier.devices[d].poisoned) == 0:
            store_i32(&copier.devices[d].poisoned, code)


cdef void guard_to_close(CopierData *copier, Guard *guard, Error *error) noexcept nogil:
    cdef int32_t d
    cdef int status = OK
    guard.mode, guard.pending = cudaStreamCaptureModeRelaxed, cudaSuccess
    for d in range(copier.n_devices if copier.devices != NULL else 0):
        if load_i32(&copier.devices[d].poisoned) == 0:
            status = guard_enter(guard, error)
            break
    if status == POISONED:
        poison_all(copier, error.cuda_code)
    elif status != OK:
        error.status = FAILED


cdef int64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec
