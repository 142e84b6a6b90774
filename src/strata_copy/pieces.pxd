"""Pieces of an arena: what is registered, the budget that it comes out of, and what of it is free.

A piece is one registration; a copy may not cross two, so nothing that is taken does. `registered` counts what is registered or about to
be: it is taken from the budget before CUDA is asked.

`ArenaData.lock` guards everything that is not written once. No CUDA call is made while it is held, and no other lock is taken. What has
a guard runs on a thread on which the arena's device is current, one such job at a time (`busy`) beside the thread that grows; the last one,
that gives everything back, has no growth beside it.
"""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error
from strata_copy.cudart cimport Guard
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
    bint stuck                  # it was not to be unregistered, and stays as it is

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
    bint busy                   # a thread attaches, registers, unregisters or closes: the next one waits for `changed`
    bint closing                # nothing is given out or added any more
    Error refusal               # why it did not grow to its budget


# Takes bytes from the budget before CUDA is asked: as many as are left, 0 where the arena is to stop.
cdef size_t budget_take(ArenaData *arena, size_t wanted) noexcept nogil
cdef void budget_give(ArenaData *arena, size_t bytes) noexcept nogil

# Notes a piece that is registered; where there is no room for the note it is unregistered again.
cdef int pieces_add(ArenaData *arena, size_t base, size_t bytes, int32_t kind, Error *error) noexcept nogil
# In registrations of a piece each; or, where all of it is registered by others, in theirs.
cdef int pieces_attach(ArenaData *arena, size_t base, size_t bytes, const Guard *guard, Error *error) noexcept nogil
# In one registration, in place.
cdef int pieces_register(ArenaData *arena, size_t base, size_t bytes, const Guard *guard, Error *error) noexcept nogil
cdef int pieces_unregister(ArenaData *arena, size_t base, const Guard *guard, Error *error) noexcept nogil
# All of them, when nothing is given out and nothing grows. One that CUDA does not take back stays mapped, and in the count.
cdef int pieces_give_back(ArenaData *arena, const Guard *guard, Error *error) noexcept nogil
# For the caller to free: Python's objects are not made while the lock is held.
cdef Piece *pieces_copy(ArenaData *arena, int32_t *n) noexcept nogil

# Takes up to `bytes`, in whole `grain`s, at least one: behind `near` where that is free, else where they fit whole, else where most
# are free. False where not one grain is free. `piece` is the first byte of the registration.
cdef bint arena_take(ArenaData *arena, size_t bytes, size_t grain, size_t near, Range *found, size_t *piece) noexcept nogil
cdef void arena_give(ArenaData *arena, size_t start, size_t bytes) noexcept nogil
