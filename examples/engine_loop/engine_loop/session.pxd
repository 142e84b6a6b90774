"""Sessions: the memory of one conversation's state in all stages, and what happens to it between copies.

A main session and a slot are the same thing. `kv` lists the attention layers in order and behind them the draft, if there is one.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

cimport strata_copy as sc

cdef enum:
    PAGE = 4
    MAX_ARRAYS = 4
    MAX_STAGES = 16
    RESIDENT = 0        # mode 0: K/V on the device
    STREAMED = 1        # mode 1: complete in pinned memory; the pages that are in use also on the device, with a map
    RING = 2            # mode 2: complete in pinned memory; the last pages also on the device, page p at p mod n_slots

# One array of a layer's K/V: codes or scales.
cdef struct Array:
    char *rows          # complete, page after page: this is what copies move
    char *resident      # modes 1 and 2: n_slots pages on the device
    int64_t page_bytes

cdef struct KvLayer:
    int32_t layer, stage, mode, n_arrays
    int64_t n_pages, n_slots
    Array arrays[MAX_ARRAYS]
    void *stream        # of its stage, or the draft's own
    char *map           # mode 1, on the device: page_table (n_pages) and slot_block (n_slots); behind them what is 0 at first
    int64_t table_bytes, counter_bytes
    int32_t *page_table     # what the map holds: the slot of each page, or -1
    int32_t *slot_block     # the page in each slot, or -1
    int64_t next_slot
    char *pooled        # the indexer's; NULL for the draft
    char *dead
    char *tail
    char *block_pos

# An array of running state, which lies in one piece, and its checkpoints.
cdef struct Running:
    int32_t stage, layer        # the first layer of all gdn rows of a stage, -1 for the PLE window
    char *live
    char *banks                 # pinned: bank after bank
    int64_t bytes

cdef struct StageData:
    int32_t device, first, end      # its layers
    void *stream

cdef struct SessionData:
    int32_t n_stages, n_kv, n_running, n_layers, heads, draft    # draft: its index in kv, or -1
    StageData stages[MAX_STAGES]
    KvLayer *kv
    int32_t *kv_of_layer        # index in kv of each layer, and of the draft behind them; -1 where there is none
    Running *running
    int64_t key_bytes, gdn_bytes, capacity, n_banks
    int32_t *ids
    int64_t n_ids, n_draft, request     # request: whom a slot serves; 0: nobody
    int32_t previous[2]         # the last two ids for the PLE, oldest first; -1: none
    uint64_t turn               # counts what changed this session

cdef class Session:
    cdef SessionData data
    cdef readonly object geometry, stages, layout, state, checkpoints
    cdef readonly str format, name
    cdef readonly int mode
    cdef readonly object draft_mode
    cdef readonly dict taken            # bank to the Checkpoint in it
    cdef readonly list memory           # (kind, address, bytes) of what has to be given back
    cdef readonly list reads            # Tickets of parks, which read the session in the background
    cdef object _streams

# A copy into a session that is under way.
cdef struct Landing:
    SessionData *session
    const int64_t *marks        # tokens, draft

# Residency after a copy into a session, as a restore leaves it: of a streamed layer no page is resident, a ring holds the last pages.
# It only enqueues on `stream`, where the layer's bytes have landed. It has the form of a hook of strata_copy; `landing` is a Landing.
cdef int landed(void *landing, int32_t layer, int32_t device, void *stream) noexcept nogil
# The spare row behind the pooled rows.
cdef int write_spare_row(const SessionData *session, const KvLayer *kv, sc.Error *error) noexcept nogil
# Length and ids after a copy.
cdef void take_ids(SessionData *session, const int32_t *ids, const int64_t *marks, int64_t request) noexcept nogil
cdef void forget(SessionData *session) noexcept nogil
# Before bytes of a session are written that strata_copy does not see: its rows come to `marks`, new from `kept` on.
cdef int written(Session session, const int64_t *kept, const int64_t *marks) except -1
cdef int raise_error(const sc.Error *error) except -1
