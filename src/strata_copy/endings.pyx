"""Endings. Declared in endings.pxd."""

from libc.stdint cimport INT32_MIN, int32_t, uint64_t

from strata_copy.abi cimport AGAIN, FAILED, OK, POISONED, REASON_CUDA, REFUSED, Error
from strata_copy.atomics cimport add_i32, load_i32, load_u64, store_i32, store_u64, swap_i32
from strata_copy.copier cimport the_tables
from strata_copy.cudart cimport Guard, clear, observed, outcome, published, rt
from strata_copy.lanes cimport CopierData, DeviceLanes, Ring, Slot, SlotDevice, device_drain, done_to, end_entries, next_lane, now
from strata_copy.lineage cimport lineage_reset
from strata_copy.news cimport nap, tell_news
from strata_copy.plan cimport PlanData, plan_drop
from strata_copy.states cimport StateData, slot_of
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_unlock

cdef enum:
    NAP_NS = 20000          # between two looks at a pin


cdef int slot_status(CopierData *copier, Slot *slot) noexcept nogil:
    cdef int status = load_i32(&slot.status)
    cdef int32_t d
    if status == QUEUING or status == ENDING:
        return AGAIN
    if status != AGAIN:
        observed(&slot.status)
        return status
    for d in range(copier.n_devices):
        if slot.devices[d].used and load_u64(slot.devices[d].word) != slot.word:
            return end_if_poisoned(copier, slot)
    return end_by_word(copier, slot)


