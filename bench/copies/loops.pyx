"""How long whole copies take, from the call of the first submit until everything has landed. Without the GIL."""

from libc.stdint cimport int64_t, uintptr_t

cimport strata_copy as sc
from common.clock cimport now
from common.extents cimport Extents, copy_extent
from common.failure cimport check, noted
from common.request cimport request_up_to
from strata_copy.cudart cimport cudaStream_t, rt

cdef enum:
    MAX_AT_ONCE = 4
    MAX_STREAMS = 8


def by_library(plans, int64_t upto, size_t stream, int repetitions, int warm_up, bint by_sync=False, feed=None):
    """ns of each repetition, all plans at once, submitted one after the other by this thread.

    The end is seen by synchronizing `stream` behind wait_done; `by_sync`, by sync, which looks at memory. feed: as of
    Plan.submit.
    """
    cdef sc.Plan *items[MAX_AT_ONCE]
    cdef sc.Request request = request_up_to(&upto, feed)
    cdef sc.Error error
    cdef cudaStream_t consumer = <cudaStream_t><uintptr_t>stream
    cdef int64_t ns = 0
    cdef int status = 0, i, n = len(plans)
    if n > MAX_AT_ONCE:
        raise ValueError(f"{n} plans; at most {MAX_AT_ONCE}")
    for i in range(n):
        items[i] = sc.plan_of(plans[i])
    found = []
    for i in range(-warm_up, repetitions):
        with nogil:
            status = once(items, n, &request, consumer, by_sync, &ns, &error)
        check(status, &error)
        if i >= 0:
            found.append(ns)
    return found


cdef int once(sc.Plan **plans, int n, const sc.Request *request, cudaStream_t consumer, bint by_sync, int64_t *ns,
              sc.Error *error) noexcept nogil:
    cdef sc.Ticket tickets[MAX_AT_ONCE]
    cdef int64_t start
    cdef int i, submitted = 0
    cdef int status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
    start = now()
    for i in range(n):
        if status == 0:
            status = sc.submit(plans[i], request, &tickets[i], error)
            submitted += status == 0
    for i in range(submitted):
        if status == 0:
            status = sc.sync(tickets[i], -1, error) if by_sync else sc.wait_done(tickets[i], consumer, -1, error)
    if status == 0 and not by_sync:
        status = noted(rt.cudaStreamSynchronize(consumer), "cudaStreamSynchronize", error)
    ns[0] = now() - start
    for i in range(submitted):
        if status == 0:
            status = sc.sync(tickets[i], -1, error)
        sc.release(&tickets[i])
    return status


def by_streams(Extents extents, streams, int repetitions, int warm_up):
    """ns of each repetition of the same extents as plain cudaMemcpyAsync, each layer on the stream with the fewest bytes so far."""
    cdef cudaStream_t items[MAX_STREAMS]
    cdef sc.Error error
    cdef int64_t ns = 0
    cdef int code = 0, i, n = len(streams)
    if not 1 <= n <= MAX_STREAMS:
        raise ValueError(f"{n} streams; 1 to {MAX_STREAMS}")
    for i in range(n):
        items[i] = <cudaStream_t><uintptr_t>streams[i]
    found = []
    for i in range(-warm_up, repetitions):
        with nogil:
            code = bare(extents, items, n, &ns, &error)
        check(code, &error)
        if i >= 0:
            found.append(ns)
    return found


cdef int bare(Extents extents, const cudaStream_t *streams, int n, int64_t *ns, sc.Error *error) noexcept nogil:
    cdef size_t queued[MAX_STREAMS]
    cdef int i, s, least = 0, layer = -2
    cdef int64_t start
    cdef int code = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
    for s in range(n):
        queued[s] = 0
    start = now()
    for i in range(extents.n):
        if code != 0:
            return code
        if extents.items[i].layer != layer:
            layer = extents.items[i].layer
            least = 0
            for s in range(1, n):
                if queued[s] < queued[least]:
                    least = s
        queued[least] += extents.items[i].width * extents.items[i].rows
        code = noted(copy_extent(rt, &extents.items[i], streams[least]), "cudaMemcpyAsync", error)
    for s in range(n):
        if code == 0:
            code = noted(rt.cudaStreamSynchronize(streams[s]), "cudaStreamSynchronize", error)
    ns[0] = now() - start
    return code
