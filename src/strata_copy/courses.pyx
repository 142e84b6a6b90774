"""Courses. Declared in courses.pxd; extents come from plan.pyx, chunks and streams are lanes.pyx."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

from strata_copy.abi cimport FAILED, OK, REASON_HOOK, WAIT_EVENT, Error, Request, Wait
from strata_copy.atomics cimport add_i64, load_i32, store_i32, store_u64
from strata_copy.cudart cimport Guard, cudaEvent_t, cudaMemcpyDefault, cudaStream_t, cuda_failed, outcome, published, rt
from strata_copy.hooks cimport enter_hook, leave_hook
from strata_copy.lanes cimport (
    ENDS, IN_LANE, LANES, LOCAL_LANES, PAUSE, PEER_CHUNKS, PEER_LANE, RELAY_LANE, STAGE_BESIDE, STAGE_HOST, STAGE_IN, STAGE_OUT,
    CopierData, DeviceLanes, Entries, Lane, Slot, SlotDevice, bytes_in, device_index, end_entries, end_stream, ends_behind, lane_copy,
    lane_flush, lane_ready, lane_record, lane_stream, next_lane, record, ring_copy, ring_flush, ring_ready, wait_event,
)
from strata_copy.layout cimport LayoutData
from strata_copy.news cimport tell_news
from strata_copy.plan cimport (
    ROUTE_HOST, ROUTE_LOCAL, ROUTE_RELAY, ROUTE_RING, ROUTE_STAGE, ROUTE_UNSTAGE, Bundle, Emission, Extent, PartRoute, Units, bytes_of,
    emit_bundle, emit_end, emit_part, emit_unmoved, is_staged, moves_early,
)
from strata_copy.staging cimport stage_copy, stage_flush, stage_layer, stage_reads, stage_sent, stage_take
from strata_copy.ways cimport bit, bundles_of_layer, pcie_lanes, peer_lanes

cdef enum:
    SHARED_BYTES = 8 << 20      # layers share events up to here: 0.15 ms of PCIe, and PEER_CHUNKS times as much by P2P


cdef void course_begin(Course *course, CopierData *copier, Slot *slot, int32_t d, const Request *request, const Units *units,
                       cudaEvent_t gate) noexcept nogil:
    memset(course, 0, sizeof(Course))
    course.copier, course.plan, course.slot = copier, slot.plan, slot
    course.request, course.units, course.gate = request, units, gate
    course.device, course.share = &copier.devices[d], &slot.devices[d]
    course.layer, course.local, course.only = BUNDLES, -1, NO_WAY
    course.share.used = True


cdef int course_go(Course *course, Budget *budget, int32_t step, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t n_layers = course.slot.n_layers
    cdef int status = OK
    course.budget, course.guard, course.error = budget, guard, error
    course.only, course.step = ANY_WAY if step == STEP_ON else NO_WAY, step
    while budget.layers > 0 and status == OK and not course.ended:
        if budget.calls <= 0:       # hooks have used them up
            return rest(course)
        if course.layer == n_layers:
            status = send_staged(course)
            if status == OK:
                status = queue_end(course)
        elif course.layer == BUNDLES:
            status = queue_bundles(course)
        else:
            error.layer = course.layer
            status = queue_layer(course, course.layer)
        if status == OK:
            error.layer = error.part = -1
            course.layer += 1
            course.extent, course.into, course.entered, course.local = 0, 0, False, -1
            budget.layers -= 1
    if status == OK:
        return send_gathered(course)
    if status != PAUSE:
        return status
    error.layer = error.part = -1
    return rest(course)


cdef int course_cut(Course *course, const Guard *guard, Error *error) noexcept nogil:
    cdef Budget none
    cdef int status = OK
    memset(&none, 0, sizeof(none))
    course.budget, course.guard, course.error = &none, guard, error
    status = send_staged(course)
    if status == OK and course.started:
        status = record_lanes(course, course.here | course.unmarked)
    return status if status != OK else queue_end(course)


cdef void course_touch(Course *course) noexcept nogil:
    if not course.started:
        course.started = True
        touch_target(course.slot)


cdef void course_tell(Course *course) noexcept nogil:
    """What is in pageable memory counts only once it is there."""
    tell_layers(course, course.promised)


cdef int64_t course_room(const Course *course) noexcept nogil:
    return bytes_in(&course.device.lanes[course.only]) if 0 <= course.only < RELAY_LANE else <int64_t>1 << 62


# ---- bundles, layers, the end

cdef int queue_bundles(Course *course) noexcept nogil:
    """The small parts that move together, before the first layer, each route's on one lane and with an event behind them: layers that
    have parts in them wait for it too."""
    cdef const Bundle *bundle
    cdef uint64_t lanes
    cdef int32_t b, n
    cdef int status
    start_emission(course)
    for b in range(course.plan.n_bundles):
        bundle = &course.plan.bundles[b]
        if bundle.count == 1 or nothing_of(course, bundle.part):
            continue
        status = go_to_lane(course, bundle.part)
        if status == OK:
            status = emit_bundle(&course.emission, course.plan, course.request, bundle, &course.units[bundle.part])
        if status != OK:
            return status
    status = end_emission(course)
    if status != OK or course.here == 0:
        return status
    lanes = course.share.bundle_lanes = course.here
    course.share.bundle_local = max(course.local, 0)
    while status == OK and lanes != 0:
        n = next_lane(&lanes)
        course.share.bundle_event[n] = course.share.taken
        status = record_lanes(course, bit(n))
    course.here = 0
    course.unmarked_bytes = 0
    return status


cdef int queue_layer(Course *course, int32_t layer) noexcept nogil:
    """All of a layer's bytes on a route go on one lane; behind them, on each lane, the event that wait_layer hands out."""
    cdef const LayoutData *layout = course.plan.target.layout
    cdef int32_t k, part
    cdef int status = OK
    if not course.entered:
        course.entered = True
        if course.unmarked != 0 and course.unmarked_bytes + layer_bytes(course, layer) > shared_bytes(course):
            status = mark_layers(course, layer, 0)
        if status != OK:
            return status
    start_emission(course)
    for k in range(layout.first[layer], layout.first[layer + 1]):
        part = layout.order[k]
        if nothing_of(course, part) or moves_early(course.plan, part):
            continue
        status = go_to_lane(course, part)
        if status == OK:
            status = emit_part(&course.emission, course.plan, course.request, part, &course.units[part])
        if status != OK:
            return status
    status = end_emission(course)
    if status != OK:
        return status
    if shares_events(course, layer):
        course.unmarked |= course.here
        course.here = 0
        return OK
    return mark_layers(course, layer + 1, course.here)


