"""The checks of a submit. Declared in checks.pxd."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from strata_copy.abi cimport (
    CALLER_SYNCED, FEED, OK, POISONED, QUEUE_ALL, REASON_BUSY, REASON_CAPTURE, REASON_CLOSED, REASON_CUDA, REASON_GENERATION,
    REASON_INVALID, REASON_ORDER, REASON_REQUEST, REASON_STREAM, REFUSED, WAIT_EVENT, WAIT_STREAM, Error, Request, Wait,
)
from strata_copy.atomics cimport load_i32, load_u64
from strata_copy.copier cimport the_tables
from strata_copy.cudart cimport cudaErrorCapturedEvent, cuda_failed, outcome, rt
from strata_copy.hooks cimport in_hook
from strata_copy.images cimport image_readable, image_writable
from strata_copy.lanes cimport MAX_AFTER, OPEN, CopierData, Slot, device_index
from strata_copy.plan cimport PlanData, units_to_move
from strata_copy.states cimport StateData, slot_of
from strata_copy.submit cimport Submission
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_unlock
from strata_copy.tickets cimport check_not_capturing, check_not_default


cdef int check_open(const CopierData *copier, uint64_t number, Error *error) noexcept nogil:
    if load_i32(&copier.state) == OPEN and copier.number == number:
        return OK
    return outcome(error, REFUSED, REASON_CLOSED, "the copier is closed, or this process is a fork of the one that opened it")


cdef int check_devices(Submission *s) noexcept nogil:
    cdef int32_t d, code
    for d in range(s.copier.n_devices):
        code = load_i32(&s.copier.devices[d].poisoned)
        if code != 0 and (uses_device(s.plan, s.copier.devices[d].device) or waits_on_device(s.request, s.copier.devices[d].device)):
            s.error.device, s.error.cuda_code = s.copier.devices[d].device, code
            return outcome(s.error, POISONED, REASON_CUDA, "device %d failed earlier with %s (%d): restart the process",
                           s.error.device, rt.cudaGetErrorName(code), code)
    return OK


cdef bint waits_on_device(const Request *request, int32_t device) noexcept nogil:
    """Whether a stream is named that is this device's."""
    cdef uint32_t i
    if request.size != sizeof(Request) or request.n_after > MAX_AFTER or request.after == NULL:     # refused later
        return False
    for i in range(request.n_after):
        if request.after[i].kind == WAIT_STREAM and request.after[i].device == device:
            return True
    return False


cdef int check_plan_now(Submission *s) noexcept nogil:
    if s.request.size != sizeof(Request):
        return units_to_move(s.plan, s.request, s.copier.units, NULL, &s.known, s.error)      # says what is wrong with it
    return check_states(s.copier, s.plan, s.request, s.error)


cdef int check_states_now(const PlanData *plan, const Request *request, Error *error) noexcept nogil:
    cdef CopierData *copier = the_tables()
    cdef int status
    if in_hook():       # which holds the lock
        return check_states(copier, plan, request, error)
    pthread_mutex_lock(&copier.lock)
    status = check_states(copier, plan, request, error)
    pthread_mutex_unlock(&copier.lock)
    return status


cdef int check_states(const CopierData *copier, const PlanData *plan, const Request *request, Error *error) noexcept nogil:
    """What may have changed since the plan was made: validity and generations."""
    cdef const StateData *target = plan.target
    cdef const StateData *source
    cdef int32_t i
    for i in range(plan.n_sources):
        source = plan.sources[i]
        if load_i32(&source.invalid):
            return outcome(error, REFUSED, REASON_INVALID, "source %d is INVALID: its last copy failed and it was not reset", i)
        if will_be_invalid(copier, source):
            return outcome(error, REFUSED, REASON_INVALID, "source %d: a copy into it was cut short, at whose end it is INVALID: reset it "
                           "then", i)
        if source.image != NULL and image_readable(source, plan, request, error) != OK:
            return REFUSED
        if request.src_generation != 0 and request.src_generation != load_u64(&source.generation):
            return wrong_generation("source", request.src_generation, load_u64(&source.generation), error)
    if target.writer != 0 and load_i32(&copier.slots[slot_of(target.writer)].status) == POISONED:
        return outcome(error, REFUSED, REASON_BUSY, "the target is held by a copy whose device failed: nobody can tell what of it still "
                       "writes")
    if target.image != NULL and image_writable(target, request, error) != OK:
        return REFUSED
    if request.dst_generation != 0 and request.dst_generation != load_u64(&target.generation):
        return wrong_generation("target", request.dst_generation, load_u64(&target.generation), error)
    return OK


