"""A small foreign copy again and again, alone or beside a long copy, and how long each took. Without the GIL."""

from libc.stdint cimport int64_t, uint64_t
from posix.time cimport nanosleep, timespec

cimport strata_copy as sc
from common.clock cimport now
from common.extents cimport Extents, copy_extent
from common.failure cimport check, noted
from common.small cimport SmallCopy
from strata_copy.atomics cimport load_u64, store_u64
from strata_copy.cudart cimport cudaMemcpyDefault, cudaStream_t, rt

import numpy as np

from strata_copy import runtime

cdef enum:
    MAX_COPIES = 16


# A long copy under way: a ticket of ours, or a plain one behind which the device sets a word.
cdef struct Long:
    sc.Ticket ticket            # 0: plain
    const uint64_t *word


cdef bint has_ended(const Long *copy) noexcept nogil:
    cdef sc.Progress progress
    if copy.ticket.v != 0:
        return sc.poll(copy.ticket, &progress) != sc.AGAIN
    return load_u64(copy.word) != 0


cdef class Foreign(SmallCopy):
    """A small copy again and again.

    at_random False: after each copy the thread sleeps for `period` ns, as a loop that works in between does. That keeps step with the gaps
    of a long copy whose chunks take a little longer. at_random True: it is awake, and the pause is anything up to twice as long, so that
    the copies come at every point of a chunk alike. `close` it.
    """

    cdef size_t word, cell      # addresses; word: pinned; cell: on the device, holds 1
    cdef public bint at_random
    cdef int64_t period
    cdef uint64_t drawn         # the latest random number

    def __init__(self, size_t size, int64_t period, bint inwards):
        super().__init__(size, inwards)
        self.period, self.drawn = period, 1
        self.word, self.cell = runtime.host_alloc(8), runtime.malloc(8)
        store_u64(<uint64_t *>self.word, 1)
        runtime.memcpy(self.cell, self.word, 8)

    def close(self):
        super().close()
        runtime.free(self.cell)
        runtime.host_free(self.word)

    def alone(self, int n):
        """ns of each of `n` foreign copies on an idle device."""
        cdef sc.Error error
        cdef int64_t due = 0
        cdef int code = 0
        self.samples = 0
        with nogil:
            while code == 0 and self.samples < n:
                while now() < due:
                    pass
                code = self.copy(&error)
                due = self.pause()
        check(code, &error)
        return np.array(self.times[:self.samples])

    def beside_library(self, plan, int64_t upto, int copies):
        """(ns of each foreign copy, ns of ours): beside `copies` submits of `plan`, one behind the other, all queued at once."""
        cdef sc.Plan *c_plan = sc.plan_of(plan)
        cdef sc.Request request = sc.request_new(&upto, 1)
        cdef sc.Ticket tickets[MAX_COPIES]
        cdef sc.Error error
        cdef Long ours
        cdef int64_t start, ended = 0
        cdef int i, status, submitted = 0
        if not 1 <= copies <= MAX_COPIES:
            raise ValueError(f"{copies} copies; 1 to {MAX_COPIES}")
        request.flags = sc.CALLER_SYNCED
        with nogil:
            status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", &error)
            start = now()
            for i in range(copies):
                if status == 0:
                    status = sc.submit(c_plan, &request, &tickets[i], &error)
                    submitted += status == 0
            if status == 0:
                ours.ticket = tickets[copies - 1]
                status = self.until_end(&ours, &ended, &error)
            for i in range(submitted):
                if status == 0:
                    status = sc.sync(tickets[i], -1, &error)
                sc.release(&tickets[i])
        check(status, &error)
        return np.array(self.times[:self.samples]), ended - start

    def beside_plain(self, Extents extents, size_t stream, int copies):
        """Likewise beside the same bytes as plain cudaMemcpyAsync, all queued at once on one stream."""
        cdef cudaStream_t to = <cudaStream_t>stream
        cdef sc.Error error
        cdef Long plain
        cdef int64_t start, ended = 0
        cdef int i, _, code
        plain.ticket.v, plain.word = 0, <uint64_t *>self.word
        store_u64(<uint64_t *>self.word, 0)
        with nogil:
            code = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", &error)
            start = now()
            for _ in range(copies):
                for i in range(extents.n):
                    if code == 0:
                        code = noted(copy_extent(rt, &extents.items[i], to), "cudaMemcpyAsync", &error)
            if code == 0:
                code = noted(rt.cudaMemcpyAsync(<void *>self.word, <void *>self.cell, 8, cudaMemcpyDefault, to), "cudaMemcpyAsync",
                             &error)
            if code == 0:
                code = self.until_end(&plain, &ended, &error)
        check(code, &error)
        return np.array(self.times[:self.samples]), ended - start

    cdef int until_end(self, const Long *copy, int64_t *ended, sc.Error *error) noexcept nogil:
        """Foreign copies until the long one has ended. Its end is looked for all the time between them, in memory alone."""
        cdef int64_t due
        cdef int code = 0
        self.samples = 0
        while code == 0:
            code = self.copy(error)
            due = self.pause()
            while True:
                if has_ended(copy):
                    ended[0] = now()
                    return code
                if now() >= due:
                    break
        return code

    cdef int64_t pause(self) noexcept nogil:
        """When the next copy is due; a sleep is over by then."""
        cdef timespec t
        if not self.at_random:
            t.tv_sec, t.tv_nsec = 0, self.period
            nanosleep(&t, NULL)
            return now()
        self.drawn = self.drawn * 6364136223846793005ULL + 1442695040888963407ULL     # Knuth's MMIX generator; its high bits
        return now() + <int64_t>(2 * self.period * ((self.drawn >> 33) / <double>(1 << 31)))