cdef int queue_end(Course *course) noexcept nogil:
    """Joins the lanes on the finish stream: the event behind everything, and behind it the word that tells the end. A copy without bytes
    stands behind what it waits for all the same, and later copies of these states behind it."""
    cdef DeviceLanes *device = course.device
    cdef int32_t d = <int32_t>(course.share - course.slot.devices)
    cdef int32_t end = end_of(course), n
    cdef cudaStream_t finish = end_stream(device, end)
    cdef Entries *entries = end_entries(device, end)
    cdef int64_t before = entries.queued
    cdef int code
    cdef int status = OK
    if course.share.taken == 0:
        status = wait_before(course, finish, entries)
    elif course.hooked != NULL:
        status = wait_event(device, finish, course.hooked, entries, course.guard, course.error)
    for n in range(LANES):
        if status == OK and course.last[n] != NULL:
            status = wait_event(device, finish, course.last[n], entries, course.guard, course.error)
    if status == OK:
        show_unmoved(course, finish)
        status = record(device, course.share.done, finish, entries, course.guard, course.error)
    if status != OK:
        entries.queued = before
        return status
    course.share.word = &course.slot.words[d * ENDS + end]
    store_u64(course.share.word, 0)
    code = rt.cudaMemcpyAsync(course.share.word, &device.cells[course.slot.word - 1], sizeof(uint64_t), cudaMemcpyDefault, finish)
    if code != 0:
        entries.queued = before
        return cuda_failed(FAILED, code, "cudaMemcpyAsync", device.device, course.guard, course.error)
    entries.queued += 1
    course.share.end, course.share.ends_upto = end, entries.queued
    course.ended = True
    tell_layers(course, course.slot.n_layers + 1)
    return OK


