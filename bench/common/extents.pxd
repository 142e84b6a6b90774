"""What a plan copies, as a C array: the bundles of small parts, then layer by layer."""

from strata_copy.cudart cimport cudaStream_t, strata_cudart


cdef extern from "extents.h" nogil:
    ctypedef struct Extent "bench_extent":
        char *target
        const char *source
        size_t width, rows, target_pitch, source_pitch
        int layer

    int copy_extent "bench_copy"(const strata_cudart *, const Extent *, cudaStream_t)


cdef class Extents:
    cdef Extent *items
    cdef readonly int n, layers
    cdef readonly size_t bytes
