"""The way of a copy: every check, then layer by layer onto the lanes, then the word that tells the end.

Reads top down. What is looked at first is checks.pyx, extents come from plan.pyx, chunks and streams are lanes.pyx, what happens
afterwards is tickets.pyx.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from strata_copy.abi cimport (
    AGAIN, FAILED, OK, POISONED, REASON_CAPACITY, REASON_PLACE, REFUSED, WAIT_EVENT, WAIT_STREAM, Error, Request, Ticket, Wait,
)
from strata_copy.atomics cimport add_i32, add_i64, load_i32, store_i32, store_u64
from strata_copy.checks cimport check_devices, check_open, check_plan_now, check_waits, uses_device
from strata_copy.cudart cimport (
    clear, cudaEvent_t, cudaMemcpyDefault, cudaStream_t, cuda_failed, guard_enter, guard_leave, outcome, rt,
)
from strata_copy.images cimport image_written
from strata_copy.kinship cimport handed_on
from strata_copy.lanes cimport (
    CELLS, HOST_LANE, IN_LANE, LANES, LOCAL_LANES, OUT_LANE, CopierData, DeviceLanes, Lane, Slot, copier_reserve, device_drain,
    device_index, lane_copy, lane_stream, now, pthread_mutex_lock, pthread_mutex_unlock, the_tables,
)
from strata_copy.layout cimport LayoutData
from strata_copy.plan cimport (
    ROUTE_IN, ROUTE_LOCAL, ROUTE_OUT, ROUTES, Bundle, Emission, Extent, PlanData, Units, emit_bundle, emit_end, emit_part,
    emit_unmoved, moves_early, plan_hold, units_to_move,
)
from strata_copy.tickets cimport QUEUING, end_badly, sweep

cdef uint64_t generations = 0       # of tickets, under the copier's lock; goes on from copier to copier

cdef enum:
    SHARED_BYTES = 8 << 20      # layers share events up to here: 0.15 ms of PCIe


cdef int submit_plan(PlanData *plan, const Request *request, Ticket *ticket, Error *error) noexcept nogil:
    """OK and a ticket; AGAIN without a free one; REFUSED before the first copy call; FAILED after it, with every lane quiet."""
    cdef Submission s
    cdef int status
    memset(&s, 0, sizeof(s))
    s.copier, s.plan, s.request, s.error = the_tables(), plan, request, error
    ticket.v = 0
    pthread_mutex_lock(&s.copier.lock)
    status = check_open(s.copier, plan.copier, error)
    if status == OK:
        status = check_devices(&s)      # a device that is poisoned is not called any more
    if status == OK:
        status = guard_enter(&s.guard, error)
        if status == OK:
            status = submit_locked(&s, ticket)
            guard_leave(&s.guard, status, error)
        if status == POISONED and s.slot == NULL:
            poison_devices(&s)
    pthread_mutex_unlock(&s.copier.lock)
    return status


cdef int submit_locked(Submission *s, Ticket *ticket) noexcept nogil:
    cdef int64_t started = now(), bytes = 0
    cdef int status
    sweep(s.copier)
    status = check_plan_now(s)
    if status == OK:
        status = units_to_move(s.plan, s.request, s.copier.units, &bytes, &s.known, s.error)
    if status == OK:
        status = check_waits(s)
    if status != OK:
        return status
    s.slot = take_slot(s, bytes, started)
    if s.slot == NULL:
        return AGAIN
    ticket.v = s.slot.ticket        # from now on other threads may wait for layers
    status = queue(s) if bytes > 0 else queue_nothing(s)
    if status != OK:
        ticket.v = 0
        return give_up(s, status)
    handed_on(&s.known, s.plan, s.request)
    if s.plan.target.image != NULL:
        image_written(s.plan.target, s.request)
    s.slot.submitted = now()
    store_i32(&s.slot.layers_queued, s.slot.n_layers + 1)
    store_i32(&s.slot.status, AGAIN)
    return OK


cdef void poison_devices(Submission *s) noexcept nogil:
    """A sticky code before anything was queued: it may be any of the plan's devices."""
    cdef int32_t d
    for d in range(s.copier.n_devices):
        if uses_device(s.plan, s.copier.devices[d].device) and load_i32(&s.copier.devices[d].poisoned) == 0:
            store_i32(&s.copier.devices[d].poisoned, s.error.cuda_code)


# ---- the slot

