"""The worker's thread and its bell. Declared in worker_thread.pxd."""

from libc.stdint cimport int64_t
from posix.time cimport CLOCK_MONOTONIC, timespec

from strata_copy.abi cimport OK, REASON_MEMORY, REFUSED
from strata_copy.copier cimport stand_on_device
from strata_copy.cudart cimport clear, outcome
from strata_copy.lanes cimport now
from strata_copy.system cimport (
    pthread_cond_broadcast, pthread_cond_init, pthread_cond_t, pthread_cond_timedwait, pthread_cond_wait, pthread_condattr_init,
    pthread_condattr_setclock, pthread_condattr_t, pthread_create, pthread_join, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock, pthread_t,
)

cdef enum:
    IDLE_NS = 1000000000

cdef struct Thread:
    pthread_t id
    CopierData *copier
    Work work
    Error beginning             # how it began

cdef Thread thread
cdef bint has_thread = False

# What it sleeps on, and what it is told.
cdef pthread_mutex_t bell_lock
cdef pthread_cond_t bell
cdef bint rung = False, stopping = False, begun = False
cdef pthread_condattr_t monotonic
pthread_condattr_init(&monotonic)
pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC)
pthread_mutex_init(&bell_lock, NULL)
pthread_cond_init(&bell, &monotonic)


cdef int thread_start(CopierData *copier, Work work, Error *error) noexcept nogil:
    global begun, stopping, has_thread
    begun = stopping = False
    thread.copier, thread.work = copier, work
    clear(&thread.beginning)
    if pthread_create(&thread.id, NULL, run, NULL) != 0:
        return outcome(error, REFUSED, REASON_MEMORY, "the worker's thread could not be made")
    pthread_mutex_lock(&bell_lock)
    while not begun:            # it tells how that went
        pthread_cond_wait(&bell, &bell_lock)
    pthread_mutex_unlock(&bell_lock)
    has_thread = thread.beginning.status == OK
    if not has_thread:
        pthread_join(thread.id, NULL)       # it ends at once
        error[0] = thread.beginning
    return error.status


cdef void thread_wake() noexcept nogil:
    global rung
    pthread_mutex_lock(&bell_lock)
    rung = True
    pthread_cond_broadcast(&bell)
    pthread_mutex_unlock(&bell_lock)


cdef void thread_dismiss() noexcept nogil:
    global stopping
    pthread_mutex_lock(&bell_lock)
    stopping = True
    pthread_cond_broadcast(&bell)
    pthread_mutex_unlock(&bell_lock)


cdef bint thread_end() noexcept nogil:
    global has_thread
    if not has_thread:
        return False
    thread_dismiss()
    pthread_join(thread.id, NULL)           # no longer than what it has in hand
    has_thread = False
    return True


cdef void *run(void *_) noexcept nogil:
    """Works whenever the bell rings, and now and then while there are jobs."""
    cdef bint stop = not begin()
    cdef int left
    while not stop:
        left = thread.work(thread.copier)
        if left != WORK_AT_ONCE:
            stop = sleep_until(now() + (LOOK_NS if left > 0 else IDLE_NS))
    return NULL


cdef bint begin() noexcept nogil:
    global begun
    cdef bint well = stand_on_device(thread.copier, REFUSED, &thread.beginning) == OK
    pthread_mutex_lock(&bell_lock)
    begun = True
    pthread_cond_broadcast(&bell)
    pthread_mutex_unlock(&bell_lock)
    return well


cdef bint sleep_until(int64_t at) noexcept nogil:
    """Or until the bell rings. Whether the thread is dismissed."""
    global rung
    cdef timespec until
    cdef bint stop
    until.tv_sec, until.tv_nsec = at // 1000000000, at % 1000000000
    pthread_mutex_lock(&bell_lock)
    while not rung and not stopping and now() < at:
        pthread_cond_timedwait(&bell, &bell_lock, &until)
    rung, stop = False, stopping
    pthread_mutex_unlock(&bell_lock)
    return stop