cdef int32_t end_of(const Course *course) noexcept nogil:
    """The stream that tells the end, of ENDS. Ends of tickets on one stream come in the order in which they get there. What is held up on
    the way to or from another device holds up no ends but those of tickets that go this way."""
    cdef uint64_t between = course.used >> PEER_LANE
    return 0 if between == 0 else 1 + next_lane(&between)


cdef int rest(Course *course) noexcept nogil:
    """Between two steps the ring is empty, nothing is gathered, helpers have what is theirs, and layers that are whole have their
    events."""
    cdef int status = flush(course)
    if status == OK and course.step == STEP_BESIDE and has_staging(course):
        status = stage_flush(course.device, course.guard, course.error)
    if status == OK:
        status = send_gathered(course)
    if status == OK and course.unmarked != 0:
        status = mark_layers(course, course.layer, 0)
    return status


# ---- events behind layers

cdef int mark_layers(Course *course, int32_t end, uint64_t here) noexcept nogil:
    """Events behind all layers before `end` that have none yet. `here`: the lanes of the latest of them, where it is in hand."""
    cdef SlotDevice *share = course.share
    cdef uint64_t before = course.unmarked
    cdef int32_t first = share.taken, first_here, end_before, layer
    cdef int64_t entries
    cdef int status = record_lanes(course, before & ~here)
    first_here = share.taken
    if status == OK:
        status = record_lanes(course, before & here)
    end_before = share.taken
    if status == OK:
        status = record_lanes(course, here & ~before)
    if status != OK:
        return status
    for layer in range(course.first_unmarked, end):
        share.first_event[layer], share.end_event[layer], share.layer_lanes[layer] = first, end_before, before
    if course.entered and end == course.layer + 1:
        share.first_event[course.layer], share.end_event[course.layer] = first_here, share.taken
        share.layer_lanes[course.layer] = here
        course.here = 0
        if course.request.hook != NULL:
            entries = course.device.hooks.queued
            status = call_hook(course)
            if status != OK:
                course.device.hooks.queued = entries
    course.unmarked, course.unmarked_bytes, course.first_unmarked = 0, 0, end
    if status == OK:
        tell_layers(course, end)
    return status


cdef int record_lanes(Course *course, uint64_t lanes) noexcept nogil:
    """An event behind what was queued on each of these lanes."""
    cdef int32_t n
    cdef int status = send_gathered(course)
    while status == OK and lanes != 0:
        n = next_lane(&lanes)
        status = lane_record(course.device, &course.device.lanes[n], next_event(course), course.guard, course.error)
        ends_behind(course.device, course.share, n)
        course.last[n] = next_event(course)
        course.share.taken += 1
    return status


cdef inline cudaEvent_t next_event(const Course *course) noexcept nogil:
    return event_of(course, course.share.taken)


cdef inline cudaEvent_t event_of(const Course *course, int32_t i) noexcept nogil:
    return course.slot.events[(course.share - course.slot.devices) * course.copier.layer_events + i]


cdef bint shares_events(const Course *course, int32_t layer) noexcept nogil:
    """Whether the next layer's events stand for this one too. On a lane over PCIe an event between two copies costs as much as 200 KB,
    and what a peer lane gathers has to be queued before one, so layers of a few megabytes share them. Never the first layer, which
    somebody waits for, nor the last."""
    if course.request.hook != NULL:
        return False
    if course.here == 0 and course.unmarked == 0:
        return course.share.taken == 0      # an event that is not recorded yet orders nothing
    if layer == 0 or layer == course.slot.n_layers - 1 or course.unmarked_bytes >= shared_bytes(course):
        return False
    return (course.here | course.unmarked) & ~(pcie_lanes() | peer_lanes()) == 0


