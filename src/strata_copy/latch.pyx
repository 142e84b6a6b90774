"""Who opens, links or closes a copier. Declared in latch.pxd."""

import os
from _thread import allocate_lock

from cpython.pythread cimport PyThread_get_thread_ident

from strata_copy.on_thread cimport at_work


cdef object lock = allocate_lock()
cdef object deed = None             # of who has it
cdef unsigned long holder = 0       # the thread


cdef object latch_deed():
    return deed if holder == PyThread_get_thread_ident() or at_work() else None


cdef int latch_check() except -1:
    mine = latch_deed()
    if mine is not None:
        raise RuntimeError(f"a copier is being {mine} on this thread, which a signal handler or a finalizer has interrupted: open, link or "
                           "close one once that is done")
    return 0


cdef int latch_take(str what) except -1:
    global deed, holder
    lock.acquire()      # until another thread has done with its copier
    holder, deed = PyThread_get_thread_ident(), what        # nothing that runs Python comes in between
    return 0


cdef bint latch_take_within(double seconds, str what) except -1:
    global deed, holder
    if not lock.acquire(timeout=seconds):       # as above
        return False
    holder, deed = PyThread_get_thread_ident(), what
    return True


cdef int latch_give() except -1:
    global deed, holder
    if holder == 0:     # in a child of fork nobody has it
        return 0
    holder, deed = 0, None
    lock.release()
    return 0


def _after_fork():
    global lock, deed, holder
    lock, deed, holder = allocate_lock(), None, 0


os.register_at_fork(after_in_child=_after_fork)
