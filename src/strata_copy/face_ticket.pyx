"""Ticket: one copy, from its submit to its end. Declared in face_ticket.pxd."""

from typing import NamedTuple

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport AGAIN, OK, REFUSED, Error
from strata_copy.cudart cimport clear, observed, published
from strata_copy.held cimport let_go
from strata_copy.raising cimport as_exception, raise_error
from strata_copy.tickets cimport (
    check_not_default, ticket_look, ticket_poll, ticket_release, ticket_sync, ticket_wait_done, ticket_wait_layer,
)
from strata_copy.worker cimport ticket_cancel

from strata_copy.places import Stream, handle, nanoseconds, whole


class Progress(NamedTuple):
    """How far a ticket is: layers queued, bytes landed (known chunk by chunk where the worker queues it, else 0 until all have) and in all,
    seconds inside submit, seconds since the call of submit (until the copy was first seen to have ended)."""

    layers_queued: int
    bytes: int
    bytes_total: int
    submit_seconds: float
    seconds: float


cdef class Ticket:
    """One submitted copy. Made by Plan.submit and Copier.submit; it holds source and target until the copy has ended.

    Waits return True where the stream now depends on the bytes and False where they were not queued within `timeout` seconds (None: for
    as long as it takes). They raise the copy's own exception where it did not end well. A stream, of any device, is a handle, an object
    that has one, or a Stream.
    """

    def __init__(self):
        raise TypeError("tickets are made by Plan.submit")

    def __dealloc__(self):
        ticket_release(&self.ticket)

    def wait_layer(self, layer, stream, timeout=0.0):
        """`stream` waits for all bytes that `layer` needs."""
        return self._wait(whole("layer", layer, 0, ticket_plan(self).target.layout.layers - 1), stream, timeout)

    def wait_done(self, stream, timeout=0.0):
        """`stream` waits for the whole copy: the target may be read behind it."""
        return self._wait(-1, stream, timeout)

    def wait_source(self, stream, timeout=0.0):
        """`stream` waits for the last read of the source: it may be overwritten or freed behind it."""
        return self._wait(-1, stream, timeout)

    def sync(self, timeout=None):
        """Holds the caller (not the GIL) until the copy has ended; False where it has not within `timeout` seconds."""
        cdef Error error
        cdef int status = AGAIN
        cdef int64_t slice_ns, left = nanoseconds("timeout", timeout)
        clear(&error)
        self._look()
        while self.status == AGAIN:
            slice_ns = 50000000 if left < 0 or left > 50000000 else left    # so that signals are seen
            with nogil:
                status = ticket_sync(self.ticket, slice_ns, &error)
            PyErr_CheckSignals()
            self._look()
            if status < OK and (not error.restored or self.status == AGAIN):    # of this thread, not of the ticket
                raise_error(&error)
            if left >= 0:
                left -= slice_ns
                if left <= 0:
                    break
        if self.failure is not None:
            raise self.failure
        return self.status == OK

    def cancel(self):
        """Stops the copy at its next chunk: it ends with Cancelled, once what is queued has landed. False where everything is queued
        already, and the copy goes on to its end, or has ended."""
        cdef Error error
        cdef abi.Ticket ticket = self.ticket
        cdef int status
        self._look()
        if self.status != AGAIN:
            return False
        clear(&error)
        with nogil:
            status = ticket_cancel(ticket, &error)
        self._look()
        if status < OK and self.status == AGAIN:
            raise_error(&error)
        return status == OK

    def poll(self):
        """A Progress, from memory alone. Raises where the copy did not end well."""
        progress = self._look()
        if self.failure is not None:
            raise self.failure
        return progress

    @property
    def done(self):
        """True once the copy has ended, well or not."""
        self._look()
        return self.status != AGAIN

    @property
    def error(self):
        """The exception that the copy ended with, or None."""
        self._look()
        return self.failure

    @property
    def target(self):
        return ticket_plan(self).target

    @property
    def routes(self):
        return ticket_plan(self).routes()

    @property
    def bytes(self):
        """Bytes that the copy moves."""
        return self._look().bytes_total

    @property
    def seconds(self):
        """From the call of submit to now, or to when the copy was first seen to have ended."""
        return self._look().seconds

    def __repr__(self):
        progress = self._look()
        how = "in flight" if self.status == AGAIN else "done" if self.status == OK else type(self.failure).__name__.lower()
        return f"<Ticket {self.value:#x}: {progress.bytes_total} bytes, {how}>"

    def _wait(self, int32_t layer, stream, timeout):
        """layer -1: the whole copy."""
        cdef Error error
        cdef void *stream_handle = <void *><size_t>handle(stream.handle if isinstance(stream, Stream) else stream)
        cdef int64_t ns = nanoseconds("timeout", timeout)
        cdef int status
        clear(&error)
        if check_not_default(stream_handle, &error) != OK:      # whatever the ticket's state: it must not depend on the time
            raise_error(&error)
        self._look()
        if self.failure is not None:
            raise self.failure
        if self.status == OK:       # the bytes have landed
            return True
        with nogil:
            status = (ticket_wait_done(self.ticket, stream_handle, ns, &error) if layer < 0 else
                      ticket_wait_layer(self.ticket, layer, stream_handle, ns, &error))
        if status == REFUSED:           # another thread may have seen the end meanwhile and given the ticket back
            self._look()
            if self.failure is not None:
                raise self.failure
            if self.status == OK:
                return True
        if status < OK:
            raise_error(&error)
        return status == OK

    def _ask_if_late(self):
        cdef abi.Ticket ticket = self.ticket
        with nogil:
            ticket_look(ticket)

    def _look(self):
        """The latest Progress. The first look that finds the end keeps it and gives the slot back."""
        cdef abi.Progress p
        cdef Error error
        cdef abi.Ticket ticket = self.ticket
        cdef int status
        ticket_plan(self)
        if self.status != AGAIN:
            observed(<void *>self)      # another thread may have been the first
            return self.last
        clear(&error)
        status = ticket_poll(ticket, &p)
        if status < OK:
            ticket_sync(ticket, 0, &error)      # tells why; at once, for the GIL may move to another look below
        if status == REFUSED:                   # released by another look, or in a fork
            if self.status == AGAIN:
                self.failure, self.status = as_exception(&error), REFUSED
                let_go(self.value)
            observed(<void *>self)
            return self.last
        last = Progress(p.layers_queued, p.bytes, p.bytes_total, p.ns_submit / 1e9, p.ns_total / 1e9)
        failure = as_exception(&error) if status < OK else None
        if self.status != AGAIN:                # another thread had the GIL meanwhile
            observed(<void *>self)
            return self.last
        self.last = last
        if status != AGAIN:
            published(<void *>self)
            self.failure, self.status = failure, status
            ticket_release(&self.ticket)
            let_go(self.value)
        return last


cdef Ticket new_ticket(Plan plan):
    cdef Ticket ticket = Ticket.__new__(Ticket)
    ticket.plan, ticket.last = plan, Progress(0, 0, 0, 0.0, 0.0)
    return ticket


cdef Plan ticket_plan(Ticket ticket):
    if ticket.plan is None:
        raise TypeError("a Ticket that Plan.submit made is needed")
    return ticket.plan
