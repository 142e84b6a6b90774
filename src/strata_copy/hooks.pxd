"""Hooks: whether this thread is inside a caller's hook, from which the library may not be called."""

from strata_copy.abi cimport Error


# Around the call of a hook.
cdef void enter_hook() noexcept nogil
cdef void leave_hook() noexcept nogil
cdef bint in_hook() noexcept nogil
# REFUSED: the library is called from a hook.
cdef int of_hook(const char *call, Error *error) noexcept nogil