cdef Slot *take_slot(Submission *s, int64_t bytes, int64_t started) noexcept nogil:
    """A free slot with source and target held, or NULL."""
    global generations
    cdef Slot *slot
    cdef int32_t i, d
    for i in range(s.copier.n_slots):
        slot = &s.copier.slots[i]
        if slot.ticket == 0 and load_i32(&slot.pins) == 0:
            break
    else:
        return NULL
    generations += 1
    slot.plan = s.plan
    plan_hold(s.plan)
    clear(&slot.error)
    slot.n_layers = s.plan.target.layout.n_layers
    memset(slot.first_event, 0, slot.n_layers * sizeof(int32_t))
    memset(slot.end_event, 0, slot.n_layers * sizeof(int32_t))
    slot.bundle_events = 0
    slot.bytes, slot.started, slot.submitted, slot.ended, slot.asked = bytes, started, started, started, 0
    slot.released = slot.reported = slot.layers_queued = 0
    slot.uses += 1
    slot.word = 1 + slot.uses % CELLS
    for d in range(s.copier.n_devices):
        slot.taken[d] = -1
        store_u64(&slot.words[d], 0)
    slot.holding = 1
    add_i32(&s.plan.target.holds, 1)
    for d in range(s.plan.n_sources):
        add_i32(&s.plan.sources[d].holds, 1)
    store_i32(&slot.status, QUEUING)
    store_u64(&slot.ticket, generations << 8 | <uint64_t>i)
    return slot


cdef int give_up(Submission *s, int status) noexcept nogil:
    """After a failed call. Before the first copy nothing was written, and what the lanes wait for does no harm: REFUSED. Later: every
    lane that was used is quiet before anyone is told."""
    cdef Error draining
    cdef int32_t d
    if status == POISONED:
        store_i32(&s.device.poisoned, s.error.cuda_code)
    for d in range(s.copier.n_devices):
        if s.started and s.slot.taken[d] >= 0 and load_i32(&s.copier.devices[d].poisoned) == 0:
            clear(&draining)
            if device_drain(&s.copier.devices[d], &s.guard, &draining) != OK:
                status = POISONED
    if status != POISONED:
        status = FAILED if s.started else REFUSED
    s.error.status = status
    if s.started:
        end_badly(s.copier, s.slot, status, s.error)
    else:
        s.slot.error = s.error[0]
        store_i32(&s.slot.status, status)
    store_i32(&s.slot.released, 1)      # nobody was given the ticket
    sweep(s.copier)
    return status


# ---- queueing

cdef int queue(Submission *s) noexcept nogil:
    """All layers, then the end. Every call's code is looked at; the first bad one ends it."""
    cdef const LayoutData *layout = s.plan.target.layout
    cdef int32_t layer, d
    cdef int status
    for d in range(s.copier.n_devices):
        start_device(&s.copier.devices[d])
    status = record_gates(s)
    if status == OK:
        status = queue_bundles(s)
    if status != OK:
        return status
    for layer in range(layout.n_layers):
        status = queue_layer(s, layer)
        if status != OK:
            s.error.layer = layer
            return status
    for d in range(s.copier.n_devices):
        if s.slot.taken[d] >= 0:
            status = queue_end(s, d)
            if status != OK:
                return status
    publish(s)
    return OK


cdef int queue_nothing(Submission *s) noexcept nogil:
    """A copy without bytes still stands behind what it waits for, and later copies of these states behind it."""
    cdef int32_t d = device_index(s.copier, s.plan.parts[0].device)
    cdef int status
    s.device = &s.copier.devices[d]
    start_device(s.device)
    s.slot.taken[d] = 0
    status = record_gates(s)
    s.device = &s.copier.devices[d]
    if status == OK:
        status = wait_before(s, s.device.finish)
    if status == OK:
        status = queue_end(s, d)
    if status == OK:
        s.slot.recorded[0], s.slot.bundle_events = s.slot.done[d], 1
        publish(s)
    return status


cdef void start_device(DeviceLanes *device) noexcept nogil:
    cdef int32_t n
    for n in range(LANES):
        device.lanes[n].used = False
        device.lanes[n].queued = 0


cdef int record_gates(Submission *s) noexcept nogil:
    """The streams that the request names, as they are now: lanes wait for an event behind what each has queued."""
    cdef const Wait *wait
    cdef uint32_t i
    cdef int status = OK
    for i in range(s.request.n_after):
        wait = &s.request.after[i]
        if wait.kind == WAIT_STREAM and status == OK:
            s.device = &s.copier.devices[device_index(s.copier, wait.device)]
            status = record(s, s.device.gates[i], wait.handle)
    return status


