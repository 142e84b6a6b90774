"""Helpers: a few threads of our own that copy host memory together with the worker. They sleep where there is nothing to copy."""

from libc.stdint cimport int32_t

from strata_copy.plan cimport Extent

# As the worker opens and closes. Fewer threads than asked, or none, are a slower way and no failure.
cdef void helpers_open(int32_t threads) noexcept nogil
cdef void helpers_close() noexcept nogil
# Copies rectangles of host memory, and returns when all bytes are there. fresh: the target may have no pages yet. For the worker alone.
cdef void helpers_copy(const Extent *extents, int32_t n, bint fresh) noexcept nogil
