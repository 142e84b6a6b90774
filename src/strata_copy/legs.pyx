"""Legs. Declared in legs.pxd."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport FAILED, OK, REFUSED, Error, Request
from strata_copy.atomics cimport add_i64
from strata_copy.copier cimport free_event, free_stream, make_event, make_stream
from strata_copy.cudart cimport Guard, cudaErrorNotReady, cudaEventDisableTiming, cuda_failed, rt
from strata_copy.lanes cimport ALIGNMENT, IN_LANE, OUT_LANE, CopierData, DeviceLanes, done_to, lane_record
from strata_copy.plan cimport PlanData
from strata_copy.ways cimport chunk_of_plan, for_helpers, slot_of_plan

cdef enum:
    STEPS_BESIDE = 3            # 2 ms of a ring, while the worker copies with the helpers for less than one
    LEAST_AHEAD = 1024          # bytes: what a copy costs does not depend on the bytes below that


cdef int leg_open(Leg *leg, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t i
    cdef int status
    cdef int code = rt.cudaSetDevice(device.device)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaSetDevice", device.device, guard, error)
    status = make_stream(&leg.gate_stream, device, guard, error)
    if status == OK:
        status = make_event(&leg.gate, cudaEventDisableTiming, device, guard, error)
    for i in range(MAX_MARKERS):
        if status == OK:
            status = make_event(&leg.window.events[i], cudaEventDisableTiming, device, guard, error)
    return status


cdef void leg_close(Leg *leg, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil:
    cdef int32_t i
    free_stream(leg.gate_stream, device, guard, error)
    free_event(leg.gate, device, guard, error)
    for i in range(MAX_MARKERS):
        free_event(leg.window.events[i], device, guard, error)


cdef void leg_size(Leg *leg, const CopierData *copier, const Request *request, const PlanData *plan, int32_t d) noexcept nogil:
    """One that shall keep its distance has no helpers beside its ring, nor one with a hook, which would have to wait for them behind each
    layer; with them the ring has less ahead, for at the end it copies that alone."""
    cdef const DeviceLanes *device = leg.course.device
    cdef int64_t steps, slot = slot_of_plan(copier, plan, d)
    leg.step = chunk_of_plan(copier, plan, d)
    leg.ahead = max(request.bytes_ahead, LEAST_AHEAD) if request.bytes_ahead > 0 else copier.window * leg.step
    if leg.ahead < 2 * leg.step:        # several steps are a chunk then, alike, or one that is its short rest would be all that is ahead
        steps = (2 * leg.step + leg.ahead - 1) // leg.ahead
        leg.step = (leg.step + steps - 1) // steps
    leg.least = min(leg.step, leg.ahead // 2, slot if slot > 0 else leg.step)
    leg.helped = 0
    if (for_helpers(plan, d) and copier.helpers > 0 and device.staging.slots > 0 and request.bytes_ahead <= 0
            and request.hook == NULL and leg.course.slot.bytes >= LEAST_BESIDE * device.staging.chunk_bytes):
        leg.helped = device.staging.chunk_bytes
        leg.ahead = min(leg.ahead, STEPS_BESIDE * leg.step)
    leg.hooked = NULL
    leg.window.first = leg.window.n = leg.window.calls_ahead = 0
    leg.window.bytes_ahead = 0


cdef int leg_mark(Leg *leg, int64_t bytes, int64_t asked, int32_t calls, const Guard *guard, Error *error) noexcept nogil:
    cdef Window *window = &leg.window
    cdef DeviceLanes *device = leg.course.device
    cdef int32_t i = (window.first + window.n) % MAX_MARKERS
    cdef int32_t lane = leg.course.only
    cdef int status = lane_record(device, &device.lanes[lane], window.events[i], guard, error)
    if status == OK:
        window.lanes[i], window.upto[i] = lane, device.lanes[lane].entries.queued
        window.sent[i] = device.ring.sent if lane == OUT_LANE else 0
        window.bytes[i], window.calls[i] = bytes, calls
        window.counted[i] = asked if asked < bytes < asked + ALIGNMENT else bytes
        window.n += 1
        window.bytes_ahead += window.counted[i]
        window.calls_ahead += calls
    return status


cdef int leg_look(Leg *leg, int64_t *landed, const Guard *guard, Error *error) noexcept nogil:
    cdef Window *window = &leg.window
    cdef DeviceLanes *device = leg.course.device
    cdef int32_t i
    cdef int code
    while window.n > 0:
        i = window.first
        code = rt.cudaEventQuery(window.events[i])
        if code == cudaErrorNotReady:
            break
        if code != 0:
            return cuda_failed(FAILED, code, "cudaEventQuery", device.device, guard, error)
        add_i64(landed, window.bytes[i])
        window.bytes_ahead -= window.counted[i]
        window.calls_ahead -= window.calls[i]
        done_to(device.lanes[window.lanes[i]].entries, window.upto[i])
        done_to(device.lanes[IN_LANE].entries, window.sent[i])
        window.first = (i + 1) % MAX_MARKERS
        window.n -= 1
    return look_at_hook(leg, guard, error)


cdef int look_at_hook(Leg *leg, const Guard *guard, Error *error) noexcept nogil:
    cdef DeviceLanes *device = leg.course.device
    cdef int code
    if leg.hooked == NULL:
        leg.hooked, leg.hooks_upto = leg.course.hooked, leg.course.share.hooks_upto
    if leg.hooked == NULL:
        return OK
    code = rt.cudaEventQuery(leg.hooked)
    if code == cudaErrorNotReady:
        return OK
    if code != 0:
        return cuda_failed(FAILED, code, "cudaEventQuery", device.device, guard, error)
    done_to(&device.hooks, leg.hooks_upto)
    leg.hooked = NULL
    return OK
