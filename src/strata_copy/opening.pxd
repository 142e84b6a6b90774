"""Opening, linking and closing a copier on a thread of its own, as Python does it."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.copier cimport Opening
from strata_copy.lanes cimport CopierData


cdef CopierData *open_on_thread(const Opening *opening) except NULL
# As copier_link.
cdef int link_on_thread(CopierData *copier, int32_t source, int32_t target, bint p2p) except -1
# Ends the tickets, calls `ended` (or None) while they can still be asked, then gives everything back.
cdef int close_on_thread(CopierData *copier, object ended) except -1

# From here on nothing is submitted, whatever another thread is at.
cdef void let_no_more_in(CopierData *copier) noexcept nogil
# The tickets that have not ended, and how many bytes of them have landed; -1 where another thread has the lock.
cdef int32_t in_flight(CopierData *copier, int64_t *landed) noexcept nogil
# Whether a ticket has not ended, though it may have been released.
cdef bint flies(CopierData *copier, uint64_t ticket) noexcept nogil
