"""Pools. Declared in pool.pxd."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp

from strata_copy.abi cimport OK, REASON_BUSY, REASON_CAPACITY, REASON_MEMORY, REASON_PLACE, REFUSED, Error
from strata_copy.arena cimport arena_drop, arena_hold
from strata_copy.atomics cimport add_i64
from strata_copy.cudart cimport clear, outcome
from strata_copy.images cimport ImageData, image_discard, image_new, image_reserve
from strata_copy.layout cimport LayoutData, layout_drop, layout_hold
from strata_copy.pieces cimport ArenaData
from strata_copy.states cimport StateData, state_drop, state_hold
from strata_copy.system cimport pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock


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


cdef StateData *pool_image(PoolData *pool, const Key *key, Error *error) noexcept nogil:
    cdef StateData *found = NULL
    cdef int32_t i
    pthread_mutex_lock(&pool.lock)
    i = index_of(pool, key)
    if i < 0:
        i = add(pool, key, error)
    if i >= 0:
        found = use(pool, i)
    pthread_mutex_unlock(&pool.lock)
    return found


cdef int pool_reserve(PoolData *pool, StateData *image, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef int status
    pthread_mutex_lock(&pool.lock)
    status = image_reserve(image, marks, n, error)
    while status == REFUSED and error.reason == REASON_CAPACITY and evict_one(pool, image):
        clear(error)
        status = image_reserve(image, marks, n, error)
    pthread_mutex_unlock(&pool.lock)
    return status


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
    cdef int status = OK
    cdef int32_t i
    pthread_mutex_lock(&pool.lock)
    i = index_of(pool, key)
    if i < 0:
        status = outcome(error, REFUSED, REASON_PLACE, "no image has this key")
    elif pool.entries[i].pins > 0:
        error.found = pool.entries[i].pins
        status = outcome(error, REFUSED, REASON_BUSY, "the image is pinned %ld times: unpin it first", error.found)
    else:
        status = image_discard(pool.entries[i].image, error)
        if status == OK:
            take_out(pool, i)
    pthread_mutex_unlock(&pool.lock)
    return status


cdef Entry *pool_table(PoolData *pool, int32_t *n) noexcept nogil:
    cdef Entry *copy
    cdef int32_t i
    pthread_mutex_lock(&pool.lock)
    copy = <Entry *>malloc((pool.n + 1) * sizeof(Entry))
    n[0] = pool.n if copy != NULL else 0
    for i in range(n[0]):
        copy[i] = pool.entries[i]
        copy[i].bytes = (<const ImageData *>copy[i].image.image).bytes
    pthread_mutex_unlock(&pool.lock)
    return copy


cdef bint pool_evicted(PoolData *pool, Key *key) noexcept nogil:
    cdef int32_t i
    cdef bint found
    pthread_mutex_lock(&pool.lock)
    found = pool.n_gone > 0
    if found:
        key[0] = pool.gone[0]
        pool.n_gone -= 1
        for i in range(pool.n_gone):
            pool.gone[i] = pool.gone[i + 1]
    pthread_mutex_unlock(&pool.lock)
    return found


# ---- the table; the lock is held

cdef int32_t index_of(const PoolData *pool, const Key *key) noexcept nogil:
    cdef int32_t i
    for i in range(pool.n):
        if pool.entries[i].key.n == key.n and memcmp(pool.entries[i].key.bytes, key.bytes, key.n) == 0:
            return i
    return -1


cdef StateData *use(PoolData *pool, int32_t i) noexcept nogil:
    pool.clock += 1
    pool.entries[i].used = pool.clock
    state_hold(pool.entries[i].image)
    return pool.entries[i].image


cdef int32_t add(PoolData *pool, const Key *key, Error *error) noexcept nogil:
    """The index of a new entry, or -1."""
    cdef StateData *image
    cdef void *grown
    if pool.n == pool.room:
        grown = realloc(pool.entries, (2 * pool.room + 16) * sizeof(Entry))
        if grown == NULL:
            outcome(error, REFUSED, REASON_MEMORY, "no host memory for a pool of %d images", pool.n + 1)
            return -1
        pool.entries, pool.room = <Entry *>grown, 2 * pool.room + 16
    image = image_new(pool.arena, pool.layout, pool.banks, pool.chunk, pool.scrub, error)
    while image == NULL and error.reason == REASON_CAPACITY and evict_one(pool, NULL):
        clear(error)
        image = image_new(pool.arena, pool.layout, pool.banks, pool.chunk, pool.scrub, error)
    if image == NULL:
        return -1
    pool.entries[pool.n].key, pool.entries[pool.n].image = key[0], image
    pool.entries[pool.n].pins, pool.entries[pool.n].used = 0, 0
    pool.n += 1
    return pool.n - 1


cdef bint evict_one(PoolData *pool, const StateData *keep) noexcept nogil:
    """The image that was used longest ago, of those that may go. False where none may."""
    cdef uint64_t after = 0
    cdef int32_t i, oldest
    cdef Error busy
    if pool.n_gone == pool.room_for_gone and not more_room_for_gone(pool):
        return False
    while True:
        oldest = -1
        for i in range(pool.n):
            if (pool.entries[i].used > after and pool.entries[i].pins == 0 and pool.entries[i].image != keep
                    and (oldest < 0 or pool.entries[i].used < pool.entries[oldest].used)):
                oldest = i
        if oldest < 0:
            return False
        clear(&busy)
        if image_discard(pool.entries[oldest].image, &busy) == OK:
            break
        after = pool.entries[oldest].used       # a ticket uses it: the next one
    pool.gone[pool.n_gone] = pool.entries[oldest].key
    pool.n_gone += 1
    pool.evictions += 1
    take_out(pool, oldest)
    return True


cdef bint more_room_for_gone(PoolData *pool) noexcept nogil:
    cdef void *grown = realloc(pool.gone, (2 * pool.room_for_gone + 16) * sizeof(Key))
    if grown == NULL:
        return False
    pool.gone, pool.room_for_gone = <Key *>grown, 2 * pool.room_for_gone + 16
    return True


cdef void take_out(PoolData *pool, int32_t i) noexcept nogil:
    state_drop(pool.entries[i].image)
    pool.n -= 1
    pool.entries[i] = pool.entries[pool.n]
