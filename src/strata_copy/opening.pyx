"""Opening and closing a copier on a thread of its own.

Opening changes the current device, and setting a device makes a context on it: one that the caller perhaps never wanted. What a thread
of ours has as its device, capture mode and last error, nobody has to put back.
"""

import threading

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport OK, Error
from strata_copy.cudart cimport clear
from strata_copy.lanes cimport MAX_DEVICES, CopierData, copier_close, copier_open
from strata_copy.raising cimport raise_error
from strata_copy.tickets cimport end_all


cdef CopierData *open_on_thread(const int32_t *devices, int32_t n_devices, int32_t tickets, int32_t layer_events, int64_t chunk,
                                int64_t patience) except NULL:
    cdef OnThread opening = OnThread()
    cdef int32_t d
    for d in range(n_devices):
        opening.devices[d] = devices[d]
    opening.n_devices, opening.tickets, opening.layer_events = n_devices, tickets, layer_events
    opening.chunk, opening.patience = chunk, patience
    opening.run(opening.open)
    return opening.copier


cdef int end_on_thread(CopierData *copier) except -1:
    cdef OnThread ending = OnThread()
    ending.copier = copier
    ending.run(ending.end)
    return 0


cdef int close_on_thread(CopierData *copier) except -1:
    cdef OnThread closing = OnThread()
    closing.copier = copier
    closing.run(closing.close)
    return 0


cdef class OnThread:
    """Opens, ends or closes a copier in `run`."""

    cdef CopierData *copier
    cdef int32_t devices[MAX_DEVICES]
    cdef int32_t n_devices, tickets, layer_events
    cdef int64_t chunk, patience
    cdef Error error

    def open(self):
        with nogil:
            self.copier = copier_open(self.devices, self.n_devices, self.tickets, self.layer_events, self.chunk, self.patience,
                                      &self.error)

    def end(self):
        with nogil:
            end_all(self.copier)

    def close(self):
        with nogil:
            copier_close(self.copier, &self.error)

    def run(self, what):
        thread = threading.Thread(target=what, name="strata_copy")
        clear(&self.error)
        thread.start()
        thread.join()
        if self.error.status != OK:
            raise_error(&self.error)
