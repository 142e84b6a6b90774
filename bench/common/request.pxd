"""The request of a timed copy: nothing is under way that it had to wait for."""

from libc.stdint cimport int64_t

cimport strata_copy as sc


cdef inline sc.Request request_up_to(const int64_t *upto, object feed) except *:
    """feed: as of Plan.submit. `upto` is read whenever the request is used."""
    cdef sc.Request request = sc.request_new(upto, 1)
    request.flags = sc.CALLER_SYNCED
    if feed is not None:
        request.flags |= sc.FEED if feed else sc.QUEUE_ALL
    return request
