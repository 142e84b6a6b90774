"""Arenas: pinned memory in pieces, and what of it is free.

A piece is one registration; a copy may not cross two, so nothing that is taken does. Pieces are made on a thread of the arena's own,
one after another with a pause, for registering holds up the CUDA calls of every other thread; the next one is mapped and touched
meanwhile. `registered` counts what is registered or about to be: it is taken from the budget before CUDA is asked.

`ArenaData.lock` guards everything that is not written once. No CUDA call is made while it is held, and no other lock is taken.
"""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error
from strata_copy.system cimport pthread_cond_t, pthread_mutex_t, pthread_t

cdef enum:
    ARENA_GRAIN = 256           # what is taken begins and ends on this many bytes

cdef enum PieceKind:
    PIECE_MADE                  # mapped and registered by the arena
    PIECE_ATTACHED              # the engine's memory, given to the arena and registered by it
    PIECE_FOREIGN               # the engine's memory, given to the arena; who registered it will unregister it
    PIECE_IN_PLACE              # the engine's memory, which the engine goes on using: registered, never given out

cdef struct Piece:
    size_t base, bytes
    int32_t kind
    bint stuck                  # CUDA would not unregister it: it stays as it is

cdef struct Range:
    size_t start, bytes

cdef struct ArenaData:
    int64_t references
    int32_t device, threads
    int32_t node                # NUMA node that is preferred; -1: none
    bint bound                  # the kernel took the preference for every piece so far
    size_t budget, piece_bytes
    int64_t pause               # ns between two registrations
    int64_t pid                 # a fork has the memory and not the registrations
    pthread_mutex_t lock
    pthread_cond_t changed
    Piece *pieces               # by base
    int32_t n_pieces, room_for_pieces
    Range *free                 # by start; neighbours of one piece are one
    int32_t n_free, room_for_free
    int32_t taken               # ranges that are out
    size_t registered, offered, used    # bytes: registered by the arena; in pieces that are given out from; given out
    pthread_t grower
    bint has_grower, growing, stop
    bint closing                # nothing is given out any more
    Error refusal               # why it did not grow to its budget


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

# Takes up to `bytes`, in whole `grain`s, at least one: behind `near` where that is free, else where they fit whole, else where most
# are free. False where not one grain is free. `piece` is the first byte of the registration.
cdef bint arena_take(ArenaData *arena, size_t bytes, size_t grain, size_t near, Range *found, size_t *piece) noexcept nogil
cdef void arena_give(ArenaData *arena, size_t start, size_t bytes) noexcept nogil


# TypeError for None, and for one that is closed or whose __init__ did not run.
cdef class Arena:
    cdef ArenaData *data
    cdef bint closed_
    cdef object __weakref__

cdef ArenaData *arena_data(Arena arena) except NULL
