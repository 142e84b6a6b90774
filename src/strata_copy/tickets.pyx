"""Tickets. Declared, with what a ticket is, in tickets.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport (
    AGAIN, CANCELLED, FAILED, OK, POISONED, REASON_BUSY, REASON_CAPTURE, REASON_MARK, REASON_STREAM, REASON_TICKET, REFUSED, Error,
    Progress, Ticket,
)
from strata_copy.atomics cimport add_i32, add_i64, load_i32, load_i64, load_u64, store_i32, swap_i32
from strata_copy.copier cimport the_tables
from strata_copy.cudart cimport (
    Guard, clear, cudaErrorNotReady, cudaStreamCaptureStatus, cudaStreamCaptureStatusNone, cuda_failed, guard_enter, guard_leave,
    observed, outcome, rt,
)
from strata_copy.endings cimport end_by_word, fail_in_flight, slot_status, sweep
from strata_copy.hooks cimport in_hook, of_hook
from strata_copy.images cimport image_anew
from strata_copy.lanes cimport CopierData, Slot, SlotDevice, cudaEvent_t, next_lane, now
from strata_copy.lineage cimport lineage_reset
from strata_copy.news cimport goes_on, nap, ran_something, wait_for_news
from strata_copy.states cimport StateData, slot_of
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_unlock, sched_yield
from strata_copy.ways cimport bundles_of_layer


cdef enum:
    NAP_NS = 20000          # between two looks at a word, at least
    LONG_NAP_NS = 500000    # and at most
    AWAKE_NS = 2000000      # how long sync looks without napping
    ASK_NS = 10000000       # between two times that sync asks CUDA


cdef Slot *pin(Ticket ticket) noexcept nogil:
    cdef Slot *slot = &the_tables().slots[slot_of(ticket.v)]
    if ticket.v == 0:
        return NULL
    if add_i32(&slot.pins, 1) >= 0 and load_u64(&slot.ticket) == ticket.v and load_i32(&slot.released) == 0:
        return slot
    unpin(slot)
    return NULL


cdef void unpin(Slot *slot) noexcept nogil:
    add_i32(&slot.pins, -1)


cdef int ticket_wait_layer(Ticket ticket, int32_t layer, void *stream, int64_t timeout_ns, Error *error) noexcept nogil:
    cdef Slot *slot = pin(ticket)
    cdef int status = REFUSED
    if slot == NULL:
        return no_ticket(ticket, error)
    if in_hook():
        of_hook("wait_layer", error)
    elif not 0 <= layer < slot.n_layers:
        error.wanted, error.found = layer, slot.n_layers
        outcome(error, REFUSED, REASON_MARK, "layer %d of a ticket with %d", layer, slot.n_layers)
    elif check_not_default(stream, error) == OK:
        status = wait_queued(slot, layer + 1, timeout_ns, error)
    if status == OK:
        status = wait_layer_events(slot, layer, stream, error)
    unpin(slot)
    return status


cdef int ticket_wait_done(Ticket ticket, void *stream, int64_t timeout_ns, Error *error) noexcept nogil:
    cdef Slot *slot = pin(ticket)
    cdef int status = REFUSED
    if slot == NULL:
        return no_ticket(ticket, error)
    if in_hook():
        of_hook("wait_done", error)
    elif check_not_default(stream, error) == OK:
        status = wait_queued(slot, slot.n_layers + 1, timeout_ns, error)
    if status == OK:
        status = wait_end_events(slot, stream, error)
    unpin(slot)
    return status


cdef int ticket_poll(Ticket ticket, Progress *progress) noexcept nogil:
    cdef Slot *slot = pin(ticket)
    if slot == NULL:
        return REFUSED
    progress.status = slot_status(the_tables(), slot)
    progress.layers_queued = min(load_i32(&slot.layers_queued), slot.n_layers)
    progress.bytes_total = slot.bytes
    progress.bytes = (slot.bytes if progress.status == OK else slot.queued_bytes if progress.status == CANCELLED else
                      load_i64(&slot.landed))
    progress.ns_submit = slot.submitted - slot.started
    progress.ns_total = (now() if progress.status == AGAIN else slot.ended) - slot.started
    unpin(slot)
    return progress.status


cdef int ticket_look(Ticket ticket) noexcept nogil:
    cdef Slot *slot = pin(ticket)
    cdef Error error
    cdef int status
    if slot == NULL:
        return REFUSED
    clear(&error)
    status = ask_if_late(the_tables(), slot, &error)
    unpin(slot)
    return status


cdef void tickets_look(CopierData *copier) noexcept nogil:
    cdef Slot *slot
    cdef Error error
    cdef int32_t i
    for i in range(copier.n_slots):
        slot = &copier.slots[i]
        clear(&error)
        if add_i32(&slot.pins, 1) >= 0 and load_u64(&slot.ticket) != 0 and now() - max(slot.asked, slot.started) >= ASK_NS:
            ask(copier, slot, &error)
        unpin(slot)


cdef int tickets_finished(CopierData *copier, Ticket *out, int32_t n) noexcept nogil:
    cdef Slot *slot
    cdef Ticket ticket
    cdef Error error
    cdef int32_t i, found = 0
    for i in range(copier.n_slots):
        if found >= n:
            break
        ticket.v = load_u64(&copier.slots[i].ticket)
        slot = pin(ticket)
        if slot == NULL:
            continue
        if load_i32(&slot.released) == 0 and load_i32(&slot.reported) == 0:
            clear(&error)
            if ask_if_late(copier, slot, &error) != AGAIN and swap_i32(&slot.reported, 0, 1):
                out[found] = ticket
                found += 1
        unpin(slot)
    return found


cdef int ticket_sync(Ticket ticket, int64_t timeout_ns, Error *error) noexcept nogil:
    """Looks at the word, yielding the processor at first and napping later: a nap takes longer than a short copy. Now and then CUDA is
    asked: the word may be lost with a device that failed, and a runtime that executes only when it must gets to execute."""
    cdef CopierData *copier = the_tables()
    cdef Slot *slot = pin(ticket)
    cdef int64_t began = now(), at = began, ask_at = began
    cdef int32_t restored
    cdef int status
    if slot == NULL:
        return no_ticket(ticket, error)
    if in_hook():
        unpin(slot)
        return of_hook("sync", error)
    while True:
        status = slot_status(copier, slot)
        if status == AGAIN and at >= ask_at:
            status = ask(copier, slot, error)
            if status == AGAIN and error.status == REFUSED:     # CUDA could not be asked
                unpin(slot)
                return REFUSED
            ask_at = at + ASK_NS
        at = now()
        if status != AGAIN or (timeout_ns >= 0 and at - began >= timeout_ns):
            break
        if ran_something():
            continue
        if at < began + AWAKE_NS:
            sched_yield()
        else:       # a sync is late by 1/128 at most, and a long one wakes the processor seldom
            nap(min(<int64_t>LONG_NAP_NS, max(<int64_t>NAP_NS, (at - began) >> 7)))
    if status < OK:
        restored = error.restored
        error[0] = slot.error
        error.restored = restored
    unpin(slot)
    return status


cdef void ticket_release(Ticket *ticket) noexcept nogil:
    cdef Slot *slot = pin(ticket[0])
    ticket.v = 0
    if slot != NULL:
        store_i32(&slot.released, 1)
        unpin(slot)


cdef int state_users(StateData *state) noexcept nogil:
    cdef CopierData *copier = the_tables()
    if in_hook():       # which holds the lock
        return load_i32(&state.holds)
    pthread_mutex_lock(&copier.lock)
    sweep(copier)
    pthread_mutex_unlock(&copier.lock)
    return load_i32(&state.holds)


cdef int reset_state(StateData *state, Error *error) noexcept nogil:
    cdef CopierData *copier = the_tables()
    cdef int status = OK
    if in_hook():
        return of_hook("reset", error)
    pthread_mutex_lock(&copier.lock)
    sweep(copier)
    if load_i32(&state.holds) != 0:
        error.found = load_i32(&state.holds)
        status = outcome(error, REFUSED, REASON_BUSY, "the state is in use by %ld tickets: wait for them first", error.found)
    elif state.image != NULL:
        status = image_anew(state, error)
    if status == OK:
        lineage_reset(state.lineage)
        if state.forget != NULL:
            state.forget(state)
        store_i32(&state.invalid, 0)
        add_i64(<int64_t *>&state.generation, 1)
    pthread_mutex_unlock(&copier.lock)
    return status


cdef int check_not_default(void *stream, Error *error) noexcept nogil:
    if <size_t>stream > 2:
        return OK
    error.found = <int64_t><size_t>stream
    return outcome(error, REFUSED, REASON_STREAM, "stream %ld is a default stream, which holds up others and may not be queried "
                   "while they capture: name a stream of your own, or use sync", error.found)


cdef int check_not_capturing(void *stream, const Guard *guard, Error *error) noexcept nogil:
    cdef cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone
    cdef int code = rt.cudaStreamIsCapturing(stream, &capturing)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaStreamIsCapturing", -1, guard, error)
    if capturing != cudaStreamCaptureStatusNone:
        return outcome(error, REFUSED, REASON_CAPTURE, "the stream is capturing a graph: wait before the capture begins")
    return OK


cdef int no_ticket(Ticket ticket, Error *error) noexcept nogil:
    return outcome(error, REFUSED, REASON_TICKET, "ticket %#llx was released, or its copier is closed",
                   <unsigned long long>ticket.v)


cdef int wait_queued(Slot *slot, int32_t layers, int64_t timeout_ns, Error *error) noexcept nogil:
    """Until so many layers are queued: by another thread inside the submit of this ticket, or by the worker. An event that is not
    recorded yet orders nothing, so there is no way but to wait here, or to say AGAIN."""
    cdef int64_t began = now() if timeout_ns > 0 else 0
    cdef int status
    while load_i32(&slot.layers_queued) < layers and goes_on(slot):
        if timeout_ns == 0 or (timeout_ns > 0 and now() - began >= timeout_ns):
            return AGAIN
        if not ran_something():
            wait_for_news(slot, layers, began + timeout_ns if timeout_ns > 0 else now() + 1000000000)
    observed(&slot.layers_queued)
    status = load_i32(&slot.status)
    if status >= OK:
        status = load_i32(&slot.verdict)
    if status < OK:
        error[0] = slot.error
        return status
    return OK


cdef int wait_layer_events(Slot *slot, int32_t layer, void *stream, Error *error) noexcept nogil:
    """On each device the layer's events, and those behind the bundles that parts of it moved in. A layer without either comes behind
    the first event of the ticket, which is behind all that it waited for."""
    cdef CopierData *copier = the_tables()
    cdef const SlotDevice *share
    cdef cudaEvent_t *events
    cdef Guard guard
    cdef int32_t d, i, waits = 0
    cdef uint64_t bundles
    cdef int status
    guard.pending = rt.cudaPeekAtLastError()
    status = check_not_capturing(stream, &guard, error)
    for d in range(copier.n_devices):
        share, events = &slot.devices[d], &slot.events[d * copier.layer_events]
        if not share.used:
            continue
        bundles = bundles_of_layer(slot, d, layer)
        while status == OK and bundles != 0:
            status = stream_waits(stream, events[share.bundle_event[next_lane(&bundles)]], &guard, error)
            waits += 1
        for i in range(share.first_event[layer], share.end_event[layer]):
            if status == OK:
                status = stream_waits(stream, events[i], &guard, error)
                waits += 1
    for d in range(copier.n_devices):
        share, events = &slot.devices[d], &slot.events[d * copier.layer_events]
        if share.used and waits == 0 and status == OK:
            status = stream_waits(stream, events[0] if share.taken > 0 else share.done, &guard, error)
            waits += 1
    if status == POISONED:
        poison_devices(copier, slot, error.cuda_code)
    return status


cdef int wait_end_events(Slot *slot, void *stream, Error *error) noexcept nogil:
    cdef CopierData *copier = the_tables()
    cdef Guard guard
    cdef int32_t d
    cdef int status
    guard.pending = rt.cudaPeekAtLastError()
    status = check_not_capturing(stream, &guard, error)
    for d in range(copier.n_devices):
        if status == OK and slot.devices[d].used:
            status = stream_waits(stream, slot.devices[d].done, &guard, error)
    if status == POISONED:
        poison_devices(copier, slot, error.cuda_code)
    return status


cdef void poison_devices(CopierData *copier, const Slot *slot, int32_t code) noexcept nogil:
    """A sticky code of a call that is about no device: it may be any of the ticket's."""
    cdef int32_t d
    for d in range(copier.n_devices):
        if slot.devices[d].involved and load_i32(&copier.devices[d].poisoned) == 0:
            store_i32(&copier.devices[d].poisoned, code)


