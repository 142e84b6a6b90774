"""Flight: all tickets that have not ended, seen from outside and waited for, as a copier closes or the interpreter ends."""

from libc.stdint cimport int32_t, uint64_t

from strata_copy.lanes cimport CopierData


# Whether a ticket has not ended, though it may have been released.
cdef bint flies(CopierData *copier, uint64_t ticket) noexcept nogil
# From here on nothing is submitted, whatever another thread is at.
cdef void let_no_more_in(CopierData *copier) noexcept nogil
cdef void let_in_again(CopierData *copier) noexcept nogil
# Lets no more in and holds the caller until none is left. What a signal handler raises ends it, and submits are let in again. Whether the
# copier is still to be closed: not so where a fork came in between.
cdef bint wait_for_flight(CopierData *copier) except? False
# Until none is left, or nothing has landed for so many seconds: how many are, -1 where that could not be seen.
cdef int32_t wait_while_it_lands(CopierData *copier, double seconds) except? -1
