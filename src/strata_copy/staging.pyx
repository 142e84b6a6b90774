"""Staging. Declared, with who owns what, in staging.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport FAILED, OK, Error
from strata_copy.atomics cimport add_i64
from strata_copy.cudart cimport Guard, cudaErrorNotReady, cuda_failed, observed, published, rt
from strata_copy.lanes cimport (
    ALIGNMENT, ENTRIES_IN_FLIGHT, IN_LANE, OUT_LANE, PAUSE, RING_PIECES, STAGE_BESIDE, STAGE_BUSY, STAGE_COPIED, STAGE_FILLING, STAGE_FREE,
    STAGE_HELPERS, STAGE_IN, STAGE_LANE, STAGE_OUT, Budget, CopierData, DeviceLanes, Extent, Lane, Staging, copy_piece, cut, done_to,
    lane_record, pending, spend,
)

cdef enum:
    ENTRIES_OF_A_PIECE = 3      # its copy, and a change of streams


cdef bint stage_take(DeviceLanes *device, uint64_t ticket, int32_t way) noexcept nogil:
    cdef Staging *staging = &device.staging
    if staging.owner == ticket and staging.way == way:
        return True
    if not stage_empty(device):
        return False
    observed(staging)
    staging.owner, staging.way, staging.may_read = ticket, way, not stage_reads(way)
    return True


cdef int stage_copy(const CopierData *copier, DeviceLanes *device, const Extent *extent, int64_t *into, Budget *budget, int32_t layer,
                    const Guard *guard, Error *error) noexcept nogil:
    cdef int64_t bytes = extent.width * extent.rows, room
    cdef Staging *staging = &device.staging
    cdef StageChunk *chunk
    cdef Extent piece
    cdef int status
    while into[0] < bytes:
        chunk = &staging.chunks[staging.at]
        if budget.bytes <= 0 or budget.calls <= 0 or (chunk.state != STAGE_FREE and chunk.state != STAGE_FILLING):
            return PAUSE
        if chunk.state == STAGE_FREE:
            chunk.state, chunk.layer, chunk.n, chunk.fill = STAGE_FILLING, layer, 0, 0
            chunk.way = staging.way
        room = staging.chunk_bytes - chunk.fill
        if chunk.n == RING_PIECES or room <= 0 or (room < extent.width <= staging.chunk_bytes and extent.rows > 1):
            status = stage_flush(device, guard, error)
            if status != OK:
                return status
            continue
        cut(extent, into[0], min(room, max(budget.bytes, ALIGNMENT)), device.max_pitch, &piece)
        status = stage_piece(copier, device, chunk, &piece, guard, error)
        if status != OK:
            return status
        spend(budget, into, piece.width * piece.rows)
    return OK


cdef int stage_piece(const CopierData *copier, DeviceLanes *device, StageChunk *chunk, const Extent *piece, const Guard *guard,
                     Error *error) noexcept nogil:
    """Notes both halves of a piece, or all of it for helpers alone. Out of a device the lane's half comes first."""
    cdef Staging *staging = &device.staging
    cdef Extent *first = &chunk.to_chunk[chunk.n]
    cdef Extent *second = &chunk.from_chunk[chunk.n]
    cdef int64_t start = chunk.fill
    first[0] = second[0] = piece[0]
    chunk.n += 1
    chunk.fill += (piece.width * piece.rows + ALIGNMENT - 1) & ~<int64_t>(ALIGNMENT - 1)
    if helpers_alone(staging):
        return OK
    first.target = chunk.memory + start
    second.source = first.target
    first.target_pitch = second.source_pitch = piece.width
    return OK if staging.way == STAGE_IN else copy_piece(device, &device.lanes[OUT_LANE], first, guard, error)


