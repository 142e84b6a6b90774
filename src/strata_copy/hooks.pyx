"""Hooks. Declared in hooks.pxd."""

from strata_copy.abi cimport REASON_HOOK, REFUSED, Error
from strata_copy.cudart cimport outcome

# A variable of the thread's: one for the process, and so not in a .pxd.
cdef extern from *:
    """
    static __thread int strata_hook_depth;
    static int strata_deeper(int by) { return strata_hook_depth += by; }
    """
    int deeper "strata_deeper"(int by) nogil


cdef void enter_hook() noexcept nogil:
    deeper(1)


cdef void leave_hook() noexcept nogil:
    deeper(-1)


cdef bint in_hook() noexcept nogil:
    return deeper(0) != 0


cdef int of_hook(const char *call, Error *error) noexcept nogil:
    return outcome(error, REFUSED, REASON_HOOK, "%s was called by a hook, which may only enqueue on its stream", call)
