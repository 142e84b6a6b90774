"""The worker. Declared, with who owns what, in worker.pxd."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from strata_copy.abi cimport (
    AGAIN, CANCELLED, OK, POISONED, REASON_CUDA, REASON_MEMORY, REASON_NONE, REFUSED, WAIT_EVENT, Error, Ticket, Wait,
)
from strata_copy.atomics cimport add_i64, load_i32, load_i64, store_i32
from strata_copy.copier cimport the_tables
from strata_copy.courses cimport (
    NO_WAY, STEP_BESIDE, STEP_ONE_WAY, course_begin, course_cut, course_go, course_room, course_tell, course_touch, course_waits,
)
from strata_copy.cudart cimport Guard, clear, cudaEvent_t, guard_enter, guard_leave, observed, outcome, published, rt
from strata_copy.endings cimport QUEUING, cut_short, give_up, sweep
from strata_copy.helpers cimport helpers_close, helpers_copy, helpers_open
from strata_copy.hooks cimport in_hook, of_hook
from strata_copy.lanes cimport (
    CLOSED, ENTRIES_IN_FLIGHT, LANES, PAUSE, STAGE_HOST, STAGE_IN, STAGE_OUT, STAGING, Budget, CopierData, DeviceLanes, Slot,
    StageChunk, device_index, guard_to_close, most_ends, most_pending, pending, poison_all, record, wait_event,
)
from strata_copy.layout cimport LayoutData
from strata_copy.legs cimport LEAST_BESIDE, MAX_MARKERS, Leg, Window, leg_close, leg_look, leg_mark, leg_open, leg_size
from strata_copy.news cimport nap, ran_something, tell_news
from strata_copy.plan cimport MAX_DEVICES, Extent, Units
from strata_copy.staging cimport stage_copied, stage_drop, stage_empty, stage_flush, stage_look, stage_next, stage_sends
from strata_copy.submit cimport Submission
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_trylock, pthread_mutex_unlock
from strata_copy.tickets cimport no_ticket, pin, unpin
from strata_copy.ways cimport lanes_of_plan
from strata_copy.worker_thread cimport LOOK_NS, WORK_AT_ONCE, thread_end, thread_start, thread_wake


cdef enum:
    CALLS_OF_A_STEP = 64
    ENTRIES_OF_A_STEP = 6 * CALLS_OF_A_STEP     # at most: a copy, a change of streams and a layer's event for each, or a hook's work
    CALLS_AHEAD = 256

cdef Job jobs[MAX_JOBS]
cdef int32_t max_parts = 0
cdef int32_t served = 0         # the device at whose chunks the worker looked last, under the copier's lock


# ---- a job is taken

cdef Job *take_job(CopierData *copier) noexcept nogil:
    cdef int32_t i
    for i in range(MAX_JOBS):
        if jobs[i].slot == NULL:
            return &jobs[i]
    return NULL


cdef int feed(Job *job, Submission *s) noexcept nogil:
    cdef cudaEvent_t gate = NULL
    cdef int32_t d, lead = -1
    cdef int status = OK
    keep_request(job, s)
    for d in range(s.copier.n_devices):
        if s.slot.devices[d].used and lead < 0:
            lead = d
    if s.request.n_after > 0:
        status = shut_gate(&job.legs[lead], s, &s.copier.devices[lead])
        gate = job.legs[lead].gate
    if status != OK:
        return status
    for d in range(s.copier.n_devices):
        if s.slot.devices[d].used:
            course_begin(&job.legs[d].course, s.copier, s.slot, d, &job.request, job.units, gate)
            leg_size(&job.legs[d], s.copier, &job.request, s.plan, d)
    job.slot, job.ticket, job.started = s.slot, s.slot.ticket, False
    s.slot.counted = s.slot.fed = True
    add_i64(<int64_t *>&s.plan.target.generation, 1)
    published(job)
    status = begin_here(job, s)
    if status != OK:
        drop_staging(s.copier, job)     # the lanes are drained before anybody else gets it
        job.slot = NULL
        return status
    thread_wake()
    return OK


cdef int begin_here(Job *job, Submission *s) noexcept nogil:
    """The first chunks, where nothing is in their way, so that the first layer does not wait for the worker to wake."""
    cdef uint64_t taken[MAX_DEVICES]
    cdef int32_t i
    if not can_begin(s.copier, job):
        return OK
    for i in range(s.copier.n_devices):
        taken[i] = 0
    for i in range(MAX_JOBS):
        if jobs[i].slot != NULL and &jobs[i] != job and before(&jobs[i], job):
            take_lanes(s.copier, &jobs[i], taken)
    return go_on(s.copier, job, taken, True, &s.guard, s.error)


cdef void keep_request(Job *job, Submission *s) noexcept nogil:
    """Everything that the caller's request points to is the caller's again when submit returns."""
    cdef const LayoutData *layout = s.plan.target.layout
    job.request = s.request[0]
    job.request.after, job.request.n_after = NULL, 0
    memcpy(job.upto, s.request.upto, layout.n_marks * sizeof(int64_t))
    job.request.upto = job.upto
    if s.request.begin != NULL:
        memcpy(job.begin, s.request.begin, layout.n_marks * sizeof(int64_t))
        job.request.begin = job.begin
    if s.request.src_bank != NULL:
        memcpy(job.src_banks, s.request.src_bank, layout.n_groups * sizeof(int64_t))
        job.request.src_bank = job.src_banks
    if s.request.dst_bank != NULL:
        memcpy(job.dst_banks, s.request.dst_bank, layout.n_groups * sizeof(int64_t))
        job.request.dst_bank = job.dst_banks
    memcpy(job.units, s.copier.units, layout.n_parts * sizeof(Units))


cdef int shut_gate(Leg *leg, Submission *s, DeviceLanes *device) noexcept nogil:
    """An event of our own behind all that the request waits for, on a stream on which nothing else waits: the caller's events may be
    recorded anew at once, and lanes wait for nothing before the job begins."""
    cdef const Wait *wait
    cdef cudaEvent_t event
    cdef uint32_t i
    cdef int status = OK
    for i in range(s.request.n_after):
        wait = &s.request.after[i]
        event = (wait.handle if wait.kind == WAIT_EVENT else
                 s.copier.devices[device_index(s.copier, wait.device)].gates[i])
        if status == OK:
            status = wait_event(device, leg.gate_stream, event, NULL, &s.guard, s.error)
    return status if status != OK else record(device, leg.gate, leg.gate_stream, NULL, &s.guard, s.error)


# ---- a step

cdef int worker_step() noexcept nogil:
    cdef CopierData *copier = the_tables()
    if pthread_mutex_trylock(&copier.lock) != 0:    # a thread that holds it may be the one that steps
        return 1
    return step_and_unlock(copier) != 0


cdef int work(CopierData *copier) noexcept nogil:
    pthread_mutex_lock(&copier.lock)
    return step_and_unlock(copier)


cdef int step_and_unlock(CopierData *copier) noexcept nogil:
    """Returns how many jobs are not done, or WORK_AT_ONCE."""
    cdef int left = step(copier)
    cdef StageChunk *chunk = next_chunk(copier)
    pthread_mutex_unlock(&copier.lock)
    if chunk == NULL:
        return left
    copy_chunk(copier, chunk)
    return WORK_AT_ONCE


cdef int step(CopierData *copier) noexcept nogil:
    """All jobs in their order: by priority, then by age. What an earlier one still has to queue on a lane comes before a later one's."""
    cdef Job *order[MAX_JOBS]
    cdef uint64_t taken[MAX_DEVICES]
    cdef Guard guard
    cdef Error error
    cdef int32_t i, n, left = 0
    cdef int status
    clear(&error)
    if load_i32(&copier.state) == CLOSED:
        return 0
    n = sort_jobs(order)
    if n == 0:
        return 0
    status = guard_enter(&guard, &error)
    if status == POISONED:
        poison_all(copier, error.cuda_code)
    if status != OK:
        for i in range(n):
            end_job(copier, order[i], status, &guard, &error)
        return 0
    sweep(copier)
    for i in range(copier.n_devices):
        taken[i] = 0
    for i in range(n):
        clear(&error)
        observed(order[i])
        step_job(copier, order[i], taken, &guard, &error)
        left += order[i].slot != NULL
    guard_leave(&guard, OK, &error)
    return left