cdef inline int64_t shared_bytes(const Course *course) noexcept nogil:
    return SHARED_BYTES if (course.here | course.unmarked) & pcie_lanes() else <int64_t>PEER_CHUNKS * SHARED_BYTES


cdef int64_t layer_bytes(const Course *course, int32_t layer) noexcept nogil:
    cdef const LayoutData *layout = course.plan.target.layout
    cdef int64_t bytes = 0
    cdef int32_t k, part
    for k in range(layout.first[layer], layout.first[layer + 1]):
        part = layout.order[k]
        if not nothing_of(course, part) and not moves_early(course.plan, part):
            bytes += bytes_of(&layout.parts[part], &course.units[part])
    return bytes


cdef void tell_layers(Course *course, int32_t queued) noexcept nogil:
    cdef Slot *slot = course.slot
    cdef int32_t d, least
    course.promised = course.share.queued = queued
    if has_staging(course) and course.device.staging.way != STAGE_IN:
        course.share.queued = stage_layer(course.device, queued)
        if course.device.staging.way != STAGE_OUT:
            published(&slot.layers_queued)      # no event stands for what helpers have written to memory that others copy from
    least = course.share.queued
    for d in range(course.copier.n_devices):
        if slot.devices[d].used:
            least = min(least, slot.devices[d].queued)
    if least > load_i32(&slot.layers_queued):
        store_i32(&slot.layers_queued, least)
        tell_news()


cdef int call_hook(Course *course) noexcept nogil:
    """The caller's own work behind the layer that was just queued. Its stream stands behind every lane of the layer; the event behind
    the work is then the layer's."""
    cdef SlotDevice *share = course.share
    cdef DeviceLanes *device = course.device
    cdef int32_t layer = course.layer, i
    cdef uint64_t bundles
    cdef int before = -1, told = 0
    cdef int status = OK
    cdef int code
    bundles = bundles_of_layer(course.slot, <int32_t>(share - course.slot.devices), layer) & ~course.hook_lanes
    if course.hooked == NULL and bundles == 0 and share.layer_lanes[layer] == 0:    # nothing of this ticket to come behind
        status = wait_before(course, device.hook, &device.hooks)
    course.hook_lanes |= bundles | share.layer_lanes[layer]
    while status == OK and bundles != 0:
        status = hook_waits(course, event_of(course, share.bundle_event[next_lane(&bundles)]))
    for i in range(share.first_event[layer], share.end_event[layer]):
        if status == OK:
            status = hook_waits(course, event_of(course, i))
    if status != OK:
        return status
    code = rt.cudaGetDevice(&before)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaGetDevice", device.device, course.guard, course.error)
    if before != device.device:
        code = rt.cudaSetDevice(device.device)
    if code != 0:
        return cuda_failed(FAILED, code, "cudaSetDevice", device.device, course.guard, course.error)
    enter_hook()
    told = course.request.hook(course.request.hook_arg, layer, device.device, device.hook)
    leave_hook()
    if before != device.device:
        code = rt.cudaSetDevice(before)
    if code != 0:
        course.error.restored = 0
        return cuda_failed(FAILED, code, "cudaSetDevice", before, course.guard, course.error)
    if told != 0:
        course.error.found, course.error.device = told, device.device
        return outcome(course.error, FAILED, REASON_HOOK, "the hook of layer %d on device %d returned %d", layer, device.device, told)
    course.hooked = next_event(course)
    device.hooks.queued += WORK_OF_A_HOOK
    status = record(device, course.hooked, device.hook, &device.hooks, course.guard, course.error)
    share.hooks_upto = device.hooks.queued
    course.budget.calls -= 1
    share.first_event[layer] = share.taken
    share.taken += 1
    share.end_event[layer], share.layer_lanes[layer] = share.taken, ~<uint64_t>0
    return status


