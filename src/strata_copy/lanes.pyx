"""Lanes, and the copier that owns them. Declared, with who owns what, in lanes.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from strata_copy.abi cimport FAILED, OK, POISONED, REASON_CUDA, REASON_MEMORY, REFUSED, Error
from strata_copy.atomics cimport load_i32, store_i32
from strata_copy.cudart cimport (
    Guard, clear, cudaDevAttrMaxPitch, cudaEventBlockingSync, cudaEventDisableTiming, cudaEvent_t, cudaHostAllocPortable,
    cudaMemcpyDefault, cudaStreamNonBlocking, cudaStream_t, cuda_failed, guard_enter, guard_leave, is_sticky, outcome, rt,
)
from strata_copy.plan cimport Extent, Units
from strata_copy.states cimport MAX_TICKETS


cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*)() noexcept, void (*)() noexcept, void (*)() noexcept)

cdef CopierData tables
pthread_mutex_init(&tables.lock, NULL)
pthread_atfork(NULL, NULL, forget_copier)


cdef CopierData *the_copier() noexcept nogil:
    return &tables if load_i32(&tables.state) == OPEN else NULL


cdef CopierData *the_tables() noexcept nogil:
    return &tables


cdef int32_t device_index(const CopierData *copier, int32_t device) noexcept nogil:
    cdef int32_t d
    for d in range(copier.n_devices):
        if copier.devices[d].device == device:
            return d
    return -1


cdef int lane_copy(const CopierData *copier, DeviceLanes *device, Lane *lane, const Extent *extent, const Guard *guard,
                   Error *error) noexcept nogil:
    cdef Extent piece = extent[0]
    cdef int64_t left = extent.width, rows_left = extent.rows
    cdef int status
    lane.queued += extent.width * extent.rows
    if extent.rows > 1 and extent.source_pitch <= device.max_pitch and extent.target_pitch <= device.max_pitch:
        while rows_left > 0:
            piece.rows = min(rows_left, rows_in(copier, lane, extent.width))
            status = copy_piece(copier, device, lane, &piece, guard, error)
            if status != OK:
                return status
            piece.source += piece.rows * extent.source_pitch
            piece.target += piece.rows * extent.target_pitch
            rows_left -= piece.rows
        return OK
    piece.rows = 1
    while rows_left > 0:        # row by row: one row, or pitches that one CUDA call cannot express
        left = extent.width
        while left > 0:
            piece.width = min(left, bytes_in(copier, lane))
            status = copy_piece(copier, device, lane, &piece, guard, error)
            if status != OK:
                return status
            piece.source += piece.width
            piece.target += piece.width
            left -= piece.width
        rows_left -= 1
        piece.source += extent.source_pitch - extent.width
        piece.target += extent.target_pitch - extent.width
    return OK


cdef inline int64_t bytes_in(const CopierData *copier, const Lane *lane) noexcept nogil:
    """Bytes that the lane takes before it changes streams."""
    cdef int64_t left = copier.chunk - lane.in_chunk
    if not lane.paired:
        return 1 << 62
    return left if left > 0 else copier.chunk


cdef inline int64_t rows_in(const CopierData *copier, const Lane *lane, int64_t width) noexcept nogil:
    cdef int64_t rows = bytes_in(copier, lane) // width
    return rows if rows > 0 else 1


cdef int copy_piece(const CopierData *copier, DeviceLanes *device, Lane *lane, const Extent *piece, const Guard *guard,
                    Error *error) noexcept nogil:
    cdef int code
    if lane.paired:
        if lane.in_chunk >= copier.chunk:
            code = change_streams(device, lane, guard, error)
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


cdef int change_streams(DeviceLanes *device, Lane *lane, const Guard *guard, Error *error) noexcept nogil:
    """The other stream goes on, behind what this one has queued."""
    cdef cudaEvent_t behind = lane.chain[lane.turn]
    cdef int code = rt.cudaEventRecord(behind, lane.streams[lane.turn])
    if code != 0:
        return cuda_failed(FAILED, code, "cudaEventRecord", device.device, guard, error)
    code = rt.cudaStreamWaitEvent(lane.streams[lane.turn ^ 1], behind, 0)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaStreamWaitEvent", device.device, guard, error)
    lane.turn ^= 1
    lane.in_chunk = 0
    return OK


cdef int device_drain(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    """Synchronizes every stream of the device: nothing of ours may run when a failure is told. A stream that cannot be waited for
    may still write, so the device counts as poisoned then."""
    cdef int n, s
    for n in range(LANES):
        for s in range(2 if device.lanes[n].paired else 1):
            if drain_stream(device, device.lanes[n].streams[s], guard, error) != OK:
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
        return poison(device, code, "cudaStreamSynchronize", guard, error)
    return OK


cdef int poison(DeviceLanes *device, int code, const char *call, const Guard *guard, Error *error) noexcept nogil:
    store_i32(&device.poisoned, code)
    return cuda_failed(POISONED, code, call, device.device, guard, error)


cdef CopierData *copier_open(const int32_t *devices, int32_t n_devices, int32_t n_slots, int32_t layer_events, int64_t chunk,
                             int64_t patience, Error *error) noexcept nogil:
    cdef CopierData *copier = &tables
    cdef Guard guard
    cdef Error closing
    cdef int32_t d
    cdef int status
    copier.number += 1
    copier.n_devices, copier.n_slots, copier.layer_events = n_devices, n_slots, layer_events
    copier.chunk, copier.patience = chunk, patience
    status = guard_enter(&guard, error)
    if status == OK:
        status = make_tables(copier, error)
        if status == OK:
            status = make_words(copier, &guard, error)
        for d in range(n_devices):
            if status == OK:
                copier.devices[d].device = devices[d]
                status = make_device(copier, d, &guard, error)
        guard_leave(&guard, status, error)
    if status == OK:
        store_i32(&copier.state, OPEN)
        return copier
    if status == POISONED:
        poison_all(copier, error.cuda_code)
    clear(&closing)     # what led here is what is told
    copier_close(copier, &closing)
    if closing.status == POISONED:
        error.status = POISONED
    return NULL


cdef int copier_reserve(CopierData *copier, int32_t parts, Error *error) noexcept nogil:
    cdef Units *grown
    if parts <= copier.max_parts:
        return OK
    grown = <Units *>realloc(copier.units, parts * sizeof(Units))
    if grown == NULL:
        return outcome(error, REFUSED, REASON_MEMORY, "no host memory for copies of %d parts", parts)
    copier.units, copier.max_parts = grown, parts
    return OK


cdef void copier_close(CopierData *copier, Error *error) noexcept nogil:
    cdef Guard guard
    cdef int32_t d
    cdef bint alive = True
    cdef int status = guard_enter(&guard, error)
    if status == POISONED:
        poison_all(copier, error.cuda_code)
    elif status != OK:          # what follows has to be done all the same
        error.status = FAILED
    if copier.devices != NULL:
        for d in range(copier.n_devices):       # the device may still write a ticket's word
            if load_i32(&copier.devices[d].poisoned) != 0:
                alive = False
                error.device, error.cuda_code = copier.devices[d].device, load_i32(&copier.devices[d].poisoned)
                outcome(error, POISONED, REASON_CUDA, "device %d failed with %s (%d): its streams and events are left to the process",
                        error.device, rt.cudaGetErrorName(error.cuda_code), error.cuda_code)
            elif device_drain(&copier.devices[d], &guard, error) != OK:
                alive = False
        if alive:       # a dead device is called no more; its objects end with the process
            for d in range(copier.n_devices):
                free_device(copier, d, &guard, error)
            if copier.words != NULL and error.status != POISONED:
                note(rt.cudaFreeHost(copier.words), "cudaFreeHost", -1, &guard, error)
    guard_leave(&guard, OK, error)
    free_tables(copier)
    store_i32(&copier.state, CLOSED)


cdef void poison_all(CopierData *copier, int32_t code) noexcept nogil:
    cdef int32_t d
    for d in range(copier.n_devices if copier.devices != NULL else 0):
        if load_i32(&copier.devices[d].poisoned) == 0:
            store_i32(&copier.devices[d].poisoned, code)


cdef int64_t now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec


cdef void forget_copier() noexcept nogil:
    """In a forked child: CUDA may not be used there, not even to give things back, and the lock may be held by a thread that is not
    there."""
    cdef int32_t i
    store_i32(&tables.state, CLOSED)
    for i in range(MAX_TICKETS):
        tables.slots[i].ticket = 0
    pthread_mutex_init(&tables.lock, NULL)


cdef int make_tables(CopierData *copier, Error *error) noexcept nogil:
    cdef int32_t i, n = copier.n_devices * copier.layer_events
    cdef Slot *slot
    cdef bint whole
    copier.devices = <DeviceLanes *>calloc(copier.n_devices, sizeof(DeviceLanes))
    whole = copier.devices != NULL
    for i in range(copier.n_slots):
        slot = &copier.slots[i]
        slot.first_event = <int32_t *>calloc(MAX_LAYERS, sizeof(int32_t))
        slot.end_event = <int32_t *>calloc(MAX_LAYERS, sizeof(int32_t))
        slot.recorded = <cudaEvent_t *>calloc(n, sizeof(cudaEvent_t))
        slot.events = <cudaEvent_t *>calloc(n, sizeof(cudaEvent_t))
        slot.done = <cudaEvent_t *>calloc(copier.n_devices, sizeof(cudaEvent_t))
        slot.taken = <int32_t *>calloc(copier.n_devices, sizeof(int32_t))
        whole = (whole and slot.first_event != NULL and slot.end_event != NULL and slot.recorded != NULL
                 and slot.events != NULL and slot.done != NULL and slot.taken != NULL)
    if not whole:
        return outcome(error, REFUSED, REASON_MEMORY, "no host memory for %d tickets of %d events", copier.n_slots, n)
    return OK


cdef void free_tables(CopierData *copier) noexcept nogil:
    cdef int32_t i
    cdef Slot *slot
    for i in range(copier.n_slots):
        slot = &copier.slots[i]
        free(slot.first_event)
        free(slot.end_event)
        free(slot.recorded)
        free(slot.events)
        free(slot.done)
        free(slot.taken)
        slot.first_event = slot.end_event = slot.taken = NULL
        slot.recorded = slot.events = slot.done = NULL
    free(copier.devices)
    free(copier.units)
    copier.devices, copier.units, copier.words, copier.max_parts = NULL, NULL, NULL, 0


cdef int make_words(CopierData *copier, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t i
    cdef size_t bytes = sizeof(uint64_t) * copier.n_slots * copier.n_devices
    cdef int code = rt.cudaHostAlloc(<void **>&copier.words, bytes, cudaHostAllocPortable)
    if code != 0:
        copier.words = NULL
        return cuda_failed(REFUSED, code, "cudaHostAlloc", -1, guard, error)
    for i in range(copier.n_slots * copier.n_devices):
        copier.words[i] = 0
    for i in range(copier.n_slots):
        copier.slots[i].words = &copier.words[i * copier.n_devices]
    return OK


cdef int make_device(CopierData *copier, int32_t d, const Guard *guard, Error *error) noexcept nogil:
    cdef DeviceLanes *device = &copier.devices[d]
    cdef int32_t n, s, i
    cdef int status
    cdef int code = rt.cudaSetDevice(device.device)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaSetDevice", device.device, guard, error)
    code = rt.cudaDeviceGetAttribute(&device.max_pitch, cudaDevAttrMaxPitch, device.device)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaDeviceGetAttribute", device.device, guard, error)
    for n in range(LANES):
        device.lanes[n].paired = n == OUT_LANE or n == IN_LANE
        for s in range(2 if device.lanes[n].paired else 1):
            status = make_stream(&device.lanes[n].streams[s], device, guard, error)
            if status == OK and device.lanes[n].paired:
                status = make_event(&device.lanes[n].chain[s], cudaEventDisableTiming, device, guard, error)
            if status != OK:
                return status
    status = make_stream(&device.finish, device, guard, error)
    for i in range(MAX_AFTER):
        if status == OK:
            status = make_event(&device.gates[i], cudaEventDisableTiming, device, guard, error)
    for s in range(copier.n_slots):
        for i in range(copier.layer_events):
            if status == OK:
                status = make_event(&copier.slots[s].events[d * copier.layer_events + i], cudaEventDisableTiming, device, guard, error)
        if status == OK:
            status = make_event(&copier.slots[s].done[d], cudaEventDisableTiming | cudaEventBlockingSync, device, guard, error)
    return status if status != OK else make_cells(device, guard, error)


cdef int make_stream(cudaStream_t *stream, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking)
    if code == 0:
        return OK
    stream[0] = NULL
    return cuda_failed(REFUSED, code, "cudaStreamCreateWithFlags", device.device, guard, error)


cdef int make_event(cudaEvent_t *event, int flags, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaEventCreateWithFlags(event, flags)
    if code == 0:
        return OK
    event[0] = NULL
    return cuda_failed(REFUSED, code, "cudaEventCreateWithFlags", device.device, guard, error)


cdef int make_cells(DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    """The words that a device can tell a ticket's end with. They are 256 so that a late word is never taken for a newer ticket's."""
    cdef uint64_t values[CELLS]
    cdef int32_t i
    cdef int code = rt.cudaMalloc(<void **>&device.cells, sizeof(values))
    if code != 0:
        device.cells = NULL
        return cuda_failed(REFUSED, code, "cudaMalloc", device.device, guard, error)
    for i in range(CELLS):
        values[i] = i + 1
    code = rt.cudaMemcpyAsync(device.cells, values, sizeof(values), cudaMemcpyDefault, device.finish)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaMemcpyAsync", device.device, guard, error)
    code = rt.cudaStreamSynchronize(device.finish)      # `values` goes out of scope
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaStreamSynchronize", device.device, guard, error)
    return OK


cdef void free_device(CopierData *copier, int32_t d, const Guard *guard, Error *error) noexcept nogil:
    cdef DeviceLanes *device = &copier.devices[d]
    cdef int32_t n, s, i
    for n in range(LANES):
        for s in range(2):
            free_stream(device.lanes[n].streams[s], device, guard, error)
            free_event(device.lanes[n].chain[s], device, guard, error)
    free_stream(device.finish, device, guard, error)
    for i in range(MAX_AFTER):
        free_event(device.gates[i], device, guard, error)
    for s in range(copier.n_slots):
        for i in range(copier.layer_events):
            free_event(copier.slots[s].events[d * copier.layer_events + i], device, guard, error)
        free_event(copier.slots[s].done[d], device, guard, error)
    if device.cells != NULL and error.status != POISONED:
        note(rt.cudaFree(device.cells), "cudaFree", device.device, guard, error)


cdef void free_stream(cudaStream_t stream, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    if stream != NULL and error.status != POISONED:
        note(rt.cudaStreamDestroy(stream), "cudaStreamDestroy", device.device, guard, error)


cdef void free_event(cudaEvent_t event, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    if event != NULL and error.status != POISONED:
        note(rt.cudaEventDestroy(event), "cudaEventDestroy", device.device, guard, error)


cdef void note(int code, const char *call, int32_t device, const Guard *guard, Error *error) noexcept nogil:
    """Closing goes on past a call that fails, and tells the first one; one that ends the device ends it."""
    cdef Error failed
    if code != 0:
        clear(&failed)
        cuda_failed(FAILED, code, call, device, guard, &failed)
        if error.status == OK or failed.status == POISONED:
            error[0] = failed
