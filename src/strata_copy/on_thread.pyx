"""Work on a thread of its own. Declared in on_thread.pxd.

Setting a device makes a context on it: one that the caller perhaps never wanted. What a thread of ours has as its device, capture mode
and last error, nobody has to put back.
"""

from _thread import allocate_lock, get_ident, start_new_thread

from strata_copy.abi cimport OK
from strata_copy.cudart cimport clear, observed, published
from strata_copy.raising cimport raise_error


cdef set idents = set()         # of the threads at work


cdef bint at_work() except -1:
    return get_ident() in idents


cdef class OnThread:
    cdef int run(self, object work) except -1:
        """A signal that arrives meanwhile is raised at the end: nothing is left half done. By a lock, for Thread.join takes a thread for
        ended whose wait was interrupted."""
        interrupt, done = None, allocate_lock()
        clear(&self.error)
        done.acquire()
        start_new_thread(self._work, (work, done))
        while True:
            try:
                done.acquire()      # until the thread is at its end
                break
            except BaseException as raised:
                interrupt = raised
        observed(<void *>self)
        if interrupt is not None:
            raise interrupt
        if self.error.status != OK:
            self.error.restored = 1     # the caller's thread was not touched
            raise_error(&self.error)
        return 0

    def _work(self, work, done):
        ident = get_ident()
        idents.add(ident)
        try:
            work()
        finally:
            idents.discard(ident)
            published(<void *>self)
            done.release()
