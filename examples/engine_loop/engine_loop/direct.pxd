"""The way of strata_copy: one request for a whole conversation, all stages at once. STRATA_SLOT_COPY_DIRECT=1."""

from libc.stdint cimport int64_t, uint64_t

cimport strata_copy as sc
from engine_loop.session cimport SessionData

cdef enum:
    # Bits of the groups, in the order of engine_loop.geometry.GROUPS
    KV = 1
    RUNNING = 2
    DRAFT = 4

# A copy from one session to another, or from an image, which no stage writes.
cdef struct Move:
    sc.Plan *plan
    sc.State *to_state
    const SessionData *source   # NULL: an image
    SessionData *target
    const int64_t *marks        # tokens, draft
    const int64_t *src_bank     # NULL, or one for each group: checkpoints
    const int64_t *dst_bank
    uint64_t groups, generation     # generation: what the source must still have; 0: any
    sc.Error *error
    int64_t moved               # bytes: what the target did not have yet

cdef int move(Move *m) noexcept nogil
