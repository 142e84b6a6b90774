"""Helpers. Declared in helpers.pxd.

`gate` guards `round_` and `stopping`; the blocks of a round are dealt by an atomic counter.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.string cimport memcpy

from strata_copy.atomics cimport add_i32, load_i32, store_i32
from strata_copy.plan cimport Extent
from strata_copy.system cimport (
    HUGE_PAGE, MADV_HUGEPAGE, MADV_POPULATE_WRITE, PAGE, madvise, pthread_cond_broadcast, pthread_cond_init, pthread_cond_t,
    pthread_cond_wait, pthread_create, pthread_join, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
    pthread_t,
)

cdef enum:
    MAX_HELPERS = 16
    BLOCK = 2 << 20             # bytes that a thread takes at a time

cdef pthread_t threads[MAX_HELPERS]
cdef int32_t n_threads = 0
cdef pthread_mutex_t gate
cdef pthread_cond_t begins, ends
cdef int64_t round_ = 0
cdef bint stopping = False
cdef const Extent *work
cdef int32_t n_work = 0, dealt = 0, at_work = 0
cdef bint makes_pages = False
pthread_mutex_init(&gate, NULL)
pthread_cond_init(&begins, NULL)
pthread_cond_init(&ends, NULL)


cdef void helpers_open(int32_t count) noexcept nogil:
    global n_threads, stopping
    stopping = False
    n_threads = 0
    while n_threads < min(count, <int32_t>MAX_HELPERS) and pthread_create(&threads[n_threads], NULL, help, NULL) == 0:
        n_threads += 1


cdef void helpers_close() noexcept nogil:
    global n_threads, stopping
    cdef int32_t i
    pthread_mutex_lock(&gate)
    stopping = True
    pthread_cond_broadcast(&begins)
    pthread_mutex_unlock(&gate)
    for i in range(n_threads):
        pthread_join(threads[i], NULL)
    n_threads = 0


cdef void helpers_copy(const Extent *extents, int32_t n, bint fresh) noexcept nogil:
    global round_, work, n_work, makes_pages
    cdef int32_t i
    for i in range(n):
        if fresh and extents[i].rows == 1:      # by huge pages, memory that was never written costs a third of the time to make
            advise(extents[i].target, extents[i].width, HUGE_PAGE, MADV_HUGEPAGE)
    pthread_mutex_lock(&gate)
    work, n_work, makes_pages = extents, n, fresh
    store_i32(&dealt, 0)
    store_i32(&at_work, n_threads)
    round_ += 1
    pthread_cond_broadcast(&begins)
    pthread_mutex_unlock(&gate)
    copy_blocks()
    pthread_mutex_lock(&gate)
    while load_i32(&at_work) > 0:       # every helper has seen this round: the next one may have other extents
        pthread_cond_wait(&ends, &gate)
    pthread_mutex_unlock(&gate)


cdef void *help(void *_) noexcept nogil:
    cdef int64_t seen = 0
    while True:
        pthread_mutex_lock(&gate)
        if seen == 0:
            seen = round_ if load_i32(&at_work) == 0 else round_ - 1
        while round_ == seen and not stopping:
            pthread_cond_wait(&begins, &gate)
        seen = round_
        pthread_mutex_unlock(&gate)
        if stopping:
            return NULL
        copy_blocks()
        if add_i32(&at_work, -1) == 1:
            pthread_mutex_lock(&gate)
            pthread_cond_broadcast(&ends)
            pthread_mutex_unlock(&gate)


cdef void copy_blocks() noexcept nogil:
    """Takes block after block of the round's extents, which all threads count alike."""
    cdef int32_t mine = add_i32(&dealt, 1), i, number = 0, blocks
    cdef const Extent *extent
    for i in range(n_work):
        extent = &work[i]
        blocks = <int32_t>((extent.width * extent.rows + BLOCK - 1) // BLOCK)
        while mine < number + blocks:
            copy_range(extent, <int64_t>(mine - number) * BLOCK)
            mine = add_i32(&dealt, 1)
        number += blocks


cdef void copy_range(const Extent *extent, int64_t start) noexcept nogil:
    """At most BLOCK bytes of an extent, from byte `start` on, row by row."""
    cdef int64_t left = min(<int64_t>BLOCK, extent.width * extent.rows - start), row, column, bytes
    while left > 0:
        row, column = start // extent.width, start % extent.width
        bytes = min(left, extent.width - column)
        # Memory that was never written has no pages yet. Where one call cannot make them memcpy does, fault by fault.
        if makes_pages:
            advise(extent.target + row * extent.target_pitch + column, bytes, PAGE, MADV_POPULATE_WRITE)
        memcpy(extent.target + row * extent.target_pitch + column, extent.source + row * extent.source_pitch + column, bytes)
        start += bytes
        left -= bytes


cdef void advise(char *target, int64_t bytes, int64_t page, int advice) noexcept nogil:
    """For the whole pages in a range, where they are worth a call."""
    cdef uintptr_t first = (<uintptr_t>target + page - 1) & ~<uintptr_t>(page - 1)
    cdef uintptr_t end = (<uintptr_t>target + bytes) & ~<uintptr_t>(page - 1)
    if end > first and end - first >= 16 * PAGE:
        madvise(<void *>first, end - first, advice)
