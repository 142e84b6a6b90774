"""What one copy moves and takes. Without the GIL."""

from libc.stdint cimport int64_t

cimport strata_copy as sc
from common.clock cimport now
from common.failure cimport check, noted
from common.request cimport request_up_to
from strata_copy.cudart cimport cudaStream_t, rt


def moved(plan, int64_t upto, size_t stream):
    """(bytes, ns inside submit, ns from its call until everything has landed), from an idle device. The end is seen by synchronizing
    `stream` behind wait_done."""
    cdef sc.Plan *c_plan = sc.plan_of(plan)
    cdef sc.Request request = request_up_to(&upto, None)
    cdef sc.Ticket ticket
    cdef sc.Progress progress
    cdef sc.Error error
    cdef int64_t start, submitted = 0, ended = 0
    cdef int status
    with nogil:
        status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", &error)
        start = now()
        if status == 0:
            status = sc.submit(c_plan, &request, &ticket, &error)
            submitted = now()
    check(status, &error)
    with nogil:
        status = sc.wait_done(ticket, <void *>stream, -1, &error)
        if status == 0:
            status = noted(rt.cudaStreamSynchronize(<cudaStream_t>stream), "cudaStreamSynchronize", &error)
        ended = now()
        if status == 0:
            status = sc.sync(ticket, -1, &error)
        sc.poll(ticket, &progress)
        sc.release(&ticket)
    check(status, &error)
    return progress.bytes_total, submitted - start, ended - start