cdef int hook_waits(Course *course, cudaEvent_t event) noexcept nogil:
    """The end of the ticket comes behind the hook's work, and so behind lanes of which this is the last event."""
    cdef int32_t n
    for n in range(LANES):
        if course.last[n] == event:
            course.last[n] = NULL
    return wait_event(course.device, course.device.hook, event, &course.device.hooks, course.guard, course.error)


cdef void show_unmoved(const Course *course, cudaStream_t finish) noexcept nogil:
    """Shows a runtime that judges what the lineages let the copy leave out, unless it was cut short or its target is lost."""
    cdef Emission emission
    cdef int32_t i
    if rt.unchanged == NULL or course.request.begin != NULL or course.layer < course.slot.n_layers or target_is_lost(course):
        return
    emission.take, emission.sink, emission.pending.rows = show_extent, finish, 0
    for i in range(course.plan.target.layout.n_parts):
        if course.plan.parts[i].device_number == course.share - course.slot.devices:
            emit_unmoved(&emission, course.plan, course.request, i, &course.units[i])
    emit_end(&emission)


cdef bint target_is_lost(const Course *course) noexcept nogil:
    """Whether a copy into the target before this one has failed, or will: what that one was to bring is not there."""
    cdef const Slot *earlier
    cdef int32_t i
    for i in range(course.copier.n_slots):
        earlier = &course.copier.slots[i]
        if (0 < earlier.ticket < course.slot.ticket and earlier.plan.target == course.plan.target
                and load_i32(&earlier.verdict) != OK):
            return True
    return load_i32(&course.plan.target.invalid) != 0


cdef int show_extent(void *sink, const Extent *e) noexcept nogil:
    rt.unchanged(e.target, e.target_pitch, e.source, e.source_pitch, e.width, e.rows, sink)
    return OK


# ---- bytes onto lanes

cdef void start_emission(Course *course) noexcept nogil:
    course.emission.take, course.emission.sink, course.emission.pending.rows = take_extent, course, 0
    course.skip, course.lane, course.ring = course.extent, -1, NULL


cdef int end_emission(Course *course) noexcept nogil:
    """What is pending goes, and what is in the ring. A lane's event stands for bytes from pageable memory only once they are on it, and a
    hook is told of bytes in pageable memory only once they are there."""
    cdef int status = emit_end(&course.emission)
    if status == OK:
        status = flush(course)
    if status == OK and has_staging(course) and (course.device.staging.way == STAGE_IN or course.request.hook != NULL):
        status = send_staged(course)
    return status


cdef int flush(Course *course) noexcept nogil:
    if course.ring == NULL or course.ring.n == 0:
        return OK
    course.budget.calls -= 1        # for the events behind and before the slot
    return ring_flush(course.copier, course.ring, course.guard, course.error)


cdef int send_gathered(Course *course) noexcept nogil:
    """An error names the latest of them."""
    cdef Lane *lane = course.gathering
    cdef int status
    course.gathering = NULL
    if lane == NULL:
        return OK
    status = lane_flush(course.device, lane, course.guard, course.error)
    if status != OK:
        course.error.layer, course.error.part = course.gathered_layer, course.gathered_part
    return status


cdef inline bint has_staging(const Course *course) noexcept nogil:
    """While none of its bytes are in the chunks another ticket may take them."""
    return course.device.staging.owner == course.slot.ticket


cdef int send_staged(Course *course) noexcept nogil:
    """PAUSE while the helpers have to copy bytes of the ticket."""
    cdef int status
    if not has_staging(course):
        return OK
    status = stage_flush(course.device, course.guard, course.error)
    return status if status != OK or stage_sent(course.device) else PAUSE


