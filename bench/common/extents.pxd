"""What a plan copies, as a C array in the order of the layers."""


cdef extern from "extents.h" nogil:
    ctypedef struct Extent "bench_extent":
        char *target
        const char *source
        size_t bytes
        int layer


cdef class Extents:
    cdef Extent *items
    cdef readonly int n, layers
    cdef readonly size_t bytes
