"""Opening and closing a copier on a thread of its own.

Opening changes the current device, and setting a device makes a context on it: one that the caller perhaps never wanted. What a thread
of ours has as its device, capture mode and last error, nobody has to put back.
"""

import threading

from strata_copy.abi cimport OK, POISONED, Error
from strata_copy.copier cimport copier_close, copier_open
from strata_copy.cudart cimport clear, observed, published
from strata_copy.lanes cimport poison_all
from strata_copy.raising cimport raise_error
from strata_copy.tickets cimport end_all, free_all
from strata_copy.worker cimport worker_close, worker_open


cdef CopierData *open_on_thread(const Opening *opening) except NULL:
    cdef OnThread thread = OnThread()
    thread.opening = opening
    thread.run(thread.open)
    return thread.copier


cdef int close_on_thread(CopierData *copier, object ended) except -1:
    cdef OnThread thread = OnThread()
    thread.copier, thread.ended = copier, ended
    thread.run(thread.close)
    return 0


cdef class OnThread:
    """Opens or closes a copier in `run`."""

    cdef CopierData *copier
    cdef const Opening *opening
    cdef object ended
    cdef Error error

    def open(self):
        cdef Error closing
        with nogil:
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

    def close(self):
        with nogil:
            end_all(self.copier)
        if self.ended is not None:
            self.ended()
        with nogil:
            free_all(self.copier)
            worker_close(self.copier, &self.error)
            copier_close(self.copier, &self.error)
            published(<void *>self)     # who closes knows then that all copies have ended

    def run(self, what):
        """Returns once it is done. A signal that arrives meanwhile is raised then: nothing goes on with a copier half opened or closed."""
        thread = threading.Thread(target=what, name="strata_copy")
        interrupt = None
        clear(&self.error)
        thread.start()
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as raised:
                interrupt = raised
        observed(<void *>self)
        if interrupt is not None:
            raise interrupt
        if self.error.status != OK:
            self.error.restored = 1     # the caller's thread was not touched
            raise_error(&self.error)
