"""Opening, linking and closing a copier on a thread of its own, as Python does it."""

from libc.stdint cimport int32_t

from strata_copy.copier cimport Opening
from strata_copy.lanes cimport CopierData


cdef CopierData *open_on_thread(const Opening *opening) except NULL
# As copier_link.
cdef int link_on_thread(CopierData *copier, int32_t source, int32_t target, bint p2p) except -1
# Ends the tickets, calls `ended` (or None) while they can still be asked, then gives everything back.
cdef int close_on_thread(CopierData *copier, object ended) except -1
