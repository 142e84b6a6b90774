"""Pools. Declared in pool.pxd."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp

from strata_copy.abi cimport (
    LINEAR, OK, REASON_BUSY, REASON_CAPACITY, REASON_CLOSED, REASON_MARK, REASON_MEMORY, REASON_PLACE, REFUSED, Error,
)
from strata_copy.arena cimport arena_drop, arena_hold
from strata_copy.atomics cimport add_i64, load_i32, load_i64
from strata_copy.copier cimport the_tables
from strata_copy.cudart cimport clear, outcome
from strata_copy.endings cimport sweep
from strata_copy.images cimport ImageData, check_caller, image_discard, image_new, image_reserve
from strata_copy.layout cimport LayoutData, layout_drop, layout_hold, units_at
from strata_copy.pieces cimport ArenaData
from strata_copy.plan cimport MAX_SOURCES
from strata_copy.states cimport DISCARDED, StateData, state_drop, state_hold
from strata_copy.system cimport pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock

# Images that an eviction leaves: the one that it is for, and the sources of its copy.
cdef struct Kept:
    const StateData *images[MAX_SOURCES + 1]
    int32_t n


cdef PoolData *pool_new(ArenaData *arena, LayoutData *layout, int64_t banks, int64_t chunk, bint scrub, Error *error) noexcept nogil:
    cdef PoolData *pool = <PoolData *>calloc(1, sizeof(PoolData))
    if pool == NULL:
        outcome(error, REFUSED, REASON_MEMORY, "no host memory for a pool")
        return NULL
    pool.references = 1
    arena_hold(arena)
    layout_hold(layout)
    pool.arena, pool.layout, pool.banks, pool.chunk, pool.scrub = arena, layout, banks, chunk, scrub
    pthread_mutex_init(&pool.lock, NULL)
    return pool


cdef void pool_hold(PoolData *pool) noexcept nogil:
    add_i64(&pool.references, 1)


cdef void pool_drop(PoolData *pool) noexcept nogil:
    if pool == NULL or add_i64(&pool.references, -1) > 1:
        return
    pool_close(pool)
    layout_drop(pool.layout)
    arena_drop(pool.arena)
    pthread_mutex_destroy(&pool.lock)
    free(pool.entries)
    free(pool.gone)
    free(pool)


cdef void pool_close(PoolData *pool) noexcept nogil:
    cdef int32_t i
    pthread_mutex_lock(&pool.lock)
    for i in range(pool.n):
        state_drop(pool.entries[i].image)
    pool.n = 0
    pthread_mutex_unlock(&pool.lock)


cdef StateData *pool_find(PoolData *pool, const Key *key) noexcept nogil:
    cdef StateData *found = NULL
    cdef int32_t i
    pthread_mutex_lock(&pool.lock)
    i = index_of(pool, key)
    if i >= 0:
        found = use(pool, i)
        pool.hits += 1
    else:
        pool.misses += 1
    pthread_mutex_unlock(&pool.lock)
    return found


cdef StateData *pool_image(PoolData *pool, const Key *key, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef StateData *found = NULL
    cdef Kept kept
    cdef bint fresh
    cdef int32_t i
    if marks != NULL and not are_marks(pool.layout, marks, n):
        error.wanted, error.found = pool.layout.n_marks, n
        outcome(error, REFUSED, REASON_MARK, "%lu marks given, the layout has %d; 0 <= mark < 2^62 is needed", n, pool.layout.n_marks)
        return NULL
    if check_caller(pool.arena, "image", error) != OK:
        return NULL
    pthread_mutex_lock(&pool.lock)
    i = index_of(pool, key)
    fresh = i < 0
    if fresh:
        i = add(pool, key, marks, n, error)
    if i >= 0:
        found = use(pool, i)
        kept.images[0], kept.n = found, 1
        if marks != NULL and make_room(pool, found, marks, n, &kept, error) != OK:
            if fresh:
                take_out(pool, index_of(pool, key), False)
            state_drop(found)
            found = NULL
    pthread_mutex_unlock(&pool.lock)
    return found


cdef int pool_reserve(PoolData *pool, StateData *image, const int64_t *marks, uint64_t n, StateData **sources, int32_t n_sources,
                      Error *error) noexcept nogil:
    cdef Kept kept
    cdef int32_t i
    cdef int status = check_caller(pool.arena, "reserve", error)
    if status != OK:
        return status
    kept.images[0], kept.n = image, 1
    for i in range(n_sources):
        kept.images[kept.n] = sources[i]
        kept.n += 1
    pthread_mutex_lock(&pool.lock)
    status = make_room(pool, image, marks, n, &kept, error)
    pthread_mutex_unlock(&pool.lock)
    return status


cdef int64_t room_missing(const StateData *image, const int64_t *marks, uint64_t n) noexcept nogil:
    if image.image == NULL or load_i32(&image.visibility) == DISCARDED or not are_marks(image.layout, marks, n):
        return 0
    return bytes_of_rows(image, marks, False)


cdef bint pool_pin(PoolData *pool, const Key *key, int32_t pins) noexcept nogil:
    cdef int32_t i
    cdef bint done
    pthread_mutex_lock(&pool.lock)
    i = index_of(pool, key)
    done = i >= 0 and pool.entries[i].pins + pins >= 0
    if done:
        pool.entries[i].pins += pins
    pthread_mutex_unlock(&pool.lock)
    return done


cdef int pool_remove(PoolData *pool, const Key *key, Error *error) noexcept nogil:
    cdef int status = check_caller(pool.arena, "del", error)
    cdef int32_t i
    if status != OK:
        return status
    pthread_mutex_lock(&pool.lock)
    i = index_of(pool, key)
    if i < 0:
        status = outcome(error, REFUSED, REASON_PLACE, "no image has this key")
    elif pool.entries[i].pins > 0:
        error.found = pool.entries[i].pins
        status = outcome(error, REFUSED, REASON_BUSY, "the image is pinned %ld times: unpin it first", error.found)
    else:
        status = image_discard(pool.entries[i].image, error)
        if status != OK and error.reason == REASON_CLOSED:      # the engine did so itself, just now
            clear(error)
            status = OK
        if status == OK:
            take_out(pool, i, False)
    pthread_mutex_unlock(&pool.lock)
    return status


cdef Entry *pool_table(PoolData *pool, int32_t *n) noexcept nogil:
    cdef Entry *copy
    cdef int32_t i
    pthread_mutex_lock(&pool.lock)
    take_out_discarded(pool)
    copy = <Entry *>malloc((pool.n + 1) * sizeof(Entry))
    n[0] = pool.n if copy != NULL else 0
    for i in range(n[0]):
        copy[i] = pool.entries[i]
        copy[i].bytes = (<const ImageData *>copy[i].image.image).bytes
    pthread_mutex_unlock(&pool.lock)
    return copy


cdef bint pool_gone(PoolData *pool, Gone *gone) noexcept nogil:
    cdef int32_t i
    cdef bint found
    pthread_mutex_lock(&pool.lock)
    found = pool.n_gone > 0
    if found:
        gone[0] = pool.gone[0]
        pool.n_gone -= 1
        for i in range(pool.n_gone):
            pool.gone[i] = pool.gone[i + 1]
    pthread_mutex_unlock(&pool.lock)
    return found


# ---- the table; the lock is held

cdef int32_t index_of(PoolData *pool, const Key *key) noexcept nogil:
    cdef int32_t i
    for i in range(pool.n):
        if pool.entries[i].key.n == key.n and memcmp(pool.entries[i].key.bytes, key.bytes, key.n) == 0:
            if not is_discarded(pool, i):
                return i
            take_out(pool, i, False)
            break
    return -1


cdef inline bint is_discarded(const PoolData *pool, int32_t i) noexcept nogil:
    return load_i32(&pool.entries[i].image.visibility) == DISCARDED


cdef void take_out_discarded(PoolData *pool) noexcept nogil:
    cdef int32_t i
    for i in range(pool.n - 1, -1, -1):
        if is_discarded(pool, i):
            take_out(pool, i, False)


cdef StateData *use(PoolData *pool, int32_t i) noexcept nogil:
    pool.clock += 1
    pool.entries[i].used = pool.clock
    state_hold(pool.entries[i].image)
    return pool.entries[i].image


cdef int32_t add(PoolData *pool, const Key *key, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    """The index of a new entry, or -1. marks: rows that it will have, or NULL."""
    cdef StateData *image
    cdef Kept nobody
    nobody.n = 0
    take_out_discarded(pool)
    if pool.n == pool.room and not more_room_for_entries(pool, error):
        return -1
    if pool.n > 0 and check_bytes(pool, bytes_of_new(pool.entries[0].image, marks), &nobody, error) != OK:
        return -1
    image = image_new(pool.arena, pool.layout, pool.banks, pool.chunk, pool.scrub, error)
    while image == NULL and error.reason == REASON_CAPACITY and evict_one(pool, &nobody):
        clear(error)
        image = image_new(pool.arena, pool.layout, pool.banks, pool.chunk, pool.scrub, error)
    if image == NULL:
        return -1
    pool.entries[pool.n].key, pool.entries[pool.n].image = key[0], image
    pool.entries[pool.n].pins, pool.entries[pool.n].used = 0, 0
    pool.n += 1
    return pool.n - 1


cdef bint more_room_for_entries(PoolData *pool, Error *error) noexcept nogil:
    cdef void *grown = realloc(pool.entries, (2 * pool.room + 16) * sizeof(Entry))
    if grown == NULL:
        outcome(error, REFUSED, REASON_MEMORY, "no host memory for a pool of %d images", pool.n + 1)
        return False
    pool.entries, pool.room = <Entry *>grown, 2 * pool.room + 16
    return True


cdef void take_out(PoolData *pool, int32_t i, bint evicted) noexcept nogil:
    """Where there is no memory to tell of it, only an image that was not evicted goes untold."""
    if pool.n_gone < pool.room_for_gone or more_room_for_gone(pool):
        pool.gone[pool.n_gone].key, pool.gone[pool.n_gone].evicted = pool.entries[i].key, evicted
        pool.n_gone += 1
    state_drop(pool.entries[i].image)
    pool.n -= 1
    pool.entries[i] = pool.entries[pool.n]


cdef bint more_room_for_gone(PoolData *pool) noexcept nogil:
    cdef void *grown = realloc(pool.gone, (2 * pool.room_for_gone + 16) * sizeof(Gone))
    if grown == NULL:
        return False
    pool.gone, pool.room_for_gone = <Gone *>grown, 2 * pool.room_for_gone + 16
    return True


# ---- room and eviction; the lock is held

cdef int make_room(PoolData *pool, StateData *image, const int64_t *marks, uint64_t n, const Kept *kept, Error *error) noexcept nogil:
    cdef int status = check_bytes(pool, room_missing(image, marks, n), kept, error)
    if status != OK:
        return status
    status = image_reserve(image, marks, n, error)
    while status == REFUSED and error.reason == REASON_CAPACITY and evict_one(pool, kept):
        clear(error)
        status = image_reserve(image, marks, n, error)
    return status


cdef int check_bytes(PoolData *pool, int64_t wanted, const Kept *kept, Error *error) noexcept nogil:
    """Whether the bytes are free or with images that may go. Where they then lie is not looked at, so that it may not be enough."""
    cdef int64_t offered, unused, evictable = 0
    cdef int32_t i
    pthread_mutex_lock(&pool.arena.lock)
    offered, unused = pool.arena.offered, pool.arena.offered - pool.arena.used
    pthread_mutex_unlock(&pool.arena.lock)
    if wanted <= unused:
        return OK
    pthread_mutex_lock(&the_tables().lock)
    sweep(the_tables())         # tickets that have ended hold nothing
    pthread_mutex_unlock(&the_tables().lock)
    for i in range(pool.n):
        if may_go(pool, i, kept) and load_i32(&pool.entries[i].image.holds) == 0:
            evictable += (<const ImageData *>pool.entries[i].image.image).bytes
    if wanted <= unused + evictable:
        return OK
    error.wanted, error.found = wanted, unused + evictable
    return outcome(error, REFUSED, REASON_CAPACITY, "%ld bytes more are needed; the arena has %ld free of %ld, and images that may go have "
                   "%ld", wanted, unused, offered, evictable)


cdef bint may_go(const PoolData *pool, int32_t i, const Kept *kept) noexcept nogil:
    cdef int32_t k
    for k in range(kept.n):
        if pool.entries[i].image == kept.images[k]:
            return False
    return pool.entries[i].pins == 0


cdef bint evict_one(PoolData *pool, const Kept *kept) noexcept nogil:
    """The image that was used longest ago, of those that may go. False where none may."""
    cdef uint64_t after = 0
    cdef int32_t i, oldest
    cdef Error busy
    cdef int status
    if pool.n_gone == pool.room_for_gone and not more_room_for_gone(pool):
        return False
    while True:
        oldest = -1
        for i in range(pool.n):
            if (pool.entries[i].used > after and may_go(pool, i, kept)
                    and (oldest < 0 or pool.entries[i].used < pool.entries[oldest].used)):
                oldest = i
        if oldest < 0:
            return False
        clear(&busy)
        status = image_discard(pool.entries[oldest].image, &busy)
        if status == OK or busy.reason == REASON_CLOSED:
            break
        after = pool.entries[oldest].used       # a ticket uses it: the next one
    pool.evictions += status == OK              # or the engine discarded it itself
    take_out(pool, oldest, status == OK)
    return True


# ---- bytes

cdef bint are_marks(const LayoutData *layout, const int64_t *marks, uint64_t n) noexcept nogil:
    cdef uint64_t m
    if n != <uint64_t>layout.n_marks:
        return False
    for m in range(n):
        if not 0 <= marks[m] < <int64_t>1 << 62:
            return False
    return True


cdef int64_t bytes_of_new(const StateData *like, const int64_t *marks) noexcept nogil:
    """Of another image of the same pool, with rows up to the marks."""
    cdef int64_t block = (<const ImageData *>like.image).block.bytes
    cdef int64_t rows = bytes_of_rows(like, marks, True) if marks != NULL else 0
    return block + rows if rows < INT64_MAX - block else INT64_MAX


cdef int64_t bytes_of_rows(const StateData *image, const int64_t *marks, bint all_of_them) noexcept nogil:
    """Of the chunks that an image needs for rows up to the marks: all of them, or those that it lacks."""
    cdef int64_t bytes = 0, units, chunks
    cdef int32_t i
    for i in range(image.layout.n_parts):
        if image.layout.parts[i].growth.rule != LINEAR:
            continue
        units = units_at(&image.layout.parts[i].growth, marks)
        if not all_of_them:
            units -= load_i64(&image.places[i].units)
        chunks = (units + image.runs[i].chunk_units - 1) // image.runs[i].chunk_units if units > 0 else 0
        if chunks > (INT64_MAX - bytes) // image.runs[i].chunk_bytes:
            return INT64_MAX
        bytes += chunks * image.runs[i].chunk_bytes
    return bytes
