"""The thread on which the worker works: it sleeps on a bell while there is nothing to do. It never takes the GIL.

One thread, of the copier that is open. `bell_lock` guards what it sleeps on and is told; no other lock is taken while it is held.
"""

from strata_copy.abi cimport Error
from strata_copy.lanes cimport CopierData


# What it does again and again, until it is dismissed. Returns how many jobs are not done, or WORK_AT_ONCE.
ctypedef int (*Work)(CopierData *copier) noexcept nogil

cdef enum:
    WORK_AT_ONCE = -1
    LOOK_NS = 100000            # between two looks at what has landed


# Starts it, and returns once it stands on a device, or could not. There is none then.
cdef int thread_start(CopierData *copier, Work work, Error *error) noexcept nogil
# There is work.
cdef void thread_wake() noexcept nogil
# It ends by itself after what it has in hand; nobody waits for it.
cdef void thread_dismiss() noexcept nogil
# Until it has ended. False where there was none.
cdef bint thread_end() noexcept nogil
