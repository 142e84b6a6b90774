"""What a copy takes of the caller's time and of the processors', beside plain cudaMemcpy. Without the GIL."""

from libc.stdint cimport int64_t
from posix.time cimport clock_gettime, nanosleep, timespec

cimport strata_copy as sc
from common.clock cimport now
from common.extents cimport Extents
from common.failure cimport check, noted
from common.request cimport request_up_to
from strata_copy.cudart cimport cudaMemcpyDefault, rt

import numpy as np

WHAT = ("submit", "whole", "cpu", "cpu of others")


cdef extern from "time.h" nogil:
    int CLOCK_PROCESS_CPUTIME_ID
    int CLOCK_THREAD_CPUTIME_ID


def by_submit(plan, int64_t upto, int repetitions, int warm_up, feed=None):
    """int64 array of (repetition, WHAT) in ns, each from an idle device: inside submit; from its call until sync returns; the processors'
    time meanwhile, of all threads and of all but this one. feed: as of Plan.submit."""
    cdef int64_t[:, ::1] found = np.zeros((repetitions, len(WHAT)), np.int64)
    cdef int64_t unread[4]
    cdef sc.Plan *c_plan = sc.plan_of(plan)
    cdef sc.Request request = request_up_to(&upto, feed)
    cdef sc.Error error
    cdef int i, status = 0
    with nogil:
        for i in range(-warm_up, repetitions):
            if status == 0:
                status = once(c_plan, &request, &unread[0] if i < 0 else &found[i, 0], &error)
    check(status, &error)
    return np.asarray(found)


cdef int once(sc.Plan *plan, const sc.Request *request, int64_t *took, sc.Error *error) noexcept nogil:
    cdef sc.Ticket ticket
    cdef int64_t start, submitted, cpu, own
    cdef int status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
    if status != 0:
        return status
    cpu, own = cpu_time(CLOCK_PROCESS_CPUTIME_ID), cpu_time(CLOCK_THREAD_CPUTIME_ID)
    start = now()
    status = sc.submit(plan, request, &ticket, error)
    submitted = now()
    if status != 0:
        return status
    status = sc.sync(ticket, -1, error)
    took[0], took[1] = submitted - start, now() - start
    own = cpu_time(CLOCK_THREAD_CPUTIME_ID) - own
    took[2] = cpu_time(CLOCK_PROCESS_CPUTIME_ID) - cpu
    took[3] = took[2] - own
    sc.release(&ticket)
    return status


def by_cudamemcpy(Extents extents, int repetitions, int warm_up):
    """ns of each repetition of the same extents by plain cudaMemcpy, each from an idle device until everything has landed."""
    cdef sc.Error error
    cdef int64_t ns = 0
    cdef int i, code
    found = []
    for i in range(-warm_up, repetitions):
        with nogil:
            code = copy_plainly(extents, &ns, &error)
        check(code, &error)
        if i >= 0:
            found.append(ns)
    return found


cdef int copy_plainly(Extents extents, int64_t *ns, sc.Error *error) noexcept nogil:
    cdef int i
    cdef size_t row
    cdef int64_t start
    cdef int code = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
    start = now()
    for i in range(extents.n):
        for row in range(extents.items[i].rows):
            if code == 0:
                code = noted(rt.cudaMemcpy(extents.items[i].target + row * extents.items[i].target_pitch,
                                           extents.items[i].source + row * extents.items[i].source_pitch, extents.items[i].width,
                                           cudaMemcpyDefault), "cudaMemcpy", error)
    if code == 0:       # from pageable memory the last bytes may still be under way
        code = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
    ns[0] = now() - start
    return code


def idle(int64_t ns):
    """ns of the processors' time that this process takes while this thread sleeps for `ns`."""
    cdef timespec t
    cdef int64_t before
    t.tv_sec, t.tv_nsec = ns // 1000000000, ns % 1000000000
    with nogil:
        before = cpu_time(CLOCK_PROCESS_CPUTIME_ID)
        nanosleep(&t, NULL)
        before = cpu_time(CLOCK_PROCESS_CPUTIME_ID) - before
    return before


cdef inline int64_t cpu_time(int clock) noexcept nogil:
    cdef timespec t
    clock_gettime(clock, &t)
    return <int64_t>t.tv_sec * 1000000000 + t.tv_nsec
