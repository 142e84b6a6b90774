"""Pieces of arenas. Declared in pieces.pxd."""

from libc.stdint cimport int32_t
from libc.stdlib cimport malloc, realloc
from libc.string cimport memcpy, memmove

from strata_copy.abi cimport OK, REASON_CAPACITY, REASON_CUDA, REASON_MEMORY, REASON_OVERLAP, REASON_PLACE, REFUSED, Error
from strata_copy.cudart cimport (
    Guard, clear, cudaHostRegisterMapped, cudaHostRegisterPortable, cudaMemoryTypeHost, cudaPointerAttributes, cuda_failed, outcome, rt,
)
from strata_copy.peers cimport peer_hangs
from strata_copy.system cimport PAGE, munmap, pthread_cond_broadcast, pthread_mutex_lock, pthread_mutex_unlock

cdef enum:
    LEFT = -1           # no code of CUDA's


cdef size_t budget_take(ArenaData *arena, size_t wanted) noexcept nogil:
    cdef size_t bytes
    pthread_mutex_lock(&arena.lock)
    bytes = 0 if arena.stop else min(wanted, arena.budget - arena.registered)
    arena.registered += bytes
    pthread_mutex_unlock(&arena.lock)
    return bytes


cdef void budget_give(ArenaData *arena, size_t bytes) noexcept nogil:
    pthread_mutex_lock(&arena.lock)
    arena.registered -= bytes
    pthread_mutex_unlock(&arena.lock)


cdef int pieces_add(ArenaData *arena, size_t base, size_t bytes, int32_t kind, Error *error) noexcept nogil:
    cdef bint noted
    pthread_mutex_lock(&arena.lock)
    noted = room(arena, 1, 1) == OK
    if noted:
        insert_piece(arena, base, bytes, kind)
        if kind != PIECE_IN_PLACE:
            arena.offered += bytes
            insert_free(arena, base, bytes)
        pthread_cond_broadcast(&arena.changed)
    pthread_mutex_unlock(&arena.lock)
    if noted:
        return OK
    if kind != PIECE_FOREIGN:
        unregister(base)
    return outcome(error, REFUSED, REASON_MEMORY, "no host memory for an arena of %d pieces", arena.n_pieces + 1)


cdef int pieces_attach(ArenaData *arena, size_t base, size_t bytes, const Guard *guard, Error *error) noexcept nogil:
    cdef size_t end = base + bytes, at = base, n = 0
    cdef int status = ends(base, bytes, error)
    if status != OK:
        return status
    if has_piece_in(arena, base, end):
        return outcome(error, REFUSED, REASON_OVERLAP, "a part of [%#zx, +%zu) belongs to the arena already", base, bytes)
    if foreign_end(base) != 0 or foreign_end(end - 1) != 0:
        return attach_foreign(arena, base, bytes, error)
    if budget_take_all(arena, base, bytes, error) != OK:
        return REFUSED
    while at < end and status == OK:
        n = min(arena.piece_bytes, end - at)
        status = register_range(arena, at, n, guard, error)
        at += n if status == OK else 0
    end = at
    while at > base and status == OK:
        n = (at - base - 1) % arena.piece_bytes + 1
        at -= n
        status = pieces_add(arena, at, n, PIECE_ATTACHED, error)
    if status == OK:
        return OK
    budget_give(arena, bytes if at == end else at + n - base)
    while at > base:            # the last one first
        n = (at - base - 1) % arena.piece_bytes + 1
        at -= n
        unregister(at)
    return status


cdef int pieces_register(ArenaData *arena, size_t base, size_t bytes, const Guard *guard, Error *error) noexcept nogil:
    cdef int status = ends(base, bytes, error)
    if status != OK or foreign_end(base) >= base + bytes:
        return status
    status = budget_take_all(arena, base, bytes, error)
    if status != OK:
        return status
    status = register_range(arena, base, bytes, guard, error)
    if status == OK:
        status = pieces_add(arena, base, bytes, PIECE_IN_PLACE, error)
    if status != OK:
        budget_give(arena, bytes)
    return status


cdef int pieces_unregister(ArenaData *arena, size_t base, const Guard *guard, Error *error) noexcept nogil:
    cdef const Piece *piece
    cdef Piece found
    cdef int code
    pthread_mutex_lock(&arena.lock)
    piece = piece_of(arena, base)
    if piece != NULL:
        found = piece[0]
    pthread_mutex_unlock(&arena.lock)
    if piece == NULL or found.base != base or found.kind != PIECE_IN_PLACE:
        return outcome(error, REFUSED, REASON_PLACE, "no memory that begins at %#zx was registered in place by this arena", base)
    code = unregister(found.base)
    if code == LEFT:
        return outcome(error, REFUSED, REASON_CUDA, "the memory at %#zx stays registered: a copy between two devices hangs, and "
                       "cudaHostUnregister would wait for it for good", base)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaHostUnregister", arena.device, guard, error)
    pthread_mutex_lock(&arena.lock)
    remove_piece(arena, <int32_t>(piece_of(arena, base) - arena.pieces))
    arena.registered -= found.bytes
    pthread_mutex_unlock(&arena.lock)
    return OK