cdef inline bint nothing_of(const Course *course, int32_t part) noexcept nogil:
    return (course.units[part].first == course.units[part].end
            or course.plan.parts[part].device_number != course.share - course.slot.devices)


cdef int go_to_lane(Course *course, int32_t part) noexcept nogil:
    """Makes the lane of a part's route the one that extents go to: the one that this layer took already, or the one to take now."""
    cdef const PartRoute *way = &course.plan.parts[part]
    cdef DeviceLanes *device = course.device
    cdef int32_t n = way.lane
    cdef int status = OK
    if way.route == ROUTE_LOCAL:
        if course.local < 0:
            course.local = least_used(course)
        n = course.local
    if n != course.lane or way.route != course.route:
        status = end_emission(course)       # what is pending belongs to the lane before
        if status != OK:                    # which `rest` empties
            return status
        course.lane, course.route = n, way.route
        course.ring = (&device.ring if way.route == ROUTE_RING else device.relays[way.other_number] if way.route == ROUTE_RELAY else
                       NULL)
    if status == OK and (course.gathering != &device.lanes[n] or course.ring != NULL or is_staged(way.route)):
        status = send_gathered(course)
    if status == OK:
        status = open_lane(course, IN_LANE if way.route == ROUTE_RING else n, first_lane(course))
    return status


cdef inline Lane *first_lane(Course *course) noexcept nogil:
    """Of the way that extents go now."""
    return &course.device.lanes[course.lane] if course.ring == NULL else course.ring.first


cdef int32_t least_used(const Course *course) noexcept nogil:
    """Of the local lanes the one with the fewest bytes of this ticket: dealt in turn, the layers with K/V would meet on one."""
    cdef int32_t n, best = 0
    for n in range(1, LOCAL_LANES):
        if course.queued[n] < course.queued[best]:
            best = n
    return best


cdef int open_lane(Course *course, int32_t n, Lane *lane) noexcept nogil:
    """Before a lane's first copy of this ticket. A ring's second lane needs nothing: it comes behind the first."""
    if course.used & bit(n):
        return OK
    course.used |= bit(n)
    return wait_before(course, lane_stream(lane), lane.entries)


cdef int32_t course_waits(const Course *course) noexcept nogil:
    cdef const Slot *earlier
    cdef int32_t i, d, waits = course.gate != NULL
    for i in range(course.copier.n_slots):
        earlier = waited_for(course, i)
        for d in range(course.copier.n_devices if earlier != NULL else 0):
            waits += earlier.devices[d].used
    return waits


cdef int wait_before(Course *course, cudaStream_t stream, Entries *entries) noexcept nogil:
    """The stream waits for whatever wrote the source and whatever still reads or writes the target: what the request names, and our own
    earlier tickets on these states, on all their devices."""
    cdef const Wait *wait
    cdef const Slot *earlier
    cdef cudaEvent_t event
    cdef int32_t i, d
    cdef int status = OK
    if course.gate != NULL:
        status = wait_event(course.device, stream, course.gate, entries, course.guard, course.error)
    for i in range(<int32_t>course.request.n_after if course.gate == NULL else 0):
        wait = &course.request.after[i]
        event = (wait.handle if wait.kind == WAIT_EVENT else
                 course.copier.devices[device_index(course.copier, wait.device)].gates[i])
        if status == OK:
            status = wait_event(course.device, stream, event, entries, course.guard, course.error)
    for i in range(course.copier.n_slots):
        earlier = waited_for(course, i)
        for d in range(course.copier.n_devices if earlier != NULL else 0):
            if status == OK and earlier.devices[d].used:
                status = wait_event(course.device, stream, earlier.devices[d].done, entries, course.guard, course.error)
    return status


cdef inline const Slot *waited_for(const Course *course, int32_t i) noexcept nogil:
    """The earlier ticket in a slot that this one comes behind, or NULL. Where the slot is free or a later ticket's, that one has ended;
    where it ended badly, its lanes are quiet."""
    cdef const Slot *earlier = &course.copier.slots[i]
    if not (course.slot.depends[i >> 6] >> (i & 63)) & 1 or not 0 < earlier.ticket < course.slot.ticket:
        return NULL
    return earlier if load_i32(&earlier.status) >= OK else NULL


