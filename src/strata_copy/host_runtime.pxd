"""The CUDA runtime over host memory, as a table of functions."""


cdef extern from "table.h" nogil:
    ctypedef struct strata_cudart:
        void (*observed)(const void *) noexcept nogil
        void (*published)(const void *) noexcept nogil


# Complete, and valid as long as the process lives.
cdef const strata_cudart *table() noexcept nogil