cdef int pieces_give_back(ArenaData *arena, const Guard *guard, Error *error) noexcept nogil:
    cdef Piece *piece
    cdef Error later
    cdef int32_t i
    cdef int code
    for i in range(arena.n_pieces - 1, -1, -1):
        piece = &arena.pieces[i]
        if piece.stuck:
            continue
        code = unregister(piece.base) if piece.kind != PIECE_FOREIGN else 0
        if code == LEFT:
            piece.stuck = True
            continue
        if code != 0:
            clear(&later)
            cuda_failed(REFUSED, code, "cudaHostUnregister", arena.device, guard, error if error.status == OK else &later)
            piece.stuck = True
            continue
        if piece.kind == PIECE_MADE:
            munmap(<void *>piece.base, piece.bytes)
        pthread_mutex_lock(&arena.lock)
        if piece.kind != PIECE_FOREIGN:
            arena.registered -= piece.bytes
        remove_piece(arena, i)
        pthread_mutex_unlock(&arena.lock)
    pthread_mutex_lock(&arena.lock)
    arena.n_free = 0
    arena.offered = 0
    pthread_mutex_unlock(&arena.lock)
    return error.status


cdef Piece *pieces_copy(ArenaData *arena, int32_t *n) noexcept nogil:
    cdef Piece *copy
    pthread_mutex_lock(&arena.lock)
    copy = <Piece *>malloc((arena.n_pieces + 1) * sizeof(Piece))
    if copy != NULL:
        n[0] = arena.n_pieces
        memcpy(copy, arena.pieces, n[0] * sizeof(Piece))
    pthread_mutex_unlock(&arena.lock)
    return copy


# ---- registrations

cdef int ends(size_t base, size_t bytes, Error *error) noexcept nogil:
    """Whether there is an address behind it, which whatever follows counts up to."""
    if base + bytes > base:
        return OK
    return outcome(error, REFUSED, REASON_PLACE, "[%#zx, +%zu) is no memory: it is empty, or goes on beyond the last address", base, bytes)


cdef bint has_piece_in(ArenaData *arena, size_t base, size_t end) noexcept nogil:
    cdef int32_t i
    cdef bint found = False
    pthread_mutex_lock(&arena.lock)
    for i in range(arena.n_pieces):
        if arena.pieces[i].base < end and base < arena.pieces[i].base + arena.pieces[i].bytes:
            found = True
    pthread_mutex_unlock(&arena.lock)
    return found


cdef int attach_foreign(ArenaData *arena, size_t base, size_t bytes, Error *error) noexcept nogil:
    cdef size_t at = base, end = base + bytes, stop
    cdef int status = OK
    while at < end:             # looked at before any of it is given out
        stop = foreign_end(at)
        if stop == 0:
            error.found = at - base
            return outcome(error, REFUSED, REASON_PLACE, "somebody has registered a part of [%#zx, +%zu), but not byte %zu: attach "
                           "what is registered, or what is not", base, bytes, at - base)
        at = stop
    at = base
    while at < end and status == OK:
        stop = min(foreign_end(at), end)
        status = pieces_add(arena, at, stop - at, PIECE_FOREIGN, error)
        at = stop
    return status


cdef size_t foreign_end(size_t at) noexcept nogil:
    """Where the pinned memory that holds this byte ends; 0 where it is not pinned."""
    cdef cudaPointerAttributes found
    cdef void *start = NULL
    cdef size_t bytes = 0
    if rt.cudaPointerGetAttributes(&found, <void *>at) != 0 or found.type != cudaMemoryTypeHost:
        return 0
    return <size_t>start + bytes if rt.pointer_range(<void *>at, &start, &bytes) == 0 else 0


cdef int budget_take_all(ArenaData *arena, size_t base, size_t bytes, Error *error) noexcept nogil:
    cdef size_t left
    if base % PAGE != 0 or bytes % PAGE != 0:
        return outcome(error, REFUSED, REASON_PLACE, "[%#zx, +%zu) does not begin and end with a page of %d bytes, and CUDA registers "
                       "whole ones", base, bytes, <int>PAGE)
    pthread_mutex_lock(&arena.lock)
    left = arena.budget - arena.registered
    if bytes <= left and not arena.stop:
        arena.registered += bytes
        left = bytes
    else:
        error.wanted, error.found = bytes, left
        outcome(error, REFUSED, REASON_CAPACITY, "%zu bytes to register, the arena's budget has %zu left", bytes, left)
    pthread_mutex_unlock(&arena.lock)
    return error.status


