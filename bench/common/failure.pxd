"""How a call that fails inside a loop without the GIL becomes an exception behind it."""

from strata_copy.abi cimport Error


# The code of a CUDA call, noted in `error` where it is not 0.
cdef int noted(int code, const char *call, Error *error) noexcept nogil
# RuntimeError where `status` is not 0: with the text of `error`.
cdef int check(int status, const Error *error) except -1
