"""Small copies. The C side is declared in small.pxd."""

from libc.stdint cimport int64_t

from common.clock cimport now
from common.failure cimport noted
from strata_copy.cudart cimport cudaErrorNotReady, cudaEvent_t, cudaMemcpyDefault, cudaStream_t, rt

import numpy as np

from strata_copy import runtime

cdef enum:
    MAX_SAMPLES = 1 << 20


cdef class SmallCopy:
    """A copy of `size` bytes between the device and pinned memory, on a non-blocking stream of its own. inwards: to the device.
    `close` it."""

    def __init__(self, size_t size, bint inwards):
        self.size, self.inwards = size, inwards
        self.device, self.pinned = runtime.malloc(size), runtime.host_alloc(size)
        self.stream, self.event = runtime.stream_create(), runtime.event_create()
        self.times = np.zeros(MAX_SAMPLES, np.int64)

    def close(self):
        runtime.stream_destroy(self.stream)
        runtime.event_destroy(self.event)
        runtime.free(self.device)
        runtime.host_free(self.pinned)

    cdef int copy(self, Error *error) noexcept nogil:
        """One copy, from its call until its event is found complete."""
        cdef int64_t start = now(), took
        cdef int code = noted(rt.cudaMemcpyAsync(<void *>(self.device if self.inwards else self.pinned),
                                                 <void *>(self.pinned if self.inwards else self.device), self.size, cudaMemcpyDefault,
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
        took = now() - start
        if self.samples < <int>MAX_SAMPLES:
            self.times[self.samples] = took
            self.samples += 1
        else:
            self.times[self.samples - 1] = max(self.times[self.samples - 1], took)
        return 0
