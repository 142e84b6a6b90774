"""Lanes and rings. Declared, with who owns what, in lanes.pxd."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from strata_copy.abi cimport FAILED, OK, POISONED, Error
from strata_copy.atomics cimport load_i32, store_i32
from strata_copy.cudart cimport Guard, cudaEvent_t, cudaMemcpyDefault, cudaStream_t, cuda_failed, is_sticky, rt
from strata_copy.plan cimport Extent

cdef enum:
    ALIGNMENT = 512         # of pieces in a slot of a ring


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
        most = min(bytes_in(copier, lane), budget.bytes)
        if extent.rows > 1 and extent.width <= copier.chunk:
            most = max(most, extent.width)      # rows stay whole
        cut(extent, into[0], most, device.max_pitch, &piece)
        status = copy_piece(copier, device, lane, &piece, guard, error)
        if status != OK:
            return status
        spend(budget, into, piece.width * piece.rows)
    return OK


cdef int ring_copy(const CopierData *copier, DeviceLanes *device, const Extent *extent, int64_t *into, Budget *budget,
                   const Guard *guard, Error *error) noexcept nogil:
    cdef int64_t bytes = extent.width * extent.rows, room
    cdef Ring *ring = &device.ring
    cdef Extent piece
    cdef int status = OK
    while into[0] < bytes:
        if budget.bytes <= 0 or budget.calls <= 0:
            return PAUSE
        room = ring.slot_bytes - ring.fill
        if ring.n == RING_PIECES or room <= 0 or (room < extent.width <= ring.slot_bytes and extent.rows > 1):
            status = ring_flush(copier, device, guard, error)
            room = ring.slot_bytes
        cut(extent, into[0], min(room, max(budget.bytes, ALIGNMENT)), device.max_pitch, &piece)
        if status == OK:
            status = ring_fill(copier, device, &piece, guard, error)
        if status != OK:
            return status
        spend(budget, into, piece.width * piece.rows)
    return OK


cdef int ring_ready(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef Ring *ring = &device.ring
    cdef int status
    if not ring.used[ring.at]:
        return OK
    status = wait_event(device, lane_stream(&device.lanes[IN_LANE]), ring.emptied[ring.at], guard, error)
    if status == OK:
        ring.used[ring.at] = False
    return status


cdef int ring_fill(const CopierData *copier, DeviceLanes *device, const Extent *piece, const Guard *guard, Error *error) noexcept nogil:
    """The first hop of a piece, from host memory into the slot."""
    cdef Ring *ring = &device.ring
    cdef Lane *lane = &device.lanes[IN_LANE]
    cdef Extent hop = piece[0]
    cdef int status = ring_ready(device, guard, error)
    if status != OK:
        return status
    hop.target = ring.memory + ring.at * ring.slot_bytes + ring.fill
    hop.target_pitch = hop.width
    ring.pieces[ring.n] = piece[0]
    ring.pieces[ring.n].source, ring.pieces[ring.n].source_pitch = hop.target, hop.width
    ring.n += 1
    ring.fill += (hop.width * hop.rows + ALIGNMENT - 1) & ~<int64_t>(ALIGNMENT - 1)
    return copy_piece(copier, device, lane, &hop, guard, error)


cdef int ring_flush(const CopierData *copier, DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    """The second hop of all pieces in the slot."""
    cdef Ring *ring = &device.ring
    cdef Lane *lane = &device.lanes[OUT_LANE]
    cdef int32_t i
    cdef int status
    if ring.n == 0:
        return OK
    status = record(device, ring.filled[ring.at], lane_stream(&device.lanes[IN_LANE]), guard, error)
    if status == OK:
        status = wait_event(device, lane_stream(lane), ring.filled[ring.at], guard, error)
    for i in range(ring.n):
        if status == OK:
            status = copy_piece(copier, device, lane, &ring.pieces[i], guard, error)
    if status == OK:
        status = record(device, ring.emptied[ring.at], lane_stream(lane), guard, error)
    if status != OK:
        return status
    ring.used[ring.at] = True
    ring.at = (ring.at + 1) % ring.slots
    ring.n, ring.fill = 0, 0
    device.lanes[IN_LANE].in_chunk = lane.in_chunk = copier.chunk   # a slot is a chunk: both lanes leave a gap behind it
    return OK


cdef void cut(const Extent *extent, int64_t into, int64_t most, int64_t max_pitch, Extent *piece) noexcept nogil:
    """The next piece of an extent, of at most so many bytes: whole rows where one begins and CUDA can express the pitches, else a part of
    a row."""
    cdef int64_t row = into // extent.width, column = into % extent.width
    piece[0] = extent[0]
    piece.source += row * extent.source_pitch + column
    piece.target += row * extent.target_pitch + column
    if (column == 0 and extent.rows > 1 and most >= extent.width and extent.source_pitch <= max_pitch
            and extent.target_pitch <= max_pitch):
        piece.rows = min(extent.rows - row, most // extent.width)
    else:
        piece.rows = 1
        piece.width = min(extent.width - column, most)


cdef inline int64_t bytes_in(const CopierData *copier, const Lane *lane) noexcept nogil:
    """Bytes that the lane takes before it changes streams."""
    cdef int64_t left = copier.chunk - lane.in_chunk
    if not lane.paired:
        return <int64_t>1 << 62
    return left if left > 0 else copier.chunk


cdef int copy_piece(const CopierData *copier, DeviceLanes *device, Lane *lane, const Extent *piece, const Guard *guard,
                    Error *error) noexcept nogil:
    cdef int code = lane_ready(copier, device, lane, guard, error)
    if code != OK:
        return code
    lane.in_chunk += piece.width * piece.rows
    if piece.rows == 1:
        code = rt.cudaMemcpyAsync(piece.target, piece.source, piece.width, cudaMemcpyDefault, lane_stream(lane))
        if code != 0:
            return cuda_failed(FAILED, code, "cudaMemcpyAsync", device.device, guard, error)
        return OK
    code = rt.cudaMemcpy2DAsync(piece.target, piece.target_pitch, piece.source, piece.source_pitch, piece.width, piece.rows,
                                cudaMemcpyDefault, lane_stream(lane))
    if code != 0:
        return cuda_failed(FAILED, code, "cudaMemcpy2DAsync", device.device, guard, error)
    return OK


cdef int lane_ready(const CopierData *copier, DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil:
    return change_streams(device, lane, guard, error) if lane.paired and lane.in_chunk >= copier.chunk else OK


cdef int change_streams(DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil:
    """The other stream goes on, behind what this one has queued."""
    cdef cudaEvent_t behind = lane.chain[lane.turn]
    cdef int status = record(device, behind, lane.streams[lane.turn], guard, error)
    if status == OK:
        status = wait_event(device, lane.streams[lane.turn ^ 1], behind, guard, error)
    if status == OK:
        lane.turn ^= 1
        lane.in_chunk = 0
    return status


cdef int record(const DeviceLanes *device, cudaEvent_t event, cudaStream_t stream, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaEventRecord(event, stream)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaEventRecord", device.device, guard, error)
    return OK


cdef int wait_event(const DeviceLanes *device, cudaStream_t stream, cudaEvent_t event, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaStreamWaitEvent(stream, event, 0)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaStreamWaitEvent", device.device, guard, error)
    return OK


cdef int device_drain(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    """Synchronizes every stream of the device: nothing of ours may run when a failure is told. A stream that cannot be waited for
    may still write, so the device counts as poisoned then."""
    cdef int n, s
    for n in range(LANES):
        for s in range(2 if device.lanes[n].paired else 1):
            if drain_stream(device, device.lanes[n].streams[s], guard, error) != OK:
                return POISONED
    device.ring.n, device.ring.fill = 0, 0
    memset(device.ring.used, 0, sizeof(device.ring.used))
    if drain_stream(device, device.hook, guard, error) != OK:
        return POISONED
    return drain_stream(device, device.finish, guard, error)


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


cdef void poison_all(CopierData *copier, int32_t code) noexcept nogil:
    cdef int32_t d
    for d in range(copier.n_devices if copier.devices != NULL else 0):
        if load_i32(&copier.devices[d].poisoned) == 0:
            store_i32(&copier.devices[d].poisoned, code)


cdef int64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec
