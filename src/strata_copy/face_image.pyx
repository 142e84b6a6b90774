"""Image: a state in an arena. Declared in face_image.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from strata_copy.abi cimport OK, Error
from strata_copy.arena cimport Arena, arena_data
from strata_copy.atomics cimport load_i32
from strata_copy.cudart cimport clear
from strata_copy.face_state cimport state_data
from strata_copy.images cimport (
    MAX_IMAGE_BANKS, Blob, blob_drop, image_blob, image_discard, image_marks, image_new, image_publish, image_reserve, image_shown,
    image_visible,
)
from strata_copy.layout cimport MAX_MARKS, Layout, LayoutData, layout_data
from strata_copy.pieces cimport ArenaData
from strata_copy.pool cimport pool_drop, pool_reserve
from strata_copy.raising cimport raise_error
from strata_copy.states cimport DISCARDED, StateData
from strata_copy.values cimport fill_marks

from strata_copy import host_runtime
from strata_copy.places import whole


cdef class Image(State):
    """A state in an arena that grows without moving, and that is read only once it is published.

    arena: where its memory is. banks: of running state. chunk: tokens of a chunk, in which parts that grow are kept. scrub: its memory
        is zeroed before the arena gives it out again.

    A copy into an image makes room for its marks first, and hides it; `publish` shows it again, with what `blob` was set to. An image is
    discarded when nothing refers to it any more, or by `discard`. Raises Refused where the arena has no room.
    """

    def __init__(self, Arena arena, Layout layout, *, banks=1, chunk=4096, scrub=False):
        cdef Error error
        cdef ArenaData *memory = arena_data(arena)
        cdef LayoutData *layout_values = layout_data(layout)
        cdef int64_t c_banks, c_chunk
        cdef bint c_scrub = scrub
        if self.data != NULL:
            raise TypeError("an Image is made once")
        c_banks, c_chunk = whole("banks", banks, 1, MAX_IMAGE_BANKS), whole("chunk", chunk, 1, 1 << 40)
        self.layout, self.places, self.owner, self.era = layout, (), arena, host_runtime.configuration()
        clear(&error)
        with nogil:
            self.data = image_new(memory, layout_values, c_banks, c_chunk, c_scrub, &error)
        if self.data == NULL:
            raise_error(&error)

    def __dealloc__(self):
        pool_drop(self.pool)

    def reserve(self, marks):
        """Room for `marks`, without moving a byte. Images of a pool get it from others where the arena is full. Raises Refused where
        there is none left; where all that may go would not be enough, nobody has gone for it."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef int64_t values[MAX_MARKS]
        cdef uint32_t n = fill_marks(self.layout, marks, values)
        cdef int status
        clear(&error)
        with nogil:
            status = (image_reserve(data, values, n, &error) if self.pool == NULL else
                      pool_reserve(self.pool, data, values, n, NULL, 0, &error))
        if status != OK:
            raise_error(&error)

    def publish(self, generation=0):
        """Shows what has landed, and the blob: True. False while a ticket uses the image. Raises Refused where nothing has landed or the
        last copy failed, and where it has another generation than the one that is named (0: any)."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef uint64_t wanted = whole("generation", generation, 0, (1 << 64) - 1)
        cdef int status
        clear(&error)
        with nogil:
            status = image_publish(data, wanted, &error)
        if status < OK:
            raise_error(&error)
        return status == OK

    def discard(self):
        """Gives the memory back now; copies from and into the image are refused from then on. Raises Refused while a ticket uses it."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef int status
        clear(&error)
        with nogil:
            status = image_discard(data, &error)
        if status != OK:
            raise_error(&error)

    @property
    def published(self):
        """Whether it may be copied from."""
        return image_visible(state_data(self))

    @property
    def marks(self):
        """The marks up to which it may be copied from, or None where it is not published. Where groups that share a mark were copied to
        different lengths, it is the least of them."""
        cdef StateData *data = state_data(self)
        cdef int64_t values[MAX_MARKS]
        cdef bint visible
        image_data(self)
        with nogil:
            visible = image_marks(data, values)
        return tuple(values[m] for m in range(len(self.layout.marks))) if visible else None

    @property
    def bytes(self):
        """Bytes of the arena that it has."""
        return image_data(self).bytes

    @property
    def blob(self):
        """What was published with the rows, as bytes: token ids, and whatever the engine wants with them. Setting it, to anything that has
        bytes (bytes, an array), is for the next `publish`. A `reset` drops both."""
        cdef StateData *data = state_data(self)
        cdef Blob *blob
        image_data(self)
        with nogil:
            blob = image_shown(data)
        try:
            return blob.bytes[:blob.n] if blob != NULL else b""
        finally:
            blob_drop(blob)

    @blob.setter
    def blob(self, value):
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef bytes copied = memoryview(value).tobytes()
        cdef const char *first = copied
        cdef size_t n = len(copied)
        cdef int status
        clear(&error)
        with nogil:
            status = image_blob(data, first, n, &error)
        if status != OK:
            raise_error(&error)

    def __repr__(self):
        cdef StateData *data = state_data(self)
        marks = self.marks
        shown = ("discarded" if load_i32(&data.visibility) == DISCARDED else "not published" if marks is None else
                 f"published up to {'/'.join(map(str, marks))}")
        return (f"<Image of {self.layout!r}, generation {self.generation}, {self.bytes:,} bytes, {shown}"
                f"{'' if self.valid else ', INVALID'}{', busy' if self.busy else ''}>")


cdef ImageData *image_data(Image image) except NULL:
    if state_data(image).image == NULL:
        raise TypeError("an Image is needed, not one whose __init__ did not run")
    return <ImageData *>image.data.image
