"""News. Declared in news.pxd."""

from libc.stdint cimport int32_t, int64_t
from posix.time cimport CLOCK_MONOTONIC, nanosleep, timespec

from strata_copy.atomics cimport add_i32, load_i32
from strata_copy.cudart cimport rt
from strata_copy.lanes cimport Slot
from strata_copy.system cimport (
    pthread_cond_broadcast, pthread_cond_init, pthread_cond_t, pthread_cond_timedwait, pthread_condattr_init, pthread_condattr_setclock,
    pthread_condattr_t, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
)

# `waiting` counts the threads that sleep, so that telling nobody costs a load.
cdef pthread_mutex_t news_lock
cdef pthread_cond_t news
cdef int32_t waiting = 0
cdef pthread_condattr_t monotonic
pthread_condattr_init(&monotonic)
pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC)
pthread_mutex_init(&news_lock, NULL)
pthread_cond_init(&news, &monotonic)


cdef void tell_news() noexcept nogil:
    if load_i32(&waiting) > 0:
        pthread_mutex_lock(&news_lock)
        pthread_cond_broadcast(&news)
        pthread_mutex_unlock(&news_lock)


cdef void wait_for_news(const Slot *slot, int32_t layers, int64_t until) noexcept nogil:
    """Sleeps until the ticket may have got further. `waiting` is raised before the look, and the look comes before the sleep under the
    lock that telling takes: nothing that is told in between is missed."""
    cdef timespec t
    t.tv_sec, t.tv_nsec = until // 1000000000, until % 1000000000
    pthread_mutex_lock(&news_lock)
    add_i32(&waiting, 1)
    if load_i32(&slot.layers_queued) < layers and goes_on(slot):
        pthread_cond_timedwait(&news, &news_lock, &t)
    add_i32(&waiting, -1)
    pthread_mutex_unlock(&news_lock)


cdef void nap(int64_t ns) noexcept nogil:
    cdef timespec t
    t.tv_sec, t.tv_nsec = 0, ns
    nanosleep(&t, NULL)


cdef bint ran_something() noexcept nogil:
    """A runtime that decides itself when things run may do so now, where this thread has nothing to do but wait."""
    return rt.idle != NULL and rt.idle()
