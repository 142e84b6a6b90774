"""The functions that other Cython modules cimport, over the types of strata_copy.h. `cimport strata_copy` is the way in."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cimport strata_copy.abi as abi

cdef int submit(abi.Plan *plan, const abi.Request *request, abi.Ticket *ticket, abi.Error *error) noexcept nogil
cdef int wait_layer(abi.Ticket ticket, int32_t layer, void *stream, int64_t timeout_ns, abi.Error *error) noexcept nogil
cdef int wait_done(abi.Ticket ticket, void *stream, int64_t timeout_ns, abi.Error *error) noexcept nogil
cdef int wait_source(abi.Ticket ticket, void *stream, int64_t timeout_ns, abi.Error *error) noexcept nogil
cdef int poll(abi.Ticket ticket, abi.Progress *progress) noexcept nogil
cdef int finished(abi.Copier *copier, abi.Ticket *out, int32_t n) noexcept nogil
cdef int sync(abi.Ticket ticket, int64_t timeout_ns, abi.Error *error) noexcept nogil
cdef void release(abi.Ticket *ticket) noexcept nogil
cdef int cancel(abi.Ticket ticket, abi.Error *error) noexcept nogil
cdef uint64_t generation(const abi.State *state) noexcept nogil
cdef int reset(abi.State *state, abi.Error *error) noexcept nogil
# What the engine says of a state's content, before it writes: strata_copy.h has what each means.
cdef int advanced(abi.State *state, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil
cdef int rewound(abi.State *state, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil
cdef int dirty(abi.State *state, int32_t part, int64_t first_unit, int64_t n, abi.Error *error) noexcept nogil
cdef int rewindable(abi.State *state, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil

# Images: room for marks before a submit, what is published with the rows, and publishing (AGAIN while a ticket uses the image).
cdef int image_reserve(abi.State *image, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil
cdef int image_blob(abi.State *image, const void *bytes, size_t n, abi.Error *error) noexcept nogil
cdef int image_publish(abi.State *image, uint64_t generation, abi.Error *error) noexcept nogil

# From the Python objects; a pointer lives as long as its object. TypeError for another object.
cdef abi.Plan *plan_of(object plan) except NULL
cdef abi.State *state_of(object state) except NULL
cdef abi.Copier *copier_of(object copier) except NULL
