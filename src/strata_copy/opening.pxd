"""Opening and closing a copier on a thread of its own, as Python does it."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.lanes cimport CopierData


cdef CopierData *open_on_thread(const int32_t *devices, int32_t n_devices, int32_t tickets, int32_t layer_events, int64_t chunk,
                                int64_t patience) except NULL
# Ends the tickets, calls `ended` (or None) while they can still be asked, then gives everything back.
cdef int close_on_thread(CopierData *copier, object ended) except -1
