"""A piece of work on a thread of its own, which has no current device, capture mode or last error that anybody misses."""

from strata_copy.abi cimport Error


cdef class OnThread:
    cdef Error error            # how the work ended; `run` clears it before, and raises it

    # Runs `work()` and returns once it is done.
    cdef int run(self, object work) except -1


# Whether this thread is one of these: whoever runs it waits for it, with what locks it has.
cdef bint at_work() except -1
