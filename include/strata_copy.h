/* strata_copy for C11 and C++17. No CUDA header is needed: streams and events are void pointers.
 *
 * Copiers, states and plans are made from Python (strata_copy.Copier, .State, Copier.plan); a C or C++ engine in the same process takes
 * their addresses (the `address` property) and calls the functions below, which never take the GIL, call Python or throw. Of these,
 * strata_sync blocks by design, and the waits for at most their timeout_ns. Types that Python fills (strata_part, strata_growth, strata_place) are here for what comes.
 *
 *     #include <Python.h>
 *     #include <strata_copy.h>
 *     if (strata_copy_import() < 0) return NULL;      once in each file that includes this, with the GIL; an exception is set on failure
 *     status = strata_submit(plan, &request, &ticket, &error);
 *
 * The functions need Python.h; a file without it is handed the table, a const strata_copy_api *, by one that has it.
 *
 * Return values are the outcomes below. A failed or refused call fills the error that it was given (NULL is allowed).
 */
#ifndef STRATA_COPY_H
#define STRATA_COPY_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Outcomes. The class decides what the caller does; `reason` in strata_error is for the log. */
enum {
    STRATA_OK = 0,
    STRATA_AGAIN = 1,      /* not yet; nothing happened */
    STRATA_REFUSED = -1,   /* before the first write: target and source are as they were */
    STRATA_FAILED = -2,    /* after the first write: the target is INVALID until it is reset, the source is untouched */
    STRATA_CANCELLED = -3, /* likewise, because the caller asked for it */
    STRATA_POISONED = -4   /* a CUDA error that ends the device for this process; no further CUDA call is made on it */
};

/* Reasons of an outcome. */
enum {
    STRATA_REASON_NONE = 0,
    STRATA_REASON_LAYOUT = 1,       /* the layouts differ: the first difference is named */
    STRATA_REASON_MARK = 2,         /* a mark or begin is negative, too large, missing or not in order */
    STRATA_REASON_CAPACITY = 3,     /* a place has fewer units than the marks need */
    STRATA_REASON_OVERLAP = 4,      /* two ranges that must be apart share bytes */
    STRATA_REASON_SAME_STATE = 5,   /* source and target are one state */
    STRATA_REASON_INVALID = 6,      /* a copy into the source failed or was cancelled, and it was not reset */
    STRATA_REASON_BUSY = 7,         /* in use by a ticket or another thread */
    STRATA_REASON_ORDER = 8,        /* neither `after` nor STRATA_CALLER_SYNCED was given */
    STRATA_REASON_CAPTURE = 9,      /* a stream or event that was named is part of a graph capture */
    STRATA_REASON_STREAM = 10,      /* a default stream; in `after` also a stream of a device that is not open */
    STRATA_REASON_GROUP = 11,       /* a group that the layout has not */
    STRATA_REASON_BANK = 12,        /* a bank that the place has not */
    STRATA_REASON_GENERATION = 13,  /* the state has changed since the caller looked */
    STRATA_REASON_PLACE = 14,       /* an address, kind, device, stride or count that a place cannot have */
    STRATA_REASON_UNSUPPORTED = 15, /* said by the interface, not done by this release */
    STRATA_REASON_TICKET = 16,      /* no such ticket: released, or never given out */
    STRATA_REASON_REQUEST = 17,     /* a field of the request that has no meaning */
    STRATA_REASON_CUDA = 18,        /* a CUDA call failed: cuda_code and call say which */
    STRATA_REASON_CLOSED = 19,      /* the copier is closed, or this process is a fork of the one that opened it */
    STRATA_REASON_MEMORY = 20,      /* host memory for the library's own tables could not be had */
    STRATA_REASON_HOOK = 21         /* the caller's hook returned non-zero */
};

typedef struct strata_copier strata_copier; /* lanes, events and tickets; one is open per process; thread-safe */
typedef struct strata_layout strata_layout; /* WHAT the bytes are: immutable, shared, fingerprinted */
typedef struct strata_state strata_state;   /* WHERE one session, slot or image keeps them; one writer at a time */
typedef struct strata_plan strata_plan;     /* a source and a target, checked: order and routes, no length */
typedef struct { uint64_t v; } strata_ticket; /* names one submitted copy; 0 is none; never dangles */