cdef int queue_bundles(Submission *s) noexcept nogil:
    """The small parts that move together, before the first layer. Every lane waits for them when it is opened, so that each layer's
    event stands for them too."""
    cdef const Bundle *bundle
    cdef int32_t b, d, n, route
    cdef int status = OK
    start_emission(s)
    for b in range(s.plan.n_bundles):
        bundle = &s.plan.bundles[b]
        if bundle.count == 1 or s.copier.units[bundle.part].first == s.copier.units[bundle.part].end:
            continue
        status = go_to_lane(s, bundle.part)
        if status == OK:
            status = emit_bundle(&s.emission, s.plan, s.request, bundle, &s.copier.units[bundle.part])
        if status != OK:
            return status
    status = emit_end(&s.emission)
    if status == OK:
        status = record_lanes(s)
    for d in range(s.copier.n_devices if s.recorded > 1 else 0):    # lanes with bundles wait for one another's
        for route in range(<int>ROUTES):
            for n in range(s.recorded):
                if s.lanes[d][route] != NULL and status == OK:
                    status = wait_event(s, lane_stream(s.lanes[d][route]), s.slot.recorded[n])
    s.slot.bundle_events = s.recorded
    begin_marks(s, 0)
    return status


cdef int queue_layer(Submission *s, int32_t layer) noexcept nogil:
    """All of a layer's bytes on a route go on one lane; behind them, on each lane, the event that wait_layer hands out."""
    cdef const LayoutData *layout = s.plan.target.layout
    cdef int32_t k, part
    cdef int status = OK
    if s.unmarked > 0 and s.unmarked + layer_bytes(s, layer) > SHARED_BYTES:
        status = mark_layers(s, layer)
        if status != OK:
            return status
    start_emission(s)
    for k in range(layout.first[layer], layout.first[layer + 1]):
        part = layout.order[k]
        if s.copier.units[part].first == s.copier.units[part].end or moves_early(s.plan, part):
            continue
        status = go_to_lane(s, part)
        if status == OK:
            status = emit_part(&s.emission, s.plan, s.request, part, &s.copier.units[part])
        if status != OK:
            return status
    status = emit_end(&s.emission)
    if status != OK or shares_events(s, layer):
        return status
    return mark_layers(s, layer + 1)


cdef int mark_layers(Submission *s, int32_t end) noexcept nogil:
    """Events behind all layers before `end` that have none yet."""
    cdef int32_t layer, first = s.recorded
    cdef int status = record_lanes(s)
    if status != OK:
        return status
    for layer in range(s.first_unmarked, end):
        s.slot.first_event[layer], s.slot.end_event[layer] = first, s.recorded
    begin_marks(s, end)
    store_i32(&s.slot.layers_queued, end)
    return OK


cdef bint shares_events(const Submission *s, int32_t layer) noexcept nogil:
    """Whether the next layer's events stand for this one too. On a lane over PCIe an event between two copies costs as much as 200 KB,
    so layers of a few megabytes share them. Never the first layer, which somebody waits for, nor the last."""
    cdef int32_t d, route
    if s.unmarked == 0:
        return s.recorded == 0      # an event that is not recorded yet orders nothing
    if layer == 0 or layer == s.slot.n_layers - 1 or s.unmarked >= SHARED_BYTES:
        return False
    for d in range(s.copier.n_devices):
        for route in range(<int>ROUTES):
            if s.lanes[d][route] != NULL and not s.lanes[d][route].paired:
                return False
    return True


cdef int64_t layer_bytes(const Submission *s, int32_t layer) noexcept nogil:
    cdef const LayoutData *layout = s.plan.target.layout
    cdef const Units *units
    cdef int64_t bytes = 0
    cdef int32_t k, part
    for k in range(layout.first[layer], layout.first[layer + 1]):
        part = layout.order[k]
        units = &s.copier.units[part]
        if not moves_early(s.plan, part):
            bytes += (units.end - units.first) * layout.parts[part].growth.unit_bytes * layout.parts[part].rep
    return bytes


cdef void begin_marks(Submission *s, int32_t layer) noexcept nogil:
    memset(s.lanes, 0, sizeof(s.lanes))
    s.unmarked, s.first_unmarked = 0, layer


cdef void start_emission(Submission *s) noexcept nogil:
    s.emission.take, s.emission.sink, s.emission.pending.rows = take_extent, s, 0
    s.lane = NULL


