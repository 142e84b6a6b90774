"""Opening, linking and closing a copier, each on a thread of its own: they change the current device."""

from libc.stdint cimport int32_t
from libc.stdio cimport snprintf
from libc.string cimport strlen

from strata_copy.abi cimport FAILED, OK, POISONED, REFUSED, Error
from strata_copy.atomics cimport load_i32, store_i32
from strata_copy.copier cimport copier_close, copier_link, copier_open, stand_on_device
from strata_copy.cudart cimport Guard, clear, cudaErrorInvalidDevice, guard_leave, rt, stand_on
from strata_copy.endings cimport free_all, sweep
from strata_copy.flight cimport let_in_again
from strata_copy.lanes cimport CLOSING, device_drain, guard_to_close, poison_all
from strata_copy.on_thread cimport OnThread
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_unlock
from strata_copy.worker cimport worker_close, worker_finish, worker_open


cdef CopierData *open_on_thread(const Opening *opening) except NULL:
    cdef Work work = Work()
    work.opening = opening
    work.run(work.open)
    return work.copier


cdef int link_on_thread(CopierData *copier, int32_t source, int32_t target, bint p2p) except -1:
    cdef Work work = Work()
    work.copier, work.source, work.target, work.p2p = copier, source, target, p2p
    return work.run(work.link)


cdef int close_on_thread(CopierData *copier, object ended) except -1:
    cdef Work work = Work()
    work.copier, work.ended = copier, ended
    try:
        return work.run(work.close)
    except BaseException:
        if not work.begun:      # there was no thread for it
            let_in_again(copier)
        raise


cdef class Work(OnThread):
    cdef CopierData *copier
    cdef const Opening *opening
    cdef object ended
    cdef int32_t source, target
    cdef bint p2p, begun

    def open(self):
        cdef Error closing
        with nogil:
            if stand_on(self.opening.devices[0], REFUSED, &self.error) == OK:
                self.copier = copier_open(self.opening, &self.error)
            if self.copier != NULL and worker_open(self.copier, self.opening, &self.error) != OK:
                if self.error.status == POISONED:
                    poison_all(self.copier, self.error.cuda_code)
                clear(&closing)     # what led here is what is told
                worker_close(self.copier, &closing)
                copier_close(self.copier, &closing)
                if closing.status == POISONED:
                    self.error.status = POISONED
                self.copier = NULL
            if self.error.cuda_code == cudaErrorInvalidDevice:
                add_devices(&self.error)

    def link(self):
        with nogil:
            if stand_on_device(self.copier, REFUSED, &self.error) == OK:
                copier_link(self.copier, self.source, self.target, self.p2p, &self.error)

    def close(self):
        self.begun = True
        with nogil:
            stand_on_device(self.copier, FAILED, &self.error)
            end_all(self.copier)
        if self.ended is not None:
            self.ended()
        with nogil:
            free_all(self.copier)
            worker_close(self.copier, &self.error)
            copier_close(self.copier, &self.error)


cdef void end_all(CopierData *copier) noexcept nogil:
    """Lets no more submits in and holds the caller until no ticket is in flight. The lanes are drained, so that the words are set: after
    this only a dead device has tickets, and the closing tells that."""
    cdef Guard guard
    cdef Error ignored
    cdef int32_t d
    clear(&ignored)
    pthread_mutex_lock(&copier.lock)
    store_i32(&copier.state, CLOSING)
    pthread_mutex_unlock(&copier.lock)
    worker_finish(copier)
    pthread_mutex_lock(&copier.lock)
    guard_to_close(copier, &guard, &ignored)
    for d in range(copier.n_devices):
        if load_i32(&copier.devices[d].poisoned) == 0:
            device_drain(&copier.devices[d], &guard, &ignored)
    guard_leave(&guard, OK, &ignored)
    sweep(copier)
    pthread_mutex_unlock(&copier.lock)


cdef void add_devices(Error *error) noexcept nogil:
    """Says how many there are, behind what was refused."""
    cdef size_t n = strlen(error.text)
    cdef int devices = 0
    if rt.cudaGetDeviceCount(&devices) == 0:
        snprintf(error.text + n, sizeof(error.text) - n, "; this process sees %d, which are numbered from 0", devices)