typedef struct {
    int32_t status, reason;        /* an outcome and a STRATA_REASON_ */
    int32_t device, layer, part;   /* -1 where it does not apply; part is the index in the layout */
    int32_t cuda_code;             /* cudaError_t of the call that failed, 0 if none did */
    int32_t pending_before;        /* a CUDA error of other code that was pending on this thread before the call */
    int32_t restored;              /* 0 where the thread's current device or capture mode could not be put back */
    int64_t wanted, found;
    char call[48];                 /* the CUDA function that failed, or "" */
    char text[192];                /* what was asked, what was found, what to do */
} strata_error;

typedef struct {
    int32_t status;                /* STRATA_AGAIN while in flight, then an outcome */
    int32_t layers_queued;         /* layers whose bytes are queued: wait_layer answers OK for them */
    int64_t bytes, bytes_total;    /* landed (known chunk by chunk where the worker queues it, else at the end) and to be moved */
    int64_t ns_submit, ns_total;   /* inside submit; from the call of submit to the first look that found the copy ended */
} strata_progress;

/* How a part grows with a mark, in units. The rules and formulas are in docs/layouts.md. */
enum { STRATA_CONST = 0, STRATA_STATE = 1, STRATA_LINEAR = 2, STRATA_WINDOW = 3 };
enum { STRATA_LO_ZERO = 0, STRATA_LO_LAST = 1, STRATA_LO_CHUNK = 2, STRATA_LO_MARK = 3 };
typedef struct {
    uint8_t rule, mark, ceil, lo, lo_mark; /* STRATA_CONST..; the mark it follows; round up; STRATA_LO_.. and its mark */
    uint8_t reserved[3];
    int32_t q, shift, extra;               /* tokens in a unit; tokens added to the mark; units after the last */
    int32_t settle, window, sinks;         /* units that change together; tokens; units */
    int32_t cp_size, cp_rank, cp_interleave;
    int64_t unit_bytes;                    /* payload of one run of a unit; padding belongs to the place */
} strata_growth;

typedef struct {
    const char *name;
    int32_t layer, needed_by;              /* layer -1: the session's; needed_by: the first layer that reads it */
    int32_t group, order;                  /* a group moves whole or not at all; order inside its layer */
    int32_t shard_axis, shard_index, shard_count, replica_index, replica_count;
    int64_t rep;                           /* runs of unit_bytes that a unit has: heads, or a transposed V */
    strata_growth growth;
} strata_part;

/* Where a state keeps one part. */
enum { STRATA_DEVICE = 0, STRATA_PINNED = 1, STRATA_PAGEABLE = 2 };
typedef struct {
    void *base, *host_base;                /* what the device uses; what the CPU uses of host memory; NULL: the same */
    int32_t device, kind;                  /* device of DEVICE memory; for host memory the device whose lanes carry it, or -1 */
    int64_t units, stride;                 /* capacity; bytes from unit to unit, at least unit_bytes */
    int64_t rep_stride, banks, bank_stride; /* bytes from run to run of a unit; snapshot banks of the part */
    int64_t ring;                          /* 0: dense; C: unit i, behind the sinks, lies at i mod C; -1: rolled, refused in this release */
    int32_t page_group, reserved;          /* -1: no pages */
    int64_t page_units, page_stride;
} strata_place;

/* One thing that a copy waits for before its first byte: who wrote the source, who still reads the target. */
enum { STRATA_WAIT_EVENT = 0, STRATA_WAIT_STREAM = 1 }; /* a recorded cudaEvent_t; a cudaStream_t as it is now */
typedef struct { void *handle; int32_t device, kind; } strata_wait;

typedef struct { const int32_t *id; int64_t n, first; } strata_pages; /* pages of logical pages first..first+n; -1: absent */

