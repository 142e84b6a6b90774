"""The way that engines have today: through pageable memory, stage after stage. STRATA_SLOT_COPY_DIRECT not set."""

from libc.stdint cimport int32_t, int64_t

cimport strata_copy as sc
from engine_loop.session cimport SessionData

cdef struct Save:
    const SessionData *source
    SessionData *target
    const int64_t *marks        # tokens, draft
    int64_t bank                # of the source's running state; -1: live
    bint draft
    void **streams              # for copies alone, one for each stage
    sc.Error *error

cdef int save_and_restore(const Save *save) noexcept nogil
# One stage's running state into a bank of the same session, or out of it.
cdef int keep_running(const SessionData *session, int32_t stage, int64_t bank, bint keep, void *stream, sc.Error *error) noexcept nogil
# Bytes of host memory that a copy needs at once, at most.
cdef int64_t images_at_once(const SessionData *source, const int64_t *marks) noexcept nogil