cdef int stream_waits(void *stream, cudaEvent_t event, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaStreamWaitEvent(stream, event, 0)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaStreamWaitEvent", -1, guard, error)
    return OK


cdef int ask_if_late(CopierData *copier, Slot *slot, Error *error) noexcept nogil:
    cdef int status = slot_status(copier, slot)
    if status != AGAIN or load_i32(&slot.status) != AGAIN or in_hook():
        return status
    if now() - max(slot.asked, slot.started) < copier.patience:
        return AGAIN
    return ask(copier, slot, error)


cdef int ask(CopierData *copier, Slot *slot, Error *error) noexcept nogil:
    """Asks CUDA for the events behind everything: the end where all are complete, and only this turns a lost word into a failure."""
    cdef Guard guard
    cdef int32_t d
    cdef int code, status
    if load_i32(&slot.status) != AGAIN:
        return slot_status(copier, slot)
    status = guard_enter(&guard, error)
    if status != OK:        # CUDA was not asked: nothing is known of the ticket
        if status == POISONED:
            poison_devices(copier, slot, error.cuda_code)
        return slot_status(copier, slot)
    slot.asked = now()
    for d in range(copier.n_devices):
        if not slot.devices[d].used or status != OK:
            continue
        code = rt.cudaEventQuery(slot.devices[d].done)
        if code == cudaErrorNotReady:
            status = AGAIN
        elif code != 0:
            status = cuda_failed(FAILED, code, "cudaEventQuery", copier.devices[d].device, &guard, error)
            status = fail_in_flight(copier, slot, d, status, &guard, error)
    if status == OK:
        status = end_by_word(copier, slot)
    return guard_leave(&guard, status, error)
