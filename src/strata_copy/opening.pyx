"""Opening and closing a copier on a thread of its own.

Opening changes the current device, and setting a device makes a context on it: one that the caller perhaps never wanted. What a thread
of ours has as its device, capture mode and last error, nobody has to put back.
"""

import threading

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport OK, Error
from strata_copy.cudart cimport clear, observed, published
from strata_copy.lanes cimport MAX_DEVICES, CopierData, copier_close, copier_open
from strata_copy.raising cimport raise_error
from strata_copy.tickets cimport end_all, free_all


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


cdef int close_on_thread(CopierData *copier, object ended) except -1:
    cdef OnThread closing = OnThread()
    closing.copier, closing.ended = copier, ended
    closing.run(closing.close)
    return 0


cdef class OnThread:
    """Opens or closes a copier in `run`."""

    cdef CopierData *copier
    cdef int32_t devices[MAX_DEVICES]
    cdef int32_t n_devices, tickets, layer_events
    cdef int64_t chunk, patience
    cdef object ended
    cdef Error error

    def open(self):
        with nogil:
            self.copier = copier_open(self.devices, self.n_devices, self.tickets, self.layer_events, self.chunk, self.patience,
                                      &self.error)

    def close(self):
        with nogil:
            end_all(self.copier)
        if self.ended is not None:
            self.ended()
        with nogil:
            free_all(self.copier)
            copier_close(self.copier, &self.error)
            published(<void *>self)     # who closes knows then that all copies have ended

    def run(self, what):
        """Returns once it is done. A signal that arrives meanwhile is raised then: nothing goes on with a copier half opened or closed."""
        thread = threading.Thread(target=what, name="strata_copy")
        interrupt = None
        clear(&self.error)
        thread.start()
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as raised:
                interrupt = raised
        observed(<void *>self)
        if interrupt is not None:
            raise interrupt
        if self.error.status != OK:
            raise_error(&self.error)
