"""Images: states in an arena that grow without moving, with a blob, published in two steps.

Parts that grow are kept in chunks of about `chunk` tokens (states.pxd: Runs), taken from the arena so that they follow each other where it
has room; what has one unit lies in one block that is taken with the image. An image is changed by one thread at a time; others may copy
from and into it meanwhile, and see it as long as it was when their submit looked.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error, Request
from strata_copy.layout cimport MAX_GROUPS, MAX_MARKS, LayoutData
from strata_copy.pieces cimport ArenaData, Range
from strata_copy.plan cimport PlanData
from strata_copy.states cimport StateData

# Held by the image, and by those who read it: a publish of another one does not wait for them.
cdef struct Blob:
    int64_t references
    size_t n
    char bytes[1]

cdef struct ImageData:
    ArenaData *arena
    Range block                 # parts of one unit
    int32_t word                # atomic; 1: a thread is changing it
    bint scrub                  # bytes are zeroed before the arena has them again
    size_t bytes                # that it has of the arena
    # Under the copier's lock, and only what was copied into it since it was made or reset: all else is other conversations' bytes.
    bint landed
    uint64_t banks[MAX_GROUPS]  # of each group the banks that were written, in bits
    int64_t upto[MAX_GROUPS][MAX_MARKS]     # of each group the latest marks that its parts moved by
    Blob *coming                # set for the next publish, or NULL: not set
    Blob *blob                  # published


cdef enum:
    MAX_IMAGE_BANKS = 64

# An image without rows, not published; NULL with the error filled where the arena has no room for its parts of one unit. chunk: tokens.
cdef StateData *image_new(ArenaData *arena, LayoutData *layout, int64_t banks, int64_t chunk, bint scrub, Error *error) noexcept nogil
# Room for the units that there are at the marks. REFUSED where the arena has none left; what it got it keeps.
cdef int image_reserve(StateData *state, const int64_t *marks, uint64_t n, Error *error) noexcept nogil
# Replaces what `image_publish` will show. n == 0: an empty one.
cdef int image_blob(StateData *state, const void *bytes, size_t n, Error *error) noexcept nogil
# Shows rows up to the marks that landed, and the blob. AGAIN while a ticket uses the image; REFUSED where its last copy failed, nothing
# has landed, or its generation is not the one that is named (0: any).
cdef int image_publish(StateData *state, uint64_t generation, Error *error) noexcept nogil
# Gives the memory back now. REFUSED while a ticket uses it.
cdef int image_discard(StateData *state, Error *error) noexcept nogil
# Refuses, before any lock is taken, a call that changes images from a hook or from a fork of the process that made the arena.
cdef int check_caller(const ArenaData *arena, const char *call, Error *error) noexcept nogil
# All of these are REFUSED in a hook, in a fork of the process that made the arena, and for an image that was discarded.

# What is published; both may be asked anywhere. The blob is held for the caller (blob_drop); NULL: none.
cdef Blob *image_shown(StateData *state) noexcept nogil
cdef void blob_drop(Blob *blob) noexcept nogil
# Published, and no copy into it has failed since.
cdef bint image_visible(const StateData *state) noexcept nogil
# Of each mark the least that a group which was copied has by it, 0 where none has. False: the image is not published.
cdef bint image_marks(StateData *state, int64_t *marks) noexcept nogil

# For a reset, under the copier's lock: OK and without a blob, or REFUSED where it was discarded.
cdef int image_anew(StateData *state, Error *error) noexcept nogil

# For submit, under the copier's lock. A request was accepted that writes the image: nobody reads it until it is published again.
cdef void image_written(StateData *state, const Request *request) noexcept nogil
# OK where all that the request leaves out was copied into the image before.
cdef int image_writable(const StateData *state, const Request *request, Error *error) noexcept nogil
# OK where all that the request reads of the image, which may be the source of some groups only, was copied into it and is published.
cdef int image_readable(const StateData *state, const PlanData *plan, const Request *request, Error *error) noexcept nogil