cdef bint will_be_invalid(const CopierData *copier, const StateData *state) noexcept nogil:
    """Whether a copy into the state was cut short that has not ended yet: who reads it from now on would read what is not there."""
    cdef const Slot *slot
    cdef int32_t i
    for i in range(copier.n_slots if state.writer != 0 else 0):
        slot = &copier.slots[i]
        if slot.ticket != 0 and slot.holding and slot.plan.target == state and load_i32(&slot.verdict) != OK:
            return True
    return False


cdef int wrong_generation(const char *side, uint64_t wanted, uint64_t found, Error *error) noexcept nogil:
    error.wanted, error.found = <int64_t>wanted, <int64_t>found
    return outcome(error, REFUSED, REASON_GENERATION, "the %s has generation %ld, %ld was named: it was written or reset since",
                   side, error.found, error.wanted)


cdef bint uses_device(const PlanData *plan, int32_t device) noexcept nogil:
    cdef int32_t i
    for i in range(plan.target.layout.n_parts):
        if plan.parts[i].device == device or plan.parts[i].other == device:
            return True
    return False


cdef int check_waits(Submission *s) noexcept nogil:
    """The streams and events that the request names, before they are touched: a wait on a captured event from outside ends the
    capture."""
    cdef const Wait *wait
    cdef uint32_t i
    cdef int status = OK
    if s.request.flags & ~<uint32_t>(CALLER_SYNCED | FEED | QUEUE_ALL) or s.request.flags & FEED and s.request.flags & QUEUE_ALL:
        return outcome(s.error, REFUSED, REASON_REQUEST, "flags %#x; CALLER_SYNCED and one of FEED and QUEUE_ALL are possible",
                       s.request.flags)
    if s.request.n_after == 0 and not s.request.flags & CALLER_SYNCED:
        return outcome(s.error, REFUSED, REASON_ORDER, "nothing to wait for was named: give `after` (who wrote the source, who reads the "
                       "target), or CALLER_SYNCED where both are known to be done")
    if s.request.n_after > MAX_AFTER or (s.request.n_after > 0 and s.request.after == NULL):
        return outcome(s.error, REFUSED, REASON_REQUEST, "%u waits; 1 to %d are possible", s.request.n_after, MAX_AFTER)
    for i in range(s.request.n_after):
        wait = &s.request.after[i]
        if wait.kind == WAIT_STREAM:
            if device_index(s.copier, wait.device) < 0:
                s.error.device = wait.device
                return outcome(s.error, REFUSED, REASON_STREAM, "wait %u: a stream of device %d, which the copier has not open", i,
                               wait.device)
            status = check_not_default(wait.handle, s.error)
            if status == OK:
                status = check_not_capturing(wait.handle, &s.guard, s.error)
        elif wait.kind == WAIT_EVENT and wait.handle != NULL:
            status = check_event(s, i, wait)
        else:
            status = outcome(s.error, REFUSED, REASON_REQUEST, "wait %u: kind %d, handle %p", i, wait.kind, wait.handle)
        if status != OK:
            return status
    return OK


cdef int check_event(Submission *s, uint32_t i, const Wait *wait) noexcept nogil:
    """Before it is touched: a lane that waits for a captured event is drawn into the capture, and its copies with it."""
    cdef int code = rt.event_captured(wait.handle)
    if code == cudaErrorCapturedEvent:
        return outcome(s.error, REFUSED, REASON_CAPTURE, "wait %u: the event is part of a graph capture", i)
    if code != 0:
        return cuda_failed(REFUSED, code, "cuEventElapsedTime", wait.device, &s.guard, s.error)
    return OK
