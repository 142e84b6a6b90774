"""Opening and closing a copier on a thread of its own.

Both change the current device. On the caller's thread that would have to be put back, and setting a device makes a context on it:
one that the caller perhaps never wanted.
"""

import threading

from strata_copy.abi cimport OK, Error
from strata_copy.copier cimport copier_close, copier_open
from strata_copy.cudart cimport clear
from strata_copy.raising cimport raise_error
from strata_copy.worker cimport worker_close, worker_open


cdef CopierData *open_on_thread(const Opening *opening) except NULL:
    cdef OnThread thread = OnThread()
    thread.opening = opening
    thread.run(thread.open)
    return thread.copier


cdef int close_on_thread(CopierData *copier) except -1:
    cdef OnThread thread = OnThread()
    thread.copier = copier
    thread.run(thread.close)
    return 0


cdef class OnThread:
    """Opens or closes a copier in `run`."""

    cdef CopierData *copier
    cdef const Opening *opening
    cdef Error error

    def open(self):
        cdef Error closing
        with nogil:
            self.copier = copier_open(self.opening, &self.error)
            if self.copier != NULL and worker_open(self.copier, &self.error) != OK:
                clear(&closing)     # what led here is what is told
                worker_close(self.copier, &closing)
                copier_close(self.copier, &closing)
                self.copier = NULL

    def close(self):
        with nogil:
            worker_close(self.copier, &self.error)
            copier_close(self.copier, &self.error)

    def run(self, what):
        thread = threading.Thread(target=what, name="strata_copy")
        clear(&self.error)
        thread.start()
        thread.join()
        if self.error.status != OK:
            raise_error(&self.error)
