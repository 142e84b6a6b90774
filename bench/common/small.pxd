"""A small foreign copy, on a stream of its own, as an engine makes them beside everything else."""

from libc.stdint cimport int64_t

from strata_copy.abi cimport Error


cdef class SmallCopy:
    cdef size_t device, pinned, size, stream, event     # addresses, bytes, handles
    cdef bint inwards
    cdef int64_t[::1] times     # ns of each copy of the latest run; behind the last there is room for, the longest of the rest
    cdef int samples
    cdef int copy(self, Error *error) noexcept nogil
