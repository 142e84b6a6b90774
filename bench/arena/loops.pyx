"""A small copy again and again in a thread of its own, until it is told to stop. Without the GIL."""

from libc.stdint cimport int32_t

from common.failure cimport check
from common.small cimport SmallCopy
from strata_copy.abi cimport Error
from strata_copy.atomics cimport load_i32, store_i32

import numpy as np


cdef class Loop(SmallCopy):
    """The copy of one thread; another one starts and stops it."""

    cdef int32_t stopped        # atomic

    def start(self):
        """Before `run`, in the thread that will call `stop`."""
        self.samples = 0
        store_i32(&self.stopped, 0)

    def stop(self):
        store_i32(&self.stopped, 1)

    def run(self):
        """ns of each copy until another thread calls `stop`."""
        cdef Error error
        cdef int code = 0
        with nogil:
            while code == 0 and (self.samples == 0 or not load_i32(&self.stopped)):
                code = self.copy(&error)
        check(code, &error)
        return np.array(self.times[:self.samples])
