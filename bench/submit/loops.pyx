"""Submits by this library and by the C twin in turn, each from an idle device, and what the calls took. Without the GIL."""

from libc.stdint cimport int64_t, uint64_t

cimport strata_copy as sc
from common.clock cimport now
from common.extents cimport Extent, Extents
from common.failure cimport check, noted
from strata_copy.atomics cimport load_u64
from strata_copy.cudart cimport cudaStreamNonBlocking, cudaStream_t, rt, strata_cudart

import numpy as np

from strata_copy import runtime

WHAT = ("submit", "waits", "poll_in_flight", "poll_after", "bytes")
cdef enum:
    POLLS = 200


cdef extern from "twin.h" nogil:
    ctypedef struct twin:
        uint64_t *word
        uint64_t expected
    int twin_open(twin *, const strata_cudart *, int n_layers)
    int twin_submit(twin *, const Extent *, int n)
    int twin_wait_layer(const twin *, int layer, cudaStream_t)
    void twin_close(twin *)


# What both sides are given.
cdef struct Setting:
    sc.Plan *plan
    const sc.Request *request
    twin *twin
    const Extent *extents
    int n, n_layers
    cudaStream_t consumer
    sc.State *told              # the source, where each submit comes behind words of the engine's; else NULL


cdef class Twin:
    """The C twin's streams and events on the current device, for one plan at one length."""

    cdef twin data
    cdef readonly Extents extents

    def __init__(self, Extents extents):
        cdef sc.Error error
        self.extents = extents
        check(noted(twin_open(&self.data, rt, extents.layers), "twin_open", &error), &error)

    def __dealloc__(self):
        twin_close(&self.data)

    def copy(self):
        """One submit, waited for."""
        cdef sc.Error error
        cdef int code
        with nogil:
            code = noted(twin_submit(&self.data, self.extents.items, self.extents.n), "twin_submit", &error)
            if code == 0:
                code = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", &error)
        check(code, &error)
        if load_u64(self.data.word) != self.data.expected:
            raise RuntimeError("the twin's word was not set")


def in_turn(plan, Twin twin, int64_t upto, int repetitions, int warm_up, bint told=False):
    """(ours, the twin's): int64 arrays of (repetition, WHAT) in ns; polls are the mean of 200, and ours alone; -1 where a copy had
    ended before it could be polled in flight. bytes: of ours.

    Requests name no `begin`: the lineages are asked. told: before each submit, and not timed, the engine says that the source was written
    anew, so that there are lineages to compare, and all has to move.
    """
    cdef int64_t[:, ::1] ours = np.full((repetitions, len(WHAT)), -1, np.int64)
    cdef int64_t[:, ::1] theirs = np.full((repetitions, len(WHAT)), -1, np.int64)
    cdef int64_t unread[5]
    cdef Setting s
    cdef sc.Request request = sc.request_new(&upto, 1)
    cdef sc.Error error
    cdef int i, side, status = 0
    request.flags = sc.CALLER_SYNCED
    s.plan, s.request, s.twin, s.extents, s.n = sc.plan_of(plan), &request, &twin.data, twin.extents.items, twin.extents.n
    s.n_layers, s.told = twin.extents.layers, NULL
    if told:
        (source,) = set(plan.sources.values())
        s.told = sc.state_of(source)
    check(noted(rt.cudaStreamCreateWithFlags(&s.consumer, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", &error), &error)
    with nogil:
        for i in range(-warm_up, repetitions):
            for side in range(2):       # who goes first changes every time
                if status == 0 and side ^ (i & 1):
                    status = by_library(&s, &unread[0] if i < 0 else &ours[i, 0], &error)
                elif status == 0:
                    status = by_twin(&s, &unread[0] if i < 0 else &theirs[i, 0], &error)
        if status == 0:         # nobody has waited for the last one
            status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", &error)
    runtime.stream_destroy(<size_t>s.consumer)
    check(status, &error)
    return np.asarray(ours), np.asarray(theirs)


cdef int by_library(const Setting *s, int64_t *took, sc.Error *error) noexcept nogil:
    cdef sc.Ticket ticket
    cdef sc.Progress progress
    cdef int64_t start, submitted, waited
    cdef int64_t nothing = 0
    cdef int layer, status
    if s.told != NULL:
        status = sc.rewound(s.told, &nothing, 1, error)
        if status == 0:
            status = sc.advanced(s.told, s.request.upto, 1, error)
        if status != 0:
            return status
    status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
    if status != 0:
        return status
    start = now()
    status = sc.submit(s.plan, s.request, &ticket, error)
    submitted = now()
    if status != sc.OK:
        return status
    for layer in range(s.n_layers):
        status = sc.wait_layer(ticket, layer, s.consumer, 0, error)
        if status != sc.OK:
            break
    waited = now()
    took[0], took[1] = submitted - start, waited - submitted
    if status == sc.OK:
        took[2] = poll_cost(ticket, &progress)
        if progress.status != sc.AGAIN:
            took[2] = -1
        status = sc.sync(ticket, -1, error)
        took[3], took[4] = poll_cost(ticket, &progress), progress.bytes_total
    sc.release(&ticket)
    return status


cdef int64_t poll_cost(sc.Ticket ticket, sc.Progress *progress) noexcept nogil:
    cdef int64_t start = now()
    cdef int _
    for _ in range(POLLS):
        sc.poll(ticket, progress)
    return (now() - start) // POLLS


cdef int by_twin(const Setting *s, int64_t *took, sc.Error *error) noexcept nogil:
    cdef int64_t start, submitted
    cdef int layer, code
    code = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
    if code != 0:
        return code
    start = now()
    code = noted(twin_submit(s.twin, s.extents, s.n), "twin_submit", error)
    submitted = now()
    for layer in range(s.n_layers):
        if code != 0:
            return code
        code = noted(twin_wait_layer(s.twin, layer, s.consumer), "cudaStreamWaitEvent", error)
    took[0], took[1] = submitted - start, now() - submitted
    return code
