"""From a filled strata_error to a Python exception."""

from strata_copy.abi cimport Error


cdef int raise_error(const Error *error) except -1
# The same exception, not raised.
cdef object as_exception(const Error *error)
