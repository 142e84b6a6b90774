"""Failures. Declared in failure.pxd."""

from libc.stdio cimport snprintf

from strata_copy.cudart cimport rt


cdef int noted(int code, const char *call, Error *error) noexcept nogil:
    if code != 0:
        snprintf(error.text, sizeof(error.text), "%s: %s (%d)", call, rt.cudaGetErrorName(code), code)
    return code


cdef int check(int status, const Error *error) except -1:
    if status != 0:
        text = error.text.decode(errors="replace")
        raise RuntimeError(text or f"status {status}")
    return 0
