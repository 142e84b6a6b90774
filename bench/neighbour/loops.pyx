"""A small foreign copy again and again, alone or beside a long copy, and how long each took. Without the GIL."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t

cimport strata_copy as sc
from common.clock cimport now
from common.extents cimport Extents
from common.failure cimport check, noted
from strata_copy.atomics cimport load_u64, store_u64
from strata_copy.cudart cimport cudaErrorNotReady, cudaEvent_t, cudaMemcpyDefault, cudaStream_t, rt

import numpy as np

from strata_copy import runtime

cdef enum:
    MAX_COPIES = 16
    MAX_SAMPLES = 1 << 16


cdef class Foreign:
    """A copy of `bytes` between the device and pinned memory on a stream of its own, every `period` ns. `close` it.

    inwards: from pinned memory to the device.
    """

    cdef void *target
    cdef void *source
    cdef size_t bytes
    cdef int64_t period
    cdef cudaStream_t stream
    cdef cudaEvent_t event
    cdef uint64_t *word         # pinned: set by the device behind a long plain copy
    cdef uint64_t *cell         # on the device: 1
    cdef int64_t[::1] times
    cdef readonly int samples   # of the latest run

    def __init__(self, size_t bytes, int64_t period, bint inwards):
        device, pinned = runtime.malloc(bytes), runtime.host_alloc(bytes)
        self.target = <void *><uintptr_t>(device if inwards else pinned)
        self.source = <void *><uintptr_t>(pinned if inwards else device)
        self.bytes, self.period = bytes, period
        self.stream = <cudaStream_t><uintptr_t>runtime.stream_create()
        self.event = <cudaEvent_t><uintptr_t>runtime.event_create()
        self.word = <uint64_t *><uintptr_t>runtime.host_alloc(8)
        self.cell = <uint64_t *><uintptr_t>runtime.malloc(8)
        self.word[0] = 1
        runtime.memcpy(<uintptr_t>self.cell, <uintptr_t>self.word, 8)
        self.times = np.zeros(MAX_SAMPLES, np.int64)
        device, pinned = <uintptr_t>self.target, <uintptr_t>self.source
        self.memory = (device, pinned) if inwards else (pinned, device)

    cdef readonly tuple memory  # (on the device, pinned)

    def close(self):
        runtime.stream_destroy(<uintptr_t>self.stream)
        runtime.event_destroy(<uintptr_t>self.event)
        for address in (self.memory[0], <uintptr_t>self.cell):
            runtime.free(address)
        for address in (self.memory[1], <uintptr_t>self.word):
            runtime.host_free(address)

    def alone(self, int n):
        """ns of each of `n` foreign copies on an idle device."""
        cdef sc.Error error
        cdef int code = 0
        self.samples = 0
        with nogil:
            while code == 0 and self.samples < n:
                code = self.one(&error)
        check(code, &error)
        return np.array(self.times[:self.samples])

    def beside_library(self, plan, int64_t upto, int copies):
        """(ns of each foreign copy, ns of ours): beside `copies` submits of `plan`, one behind the other, all queued at once."""
        cdef sc.Plan *c_plan = sc.plan_of(plan)
        cdef sc.Request request = sc.request_new(&upto, 1)
        cdef sc.Ticket tickets[MAX_COPIES]
        cdef sc.Progress progress
        cdef sc.Error error
        cdef int64_t start, ended = 0
        cdef int i, submitted = 0, status
        if not 1 <= copies <= MAX_COPIES:
            raise ValueError(f"{copies} copies; 1 to {MAX_COPIES}")
        request.flags = sc.CALLER_SYNCED
        self.samples = 0
        with nogil:
            status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", &error)
            start = now()
            for i in range(copies):
                if status == 0:
                    status = sc.submit(c_plan, &request, &tickets[i], &error)
                    submitted += status == 0
            while status == 0 and ended == 0:
                status = self.one(&error)
                while ended == 0 and now() < self.next_start():
                    if sc.poll(tickets[copies - 1], &progress) != sc.AGAIN:
                        ended = now()
                if ended == 0 and sc.poll(tickets[copies - 1], &progress) != sc.AGAIN:
                    ended = now()       # also where a foreign copy took longer than its period
            for i in range(submitted):
                if status == 0:
                    status = sc.sync(tickets[i], -1, &error)
                sc.release(&tickets[i])
        check(status, &error)
        return np.array(self.times[:self.samples]), ended - start

    def beside_plain(self, Extents extents, size_t stream, int copies):
        """Likewise beside the same bytes as plain cudaMemcpyAsync on one stream."""
        cdef cudaStream_t s = <cudaStream_t><uintptr_t>stream
        cdef sc.Error error
        cdef int64_t start, ended = 0
        cdef int i, k, code
        self.samples = 0
        store_u64(self.word, 0)
        with nogil:
            code = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", &error)
            start = now()
            for k in range(copies):
                for i in range(extents.n):
                    if code == 0:
                        code = noted(rt.cudaMemcpyAsync(extents.items[i].target, extents.items[i].source, extents.items[i].bytes,
                                                        cudaMemcpyDefault, s), "cudaMemcpyAsync", &error)
            if code == 0:
                code = noted(rt.cudaMemcpyAsync(self.word, self.cell, 8, cudaMemcpyDefault, s), "cudaMemcpyAsync", &error)
            while code == 0 and ended == 0:
                code = self.one(&error)
                while ended == 0 and now() < self.next_start():
                    if load_u64(self.word) != 0:
                        ended = now()
                if ended == 0 and load_u64(self.word) != 0:
                    ended = now()
        check(code, &error)
        return np.array(self.times[:self.samples]), ended - start
