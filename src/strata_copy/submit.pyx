"""The way of a copy: every check, then a ticket, then the copies, queued here or by the worker.

Reads top down. What is looked at first is checks.pyx, extents come from plan.pyx, what is queued in which order is courses.pyx, onto
which streams lanes.pyx, the worker's turn worker.pyx, what happens afterwards tickets.pyx and endings.pyx.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from strata_copy.abi cimport (
    AGAIN, FEED, OK, POISONED, QUEUE_ALL, REASON_CAPACITY, REASON_PLACE, REFUSED, WAIT_STREAM, Error, PartSpec, PlaceSpec, Request, Ticket,
    Wait,
)
from strata_copy.atomics cimport add_i32, load_i32, store_i32, store_i64, store_u64
from strata_copy.checks cimport check_devices, check_open, check_plan_now, check_waits, uses_device
from strata_copy.copier cimport copier_reserve, the_tables
from strata_copy.courses cimport STEP_ON, WORK_OF_A_HOOK, Course, course_begin, course_go
from strata_copy.cudart cimport clear, guard_enter, guard_leave, outcome
from strata_copy.endings cimport QUEUING, count_relays, give_up, queued_to_end, sweep
from strata_copy.hooks cimport in_hook, of_hook
from strata_copy.images cimport image_written
from strata_copy.kinship cimport handed_on
from strata_copy.lanes cimport (
    CELLS, ENTRIES_IN_FLIGHT, HOST_LANE, IN_LANE, LANES, LINK_RELAY, OUT_LANE, PEER_CHUNKS, PEER_LANE, RELAY_LANE, Budget, CopierData,
    DeviceLanes, Slot, SlotDevice, device_index, most_ends, most_pending, next_lane, now, pending, record, relay_room,
)
from strata_copy.layout cimport LayoutData
from strata_copy.plan cimport (
    MAX_DEVICES, ROUTE_IN, ROUTE_LOCAL, ROUTE_OUT, ROUTE_PEER, ROUTE_RELAY, ROUTE_RING, ROUTE_STAGE, ROUTE_UNSTAGE, PartRoute,
    PlanData, Units, bytes_of, is_staged, plan_hold, plan_settle, units_asked, units_to_move,
)
from strata_copy.states cimport TICKET_BITS, TICKET_WORDS, Runs, StateData, slot_of
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_unlock
from strata_copy.ways cimport lanes_of_part
from strata_copy.worker cimport Job, feed, take_job, worker_reserve

cdef uint64_t generations = 0       # of tickets, under the copier's lock; goes on from copier to copier
cdef Course courses[MAX_DEVICES]    # of the submit that is under way, under the lock

cdef enum:
    SHORT = 128             # entries that are queued as quickly as a chunk is copied
    ENTRIES_OF_A_CHUNK = 4  # two copies where it cuts one, and the event and the wait of the change of streams
    ENTRIES_OF_A_SLOT = 6   # of a ring: waits, events, copies cut in two, and where it is a chunk a change of streams
    MOST_ENTRIES = 1 << 20


cdef int submit_plan(PlanData *plan, const Request *request, Ticket *ticket, Error *error) noexcept nogil:
    """OK and a ticket; AGAIN without a free one; REFUSED before the first copy call; FAILED after it, with every lane quiet."""
    ticket.v = 0
    return under_lock(plan, request, ticket, error)


cdef int submit_ahead(PlanData *plan, const Request *request, Error *error) noexcept nogil:
    return under_lock(plan, request, NULL, error)


cdef int under_lock(PlanData *plan, const Request *request, Ticket *ticket, Error *error) noexcept nogil:
    """ticket == NULL: up to where it would be taken."""
    cdef Submission s
    cdef int status
    memset(&s, 0, sizeof(s))
    s.copier, s.plan, s.request, s.error = the_tables(), plan, request, error
    if in_hook():
        return of_hook("submit", error)
    pthread_mutex_lock(&s.copier.lock)
    status = check_open(s.copier, plan.copier, error)
    if status == OK:
        status = check_devices(&s)      # a device that is poisoned is not called any more
    if status == OK:
        status = guard_enter(&s.guard, error)
        if status == OK:
            status = submit_locked(&s, ticket) if ticket != NULL else look_ahead(&s)
            guard_leave(&s.guard, status, error)
        if status == POISONED and s.slot == NULL:
            poison_devices(&s)
    pthread_mutex_unlock(&s.copier.lock)
    return status


cdef int submit_locked(Submission *s, Ticket *ticket) noexcept nogil:
    cdef int64_t started = now()
    cdef Job *job = NULL
    cdef int status
    sweep(s.copier)
    status = check_plan_now(s)
    if status == OK:
        status = units_to_move(s.plan, s.request, s.copier.units, &s.bytes, &s.known, s.error)
    if status == OK:
        status = find_way_to_queue(s, &job)
    if status != OK:
        return status
    s.slot = take_slot(s, started)
    if s.slot == NULL:
        return AGAIN
    ticket.v = s.slot.ticket        # from now on other threads may wait for layers
    status = record_gates(s)
    if status == OK:
        status = queue_all(s) if job == NULL else feed(job, s)
    if status != OK:
        ticket.v = 0
        status = give_up(s.copier, s.slot, status, &s.guard, s.error)
        store_i32(&s.slot.released, 1)      # nobody was given the ticket
        sweep(s.copier)
        return status
    publish(s)
    handed_on(&s.known, s.plan, s.request)
    if s.plan.target.image != NULL:
        image_written(s.plan.target, s.request)
    s.slot.submitted = now()
    if job == NULL:
        store_i32(&s.slot.status, AGAIN)
    return OK


cdef int look_ahead(Submission *s) noexcept nogil:
    cdef Job *job = NULL
    cdef int status
    sweep(s.copier)
    status = check_plan_now(s)
    if status == OK:
        status = units_asked(s.plan, s.request, s.copier.units, &s.bytes, &s.known, s.error)
    if status == OK:
        status = find_way_to_queue(s, &job)
    return status if status != OK or free_slot(s.copier) != NULL else AGAIN


cdef int find_way_to_queue(Submission *s, Job **job) noexcept nogil:
    """job: of the worker's, where it queues the copy."""
    cdef int status = check_waits(s)
    if status == OK:
        status = measure(s)
    if status != OK:
        return status
    s.behind_fed = comes_behind_fed(s)
    if is_fed(s):
        job[0] = take_job(s.copier)
        if job[0] == NULL or (s.request.flags & QUEUE_ALL and not s.staged):
            return AGAIN
    return OK