cdef int take_extent(void *sink, const Extent *extent) noexcept nogil:
    cdef Course *course = <Course *>sink
    cdef bint by_helpers, staged
    cdef Lane *lane = first_lane(course)
    cdef int status
    if course.skip > 0:
        course.skip -= 1
        return OK
    by_helpers = course.route == ROUTE_HOST or (course.step == STEP_BESIDE and course.route == ROUTE_RING)
    staged = by_helpers or is_staged(course.route)
    if course.only == NO_WAY:
        course.only = course.lane + (LANES if staged else 0)
    elif course.only != ANY_WAY and course.only != course.lane + (LANES if staged else 0):
        return PAUSE
    status = ready_staging(course, lane, by_helpers) if staged else ready_lane(course, lane)
    if status != OK:
        return status
    course.error.part = course.emission.part
    if course.into == 0:
        course.unmarked_bytes += extent.width * extent.rows
        course.queued[course.lane] += extent.width * extent.rows
    course.here |= bit(course.lane)
    if staged:
        status = stage_copy(course.copier, course.device, extent, &course.into, course.budget, course.layer, course.guard, course.error)
    elif course.ring != NULL:
        status = ring_copy(course.copier, course.ring, extent, &course.into, course.budget, course.guard, course.error)
    else:
        if lane.gathers and not lane.singly:
            course.gathering, course.gathered_layer, course.gathered_part = lane, course.layer, course.emission.part
        status = lane_copy(course.copier, course.device, lane, extent, &course.into, course.budget, course.guard, course.error)
    if status == OK:
        course.extent += 1
        course.into = 0
    return status


cdef int ready_lane(Course *course, Lane *lane) noexcept nogil:
    cdef int status = OK
    if course.gathering == lane and lane.in_chunk >= lane.chunk:    # the change of streams would queue it, and an error name this part
        status = send_gathered(course)
    if status == OK:
        status = lane_ready(course.device, lane, course.guard, course.error)
    if status == OK and course.ring != NULL:
        status = ring_ready(course.ring, course.guard, course.error)
    if status == OK and has_staging(course):    # helpers get what is theirs, or layers would count only where the next of them ends
        status = stage_flush(course.device, course.guard, course.error)
    if status == OK:                            # the next call is a copy
        course_touch(course)
    return status


cdef int ready_staging(Course *course, Lane *lane, bint by_helpers) noexcept nogil:
    cdef int status = take_staging(course)
    if status == OK and not by_helpers:
        status = lane_ready(course.device, lane, course.guard, course.error)
    if status == OK and course.route == ROUTE_UNSTAGE:      # the next call is a copy
        course_touch(course)
    return status


cdef int take_staging(Course *course) noexcept nogil:
    """PAUSE while bytes of another ticket or of the other direction are in it."""
    cdef DeviceLanes *device = course.device
    cdef int32_t way = (STAGE_IN if course.route == ROUTE_STAGE else STAGE_OUT if course.route == ROUTE_UNSTAGE else
                        STAGE_HOST if course.route == ROUTE_HOST else STAGE_BESIDE)
    cdef int status
    if has_staging(course) and device.staging.way == way:
        return OK
    status = send_staged(course)
    if status != OK:
        return status
    if not stage_take(device, course.slot.ticket, way):
        return PAUSE
    if not stage_reads(way):
        return OK
    # The helpers begin when all is over that the lane waits for.
    return lane_record(device, &device.lanes[course.lane], device.staging.opened, course.guard, course.error)


cdef void touch_target(Slot *slot) noexcept nogil:
    """From here on the target may differ."""
    slot.touched = 1
    if not slot.counted:
        slot.counted = 1
        add_i64(<int64_t *>&slot.plan.target.generation, 1)
