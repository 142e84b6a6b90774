"""Arenas: pinned memory in pieces, which are made on a thread of the arena's own. Pieces and their lock: pieces.pxd."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error
from strata_copy.pieces cimport ArenaData


cdef ArenaData *arena_new(int32_t device, int32_t node, size_t budget, size_t piece_bytes, int32_t threads, int64_t pause,
                          Error *error) noexcept nogil
cdef void arena_hold(ArenaData *arena) noexcept nogil
# The last one gives everything back.
cdef void arena_drop(ArenaData *arena) noexcept nogil

# Starts the thread that makes pieces until the budget is used up or something is refused.
cdef int arena_grow(ArenaData *arena, Error *error) noexcept nogil
# Ends the growth: nothing is made any more when it returns.
cdef void arena_stop(ArenaData *arena) noexcept nogil
# Until `bytes` can be given out, or growing has ended, or the time is up: True unless it is.
cdef bint arena_wait(ArenaData *arena, size_t bytes, int64_t timeout_ns) noexcept nogil
# Memory of the engine's. attach gives it to the arena; register_ leaves it to the engine.
cdef int arena_attach(ArenaData *arena, size_t base, size_t bytes, Error *error) noexcept nogil
cdef int arena_register(ArenaData *arena, size_t base, size_t bytes, Error *error) noexcept nogil
cdef int arena_unregister(ArenaData *arena, size_t base, Error *error) noexcept nogil
# REFUSED where something is still taken, else everything that CUDA takes back is given back.
cdef int arena_close(ArenaData *arena, Error *error) noexcept nogil


# TypeError for None, and for one that is closed or whose __init__ did not run.
cdef class Arena:
    cdef ArenaData *data
    cdef bint closed_
    cdef object __weakref__

cdef ArenaData *arena_data(Arena arena) except NULL
