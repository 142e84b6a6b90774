"""What the loop writes in the place of a model: bytes that tell which conversation, layer, array and position they belong to."""

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef uint64_t row_key(int64_t conversation, int32_t layer, int32_t array) noexcept nogil
# The row of a position; equal keys and positions give equal rows.
cdef void write_row(char *to, int64_t bytes, uint64_t key, int64_t position) noexcept nogil
cdef int32_t token(int64_t conversation, int64_t position) noexcept nogil
