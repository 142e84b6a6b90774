"""A small copy again and again in a thread of its own, until it is told to stop, and how long each took. Without the GIL."""

from libc.stdint cimport int32_t, int64_t

cimport strata_copy as sc
from common.clock cimport now
from common.failure cimport check, noted
from strata_copy.atomics cimport load_i32, store_i32
from strata_copy.cudart cimport cudaErrorNotReady, cudaEvent_t, cudaMemcpyDefault, cudaStream_t, rt

import numpy as np

from strata_copy import runtime

cdef enum:
    MAX_SAMPLES = 1 << 20


cdef class Loop:
    """A copy of `size` bytes from pinned memory to the device, on a stream of its own, as a decoding engine makes them. `close` it."""

    cdef size_t device, pinned, size, stream, event
    cdef int64_t[::1] times
    cdef int samples
    cdef int32_t stopped        # atomic

    def __init__(self, size_t size):
        self.size = size
        self.device, self.pinned = runtime.malloc(size), runtime.host_alloc(size)
        self.stream, self.event = runtime.stream_create(), runtime.event_create()
        self.times = np.zeros(MAX_SAMPLES, np.int64)

    def close(self):
        runtime.stream_destroy(self.stream)
        runtime.event_destroy(self.event)
        runtime.free(self.device)
        runtime.host_free(self.pinned)

    def start(self):
        """Before `run`, in the thread that will call `stop`."""
        self.samples = 0
        store_i32(&self.stopped, 0)

    def stop(self):
        store_i32(&self.stopped, 1)

    def run(self):
        """ns of each copy, from its call until its event is found complete, until another thread calls `stop`."""
        cdef sc.Error error
        cdef int code = 0
        with nogil:
            while code == 0 and (self.samples == 0 or not load_i32(&self.stopped)) and self.samples < <int>MAX_SAMPLES:
                code = self.copy(&error)
        check(code, &error)
        return np.array(self.times[:self.samples])

    cdef int copy(self, sc.Error *error) noexcept nogil:
        cdef int64_t start = now()
        cdef int code = noted(rt.cudaMemcpyAsync(<void *>self.device, <void *>self.pinned, self.size, cudaMemcpyDefault,
                                                 <cudaStream_t>self.stream), "cudaMemcpyAsync", error)
        if code == 0:
            code = noted(rt.cudaEventRecord(<cudaEvent_t>self.event, <cudaStream_t>self.stream), "cudaEventRecord", error)
        while code == 0:
            code = rt.cudaEventQuery(<cudaEvent_t>self.event)
            if code != cudaErrorNotReady:
                break
            code = 0
        if code != 0:
            return noted(code, "cudaEventQuery", error)
        self.times[self.samples] = now() - start
        self.samples += 1
        return 0