cdef int32_t sort_jobs(Job **order) noexcept nogil:
    cdef int32_t i, k, n = 0
    for i in range(MAX_JOBS):
        if jobs[i].slot == NULL:
            continue
        k = n
        while k > 0 and before(&jobs[i], order[k - 1]):
            order[k] = order[k - 1]
            k -= 1
        order[k] = &jobs[i]
        n += 1
    return n


cdef inline bint before(const Job *a, const Job *b) noexcept nogil:
    return a.request.priority > b.request.priority or (a.request.priority == b.request.priority and a.ticket < b.ticket)


cdef void step_job(CopierData *copier, Job *job, uint64_t *taken, const Guard *guard, Error *error) noexcept nogil:
    cdef Slot *slot = job.slot
    cdef int status
    if slot.ticket != job.ticket or load_i32(&slot.status) < OK or load_i32(&slot.status) == OK:
        drop_staging(copier, job)       # it has ended
        job.slot = NULL
        return
    status = check_alive(copier, slot, error)
    if status == OK:
        status = look(copier, job, guard, error)
    if status == OK and load_i32(&slot.status) == QUEUING:
        if not job.started and not can_begin(copier, job):
            pass
        elif load_i32(&slot.verdict) != OK:
            status = cut(copier, job, guard, error)
        else:
            status = go_on(copier, job, taken, False, guard, error)
            if status == OK and load_i32(&slot.status) == QUEUING:
                take_lanes(copier, job, taken)
    if status != OK:
        end_job(copier, job, status, guard, error)


