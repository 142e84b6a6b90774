"""Rows. Declared in rows.pxd."""

from libc.string cimport memcpy

cdef enum:
    VOCABULARY = 248320

cdef uint64_t STEP = 0x9E3779B97F4A7C15, MIX = 0xD6E8FEB86659FD93


cdef inline uint64_t mixed(uint64_t x) noexcept nogil:
    x = (x ^ (x >> 32)) * MIX
    x = (x ^ (x >> 32)) * MIX
    return x ^ (x >> 32)


cdef uint64_t row_key(int64_t conversation, int32_t layer, int32_t array) noexcept nogil:
    return mixed(mixed(<uint64_t>conversation * STEP + layer) + array)


cdef void write_row(char *to, int64_t bytes, uint64_t key, int64_t position) noexcept nogil:
    cdef uint64_t word, x = mixed(key + <uint64_t>position * STEP)
    cdef int64_t at
    for at in range(0, bytes - 7, 8):
        x += STEP
        word = mixed(x)
        memcpy(to + at, &word, 8)
    word = mixed(x + STEP)
    memcpy(to + (bytes & ~<int64_t>7), &word, bytes & 7)


cdef int32_t token(int64_t conversation, int64_t position) noexcept nogil:
    return <int32_t>(mixed(row_key(conversation, -1, -1) + <uint64_t>position) % VOCABULARY)