cdef int go_to_lane(Submission *s, int32_t part) noexcept nogil:
    """Makes the lane of a part's route the one that extents go to: the one that this layer took already, or the one to take now."""
    cdef int32_t route = s.plan.parts[part].route
    cdef int32_t d = device_index(s.copier, s.plan.parts[part].device)
    cdef Lane *lane = s.lanes[d][route]
    cdef int status = OK
    if lane == NULL:
        lane = s.lanes[d][route] = choose_lane(&s.copier.devices[d], route)
    if lane != s.lane:
        status = emit_end(&s.emission)      # the pending extent belongs to the lane before
        s.lane, s.device = lane, &s.copier.devices[d]
    if status == OK and not lane.used:
        status = open_lane(s, d)
    return status


cdef int record_lanes(Submission *s) noexcept nogil:
    """An event behind what was queued on each lane since the latest events."""
    cdef int32_t d, route
    cdef int status = OK
    for d in range(s.copier.n_devices):
        for route in range(<int>ROUTES):
            if s.lanes[d][route] != NULL and status == OK:
                status = record_lane(s, d, s.lanes[d][route])
    return status


cdef int take_extent(void *sink, const Extent *extent) noexcept nogil:
    cdef Submission *s = <Submission *>sink
    if not s.started:
        s.started = True
        add_i64(<int64_t *>&s.plan.target.generation, 1)
    s.error.part = s.emission.part
    s.unmarked += extent.width * extent.rows
    return lane_copy(s.copier, s.device, s.lane, extent, &s.guard, s.error)


cdef Lane *choose_lane(DeviceLanes *device, int32_t route) noexcept nogil:
    """Of the local lanes the one with the fewest bytes of this ticket: dealt in turn, the layers with K/V would meet on one."""
    cdef Lane *best = &device.lanes[0]
    cdef int32_t n
    if route != ROUTE_LOCAL:
        return &device.lanes[OUT_LANE if route == ROUTE_OUT else IN_LANE if route == ROUTE_IN else HOST_LANE]
    for n in range(1, LOCAL_LANES):
        if device.lanes[n].queued < best.queued:
            best = &device.lanes[n]
    return best


cdef int open_lane(Submission *s, int32_t d) noexcept nogil:
    """Before a lane's first copy of this ticket."""
    cdef int32_t n
    cdef int status
    if s.slot.taken[d] < 0:
        s.slot.taken[d] = 0
    s.lane.used = True
    status = wait_before(s, lane_stream(s.lane))
    for n in range(s.slot.bundle_events):
        if status == OK:
            status = wait_event(s, lane_stream(s.lane), s.slot.recorded[n])
    return status


cdef int wait_before(Submission *s, cudaStream_t stream) noexcept nogil:
    """The stream waits for whatever wrote the source and whatever still reads or writes the target: what the request names, and our own
    earlier tickets on these states."""
    cdef const Wait *wait
    cdef cudaEvent_t event
    cdef uint32_t i
    cdef int32_t n
    cdef int status = OK
    for i in range(s.request.n_after):
        wait = &s.request.after[i]
        event = wait.handle if wait.kind == WAIT_EVENT else s.copier.devices[device_index(s.copier, wait.device)].gates[i]
        status = wait_event(s, stream, event)
        if status != OK:
            return status
    for n in range(s.plan.n_sources):
        status = wait_ticket(s, stream, s.plan.sources[n].writer)
        if status != OK:
            return status
    status = wait_ticket(s, stream, s.plan.target.writer)
    for n in range(s.copier.n_slots):
        if status == OK and (s.plan.target.readers[n >> 6] >> (n & 63)) & 1:
            status = wait_ticket(s, stream, s.copier.slots[n].ticket)
    return status


cdef int wait_ticket(Submission *s, cudaStream_t stream, uint64_t ticket) noexcept nogil:
    """Behind an earlier ticket of ours, on all its devices. A state's writer and readers are in flight or just ended: `sweep` takes
    them off the state before their slots are used again."""
    cdef Slot *slot
    cdef int32_t d
    cdef int status
    if ticket == 0:
        return OK
    slot = &s.copier.slots[ticket & 255]
    for d in range(s.copier.n_devices):
        if slot.ticket == ticket and slot.taken[d] >= 0:
            status = wait_event(s, stream, slot.done[d])
            if status != OK:
                return status
    return OK