/* Flags of a request. */
enum {
    STRATA_CALLER_SYNCED = 1, /* n_after == 0 is meant: source is written and target is unread already */
    STRATA_FEED = 2,          /* the worker queues it in windows, however short it is */
    STRATA_QUEUE_ALL = 4      /* the caller queues it whole, however long it is: AGAIN behind a ticket that the worker still queues, and
                               * where streams are in use that would be full with it */
};

/* Called once for each layer and device of the plan, in the order of the layers, by the thread that queues the layer (the caller of
 * submit, or the worker), with `device` current and without the GIL. It may only enqueue work on `stream`, which stands behind the
 * layer's bytes: wait_layer stands behind that work. Four entries for each layer are reckoned with (docs/guarantees.md). Calls of
 * this library from it are refused; a non-zero return fails the ticket. */
typedef int (*strata_hook)(void *hook_arg, int32_t layer, int32_t device, void *stream);

/* Everything is read before submit returns. Make one with strata_request_new and set what differs. */
typedef struct {
    uint32_t size, flags;
    const int64_t *begin, *upto;           /* one value per mark; begin NULL: what the states' lineages say */
    uint32_t n_marks, reserved;
    uint64_t groups;                       /* bit g: group g moves; 0: all */
    const int64_t *src_bank, *dst_bank;    /* one value per group; NULL: bank 0 */
    const strata_pages *src_pages, *dst_pages; /* refused in this release */
    uint32_t n_page_groups, n_after;
    const strata_wait *after;
    uint64_t src_generation, dst_generation; /* 0: any; else the state must still have it */
    int32_t priority, reserved2;           /* 0, or -1: copies of priority 0 overtake it at the next chunk */
    int64_t bytes_ahead;                   /* queued and not landed on a device, at most; below 1024 counts as 1024; 0: the copier's window */
    void *user;
    strata_hook hook;
    void *hook_arg;
} strata_request;

static inline strata_request strata_request_new(const int64_t *upto, uint32_t n_marks) {
    strata_request request;
    unsigned char *bytes = (unsigned char *)&request;
    for (size_t i = 0; i < sizeof request; i++) bytes[i] = 0;
    request.size = (uint32_t)sizeof request;
    request.upto = upto;
    request.n_marks = n_marks;
    return request;
}

/* The functions, as one table in the capsule strata_copy._core._C_API. Members are only ever appended: `size` lets an older
 * consumer take a newer table. */
