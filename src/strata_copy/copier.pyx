"""Opening and closing the copier. Declared in copier.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

from strata_copy.abi cimport FAILED, OK, POISONED, REASON_CUDA, REASON_MEMORY, REFUSED, Error
from strata_copy.atomics cimport load_i32, store_i32
from strata_copy.cudart cimport (
    clear, cudaDevAttrMaxPitch, cudaEventBlockingSync, cudaEventDisableTiming, cudaHostAllocPortable, cudaMemcpyDefault,
    cudaStreamNonBlocking, cuda_failed, guard_enter, guard_leave, outcome, rt, stand_on,
)
from strata_copy.lanes cimport (
    CELLS, CLOSED, ENDS, IN_LANE, LANES, LINK_NONE, LINK_PEER, LINK_RELAY, MAX_AFTER, MAX_RING, OPEN, OUT_LANE, PEER_CHUNKS, PEER_LANE,
    PEER_STEPS, RELAY_LANE, Lane, Ring, Slot, SlotDevice, Staging, device_drain, guard_to_close, poison_all,
)
from strata_copy.layout cimport MAX_LAYERS
from strata_copy.peers cimport peer_hangs
from strata_copy.plan cimport Units
from strata_copy.states cimport MAX_TICKETS
from strata_copy.system cimport pthread_atfork, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock

cdef CopierData tables
pthread_mutex_init(&tables.lock, NULL)
pthread_atfork(NULL, NULL, forget_copier)


cdef CopierData *the_copier() noexcept nogil:
    return &tables if load_i32(&tables.state) == OPEN else NULL


cdef CopierData *the_tables() noexcept nogil:
    return &tables


cdef CopierData *copier_open(const Opening *opening, Error *error) noexcept nogil:
    cdef CopierData *copier = &tables
    cdef Guard guard
    cdef Error closing
    cdef int32_t d
    cdef int status
    copier.number += 1
    copier.n_devices, copier.n_slots, copier.layer_events = opening.n_devices, opening.tickets, opening.layer_events
    copier.chunk, copier.patience, copier.window = opening.chunk, opening.patience, opening.window
    copier.helpers = opening.helpers
    copier.relay_slots, copier.relay_slot_bytes = opening.relay_slots, opening.relay_slot_bytes
    copier.relays_in_flight = 0
    status = guard_enter(&guard, error)
    if status == OK:
        status = make_tables(copier, error)
        for d in range(opening.n_devices):
            if status == OK:
                copier.devices[d].device = opening.devices[d]
                status = make_device(copier, d, opening, &guard, error)
        if status == OK:
            status = make_words(copier, &guard, error)
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


cdef int copier_link(CopierData *copier, int32_t source, int32_t target, bint p2p, Error *error) noexcept nogil:
    """What is made is shown under the lock, whole: others drain devices meanwhile."""
    cdef DeviceLanes *from_ = &copier.devices[source]
    cdef DeviceLanes *to = &copier.devices[target]
    cdef Guard guard
    cdef Lane lane
    cdef Ring *ring = NULL
    cdef int status
    if from_.links[target] != LINK_NONE:
        return OK
    memset(&lane, 0, sizeof(Lane))
    lane.entries = &from_.lanes[PEER_LANE + target].own if p2p else &to.lanes[RELAY_LANE + source].own
    status = guard_enter(&guard, error)
    if status != OK:
        return status
    if p2p:
        lane.crosses, lane.gathers, lane.source, lane.target = True, True, from_.device, to.device
        status = use_device(from_, &guard, error)
        if status == OK:
            status = make_pair(&lane, from_, PEER_STEPS * PEER_CHUNKS * copier.chunk, &guard, error)
        if status == OK:
            status = make_stream(&lane.finish, from_, &guard, error)
    else:
        status = make_relay(&ring, &lane, copier, from_, to, &guard, error)
    if status != OK:
        unmake_link(ring, &lane, from_, to, &guard, error)
    else:
        pthread_mutex_lock(&copier.lock)
        if p2p:
            from_.lanes[PEER_LANE + target] = lane
        else:
            to.lanes[RELAY_LANE + source] = lane
            ring.second = &to.lanes[RELAY_LANE + source]
            to.relays[source] = ring
        from_.links[target] = LINK_PEER if p2p else LINK_RELAY
        pthread_mutex_unlock(&copier.lock)
    guard_leave(&guard, status, error)
    if status == POISONED:
        poison_all(copier, error.cuda_code)
    return status


cdef int stand_on_device(CopierData *copier, int status_of_failure, Error *error) noexcept nogil:
    cdef int32_t d
    cdef int status = OK
    for d in range(copier.n_devices):
        if load_i32(&copier.devices[d].poisoned) == 0:
            status = stand_on(copier.devices[d].device, status_of_failure, error)
            break
    if status == POISONED:
        poison_all(copier, error.cuda_code)
    return status


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
    guard_to_close(copier, &guard, error)
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
            free_pinned(copier.words, -1, &guard, error)
    guard_leave(&guard, OK, error)
    free_tables(copier)
    store_i32(&copier.state, CLOSED)


cdef void forget_copier() noexcept nogil:
    """In a forked child: CUDA may not be used there, not even to give things back, and the lock may be held by a thread that is not
    there."""
    cdef int32_t i
    store_i32(&tables.state, CLOSED)
    for i in range(MAX_TICKETS):
        tables.slots[i].ticket = 0
    pthread_mutex_init(&tables.lock, NULL)


cdef int make_tables(CopierData *copier, Error *error) noexcept nogil:
    cdef int32_t i, d, n = copier.n_devices * copier.layer_events
    cdef Slot *slot
    cdef bint whole
    copier.devices = <DeviceLanes *>calloc(copier.n_devices, sizeof(DeviceLanes))
    whole = copier.devices != NULL
    for i in range(copier.n_slots):
        slot = &copier.slots[i]
        slot.events = <cudaEvent_t *>calloc(n, sizeof(cudaEvent_t))
        slot.devices = <SlotDevice *>calloc(copier.n_devices, sizeof(SlotDevice))
        whole = whole and slot.events != NULL and slot.devices != NULL
        for d in range(copier.n_devices if slot.devices != NULL else 0):
            slot.devices[d].first_event = <int32_t *>calloc(MAX_LAYERS, sizeof(int32_t))
            slot.devices[d].end_event = <int32_t *>calloc(MAX_LAYERS, sizeof(int32_t))
            slot.devices[d].layer_lanes = <uint64_t *>calloc(MAX_LAYERS, sizeof(uint64_t))
            whole = (whole and slot.devices[d].first_event != NULL and slot.devices[d].end_event != NULL
                     and slot.devices[d].layer_lanes != NULL)
    if not whole:
        free_tables(copier)
        return outcome(error, REFUSED, REASON_MEMORY, "no host memory for %d tickets of %d events", copier.n_slots, n)
    return OK


cdef void free_tables(CopierData *copier) noexcept nogil:
    cdef int32_t i, d
    cdef Slot *slot
    for i in range(copier.n_slots):
        slot = &copier.slots[i]
        for d in range(copier.n_devices if slot.devices != NULL else 0):
            free(slot.devices[d].first_event)
            free(slot.devices[d].end_event)
            free(slot.devices[d].layer_lanes)
        free(slot.devices)
        free(slot.events)
        slot.devices, slot.events = NULL, NULL
    for d in range(copier.n_devices if copier.devices != NULL else 0):
        for i in range(copier.n_devices):
            free(copier.devices[d].relays[i])
    free(copier.devices)
    free(copier.units)
    copier.devices, copier.units, copier.words, copier.max_parts = NULL, NULL, NULL, 0


cdef int make_words(CopierData *copier, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t i
    cdef int32_t n = copier.n_devices * ENDS
    cdef size_t bytes = sizeof(uint64_t) * copier.n_slots * n
    cdef int code = rt.cudaHostAlloc(<void **>&copier.words, bytes, cudaHostAllocPortable)
    if code != 0:
        copier.words = NULL
        return cuda_failed(REFUSED, code, "cudaHostAlloc", -1, guard, error)
    for i in range(copier.n_slots * n):
        copier.words[i] = 0
    for i in range(copier.n_slots):
        copier.slots[i].words = &copier.words[i * n]
    return OK


cdef int make_device(CopierData *copier, int32_t d, const Opening *opening, const Guard *guard, Error *error) noexcept nogil:
    cdef DeviceLanes *device = &copier.devices[d]
    cdef int32_t n, s, i
    cdef int status
    cdef int code
    for n in range(LANES):
        device.lanes[n].entries = &device.lanes[n].own
    status = use_device(device, guard, error)
    if status != OK:
        return status
    code = rt.cudaDeviceGetAttribute(&device.max_pitch, cudaDevAttrMaxPitch, device.device)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaDeviceGetAttribute", device.device, guard, error)
    for n in range(PEER_LANE):
        device.lanes[n].chunk = copier.chunk
        if n == OUT_LANE or n == IN_LANE:
            device.lanes[n].gathers = True
            status = make_pair(&device.lanes[n], device, copier.chunk, guard, error)
        else:
            status = make_stream(&device.lanes[n].streams[0], device, guard, error)
        if status != OK:
            return status
    status = make_stream(&device.finish, device, guard, error)
    if status == OK:
        status = make_stream(&device.hook, device, guard, error)
    if status == OK:
        status = make_ring(device, opening, guard, error)
    if status == OK:
        status = make_staging(&device.staging, device, opening, guard, error)
    for i in range(MAX_AFTER):
        if status == OK:
            status = make_event(&device.gates[i], cudaEventDisableTiming, device, guard, error)
    for s in range(copier.n_slots):
        for i in range(copier.layer_events):
            if status == OK:
                status = make_event(&copier.slots[s].events[d * copier.layer_events + i], cudaEventDisableTiming, device, guard, error)
        if status == OK:
            status = make_event(&copier.slots[s].devices[d].done, cudaEventDisableTiming | cudaEventBlockingSync, device, guard, error)
    return status if status != OK else make_cells(device, guard, error)


cdef int make_pair(Lane *lane, const DeviceLanes *device, int64_t chunk, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t s
    cdef int status = OK
    lane.paired, lane.chunk = True, chunk
    for s in range(2):
        if status == OK:
            status = make_stream(&lane.streams[s], device, guard, error)
        if status == OK:
            status = make_event(&lane.chain[s], cudaEventDisableTiming, device, guard, error)
    return status


cdef int make_ring(DeviceLanes *device, const Opening *opening, const Guard *guard, Error *error) noexcept nogil:
    cdef Ring *ring = &device.ring
    cdef int32_t i
    cdef int code
    cdef int status = OK
    ring.filler = ring.emptier = device
    ring.first, ring.second = &device.lanes[IN_LANE], &device.lanes[OUT_LANE]
    if opening.ring_slots == 0:
        return OK
    ring.slots, ring.slot_bytes = opening.ring_slots, opening.ring_slot_bytes
    code = rt.cudaMalloc(<void **>&ring.memory, ring.slots * ring.slot_bytes)
    if code != 0:
        ring.memory = NULL
        error.wanted = ring.slots * ring.slot_bytes
        return cuda_failed(REFUSED, code, "cudaMalloc", device.device, guard, error)
    for i in range(ring.slots):
        if status == OK:
            status = make_event(&ring.filled[i], cudaEventDisableTiming, device, guard, error)
        if status == OK:
            status = make_event(&ring.emptied[i], cudaEventDisableTiming, device, guard, error)
    return status


cdef int make_relay(Ring **made, Lane *second, const CopierData *copier, DeviceLanes *from_, DeviceLanes *to, const Guard *guard,
                    Error *error) noexcept nogil:
    """The ring from a device to another one, and the lane that empties it. Each event is made where it will be recorded."""
    cdef Ring *ring = <Ring *>calloc(1, sizeof(Ring))
    cdef int32_t i
    cdef int code
    cdef int status
    made[0] = ring
    if ring == NULL:
        return outcome(error, REFUSED, REASON_MEMORY, "no host memory for a ring")
    ring.slots, ring.slot_bytes, ring.shares = copier.relay_slots, copier.relay_slot_bytes, True
    ring.filler, ring.emptier, ring.first = from_, to, &ring.own
    ring.own.entries = second.entries
    status = use_device(from_, guard, error)
    if status == OK:
        code = rt.cudaHostAlloc(<void **>&ring.memory, ring.slots * ring.slot_bytes, cudaHostAllocPortable)
        if code != 0:
            ring.memory = NULL
            error.wanted = ring.slots * ring.slot_bytes
            status = cuda_failed(REFUSED, code, "cudaHostAlloc", from_.device, guard, error)
    if status == OK:
        status = make_pair(&ring.own, from_, copier.chunk, guard, error)
    for i in range(ring.slots):
        if status == OK:
            status = make_event(&ring.filled[i], cudaEventDisableTiming, from_, guard, error)
    if status == OK:
        status = use_device(to, guard, error)
    if status == OK:
        status = make_pair(second, to, copier.chunk, guard, error)
    if status == OK:
        status = make_stream(&second.finish, to, guard, error)
    for i in range(ring.slots):
        if status == OK:
            status = make_event(&ring.emptied[i], cudaEventDisableTiming, to, guard, error)
    return status


cdef void unmake_link(Ring *ring, Lane *lane, const DeviceLanes *from_, const DeviceLanes *to, const Guard *guard,
                      Error *error) noexcept nogil:
    """What was made of a link that could not be made whole. What led here is what is told, unless a device ends meanwhile."""
    cdef Error freeing
    clear(&freeing)
    freeing.status = POISONED if error.status == POISONED else OK
    free_lane(lane, to if ring != NULL else from_, guard, &freeing)
    if ring != NULL:
        free_relay(ring, guard, &freeing)
        free(ring)
    if freeing.status == POISONED and error.status != POISONED:
        error[0] = freeing


cdef int use_device(const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaSetDevice(device.device)
    return OK if code == 0 else cuda_failed(REFUSED, code, "cudaSetDevice", device.device, guard, error)


cdef int make_staging(Staging *staging, const DeviceLanes *device, const Opening *opening, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t i
    cdef int code
    cdef int status = OK
    if opening.stage_slots == 0:
        return OK
    staging.slots, staging.chunk_bytes = opening.stage_slots, opening.stage_chunk_bytes
    code = rt.cudaHostAlloc(<void **>&staging.memory, staging.slots * staging.chunk_bytes, cudaHostAllocPortable)
    if code != 0:
        staging.memory = NULL
        error.wanted = staging.slots * staging.chunk_bytes
        return cuda_failed(REFUSED, code, "cudaHostAlloc", device.device, guard, error)
    status = make_event(&staging.opened, cudaEventDisableTiming, device, guard, error)
    for i in range(staging.slots):
        staging.chunks[i].memory = staging.memory + i * staging.chunk_bytes
        if status == OK:
            status = make_event(&staging.chunks[i].event, cudaEventDisableTiming, device, guard, error)
    return status


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
        free_lane(&device.lanes[n], device, guard, error)
    for n in range(copier.n_devices):
        if device.relays[n] != NULL:
            free_relay(device.relays[n], guard, error)
    free_stream(device.finish, device, guard, error)
    free_stream(device.hook, device, guard, error)
    for i in range(device.ring.slots):
        free_event(device.ring.filled[i], device, guard, error)
        free_event(device.ring.emptied[i], device, guard, error)
    free_event(device.staging.opened, device, guard, error)
    for i in range(device.staging.slots):
        free_event(device.staging.chunks[i].event, device, guard, error)
    free_pinned(device.staging.memory, device.device, guard, error)
    free_memory(device.ring.memory, device, guard, error)
    for i in range(MAX_AFTER):
        free_event(device.gates[i], device, guard, error)
    for s in range(copier.n_slots):
        for i in range(copier.layer_events):
            free_event(copier.slots[s].events[d * copier.layer_events + i], device, guard, error)
        free_event(copier.slots[s].devices[d].done, device, guard, error)
    free_memory(device.cells, device, guard, error)


cdef void free_lane(Lane *lane, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t s
    for s in range(2):
        free_stream(lane.streams[s], device, guard, error)
        free_event(lane.chain[s], device, guard, error)
    free_stream(lane.finish, device, guard, error)


cdef void free_relay(Ring *ring, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t i
    free_lane(&ring.own, ring.filler, guard, error)
    for i in range(MAX_RING):
        free_event(ring.filled[i], ring.filler, guard, error)
        free_event(ring.emptied[i], ring.emptier, guard, error)
    free_pinned(ring.memory, ring.filler.device, guard, error)


cdef void free_stream(cudaStream_t stream, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    if stream != NULL and error.status != POISONED:
        note(rt.cudaStreamDestroy(stream), "cudaStreamDestroy", device.device, guard, error)


cdef void free_event(cudaEvent_t event, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    if event != NULL and error.status != POISONED:
        note(rt.cudaEventDestroy(event), "cudaEventDestroy", device.device, guard, error)


cdef void free_memory(void *memory, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    if memory != NULL and error.status != POISONED and not peer_hangs(device.device):
        note(rt.cudaFree(memory), "cudaFree", device.device, guard, error)


cdef void free_pinned(void *memory, int32_t device, const Guard *guard, Error *error) noexcept nogil:
    if memory != NULL and error.status != POISONED and not peer_hangs(-1):
        note(rt.cudaFreeHost(memory), "cudaFreeHost", device, guard, error)


cdef void note(int code, const char *call, int32_t device, const Guard *guard, Error *error) noexcept nogil:
    """Closing goes on past a call that fails, and tells the first one; one that ends the device ends it."""
    cdef Error failed
    if code != 0:
        clear(&failed)
        cuda_failed(FAILED, code, call, device, guard, &failed)
        if error.status == OK or failed.status == POISONED:
            error[0] = failed