cdef int register_range(ArenaData *arena, size_t base, size_t bytes, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaHostRegister(<void *>base, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped)
    return OK if code == 0 else cuda_failed(REFUSED, code, "cudaHostRegister", arena.device, guard, error)


# ---- the list of pieces, which the lock guards

cdef int room(ArenaData *arena, int32_t pieces, int32_t ranges) noexcept nogil:
    """Room for so many more. Each range that is out may come back as one more, which must not fail."""
    cdef int32_t n
    cdef void *grown
    if arena.n_pieces + pieces > arena.room_for_pieces:
        n = 2 * arena.room_for_pieces + 16
        grown = realloc(arena.pieces, n * sizeof(Piece))
        if grown == NULL:
            return REFUSED
        arena.pieces, arena.room_for_pieces = <Piece *>grown, n
    if arena.n_free + arena.taken + ranges > arena.room_for_free:
        n = 2 * (arena.n_free + arena.taken + ranges) + 64
        grown = realloc(arena.free, n * sizeof(Range))
        if grown == NULL:
            return REFUSED
        arena.free, arena.room_for_free = <Range *>grown, n
    return OK


cdef void insert_piece(ArenaData *arena, size_t base, size_t bytes, int32_t kind) noexcept nogil:
    cdef int32_t i = arena.n_pieces
    while i > 0 and arena.pieces[i - 1].base > base:
        arena.pieces[i] = arena.pieces[i - 1]
        i -= 1
    arena.pieces[i].base, arena.pieces[i].bytes, arena.pieces[i].kind, arena.pieces[i].stuck = base, bytes, kind, False
    arena.n_pieces += 1


cdef const Piece *piece_of(const ArenaData *arena, size_t start) noexcept nogil:
    """The piece that holds the address; NULL: none."""
    cdef int32_t low = 0, high = arena.n_pieces, middle
    while low < high:
        middle = (low + high) // 2
        if arena.pieces[middle].base <= start:
            low = middle + 1
        else:
            high = middle
    return &arena.pieces[low - 1] if low > 0 and start - arena.pieces[low - 1].base < arena.pieces[low - 1].bytes else NULL


cdef void remove_piece(ArenaData *arena, int32_t i) noexcept nogil:
    arena.n_pieces -= 1
    memmove(&arena.pieces[i], &arena.pieces[i + 1], (arena.n_pieces - i) * sizeof(Piece))


# ---- what is free

cdef bint arena_take(ArenaData *arena, size_t bytes, size_t grain, size_t near, Range *found, size_t *piece) noexcept nogil:
    cdef int32_t i
    cdef size_t n
    cdef bint taken = False
    pthread_mutex_lock(&arena.lock)
    i = range_for(arena, bytes, grain, near) if not arena.closing else -1
    if i >= 0 and room(arena, 0, 1) == OK:
        n = min(bytes, arena.free[i].bytes) // grain * grain
        found.start, found.bytes = arena.free[i].start, n
        piece[0] = piece_of(arena, found.start).base
        arena.free[i].start += n
        arena.free[i].bytes -= n
        if arena.free[i].bytes == 0:
            remove_free(arena, i)
        arena.taken += 1
        arena.used += n
        taken = True
    pthread_mutex_unlock(&arena.lock)
    return taken


cdef int32_t range_for(const ArenaData *arena, size_t bytes, size_t grain, size_t near) noexcept nogil:
    cdef int32_t i, whole_ = -1, largest = -1
    for i in range(arena.n_free):
        if arena.free[i].bytes < grain:
            continue
        if near != 0 and arena.free[i].start == near:
            return i
        if whole_ < 0 and arena.free[i].bytes >= bytes:
            whole_ = i
        if largest < 0 or arena.free[i].bytes > arena.free[largest].bytes:
            largest = i
    return whole_ if whole_ >= 0 else largest


cdef void arena_give(ArenaData *arena, size_t start, size_t bytes) noexcept nogil:
    pthread_mutex_lock(&arena.lock)
    insert_free(arena, start, bytes)
    arena.taken -= 1
    arena.used -= bytes
    pthread_mutex_unlock(&arena.lock)


cdef void insert_free(ArenaData *arena, size_t start, size_t bytes) noexcept nogil:
    """One range with its neighbours where they are of one piece."""
    cdef int32_t i = arena.n_free
    while i > 0 and arena.free[i - 1].start > start:
        i -= 1
    if i > 0 and joined(arena, &arena.free[i - 1], start):
        i -= 1
        arena.free[i].bytes += bytes
    else:
        memmove(&arena.free[i + 1], &arena.free[i], (arena.n_free - i) * sizeof(Range))
        arena.free[i].start, arena.free[i].bytes = start, bytes
        arena.n_free += 1
    if i + 1 < arena.n_free and joined(arena, &arena.free[i], arena.free[i + 1].start):
        arena.free[i].bytes += arena.free[i + 1].bytes
        remove_free(arena, i + 1)


cdef inline bint joined(const ArenaData *arena, const Range *before, size_t start) noexcept nogil:
    return before.start + before.bytes == start and piece_of(arena, before.start) == piece_of(arena, start)


cdef void remove_free(ArenaData *arena, int32_t i) noexcept nogil:
    arena.n_free -= 1
    memmove(&arena.free[i], &arena.free[i + 1], (arena.n_free - i) * sizeof(Range))


cdef int unregister(size_t base) noexcept nogil:
    """CUDA's code, or LEFT: where a copy of a proof of P2P hangs, the call would wait for it."""
    if peer_hangs(-1):
        return LEFT
    return rt.cudaHostUnregister(<void *>base)
