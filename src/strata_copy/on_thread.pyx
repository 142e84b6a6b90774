"""Work on a thread of its own. Declared in on_thread.pxd.

Setting a device makes a context on it: one that the caller perhaps never wanted. What a thread of ours has as its device, capture mode
and last error, nobody has to put back.
"""

import threading

from strata_copy.abi cimport OK
from strata_copy.cudart cimport clear, observed, published
from strata_copy.raising cimport raise_error


cdef class OnThread:
    cdef int run(self, object work) except -1:
        """A signal that arrives meanwhile is raised at the end: nothing is left half done."""
        thread = threading.Thread(target=self._work, args=(work,), name="strata_copy")
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
        return 0

    def _work(self, work):
        work()
        published(<void *>self)
