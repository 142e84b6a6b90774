"""Pool: images by key."""

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from strata_copy.abi cimport OK, REASON_PLACE, Error
from strata_copy.arena cimport Arena, arena_data
from strata_copy.cudart cimport clear
from strata_copy.face_image cimport Image
from strata_copy.hooks cimport in_hook, of_hook
from strata_copy.images cimport MAX_IMAGE_BANKS
from strata_copy.layout cimport MAX_MARKS, Layout, layout_data
from strata_copy.pieces cimport ArenaData
from strata_copy.pool cimport (
    MAX_KEY, Entry, Gone, Key, PoolData, pool_close, pool_drop, pool_find, pool_gone, pool_hold, pool_image, pool_new, pool_pin,
    pool_remove, pool_table,
)
from strata_copy.raising cimport raise_error
from strata_copy.states cimport StateData, state_drop
from strata_copy.values cimport fill_marks

from strata_copy import host_runtime
from strata_copy.places import whole


cdef class Pool:
    """Images by key, in an arena: where it is full, the one that was used longest ago goes.

    arena, layout, banks, chunk, scrub: as for Image. Keys are str, or bytes, of 1 to 64 bytes. An image that is pinned does not go, nor
    one that a ticket uses. Raises Refused where nothing more may go.
    """

    cdef PoolData *data
    cdef readonly Arena arena
    cdef readonly Layout layout
    cdef dict names, images     # from a key's bytes: the key as it was given, the Image
    cdef list evicted_          # keys that were not asked for yet

    def __init__(self, Arena arena, Layout layout, *, banks=1, chunk=4096, scrub=False):
        cdef Error error
        cdef ArenaData *memory = arena_data(arena)
        if self.data != NULL:
            raise TypeError("a Pool is made once")
        self.arena, self.layout, self.names, self.images, self.evicted_ = arena, layout, {}, {}, []
        clear(&error)
        self.data = pool_new(memory, layout_data(layout), whole("banks", banks, 1, MAX_IMAGE_BANKS), whole("chunk", chunk, 1, 1 << 40),
                             scrub, &error)
        if self.data == NULL:
            raise_error(&error)

    def __dealloc__(self):
        if self.data != NULL:
            pool_close(self.data)       # images that were handed out refer to the pool's C side
            pool_drop(self.data)

    def image(self, key, upto=None, *, blob=None):
        """The image of `key`, made where there is none, with room for the marks `upto` if they are given. blob: what its next `publish`
        shows. Others may be evicted for it; so may this one, once others are asked for, where it is not pinned or in use."""
        cdef Error error
        cdef PoolData *data = pool_data(self, "image")
        cdef Key c_key
        cdef StateData *found
        cdef int64_t marks[MAX_MARKS]
        cdef uint32_t n = fill_marks(self.layout, upto, marks) if upto is not None else 0
        cdef bytes copied = None if blob is None else memoryview(blob).tobytes()
        name = fill_key(key, &c_key)
        clear(&error)
        with nogil:
            found = pool_image(data, &c_key, marks if n > 0 else NULL, n, &error)
        self._tell()
        if found == NULL:
            raise_error(&error)
        self.names.setdefault(name, key)
        image = self._wrapped(name, found)
        if copied is not None:
            image.blob = copied
        return image

    def __getitem__(self, key):
        """The image of `key`, which counts as used now. Raises KeyError."""
        cdef PoolData *data = pool_data(self, "pool[key]")
        cdef Key c_key
        cdef StateData *found
        name = fill_key(key, &c_key)
        with nogil:
            found = pool_find(data, &c_key)
        self._tell()
        if found == NULL:
            raise KeyError(key)
        return self._wrapped(name, found)

    def __delitem__(self, key):
        """Takes the image out and gives its memory back. Raises KeyError, and Refused where it is pinned or in use."""
        cdef Error error
        cdef PoolData *data = pool_data(self, "del pool[key]")
        cdef Key c_key
        cdef int status
        fill_key(key, &c_key)
        clear(&error)
        with nogil:
            status = pool_remove(data, &c_key, &error)
        self._tell()
        if status != OK and error.reason == REASON_PLACE:
            raise KeyError(key)
        if status != OK:
            raise_error(&error)

    def __contains__(self, key):
        names = self._bytes_of_keys()
        try:
            return bytes_of(key) in names
        except (TypeError, ValueError):     # no image can have it
            return False

    def __len__(self):
        return len(self._table())

    def __iter__(self):
        return iter(self.keys())

    def keys(self):
        """The keys, the one that was used longest ago first."""
        return [self.names.get(name, name) for name in self._bytes_of_keys()]

    def pin(self, key):
        """The image of `key` is not evicted until it is unpinned as often. Raises KeyError."""
        self._pin(key, 1)

    def unpin(self, key):
        """Takes back a `pin`. Raises KeyError where there is none."""
        self._pin(key, -1)

    def evicted(self):
        """The keys of the images that were evicted since the last call, the first one first."""
        self._tell()
        found, self.evicted_ = self.evicted_, []
        return found

    def usage(self):
        """A dict: images, pinned (of them), bytes (that they have), free (in the arena), hits and misses of `pool[key]`, evictions."""
        table = self._table()
        return {
            "images": len(table),
            "pinned": sum(pins > 0 for _, _, pins, _ in table),
            "bytes": sum(size for *_, size in table),
            "free": self.arena.pinned - self.arena.used,
            "hits": self.data.hits,
            "misses": self.data.misses,
            "evictions": self.data.evictions,
        }

    def __repr__(self):
        return f"<Pool of {self.data.n if self.data != NULL else 0} images in {self.arena!r}>"

    def _pin(self, key, int32_t pins):
        cdef PoolData *data = pool_data(self, "pin")
        cdef Key c_key
        cdef bint done
        fill_key(key, &c_key)
        with nogil:
            done = pool_pin(data, &c_key, pins)
        if not done:
            raise KeyError(key)

    def _bytes_of_keys(self):
        return [name for _, name, _, _ in sorted(self._table())]

    def _table(self):
        """(when it was used, key in bytes, pins, bytes) of each image."""
        cdef PoolData *data = pool_data(self, "keys")
        cdef int32_t n = 0
        cdef Entry *table
        with nogil:
            table = pool_table(data, &n)
        if table == NULL:
            raise MemoryError
        try:
            return [(table[i].used, table[i].key.bytes[:table[i].key.n], table[i].pins, table[i].bytes) for i in range(n)]
        finally:
            free(table)

    def _tell(self):
        """Learns which images are gone, whoever was the cause."""
        cdef PoolData *data = pool_data(self, "evicted")
        cdef Gone gone
        cdef bint found
        while True:
            with nogil:
                found = pool_gone(data, &gone)
            if not found:
                break
            name = gone.key.bytes[:gone.key.n]
            self.images.pop(name, None)
            key = self.names.pop(name, name)
            if gone.evicted:
                self.evicted_.append(key)

    cdef Image _wrapped(self, name, StateData *found):
        """The Image of a state that is held for the caller."""
        cdef Image image = self.images.get(name)
        if image is not None and image.data == found:
            state_drop(found)
            return image
        image = Image.__new__(Image)
        image.data, image.layout, image.places, image.owner, image.pool = found, self.layout, (), self.arena, self.data
        image.era = host_runtime.configuration()
        pool_hold(self.data)
        self.images[name] = image
        return image


cdef PoolData *pool_data(Pool pool, const char *call) except NULL:
    """For a call that takes the pool's lock: who has it may wait for the copier's, which hooks run under."""
    cdef Error error
    if pool.data == NULL:
        raise TypeError("a Pool is needed, not one whose __init__ did not run")
    if in_hook():
        clear(&error)
        of_hook(call, &error)
        raise_error(&error)
    return pool.data


cdef bytes bytes_of(key):
    if not isinstance(key, (str, bytes)):
        raise TypeError(f"key {key!r}; a str, or bytes, of 1 to {MAX_KEY} bytes is needed")
    name = key.encode() if isinstance(key, str) else bytes(key)
    if not 1 <= len(name) <= MAX_KEY:
        raise ValueError(f"key {key!r:.100} has {len(name)} bytes; 1 to {MAX_KEY} are possible")
    return name


cdef bytes fill_key(key, Key *c_key):
    cdef bytes name = bytes_of(key)
    cdef const char *first = name
    c_key.n = len(name)
    memcpy(c_key.bytes, first, c_key.n)
    return name
