"""Tickets as Python has them."""

from libc.stdint cimport uint64_t

cimport strata_copy.abi as abi
from strata_copy.face_plan cimport Plan


cdef class Ticket:
    cdef abi.Ticket ticket
    cdef readonly Plan plan
    cdef readonly uint64_t value
    cdef int status             # AGAIN until a look has found the end
    cdef object last, failure, __weakref__


# One that is not submitted yet.
cdef Ticket new_ticket(Plan plan)
