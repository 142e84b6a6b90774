"""Pools: images by key, and which of them have to go where the arena is full.

Whoever was used longest ago goes first: never one that is pinned, nor one that a ticket uses. `PoolData.lock` guards the table; the
image's word, the arena's lock and the copier's are taken while it is held, never the other way round.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error
from strata_copy.layout cimport LayoutData
from strata_copy.pieces cimport ArenaData
from strata_copy.states cimport StateData
from strata_copy.system cimport pthread_mutex_t

cdef enum:
    MAX_KEY = 64                # bytes

cdef struct Key:
    char bytes[MAX_KEY]
    int32_t n

cdef struct Entry:
    Key key
    int32_t pins
    uint64_t used               # when it was last asked for, on the pool's clock
    StateData *image
    size_t bytes                # that it has of the arena; of copies of the table only

# An image that is in the table no more.
cdef struct Gone:
    Key key
    bint evicted                # or else taken out for its key's sake, or discarded by the engine itself

cdef struct PoolData:
    int64_t references
    ArenaData *arena
    LayoutData *layout
    int64_t banks, chunk
    bint scrub
    pthread_mutex_t lock
    Entry *entries
    int32_t n, room
    Gone *gone                  # not told yet
    int32_t n_gone, room_for_gone
    uint64_t clock
    int64_t hits, misses, evictions


cdef PoolData *pool_new(ArenaData *arena, LayoutData *layout, int64_t banks, int64_t chunk, bint scrub, Error *error) noexcept nogil
cdef void pool_hold(PoolData *pool) noexcept nogil
cdef void pool_drop(PoolData *pool) noexcept nogil
# Lets go of all images: those that nobody else has give their memory back.
cdef void pool_close(PoolData *pool) noexcept nogil

# An image that the engine discarded itself is taken out wherever it is met, as if it had never been there. None of these is for hooks: who
# has the pool's lock may wait for the copier's, which hooks run under.
#
# All images that these hand out are held for the caller (state_drop).
# The image of a key, or NULL.
cdef StateData *pool_find(PoolData *pool, const Key *key) noexcept nogil
# The image of a key, new where there is none, with room for marks (NULL: none are given). NULL with the error filled where that is not to
# be had of others either.
cdef StateData *pool_image(PoolData *pool, const Key *key, const int64_t *marks, uint64_t n, Error *error) noexcept nogil
# Room for marks in an image of the pool, from others where the arena is full, but not from the sources of the copy that it is for. Nobody
# goes where all that may go would not be enough bytes.
cdef int pool_reserve(PoolData *pool, StateData *image, const int64_t *marks, uint64_t n, StateData **sources, int32_t n_sources,
                      Error *error) noexcept nogil
# Bytes that an image needs of the arena to have room for marks; 0 where it cannot have it, which image_reserve says.
cdef int64_t room_missing(const StateData *image, const int64_t *marks, uint64_t n) noexcept nogil
# A pinned image is not evicted until it is unpinned as often. False where there is none with this key, or it is not pinned.
cdef bint pool_pin(PoolData *pool, const Key *key, int32_t pins) noexcept nogil
# Takes an image out: OK; REFUSED where there is none, or it is pinned or in use.
cdef int pool_remove(PoolData *pool, const Key *key, Error *error) noexcept nogil
# A copy of the table, for the caller to free; NULL without memory. Nothing is held by it.
cdef Entry *pool_table(PoolData *pool, int32_t *n) noexcept nogil
# The next image that is gone and not told of yet; False where there is none.
cdef bint pool_gone(PoolData *pool, Gone *gone) noexcept nogil
