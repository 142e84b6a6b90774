"""include/strata_copy.h for Cython: types and codes, without the prefix. No code."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "strata_copy.h" nogil:
    enum:
        OK "STRATA_OK"
        AGAIN "STRATA_AGAIN"
        REFUSED "STRATA_REFUSED"
        FAILED "STRATA_FAILED"
        CANCELLED "STRATA_CANCELLED"
        POISONED "STRATA_POISONED"

    enum:
        REASON_NONE "STRATA_REASON_NONE"
        REASON_LAYOUT "STRATA_REASON_LAYOUT"
        REASON_MARK "STRATA_REASON_MARK"
        REASON_CAPACITY "STRATA_REASON_CAPACITY"
        REASON_OVERLAP "STRATA_REASON_OVERLAP"
        REASON_SAME_STATE "STRATA_REASON_SAME_STATE"
        REASON_INVALID "STRATA_REASON_INVALID"
        REASON_BUSY "STRATA_REASON_BUSY"
        REASON_ORDER "STRATA_REASON_ORDER"
        REASON_CAPTURE "STRATA_REASON_CAPTURE"
        REASON_STREAM "STRATA_REASON_STREAM"
        REASON_GROUP "STRATA_REASON_GROUP"
        REASON_BANK "STRATA_REASON_BANK"
        REASON_GENERATION "STRATA_REASON_GENERATION"
        REASON_PLACE "STRATA_REASON_PLACE"
        REASON_UNSUPPORTED "STRATA_REASON_UNSUPPORTED"
        REASON_TICKET "STRATA_REASON_TICKET"
        REASON_REQUEST "STRATA_REASON_REQUEST"
        REASON_CUDA "STRATA_REASON_CUDA"
        REASON_CLOSED "STRATA_REASON_CLOSED"
        REASON_MEMORY "STRATA_REASON_MEMORY"
        REASON_HOOK "STRATA_REASON_HOOK"

    enum:
        CONST "STRATA_CONST"
        STATE "STRATA_STATE"
        LINEAR "STRATA_LINEAR"
        WINDOW "STRATA_WINDOW"

    enum:
        DEVICE "STRATA_DEVICE"
        PINNED "STRATA_PINNED"
        PAGEABLE "STRATA_PAGEABLE"

    enum:
        WAIT_EVENT "STRATA_WAIT_EVENT"
        WAIT_STREAM "STRATA_WAIT_STREAM"

    enum:
        CALLER_SYNCED "STRATA_CALLER_SYNCED"
        FEED "STRATA_FEED"
        QUEUE_ALL "STRATA_QUEUE_ALL"

    enum:
        API_VERSION "STRATA_COPY_API_VERSION"

    ctypedef struct Copier "strata_copier":
        pass

    ctypedef struct State "strata_state":
        pass

    ctypedef struct Plan "strata_plan":
        pass

    ctypedef struct Ticket "strata_ticket":
        uint64_t v

    ctypedef struct Error "strata_error":
        int32_t status, reason, device, layer, part, cuda_code, pending_before, restored
        int64_t wanted, found
        char call[48]
        char text[192]

    ctypedef struct Progress "strata_progress":
        int32_t status, layers_queued
        int64_t bytes, bytes_total, ns_submit, ns_total

    ctypedef struct Growth "strata_growth":
        uint8_t rule, mark, ceil, lo, lo_mark
        int32_t q, shift, extra, settle, window, sinks
        int32_t cp_size, cp_rank, cp_interleave
        int64_t unit_bytes

    ctypedef struct PartSpec "strata_part":
        const char *name
        int32_t layer, needed_by, group, order
        int32_t shard_axis, shard_index, shard_count, replica_index, replica_count
        int64_t rep
        Growth growth

    ctypedef struct PlaceSpec "strata_place":
        void *base
        void *host_base
        int32_t device, kind
        int64_t units, stride, rep_stride, banks, bank_stride, ring
        int32_t page_group
        int64_t page_units, page_stride

    ctypedef struct Wait "strata_wait":
        void *handle
        int32_t device, kind

    ctypedef struct Pages "strata_pages":
        const int32_t *id
        int64_t n, first

    ctypedef int (*Hook "strata_hook")(void *, int32_t, int32_t, void *) noexcept nogil

    ctypedef struct Request "strata_request":
        uint32_t size, flags
        const int64_t *begin
        const int64_t *upto
        uint32_t n_marks
        uint64_t groups
        const int64_t *src_bank
        const int64_t *dst_bank
        const Pages *src_pages
        const Pages *dst_pages
        uint32_t n_page_groups, n_after
        const Wait *after
        uint64_t src_generation, dst_generation
        int32_t priority
        int64_t bytes_ahead
        void *user
        Hook hook
        void *hook_arg

    Request request_new "strata_request_new"(const int64_t *upto, uint32_t n_marks)