cdef void sweep(CopierData *copier) noexcept nogil:
    cdef Slot *slot
    cdef int32_t i
    cdef bint let_some_go = False
    for i in range(copier.n_slots):
        slot = &copier.slots[i]
        if slot.ticket == 0:
            continue
        if slot_status(copier, slot) == AGAIN:
            continue
        leave_lanes(copier, slot)
        # What a dead device still does to source and target, nobody can tell: they stay held.
        if slot.holding and load_i32(&slot.status) != POISONED:
            let_go(slot, i, 1)
            let_some_go = True
        if load_i32(&slot.released) and not slot.holding and swap_i32(&slot.pins, 0, INT32_MIN // 2):
            free_slot(slot)
    observed(copier)
    if let_some_go:
        published(copier)


cdef int give_up(CopierData *copier, Slot *slot, int status, const Guard *guard, Error *error) noexcept nogil:
    """After a failed call. Before the first copy nothing was written, and what the lanes wait for does no harm: REFUSED. Later: every
    lane that was used is quiet before anyone is told."""
    cdef Error draining
    cdef int32_t d
    for d in range(copier.n_devices):
        if status == POISONED and slot.devices[d].involved and (error.device < 0 or error.device == copier.devices[d].device):
            store_i32(&copier.devices[d].poisoned, error.cuda_code)
    for d in range(copier.n_devices):
        # A fed ticket has later ones behind it, which come behind what it came behind: everything that they could meet is quiet.
        if (slot.touched and slot.devices[d].used or slot.fed) and load_i32(&copier.devices[d].poisoned) == 0:
            clear(&draining)
            if device_drain(&copier.devices[d], guard, &draining) != OK:
                status = POISONED
    if status != POISONED:
        status = FAILED if slot.touched else REFUSED
    if status == REFUSED and not slot.fed:
        take_back_waits(copier, slot)
    error.status = status
    end_badly(copier, slot, status, error)
    return status


cdef void cut_short(CopierData *copier, Slot *slot, int status, const Error *error) noexcept nogil:
    slot.error = error[0]
    slot.error.status = status
    store_i32(&slot.verdict, status)
    tell_news()
    end_readers(copier, slot, FAILED, error)


cdef int fail_in_flight(CopierData *copier, Slot *slot, int32_t d, int status, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t other
    cdef Error draining
    pthread_mutex_lock(&copier.lock)
    if swap_i32(&slot.status, AGAIN, ENDING):       # one thread ends it; whoever saw it end well was first
        if status == POISONED:
            store_i32(&copier.devices[d].poisoned, error.cuda_code)
        for other in range(copier.n_devices):   # all: tickets that read this target may be on others
            if load_i32(&copier.devices[other].poisoned) == 0:
                clear(&draining)
                if device_drain(&copier.devices[other], guard, &draining) != OK:
                    status = POISONED
        end_badly(copier, slot, status, error)
    pthread_mutex_unlock(&copier.lock)
    return slot_status(copier, slot)


cdef int end_by_word(CopierData *copier, Slot *slot) noexcept nogil:
    cdef int32_t d
    cdef int status = load_i32(&slot.verdict)
    for d in range(copier.n_devices):
        if slot.devices[d].used:
            observed(slot.devices[d].word)
    if status != OK:
        store_i32(&slot.plan.target.invalid, 1)
    published(&slot.status)
    slot.ended = now()
    swap_i32(&slot.status, AGAIN, status)
    return load_i32(&slot.status)


cdef bint queued_to_end(CopierData *copier, uint64_t ticket) noexcept nogil:
    cdef const Slot *slot = &copier.slots[slot_of(ticket)]
    return ticket == 0 or slot.ticket != ticket or load_i32(&slot.status) != QUEUING


cdef void free_all(CopierData *copier) noexcept nogil:
    cdef Slot *slot
    cdef int32_t i
    for i in range(copier.n_slots):
        slot = &copier.slots[i]
        while load_u64(&slot.ticket) != 0:
            pthread_mutex_lock(&copier.lock)
            store_i32(&slot.released, 1)
            if swap_i32(&slot.pins, 0, INT32_MIN // 2):
                if slot.holding:
                    # What a dead device still does to source and target, nobody can tell: they stay held.
                    let_go(slot, i, 0 if load_i32(&slot.status) == POISONED else 1)
                free_slot(slot)
            pthread_mutex_unlock(&copier.lock)
            if load_u64(&slot.ticket) != 0:
                nap(NAP_NS)     # another thread is inside a wait or sync, which end now that the ticket has


# ---- what goes with it

cdef void end_badly(CopierData *copier, Slot *slot, int status, const Error *error) noexcept nogil:
    """A ticket that is QUEUING or ENDING, and with it all that wait to read its target. Its devices are drained."""
    slot.error = error[0]
    slot.error.status = status
    slot.ended = now()
    if slot.touched:
        store_i32(&slot.plan.target.invalid, 1)
    elif slot.fed:
        disown(slot)
    published(&slot.status)
    store_i32(&slot.status, status)
    tell_news()
    end_readers(copier, slot, POISONED if status == POISONED else FAILED, error)


cdef void disown(Slot *slot) noexcept nogil:
    """A target that is as it was, though it counted as what a ticket would make of it: it claims nothing. Where later tickets write it,
    which left out what this one would have brought, it is INVALID."""
    cdef StateData *target = slot.plan.target
    if target.writer != 0 and target.writer != slot.ticket:
        store_i32(&target.invalid, 1)
    lineage_reset(target.lineage)
    if target.forget != NULL:
        target.forget(target)


cdef void end_readers(CopierData *copier, Slot *slot, int status, const Error *error) noexcept nogil:
    """Those in flight end at once: their devices were drained with this one's. Those that are being queued are cut short where they are,
    and keep their place in line: later tickets come behind what they come behind."""
    cdef Slot *reader
    cdef int32_t i, s
    for i in range(copier.n_slots):
        reader = &copier.slots[i]
        if (reader.ticket >> 8) <= (slot.ticket >> 8):
            continue        # free, or from before
        for s in range(reader.plan.n_sources):
            if reader.plan.sources[s] != slot.plan.target:
                continue
            if load_i32(&reader.status) == QUEUING and load_i32(&reader.verdict) == OK:
                cut_short(copier, reader, status, error)
            elif swap_i32(&reader.status, AGAIN, ENDING):
                end_badly(copier, reader, status, error)
            break


cdef int end_if_poisoned(CopierData *copier, Slot *slot) noexcept nogil:
    """A word that is not there may never come: a device is dead that carries some of it, or is at the other end."""
    cdef int32_t d
    for d in range(copier.n_devices):
        if slot.devices[d].involved and load_i32(&copier.devices[d].poisoned) != 0:
            return end_poisoned(copier, slot, d)
    return AGAIN


cdef int end_poisoned(CopierData *copier, Slot *slot, int32_t d) noexcept nogil:
    cdef DeviceLanes *device = &copier.devices[d]
    clear(&slot.error)
    slot.error.cuda_code, slot.error.device = load_i32(&device.poisoned), device.device
    outcome(&slot.error, POISONED, REASON_CUDA, "device %d failed earlier with %s (%d): restart the process", device.device,
            rt.cudaGetErrorName(slot.error.cuda_code), slot.error.cuda_code)
    slot.ended = now()
    store_i32(&slot.plan.target.invalid, 1)
    swap_i32(&slot.status, AGAIN, POISONED)
    return load_i32(&slot.status)


cdef void free_slot(Slot *slot) noexcept nogil:
    """Its pins were taken down below any number of threads that may still try."""
    store_u64(&slot.ticket, 0)
    plan_drop(slot.plan)
    slot.plan = NULL
    add_i32(&slot.pins, -(INT32_MIN // 2))


cdef void let_go(Slot *slot, int32_t index, int32_t holds) noexcept nogil:
    """Source and target are the engine's again; with holds 0 they stay held, but later tickets find nothing to wait for."""
    cdef CopierData *copier = the_tables()
    cdef PlanData *plan = slot.plan
    cdef int32_t s
    slot.holding = 0
    leave_lanes(copier, slot)
    if plan.target.writer == slot.ticket:
        plan.target.writer = 0
    add_i32(&plan.target.holds, -holds)
    for s in range(plan.n_sources):
        plan.sources[s].readers[index >> 6] &= ~(<uint64_t>1 << (index & 63))
        add_i32(&plan.sources[s].holds, -holds)


cdef void leave_lanes(CopierData *copier, Slot *slot) noexcept nogil:
    """What a ticket that has ended had on lanes is done; all of it, where no other one is left that uses them. With a dead device nobody
    can tell, but then nobody shall wait for it either."""
    cdef DeviceLanes *device
    cdef SlotDevice *share
    cdef uint64_t lanes
    cdef int32_t d, n
    if not slot.on_lanes:
        return
    slot.on_lanes = False
    count_relays(copier, slot, -1)
    for d in range(copier.n_devices):
        device, share = &copier.devices[d], &slot.devices[d]
        lanes = share.ended
        while lanes != 0:
            n = next_lane(&lanes)
            done_to(device.lanes[n].entries, share.upto[n])
        lanes = share.lanes
        while lanes != 0:
            n = next_lane(&lanes)
            device.lanes[n].tickets -= 1
            if device.lanes[n].tickets == 0:
                done_to(device.lanes[n].entries, device.lanes[n].entries.queued)
        done_to(end_entries(device, share.end), share.ends_upto)
        done_to(&device.hooks, share.hooks_upto)


cdef void take_back_waits(CopierData *copier, const Slot *slot) noexcept nogil:
    """What a ticket has on lanes that was refused before its first copy. Nothing is behind it: the lock was held since."""
    cdef uint64_t lanes
    cdef int32_t d, n
    for d in range(copier.n_devices):
        lanes = slot.devices[d].lanes & ~slot.devices[d].ended
        while lanes != 0:
            n = next_lane(&lanes)
            copier.devices[d].lanes[n].entries.queued = slot.devices[d].upto[n]


cdef void count_relays(CopierData *copier, const Slot *slot, int32_t tickets) noexcept nogil:
    cdef Ring *ring
    cdef int32_t d, n
    for d in range(copier.n_devices):
        for n in range(copier.n_devices if slot.devices[d].relays != 0 else 0):
            if (slot.devices[d].relays >> n) & 1:
                ring = copier.devices[d].relays[n]
                copier.relays_in_flight -= ring.tickets > 0
                ring.tickets += tickets
                copier.relays_in_flight += ring.tickets > 0