cdef void end_job(CopierData *copier, Job *job, int status, const Guard *guard, Error *error) noexcept nogil:
    """After a failed call. Where everything was queued, the ticket ends by its word, or with its device; what it has of the staging,
    lanes still use until then."""
    cdef bint queueing = load_i32(&job.slot.status) == QUEUING
    if status == POISONED and error.device >= 0:
        store_i32(&copier.devices[device_index(copier, error.device)].poisoned, error.cuda_code)
    if queueing:
        give_up(copier, job.slot, status, guard, error)
    elif status != POISONED and has_staging(copier, job):
        return
    drop_staging(copier, job)
    job.slot = NULL


cdef bint can_begin(CopierData *copier, Job *job) noexcept nogil:
    """Once the tickets that it comes behind are queued to their ends: their last events are recorded then."""
    cdef const Slot *earlier
    cdef int32_t i
    for i in range(copier.n_slots):
        if (job.slot.depends[i >> 6] >> (i & 63)) & 1:
            earlier = &copier.slots[i]
            if 0 < earlier.ticket < job.ticket and load_i32(&earlier.status) == QUEUING:
                return False
    return True


cdef void take_lanes(CopierData *copier, const Job *job, uint64_t *taken) noexcept nogil:
    cdef int32_t d
    if not job.started or job.slot.ticket != job.ticket:        # its slot may be another ticket's already
        return
    for d in range(copier.n_devices):
        if job.slot.devices[d].used and not job.legs[d].course.ended:
            taken[d] |= lanes_of_plan(job.slot.plan, d)


cdef int go_on(CopierData *copier, Job *job, const uint64_t *taken, bint begins, const Guard *guard, Error *error) noexcept nogil:
    """Queues on each device what its window has room for. begins: a quarter of that and two steps at least, for a caller waits; over
    PCIe that is a millisecond, in which the worker comes."""
    cdef Slot *slot = job.slot
    cdef uint64_t lanes
    cdef int32_t d, queueing = 0
    cdef int status = OK
    job.started = True
    for d in range(copier.n_devices):
        if not slot.devices[d].used or job.legs[d].course.ended:
            continue
        lanes = taken[d] & lanes_of_plan(slot.plan, d)
        if status == OK and lanes == 0:
            status = fill_window(job, &job.legs[d], begins, taken[d] >> STAGING == 0, guard, error)
        elif status == OK and copier.devices[d].staging.owner == job.ticket:    # an earlier job may wait for it to be empty
            status = stage_flush(&copier.devices[d], guard, error)
        queueing += not job.legs[d].course.ended
    if status == OK and queueing == 0:
        slot.submitted = max(slot.submitted, slot.started)
        store_i32(&slot.status, AGAIN)
        tell_news()
    return status