#define STRATA_COPY_API_VERSION 1
typedef struct {
    uint32_t version, size;
    /* Checks everything on every device, then queues the copy on the calling thread, or has the worker queue it where it is long. OK:
     * *ticket names it (it is written before the first copy, so that another thread may wait for layers already). AGAIN: every ticket
     * is in flight or not released, or 16 are being fed, or as STRATA_QUEUE_ALL says. Not OK: *ticket is 0, whose release does nothing. */
    int (*submit)(strata_plan *, const strata_request *, strata_ticket *, strata_error *);
    /* OK: `stream` now depends on all bytes that `layer` needs. AGAIN: the layer was not queued within timeout_ns (< 0: for as long as
     * it takes, of all waits), and the stream waits for nothing. */
    int (*wait_layer)(strata_ticket, int32_t layer, void *stream, int64_t timeout_ns, strata_error *);
    /* OK: `stream` now depends on the whole copy: the target may be read behind it. */
    int (*wait_done)(strata_ticket, void *stream, int64_t timeout_ns, strata_error *);
    /* OK: `stream` now depends on the last read of the source: it may be overwritten or freed behind it. */
    int (*wait_source)(strata_ticket, void *stream, int64_t timeout_ns, strata_error *);
    /* A memory load; never a CUDA call. AGAIN while in flight. */
    int (*poll)(strata_ticket, strata_progress *);
    /* Up to n tickets that have ended and were not given out here before; returns how many. No CUDA call, but for a ticket that
     * is older than the copier's time limit: CUDA is then asked once. */
    int (*finished)(strata_copier *, strata_ticket *out, int32_t n);
    /* Holds the calling thread until the ticket ends. timeout_ns < 0: for as long as it takes. */
    int (*sync)(strata_ticket, int64_t timeout_ns, strata_error *);
    /* The ticket's number is free again once the copy has ended; sets *ticket to 0. */
    void (*release)(strata_ticket *);
    uint64_t (*state_generation)(const strata_state *);
    /* The state starts anew: valid again after a failed copy. BUSY while a ticket uses it, CLOSED for an image that was discarded. */
    int (*state_reset)(strata_state *, strata_error *);
    /* OK: the ticket stops at the next chunk and ends CANCELLED once what is queued has landed: poll it. AGAIN: everything is queued
     * already, or it has ended. */
    int (*cancel)(strata_ticket, strata_error *);
    /* What the engine says of a state's content, so that copies move what changed: each before the first kernel that writes, from any
     * thread, one at a time for a state (else BUSY), also while copies are in flight. A state that was told nothing moves whole.
     * Each gives running state a new generation. n_marks: one for each mark of the layout. */
    /* Rows up to the marks, and running state with them, were or will be written. */
    int (*state_advanced)(strata_state *, const int64_t *marks, uint32_t n_marks, strata_error *);
    /* Rows from the marks on were or will be rewritten. */
    int (*state_rewound)(strata_state *, const int64_t *marks, uint32_t n_marks, strata_error *);
    /* Units [first_unit, first_unit + n) of a part were or will be rewritten; of running state a unit is a bank (a snapshot). */
    int (*state_dirty)(strata_state *, int32_t part, int64_t first_unit, int64_t n, strata_error *);
    /* OK where the engine could go back to the marks; else REFUSED with the first part that could not in the error. */
    int (*state_rewindable)(strata_state *, const int64_t *marks, uint32_t n_marks, strata_error *);
    /* Images (strata_copy.Image): room for the marks, before a submit into one; REFUSED where the arena has none left. */
    int (*image_reserve)(strata_state *, const int64_t *marks, uint32_t n_marks, strata_error *);
    /* What the next publish shows with the rows: copied now. */
    int (*image_blob)(strata_state *, const void *bytes, size_t n, strata_error *);
    /* Shows what has landed. AGAIN while a ticket uses the image; generation 0: any. */
    int (*image_publish)(strata_state *, uint64_t generation, strata_error *);
} strata_copy_api;

#ifdef Py_PYTHON_H
/* One pointer for each file that includes this header; set it with strata_copy_import in each. */
static const strata_copy_api *strata_copy_table;

/* 0, or -1 with a Python exception set. Needs the GIL. */
static inline int strata_copy_import(void) {
    const strata_copy_api *table = (const strata_copy_api *)PyCapsule_Import("strata_copy._core._C_API", 0);
    if (!table) return -1;
    if (table->version != STRATA_COPY_API_VERSION || table->size < sizeof *table) {
        PyErr_Format(PyExc_ImportError, "strata_copy offers C table %u of %u bytes, this module was built for %u of %u",
                     table->version, table->size, STRATA_COPY_API_VERSION, (unsigned)sizeof *table);
        return -1;
    }
    strata_copy_table = table;
    return 0;
}

#define strata_submit (strata_copy_table->submit)
#define strata_wait_layer (strata_copy_table->wait_layer)
#define strata_wait_done (strata_copy_table->wait_done)
#define strata_wait_source (strata_copy_table->wait_source)
#define strata_poll (strata_copy_table->poll)
#define strata_finished (strata_copy_table->finished)
#define strata_sync (strata_copy_table->sync)
#define strata_release (strata_copy_table->release)
#define strata_state_generation (strata_copy_table->state_generation)
#define strata_state_reset (strata_copy_table->state_reset)
#define strata_cancel (strata_copy_table->cancel)
#define strata_state_advanced (strata_copy_table->state_advanced)
#define strata_state_rewound (strata_copy_table->state_rewound)
#define strata_state_dirty (strata_copy_table->state_dirty)
#define strata_state_rewindable (strata_copy_table->state_rewindable)
#define strata_image_reserve (strata_copy_table->image_reserve)
#define strata_image_blob (strata_copy_table->image_blob)
#define strata_image_publish (strata_copy_table->image_publish)
#endif

#ifdef __cplusplus
}
#endif
#endif
