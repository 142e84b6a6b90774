"""Opening, linking and closing a copier, each on a thread of its own: they change the current device."""

from strata_copy.abi cimport FAILED, OK, POISONED, REFUSED, Error
from strata_copy.copier cimport copier_close, copier_link, copier_open, stand_on_device
from strata_copy.cudart cimport clear, stand_on
from strata_copy.lanes cimport poison_all
from strata_copy.on_thread cimport OnThread
from strata_copy.tickets cimport end_all, free_all
from strata_copy.worker cimport worker_close, worker_open


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
    return work.run(work.close)


cdef class Work(OnThread):
    cdef CopierData *copier
    cdef const Opening *opening
    cdef object ended
    cdef int32_t source, target
    cdef bint p2p

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

    def link(self):
        with nogil:
            if stand_on_device(self.copier, REFUSED, &self.error) == OK:
                copier_link(self.copier, self.source, self.target, self.p2p, &self.error)

    def close(self):
        with nogil:
            stand_on_device(self.copier, FAILED, &self.error)
            end_all(self.copier)
        if self.ended is not None:
            self.ended()
        with nogil:
            free_all(self.copier)
            worker_close(self.copier, &self.error)
            copier_close(self.copier, &self.error)