cdef int fill_window(Job *job, Leg *leg, bint begins, bint beside, const Guard *guard, Error *error) noexcept nogil:
    """beside: no earlier job needs the staging."""
    cdef Window *window = &leg.window
    cdef int64_t most, ahead = min(leg.ahead, max(leg.ahead // 4, 2 * leg.step)) if begins else leg.ahead
    cdef Budget budget
    cdef int status = OK
    leg.course.units = job.units        # a plan that was made since may have moved them
    if beside and has_room(leg):
        status = give_beside(job, leg, guard, error)
    while (status == OK and not leg.course.ended and window.n < MAX_MARKERS and window.calls_ahead < CALLS_AHEAD
           and has_room(leg)):
        # Two steps a window at least, so that there is something to do while one of them is looked at.
        most = min(leg.step, max(ahead // 2, 1), ahead - window.bytes_ahead)
        if most <= 0 or (most < leg.least and window.n > 0):
            break
        most = min(most, course_room(&leg.course))
        budget.bytes, budget.calls, budget.layers = most, CALLS_OF_A_STEP, 1 << 30
        status = course_go(&leg.course, &budget, STEP_ONE_WAY, guard, error)
        if status == OK and budget.calls == CALLS_OF_A_STEP and not leg.course.ended:
            break               # it waits for helpers, or for staging that another ticket has
        if status == OK and budget.calls < CALLS_OF_A_STEP:
            job.slot.queued_bytes += most - budget.bytes
            if leg.course.only >= LANES or leg.course.only == NO_WAY:       # staging counts by itself, and hooks do
                continue
            status = leg_mark(leg, most - budget.bytes, most, CALLS_OF_A_STEP - budget.calls, guard, error)
    return status


cdef bint has_room(const Leg *leg) noexcept nogil:
    """For a step on every stream that it may use, and for what it waits for where it has not begun on one."""
    cdef const DeviceLanes *device = leg.course.device
    cdef uint64_t lanes = leg.course.share.lanes
    return (max(most_pending(device, lanes), most_ends(device, lanes), pending(&device.hooks) if leg.course.request.hook != NULL else 0)
            + (course_waits(&leg.course) if lanes & ~leg.course.used or lanes == 0 else 0) + ENTRIES_OF_A_STEP <= ENTRIES_IN_FLIGHT)


cdef int give_beside(Job *job, Leg *leg, const Guard *guard, Error *error) noexcept nogil:
    """Helpers take their next share beside a ring once they are done with the latest; the first one once bytes of the ticket have landed.
    What it waits for is over then, on all devices: helpers may read its source, and the first layers, which are told at once, are not
    theirs."""
    cdef Slot *slot = job.slot
    cdef int64_t rest
    cdef Budget budget
    cdef int status
    rest = slot.bytes - slot.queued_bytes
    if (leg.helped == 0 or leg.course.ended or rest < leg.helped or rest + leg.window.bytes_ahead < LEAST_BESIDE * leg.helped
            or load_i64(&slot.landed) == 0 or not stage_empty(leg.course.device)):
        return OK
    budget.bytes, budget.calls, budget.layers = leg.helped, CALLS_OF_A_STEP, 1 << 30
    status = course_go(&leg.course, &budget, STEP_BESIDE, guard, error)
    slot.queued_bytes += leg.helped - budget.bytes
    return status


cdef int cut(CopierData *copier, Job *job, const Guard *guard, Error *error) noexcept nogil:
    """Ends a ticket that was cut short where it is. What it has queued lands, and behind that and its place in line the ticket ends."""
    cdef Slot *slot = job.slot
    cdef int32_t d
    cdef int status = OK
    for d in range(copier.n_devices):
        if status == OK and slot.devices[d].used and not job.legs[d].course.ended:
            if not job.started:         # what the request waits for does not matter any more
                job.legs[d].course.gate = NULL
            status = course_cut(&job.legs[d].course, guard, error) if has_room(&job.legs[d]) else PAUSE
    if status == OK:
        store_i32(&slot.status, AGAIN)
    return OK if status == PAUSE else status


cdef int check_alive(CopierData *copier, Slot *slot, Error *error) noexcept nogil:
    cdef int32_t d, code
    for d in range(copier.n_devices):
        code = load_i32(&copier.devices[d].poisoned)
        if slot.devices[d].involved and code != 0:
            error.device, error.cuda_code = copier.devices[d].device, code
            return outcome(error, POISONED, REASON_CUDA, "device %d failed earlier with %s (%d): restart the process", error.device,
                           rt.cudaGetErrorName(code), code)
    return OK


cdef int look(CopierData *copier, Job *job, const Guard *guard, Error *error) noexcept nogil:
    """Takes what has landed out of the windows."""
    cdef Leg *leg
    cdef int32_t d
    cdef int status = OK
    for d in range(copier.n_devices):
        leg = &job.legs[d]
        if status == OK and job.slot.devices[d].used and copier.devices[d].staging.owner == job.ticket:
            if stage_sends(&copier.devices[d]):
                course_touch(&leg.course)
            status = stage_look(copier, &copier.devices[d], &job.slot.landed, guard, error)
            if status == OK:
                course_tell(&leg.course)
        if status == OK and job.slot.devices[d].used:
            status = leg_look(leg, &job.slot.landed, guard, error)
    return status


# ---- the helpers' part of staging

cdef StageChunk *next_chunk(CopierData *copier) noexcept nogil:
    """The devices in turn: one that has a chunk again and again would hold up the others."""
    global served
    cdef StageChunk *chunk
    cdef int32_t _turn
    for _turn in range(copier.n_devices if load_i32(&copier.state) != CLOSED else 0):
        served = (served + 1) % copier.n_devices
        chunk = stage_next(&copier.devices[served])
        if chunk != NULL:
            if chunk.way != STAGE_IN:       # what helpers fill first is a chunk
                touch_target_of(copier.devices[served].staging.owner, served)
            return chunk
    return NULL


cdef void touch_target_of(uint64_t ticket, int32_t d) noexcept nogil:
    cdef int32_t i
    for i in range(MAX_JOBS):
        if jobs[i].slot != NULL and jobs[i].ticket == ticket:
            course_touch(&jobs[i].legs[d].course)


cdef void copy_chunk(CopierData *copier, StageChunk *chunk) noexcept nogil:
    """Without the lock: it takes milliseconds. The ticket cannot end meanwhile, for only the worker ends one that it feeds."""
    cdef const Extent *pieces = &chunk.to_chunk[0] if chunk.way == STAGE_IN else &chunk.from_chunk[0]
    cdef int32_t i
    for i in range(chunk.n if rt.accessed != NULL else 0):
        rt.accessed(pieces[i].source, pieces[i].source_pitch, pieces[i].width, pieces[i].rows, 0)
        rt.accessed(pieces[i].target, pieces[i].target_pitch, pieces[i].width, pieces[i].rows, 1)
    helpers_copy(pieces, chunk.n, chunk.way == STAGE_OUT or chunk.way == STAGE_HOST)
    pthread_mutex_lock(&copier.lock)
    stage_copied(chunk)
    pthread_mutex_unlock(&copier.lock)


cdef bint has_staging(const CopierData *copier, const Job *job) noexcept nogil:
    cdef int32_t d
    for d in range(copier.n_devices):
        if copier.devices[d].staging.owner == job.ticket:
            return True
    return False


cdef void drop_staging(CopierData *copier, const Job *job) noexcept nogil:
    cdef int32_t d
    for d in range(copier.n_devices):
        if copier.devices[d].staging.owner == job.ticket:
            stage_drop(&copier.devices[d])


# ---- cancelling

cdef int ticket_cancel(Ticket ticket, Error *error) noexcept nogil:
    cdef CopierData *copier = the_tables()
    cdef Slot *slot
    cdef int32_t i
    cdef int status = AGAIN
    if in_hook():
        return of_hook("cancel", error)
    slot = pin(ticket)
    if slot == NULL:
        return no_ticket(ticket, error)
    pthread_mutex_lock(&copier.lock)
    for i in range(MAX_JOBS):
        if jobs[i].slot == slot and jobs[i].ticket == ticket.v and load_i32(&slot.status) == QUEUING:
            status = OK
            if load_i32(&slot.verdict) == OK:
                outcome(error, CANCELLED, REASON_NONE, "cancelled after %ld of %ld bytes", slot.queued_bytes, slot.bytes)
                error.wanted, error.found = slot.bytes, slot.queued_bytes
                cut_short(copier, slot, CANCELLED, error)
                clear(error)
    pthread_mutex_unlock(&copier.lock)
    unpin(slot)
    if status == OK:
        thread_wake()
    return status


# ---- opening and closing

cdef int worker_open(CopierData *copier, const Opening *opening, Error *error) noexcept nogil:
    cdef Guard guard
    cdef int32_t i, d
    cdef int status = guard_enter(&guard, error)
    if status != OK:
        return status
    for i in range(MAX_JOBS):
        jobs[i].slot = NULL
        jobs[i].legs = <Leg *>calloc(copier.n_devices, sizeof(Leg))
        if jobs[i].legs == NULL:
            status = outcome(error, REFUSED, REASON_MEMORY, "no host memory for %d fed tickets", <int>MAX_JOBS)
    for d in range(copier.n_devices):
        for i in range(MAX_JOBS):
            if status == OK:
                status = leg_open(&jobs[i].legs[d], &copier.devices[d], &guard, error)
    guard_leave(&guard, status, error)
    if status != OK:
        return status
    if rt.adopt_worker == NULL or not rt.adopt_worker(worker_step):
        status = thread_start(copier, work, error)
        if status == OK:
            helpers_open(opening.helpers)
    return status


cdef void worker_close(CopierData *copier, Error *error) noexcept nogil:
    global max_parts
    cdef Guard guard
    cdef int32_t i, d
    cdef bint alive = True
    if thread_end():
        helpers_close()
    elif rt.adopt_worker != NULL:
        rt.adopt_worker(NULL)
    guard_to_close(copier, &guard, error)
    for d in range(copier.n_devices):
        alive = alive and load_i32(&copier.devices[d].poisoned) == 0
    for i in range(MAX_JOBS):
        for d in range(copier.n_devices if alive and jobs[i].legs != NULL else 0):
            leg_close(&jobs[i].legs[d], &copier.devices[d], &guard, error)
        free(jobs[i].legs)
        free(jobs[i].units)
        jobs[i].legs, jobs[i].units, jobs[i].slot = NULL, NULL, NULL
    max_parts = 0
    guard_leave(&guard, OK, error)
    if error.status == POISONED:        # nothing further is called, whichever device it was
        poison_all(copier, error.cuda_code)


cdef void worker_finish(CopierData *copier) noexcept nogil:
    cdef int32_t i, left = 1
    while left > 0:
        left = 0
        pthread_mutex_lock(&copier.lock)
        for i in range(MAX_JOBS):
            left += jobs[i].slot != NULL and jobs[i].slot.ticket == jobs[i].ticket and load_i32(&jobs[i].slot.status) == QUEUING
        pthread_mutex_unlock(&copier.lock)
        if left > 0 and not ran_something():
            nap(LOOK_NS)        # the worker is at it


cdef int worker_reserve(int32_t parts, Error *error) noexcept nogil:
    global max_parts
    cdef Units *grown
    cdef int32_t i
    for i in range(MAX_JOBS if parts > max_parts else 0):
        grown = <Units *>realloc(jobs[i].units, parts * sizeof(Units))
        if grown == NULL:
            return outcome(error, REFUSED, REASON_MEMORY, "no host memory for fed tickets of %d parts", parts)
        jobs[i].units = grown
    max_parts = max(max_parts, parts)
    return OK