cdef int stage_flush(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef Staging *staging = &device.staging
    cdef StageChunk *chunk = &staging.chunks[staging.at]
    cdef int status = OK
    if staging.slots == 0 or chunk.state != STAGE_FILLING:
        return OK
    if staging.way == STAGE_OUT:
        status = send_event(device, chunk, &device.lanes[OUT_LANE], guard, error)
    if status == OK:
        chunk.state = STAGE_LANE if staging.way == STAGE_OUT else STAGE_HELPERS
        staging.at = (staging.at + 1) % staging.slots
    return status


cdef bint stage_sent(const DeviceLanes *device) noexcept nogil:
    cdef int32_t i, state
    for i in range(device.staging.slots):
        state = device.staging.chunks[i].state
        if state != STAGE_FREE and (device.staging.way != STAGE_IN or state != STAGE_LANE):
            return False
    return True


cdef bint stage_empty(const DeviceLanes *device) noexcept nogil:
    cdef int32_t i
    for i in range(device.staging.slots):
        if device.staging.chunks[i].state != STAGE_FREE:
            return False
    return True


cdef int32_t stage_layer(const DeviceLanes *device, int32_t none) noexcept nogil:
    cdef int32_t i, layer = none
    for i in range(device.staging.slots):
        if device.staging.chunks[i].state != STAGE_FREE:
            layer = min(layer, max(device.staging.chunks[i].layer, 0))
    return layer


cdef int stage_look(const CopierData *copier, DeviceLanes *device, int64_t *landed, const Guard *guard, Error *error) noexcept nogil:
    """In the order in which the chunks were filled."""
    cdef Staging *staging = &device.staging
    cdef StageChunk *chunk
    cdef int32_t i
    cdef int status = OK
    observed(staging)
    if not staging.may_read and not stage_empty(device):
        status = is_over(device, staging.opened, guard, error)
        if status != OK:
            return OK if status == PAUSE else status
        staging.may_read = True
    for i in range(staging.slots):
        chunk = &staging.chunks[(staging.at + i) % staging.slots]
        if chunk.state == STAGE_COPIED:
            observed(chunk)
        if chunk.state == STAGE_COPIED and staging.way == STAGE_IN:
            if pending(device.lanes[IN_LANE].entries) + ENTRIES_OF_A_PIECE * chunk.n >= ENTRIES_IN_FLIGHT:
                break       # until some of them are done
            status = send(copier, device, chunk, guard, error)
        elif chunk.state == STAGE_COPIED:
            add_i64(landed, bytes_of(chunk))
            chunk.state = STAGE_FREE
        elif chunk.state == STAGE_LANE:
            status = is_over(device, chunk.event, guard, error)
            if status == OK and staging.way == STAGE_IN:
                add_i64(landed, bytes_of(chunk))
            if status == OK:
                done_to(device.lanes[IN_LANE if staging.way == STAGE_IN else OUT_LANE].entries, chunk.upto)
                chunk.state = STAGE_FREE if staging.way == STAGE_IN else STAGE_HELPERS
        if status != OK and status != PAUSE:
            return status
    published(staging)
    return OK


cdef bint stage_sends(const DeviceLanes *device) noexcept nogil:
    cdef int32_t i
    for i in range(device.staging.slots):
        if device.staging.way == STAGE_IN and device.staging.chunks[i].state == STAGE_COPIED:
            return True
    return False


cdef int send(const CopierData *copier, DeviceLanes *device, StageChunk *chunk, const Guard *guard, Error *error) noexcept nogil:
    cdef Lane *lane = &device.lanes[IN_LANE]
    cdef int32_t i
    cdef int status = OK
    for i in range(chunk.n):
        if status == OK:
            status = copy_piece(device, lane, &chunk.from_chunk[i], guard, error)
    if status == OK:
        status = send_event(device, chunk, lane, guard, error)
    if status == OK:
        chunk.state = STAGE_LANE
    return status


cdef int send_event(const DeviceLanes *device, StageChunk *chunk, const Lane *lane, const Guard *guard, Error *error) noexcept nogil:
    cdef int status = lane_record(device, lane, chunk.event, guard, error)
    chunk.upto = lane.entries.queued
    return status


cdef inline bint helpers_alone(const Staging *staging) noexcept nogil:
    return staging.way == STAGE_BESIDE or staging.way == STAGE_HOST


cdef int is_over(DeviceLanes *device, void *event, const Guard *guard, Error *error) noexcept nogil:
    """OK, or PAUSE while not."""
    cdef int code = rt.cudaEventQuery(event)
    if code == cudaErrorNotReady:
        return PAUSE
    return OK if code == 0 else cuda_failed(FAILED, code, "cudaEventQuery", device.device, guard, error)


cdef int64_t bytes_of(const StageChunk *chunk) noexcept nogil:
    cdef int64_t bytes = 0
    cdef int32_t i
    for i in range(chunk.n):
        bytes += chunk.from_chunk[i].width * chunk.from_chunk[i].rows
    return bytes


cdef StageChunk *stage_next(DeviceLanes *device) noexcept nogil:
    cdef Staging *staging = &device.staging
    cdef StageChunk *chunk
    cdef int32_t i
    for i in range(staging.slots):
        chunk = &staging.chunks[(staging.at + i) % staging.slots]
        if chunk.state == STAGE_HELPERS and staging.may_read:
            chunk.state = STAGE_BUSY
            return chunk
    return NULL


cdef void stage_copied(StageChunk *chunk) noexcept nogil:
    published(chunk)
    chunk.state = STAGE_COPIED


cdef void stage_drop(DeviceLanes *device) noexcept nogil:
    cdef int32_t i
    for i in range(device.staging.slots):
        device.staging.chunks[i].state = STAGE_FREE
    device.staging.owner = 0