cdef void poison_devices(Submission *s) noexcept nogil:
    """A sticky code before anything was queued: it may be any of the plan's devices."""
    cdef int32_t d
    for d in range(s.copier.n_devices):
        if uses_device(s.plan, s.copier.devices[d].device) and load_i32(&s.copier.devices[d].poisoned) == 0:
            store_i32(&s.copier.devices[d].poisoned, s.error.cuda_code)


# ---- who queues it

cdef int measure(Submission *s) noexcept nogil:
    """What moves on which device, in copies and in chunks."""
    cdef const LayoutData *layout = s.plan.target.layout
    cdef int64_t bytes[MAX_DEVICES]
    cdef int64_t relayed[MAX_DEVICES]
    cdef int64_t ringed[MAX_DEVICES]
    cdef int64_t *entries = s.entries
    cdef const PartRoute *part
    cdef const Units *units
    cdef int64_t size, room, extents
    cdef int32_t i, d
    for d in range(s.copier.n_devices):
        bytes[d] = relayed[d] = ringed[d] = 0
    for i in range(layout.n_parts):
        units = &s.copier.units[i]
        part = &s.plan.parts[i]
        d = part.device_number
        if s.request.hook != NULL:          # which is told of every device of the plan
            s.devices |= <uint32_t>1 << d
        if units.first == units.end:
            continue
        s.devices |= <uint32_t>1 << d
        size = bytes_of(&layout.parts[i], units)
        s.lanes[d] |= lanes_of_part(part)
        extents = extents_of(s, i, part)
        entries[d] += extents + 1       # an event behind the layer
        s.staged = s.staged or is_staged(part.route)
        if part.other >= 0:
            s.others |= <uint32_t>1 << part.other_number
        if part.route == ROUTE_PEER:
            size //= PEER_CHUNKS        # as long as so many over PCIe
        if part.route != ROUTE_LOCAL:
            bytes[d] += size
        if part.route == ROUTE_RING:
            ringed[d] += size if layout.parts[i].rep == 1 else 2 * size     # long rows may leave half a slot empty
        elif part.route == ROUTE_RELAY:
            relayed[d] += size if layout.parts[i].rep == 1 else 2 * size
            entries[d] += extents           # both hops count on one lane
            s.relays[d] |= <uint32_t>1 << part.other_number
    room = relay_room(s.copier, s.copier.relays_in_flight + new_relays(s))
    s.waits = waits_of(s)
    for d in range(s.copier.n_devices):
        if bytes[d] > 0:
            entries[d] += ENTRIES_OF_A_CHUNK * (1 + bytes[d] // s.copier.chunk)
        if ringed[d] > 0:       # a ring is emptied behind each layer
            entries[d] += ENTRIES_OF_A_SLOT * (layout.n_layers + ringed[d] // s.copier.devices[d].ring.slot_bytes)
        if relayed[d] > 0:
            entries[d] += ENTRIES_OF_A_SLOT * (layout.n_layers + relayed[d] // room)
        entries[d] = min(entries[d] + s.waits, <int64_t>MOST_ENTRIES)
        s.chunks = max(s.chunks, bytes[d] // s.copier.chunk, entries[d] // SHORT)
    if s.devices == 0:          # a copy without bytes stands in line on one device
        s.devices = <uint32_t>1 << s.plan.parts[0].device_number
    if s.request.hook != NULL and s.plan.n_events + layout.n_layers > s.copier.layer_events:
        s.error.wanted, s.error.found = s.plan.n_events + layout.n_layers, s.copier.layer_events
        return outcome(s.error, REFUSED, REASON_CAPACITY, "%ld layer events are needed with a hook; the copier was opened with "
                       "layer_events=%ld", s.error.wanted, s.error.found)
    return OK


cdef int64_t extents_of(const Submission *s, int32_t i, const PartRoute *way) noexcept nogil:
    """At most. Sinks, the end of a ring of units and a patch begin one each; rows that do not lie one behind the other take one for each
    run of a unit."""
    cdef const LayoutData *layout = s.plan.target.layout
    cdef const PartSpec *part = &layout.parts[i]
    cdef const Units *units = &s.copier.units[i]
    cdef const PlaceSpec *source = &way.source.places[i]
    cdef const PlaceSpec *target = &s.plan.target.places[i]
    cdef int64_t runs = (1 + (units.sinks > 0) + (source.ring > 0) + (target.ring > 0) + pieces_of(way.source, i, units)
                         + pieces_of(s.plan.target, i, units))
    cdef int64_t rep = max(part.rep, 1)
    cdef bint dense = source.stride == part.growth.unit_bytes and target.stride == part.growth.unit_bytes
    cdef bint pitched = max(source.rep_stride, target.rep_stride) <= s.copier.devices[way.device_number].max_pitch
    return (runs if dense and pitched else runs * rep) + (rep if layout.patch_of[i] >= 0 else 0)


cdef int32_t waits_of(const Submission *s) noexcept nogil:
    """At most: what the request names, and the tickets before it on all their devices."""
    cdef int32_t i, tickets = 1 + s.plan.n_sources
    cdef uint64_t readers
    for i in range(TICKET_WORDS):
        readers = s.plan.target.readers[i]
        while readers != 0:
            readers &= readers - 1
            tickets += 1
    return <int32_t>s.request.n_after + tickets * s.copier.n_devices


cdef inline int64_t pieces_of(const StateData *state, int32_t part, const Units *units) noexcept nogil:
    """In which its units lie, where it is kept in chunks."""
    cdef const Runs *runs = state.runs[part] if state.runs != NULL else NULL
    return 0 if runs == NULL else 2 + (units.end - units.first + units.sinks) // runs.chunk_units


cdef int32_t new_relays(const Submission *s) noexcept nogil:
    """Rings between devices that it goes through, and no ticket in flight does."""
    cdef int32_t d, n, new = 0
    for d in range(s.copier.n_devices):
        for n in range(s.copier.n_devices if s.relays[d] != 0 else 0):
            if (s.relays[d] >> n) & 1:
                new += s.copier.devices[d].relays[n].tickets == 0
    return new


cdef bint is_fed(const Submission *s) noexcept nogil:
    """Whether the worker queues the ticket: where it is long, of low priority or shall keep its distance, where it would fill a
    stream, and behind a ticket that is not queued to its end."""
    if s.behind_fed or s.staged or s.request.flags & FEED:
        return True
    if s.request.flags & QUEUE_ALL:
        return would_fill(s, 1)
    return s.request.priority < 0 or s.request.bytes_ahead > 0 or s.chunks > s.copier.window or would_fill(s, 0)


cdef bint would_fill(const Submission *s, int32_t least) noexcept nogil:
    """A stream that has so many entries in flight at least. One that is full holds its caller, and with it the lock, until something on it
    is done."""
    cdef const DeviceLanes *device
    cdef int32_t d
    for d in range(s.copier.n_devices):
        device = &s.copier.devices[d]
        if (s.devices >> d) & 1 and (fills(most_pending(device, s.lanes[d]), s.entries[d], least)
                                     or fills(most_ends(device, s.lanes[d]), LANES + s.waits, least)
                                     or (s.request.hook != NULL and fills(pending(&device.hooks), hook_entries(s), least))):
            return True
    return False


cdef inline bint fills(int64_t held, int64_t more, int32_t least) noexcept nogil:
    return held >= least and held + more > ENTRIES_IN_FLIGHT


cdef inline int64_t hook_entries(const Submission *s) noexcept nogil:
    return s.waits + s.plan.n_events + s.plan.target.layout.n_layers * (1 + WORK_OF_A_HOOK)


cdef bint comes_behind_fed(const Submission *s) noexcept nogil:
    cdef const StateData *target = s.plan.target
    cdef int32_t i
    if not queued_to_end(s.copier, target.writer):
        return True
    for i in range(s.plan.n_sources):
        if not queued_to_end(s.copier, s.plan.sources[i].writer):
            return True
    for i in range(s.copier.n_slots):
        if (target.readers[i >> 6] >> (i & 63)) & 1 and not queued_to_end(s.copier, s.copier.slots[i].ticket):
            return True
    return False


# ---- the slot

cdef Slot *take_slot(Submission *s, int64_t started) noexcept nogil:
    """A free slot with source and target held, or NULL."""
    global generations
    cdef Slot *slot = free_slot(s.copier)
    cdef int32_t d, n_layers = s.plan.target.layout.n_layers
    if slot == NULL:
        return NULL
    generations += 1
    slot.plan = s.plan
    plan_hold(s.plan)
    clear(&slot.error)
    slot.n_layers = n_layers
    slot.bytes, slot.started, slot.submitted, slot.ended, slot.asked = s.bytes, started, started, started, 0
    slot.released = slot.reported = slot.layers_queued = slot.verdict = 0
    slot.touched = slot.counted = slot.fed = False
    slot.queued_bytes = 0
    store_i64(&slot.landed, 0)
    slot.uses += 1
    slot.word = 1 + slot.uses % CELLS
    for d in range(s.copier.n_devices):
        slot.devices[d].used = (s.devices >> d) & 1
        slot.devices[d].involved = ((s.devices | s.others) >> d) & 1
        slot.devices[d].taken = slot.devices[d].queued = 0
        join_lanes(&s.copier.devices[d], &slot.devices[d], s.lanes[d])
        slot.devices[d].relays = s.relays[d]
        if slot.devices[d].used:
            slot.devices[d].bundle_lanes = 0
            memset(slot.devices[d].first_event, 0, n_layers * sizeof(int32_t))
            memset(slot.devices[d].end_event, 0, n_layers * sizeof(int32_t))
    depend(s, slot)
    count_relays(s.copier, slot, 1)
    slot.on_lanes = True
    slot.holding = 1
    add_i32(&s.plan.target.holds, 1)
    for d in range(s.plan.n_sources):
        add_i32(&s.plan.sources[d].holds, 1)
    store_i32(&slot.status, QUEUING)
    store_u64(&slot.ticket, generations << TICKET_BITS | <uint64_t>(slot - s.copier.slots))
    return slot


cdef void join_lanes(DeviceLanes *device, SlotDevice *share, uint64_t lanes) noexcept nogil:
    cdef int32_t n
    share.lanes, share.ended = lanes, 0
    share.end = 0
    share.ends_upto = share.hooks_upto = 0
    while lanes != 0:
        n = next_lane(&lanes)
        device.lanes[n].tickets += 1
        share.upto[n] = device.lanes[n].entries.queued


cdef Slot *free_slot(CopierData *copier) noexcept nogil:
    cdef int32_t i
    for i in range(copier.n_slots):
        if copier.slots[i].ticket == 0 and load_i32(&copier.slots[i].pins) == 0:
            return &copier.slots[i]
    return NULL


cdef void depend(const Submission *s, Slot *slot) noexcept nogil:
    """The tickets that it comes behind: writers of its sources and of its target, readers of its target. They are in flight or just
    ended: `sweep` takes them off the states before their slots are used again."""
    cdef const StateData *target = s.plan.target
    cdef int32_t i
    for i in range(TICKET_WORDS):
        slot.depends[i] = target.readers[i]
    add_slot(slot, target.writer)
    for i in range(s.plan.n_sources):
        add_slot(slot, s.plan.sources[i].writer)


cdef inline void add_slot(Slot *slot, uint64_t ticket) noexcept nogil:
    if ticket != 0:
        slot.depends[slot_of(ticket) >> 6] |= <uint64_t>1 << (slot_of(ticket) & 63)


cdef void publish(Submission *s) noexcept nogil:
    """Later tickets on these states find this one."""
    cdef int32_t index = slot_of(s.slot.ticket)
    cdef int32_t n
    s.plan.target.writer = s.slot.ticket
    for n in range(s.plan.n_sources):
        s.plan.sources[n].readers[index >> 6] |= <uint64_t>1 << (index & 63)


# ---- queueing

cdef int record_gates(Submission *s) noexcept nogil:
    """The streams that the request names, as they are now: lanes wait for an event behind what each has queued."""
    cdef const Wait *wait
    cdef DeviceLanes *device
    cdef uint32_t i
    cdef int status = OK
    for i in range(s.request.n_after):
        wait = &s.request.after[i]
        if wait.kind == WAIT_STREAM and status == OK:
            device = &s.copier.devices[device_index(s.copier, wait.device)]
            status = record(device, device.gates[i], wait.handle, NULL, &s.guard, s.error)
    return status


cdef int queue_all(Submission *s) noexcept nogil:
    """Everything on every device, a layer of each in turn where they are several. Every call's code is looked at; the first bad one
    ends it."""
    cdef int32_t n = 0, d, left
    cdef Budget budget
    cdef int status = OK
    for d in range(s.copier.n_devices):
        if s.slot.devices[d].used:
            course_begin(&courses[n], s.copier, s.slot, d, s.request, s.copier.units, NULL)
            n += 1
    left = n
    while left > 0:
        for d in range(n):
            if status == OK and not courses[d].ended:
                budget.bytes, budget.calls, budget.layers = <int64_t>1 << 62, 1 << 30, 1 << 30 if n == 1 else 1
                status = course_go(&courses[d], &budget, STEP_ON, &s.guard, s.error)
                left -= courses[d].ended
        if status != OK:
            return status
    return OK


# ---- plans

cdef int adopt_plan(PlanData *plan, uint64_t number, Error *error) noexcept nogil:
    cdef CopierData *copier = the_tables()
    cdef int status
    if in_hook():
        return of_hook("plan", error)
    pthread_mutex_lock(&copier.lock)
    status = check_open(copier, number, error)
    if status == OK:
        status = adopt_locked(copier, plan, error)
    pthread_mutex_unlock(&copier.lock)
    return status


cdef int adopt_locked(CopierData *copier, PlanData *plan, Error *error) noexcept nogil:
    """What a plan needs of the copier that will carry it."""
    cdef const LayoutData *layout = plan.target.layout
    cdef int32_t i
    cdef int status
    for i in range(layout.n_parts):
        status = find_way(copier, &plan.parts[i], layout, i, error)
        if status != OK:
            return status
    plan_settle(plan)
    if plan.n_events > copier.layer_events:
        error.wanted, error.found = plan.n_events, copier.layer_events
        return outcome(error, REFUSED, REASON_CAPACITY, "%d layer events are needed; the copier was opened with layer_events=%d",
                       plan.n_events, copier.layer_events)
    plan.copier = copier.number
    status = copier_reserve(copier, layout.n_parts, error)
    return status if status != OK else worker_reserve(layout.n_parts, error)


cdef int find_way(const CopierData *copier, PartRoute *part, const LayoutData *layout, int32_t i, Error *error) noexcept nogil:
    """The copier's own devices, lanes and rings for a part's route."""
    cdef const DeviceLanes *device
    if part.device == -1:
        part.device = copier.devices[0].device
    part.device_number, part.other_number = device_index(copier, part.device), -1
    if part.other >= 0:
        part.other_number = device_index(copier, part.other)
    if part.device_number < 0 or (part.other >= 0 and part.other_number < 0):
        error.part, error.layer, error.device = i, layout.parts[i].layer, part.device if part.device_number < 0 else part.other
        return outcome(error, REFUSED, REASON_PLACE,
                       "part '%.32s' of layer %d is on device %d, which the copier has not open: name it in `devices`",
                       layout.parts[i].name, layout.parts[i].layer, error.device)
    if part.route == ROUTE_PEER and copier.devices[part.device_number].links[part.other_number] == LINK_RELAY:
        part.route = ROUTE_RELAY
        part.device, part.other = part.other, part.device
        part.device_number, part.other_number = part.other_number, part.device_number
    device = &copier.devices[part.device_number]
    part.lane = lane_of(part)
    if part.route == ROUTE_RING and device.ring.slots == 0:
        error.part, error.layer, error.device = i, layout.parts[i].layer, part.device
        return outcome(error, REFUSED, REASON_CAPACITY, "part '%.32s' of layer %d goes from pinned to pinned memory, through a ring on "
                       "device %d; the copier was opened with device_memory=0", layout.parts[i].name, layout.parts[i].layer,
                       part.device)
    if is_staged(part.route) and device.staging.slots == 0:
        error.part, error.layer, error.device = i, layout.parts[i].layer, part.device
        return outcome(error, REFUSED, REASON_CAPACITY, "part '%.32s' of layer %d comes from or goes to pageable memory, in chunks that "
                       "device %d has; the copier was opened with pinned_memory=0", layout.parts[i].name, layout.parts[i].layer,
                       part.device)
    return OK


cdef inline int32_t lane_of(const PartRoute *part) noexcept nogil:
    if part.route == ROUTE_PEER:
        return PEER_LANE + part.other_number
    if part.route == ROUTE_RELAY:
        return RELAY_LANE + part.other_number
    return (0 if part.route == ROUTE_LOCAL else
            OUT_LANE if part.route == ROUTE_OUT or part.route == ROUTE_RING or part.route == ROUTE_UNSTAGE else
            IN_LANE if part.route == ROUTE_IN or part.route == ROUTE_STAGE else HOST_LANE)