cdef int record_lane(Submission *s, int32_t d, Lane *lane) noexcept nogil:
    cdef cudaEvent_t event = s.slot.events[d * s.copier.layer_events + s.slot.taken[d]]
    cdef int status
    s.device = &s.copier.devices[d]
    status = record(s, event, lane_stream(lane))
    if status == OK:
        s.slot.taken[d] += 1
        s.slot.recorded[s.recorded] = lane.last = event
        s.recorded += 1
    return status


cdef int queue_end(Submission *s, int32_t d) noexcept nogil:
    """Joins the lanes on the finish stream: the event behind everything, and behind it the word that tells the end."""
    cdef DeviceLanes *device = &s.copier.devices[d]
    cdef int32_t n
    cdef int code
    cdef int status = OK
    s.device = device
    for n in range(LANES):
        if status == OK and device.lanes[n].used:
            status = wait_event(s, device.finish, device.lanes[n].last)
    if status == OK:
        show_unmoved(s, d)
        status = record(s, s.slot.done[d], device.finish)
    if status != OK:
        return status
    code = rt.cudaMemcpyAsync(&s.slot.words[d], &device.cells[s.slot.word - 1], sizeof(uint64_t), cudaMemcpyDefault, device.finish)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaMemcpyAsync", device.device, &s.guard, s.error)
    return OK


cdef void show_unmoved(Submission *s, int32_t d) noexcept nogil:
    """Shows a runtime that judges what the lineages let the copy leave out."""
    cdef Emission emission
    cdef int32_t i
    if rt.unchanged == NULL or s.request.begin != NULL:
        return
    emission.take, emission.sink, emission.pending.rows = show_extent, s.copier.devices[d].finish, 0
    for i in range(s.plan.target.layout.n_parts):
        if device_index(s.copier, s.plan.parts[i].device) == d:
            emit_unmoved(&emission, s.plan, s.request, i, &s.copier.units[i])
    emit_end(&emission)


cdef int show_extent(void *sink, const Extent *e) noexcept nogil:
    rt.unchanged(e.target, e.target_pitch, e.source, e.source_pitch, e.width, e.rows, sink)
    return OK


cdef void publish(Submission *s) noexcept nogil:
    """Later tickets on these states find this one."""
    cdef int32_t index = s.slot.ticket & 255
    cdef int32_t n
    s.plan.target.writer = s.slot.ticket
    for n in range(s.plan.n_sources):
        s.plan.sources[n].readers[index >> 6] |= <uint64_t>1 << (index & 63)


cdef int record(Submission *s, cudaEvent_t event, cudaStream_t stream) noexcept nogil:
    cdef int code = rt.cudaEventRecord(event, stream)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaEventRecord", s.device.device, &s.guard, s.error)
    return OK


cdef int wait_event(Submission *s, cudaStream_t stream, cudaEvent_t event) noexcept nogil:
    cdef int code = rt.cudaStreamWaitEvent(stream, event, 0)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaStreamWaitEvent", s.device.device, &s.guard, s.error)
    return OK


# ---- plans

cdef int adopt_plan(PlanData *plan, Error *error) noexcept nogil:
    cdef CopierData *copier = the_tables()
    cdef int status
    pthread_mutex_lock(&copier.lock)
    status = check_open(copier, copier.number, error)
    if status == OK:
        status = adopt_locked(copier, plan, error)
    pthread_mutex_unlock(&copier.lock)
    return status


cdef int adopt_locked(CopierData *copier, PlanData *plan, Error *error) noexcept nogil:
    """What a plan needs of the copier that will carry it."""
    cdef const LayoutData *layout = plan.target.layout
    cdef int32_t i
    if plan.n_events > copier.layer_events:
        error.wanted, error.found = plan.n_events, copier.layer_events
        return outcome(error, REFUSED, REASON_CAPACITY, "%d layer events are needed; the copier was opened with layer_events=%d",
                       plan.n_events, copier.layer_events)
    for i in range(layout.n_parts):
        if plan.parts[i].device == -1:
            plan.parts[i].device = copier.devices[0].device
        if device_index(copier, plan.parts[i].device) < 0:
            error.part, error.layer, error.device = i, layout.parts[i].layer, plan.parts[i].device
            return outcome(error, REFUSED, REASON_PLACE, "part '%s' of layer %d is on device %d, which the copier has not open",
                           layout.parts[i].name, layout.parts[i].layer, plan.parts[i].device)
    plan.copier = copier.number
    return copier_reserve(copier, layout.n_parts, error)
