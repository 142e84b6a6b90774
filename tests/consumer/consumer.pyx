"""An engine in Cython that submits copies and follows them, without the GIL."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

cimport strata_copy as sc


def codes():
    return {"OK": sc.OK, "AGAIN": sc.AGAIN, "REFUSED": sc.REFUSED, "TICKET": sc.REASON_TICKET}


def sizes():
    """Bytes of each struct as strata_copy.abi declares it, and of its members, which a member that is missing there would miss."""
    return {
        "Error": sizeof(sc.Error), "Progress": sizeof(sc.Progress), "Growth": sizeof(sc.Growth), "PartSpec": sizeof(sc.PartSpec),
        "PlaceSpec": sizeof(sc.PlaceSpec), "Wait": sizeof(sc.Wait), "Pages": sizeof(sc.Pages), "Request": sizeof(sc.Request),
        "Ticket": sizeof(sc.Ticket),
    }


cdef class Flight:
    """A ticket, and what was last said of it. Its methods let the GIL go: another thread may wait while `submit` is under way."""

    cdef sc.Ticket ticket
    cdef sc.Error error
    cdef object plan

    def submit(self, plan, int64_t upto):
        cdef sc.Plan *data = sc.plan_of(plan)
        cdef sc.Request request = sc.request_new(&upto, 1)
        cdef int status
        self.plan = plan
        request.flags = sc.CALLER_SYNCED
        with nogil:
            status = sc.submit(data, &request, &self.ticket, &self.error)
        return status

    def submit_after(self, plan, int64_t upto, size_t stream):
        cdef sc.Plan *data = sc.plan_of(plan)
        cdef sc.Request request = sc.request_new(&upto, 1)
        cdef sc.Wait wait
        cdef int status
        self.plan = plan
        wait.handle, wait.device, wait.kind = <void *>stream, 0, sc.WAIT_STREAM
        request.after, request.n_after = &wait, 1
        with nogil:
            status = sc.submit(data, &request, &self.ticket, &self.error)
        return status

    def wait_layer(self, int32_t layer, size_t stream, int64_t timeout_ns=0):
        cdef int status
        with nogil:
            status = sc.wait_layer(self.ticket, layer, <void *>stream, timeout_ns, &self.error)
        return status

    def wait_done(self, size_t stream, int64_t timeout_ns=0):
        cdef int status
        with nogil:
            status = sc.wait_done(self.ticket, <void *>stream, timeout_ns, &self.error)
        return status

    def poll(self):
        """(status, layers queued, bytes, bytes in all)"""
        cdef sc.Progress p
        cdef int status
        memset(&p, 0, sizeof(p))
        with nogil:
            status = sc.poll(self.ticket, &p)
        return status, p.layers_queued, p.bytes, p.bytes_total

    def sync(self, int64_t timeout_ns=-1):
        cdef int status
        with nogil:
            status = sc.sync(self.ticket, timeout_ns, &self.error)
        return status

    def release(self):
        with nogil:
            sc.release(&self.ticket)

    @property
    def value(self):
        return self.ticket.v

    @value.setter
    def value(self, uint64_t value):
        self.ticket.v = value

    @property
    def said(self):
        """(reason, text) of the last error."""
        return self.error.reason, self.error.text.decode()


def finished(copier, int n):
    """Values of the tickets that have ended, and how many words of the array behind them were written."""
    cdef sc.Ticket found[16]
    cdef sc.Copier *data = sc.copier_of(copier)
    cdef int count
    memset(found, 0xFF, sizeof(found))
    with nogil:
        count = sc.finished(data, found, n)
    return [found[i].v for i in range(count)], sum(found[i].v != 0xFFFFFFFFFFFFFFFF for i in range(16))


def generation(state):
    return sc.generation(sc.state_of(state))


def reset(state):
    cdef sc.Error error
    return sc.reset(sc.state_of(state), &error)


def say(state, what, int64_t value, int64_t part=0):
    """One of the words on a state's content, with its outcome and reason."""
    cdef sc.State *data = sc.state_of(state)
    cdef sc.Error error
    cdef int status
    if what == "advanced":
        status = sc.advanced(data, &value, 1, &error)
    elif what == "rewound":
        status = sc.rewound(data, &value, 1, &error)
    elif what == "dirty":
        status = sc.dirty(data, part, value, 1, &error)
    elif what == "rewindable":
        status = sc.rewindable(data, &value, 1, &error)
    elif what == "room":
        status = sc.image_reserve(data, &value, 1, &error)
    elif what == "blob":
        status = sc.image_blob(data, &value, 8, &error)
    elif what == "publish":
        status = sc.image_publish(data, value, &error)
    else:
        raise ValueError(what)
    return status, error.reason


cdef int no_hook(void *arg, int32_t layer, int32_t device, void *stream) noexcept nogil:
    return 0


def refused(plan, what, int64_t value=0):
    """(status, reason, text, ticket) of a request with one thing in it that `what` names; `value` is what it is set to."""
    cdef sc.Plan *data = sc.plan_of(plan)
    cdef int64_t upto = 9
    cdef sc.Request request = sc.request_new(&upto, 1)
    cdef sc.Ticket ticket
    cdef sc.Error error
    cdef sc.Wait waits[40]
    cdef sc.Pages pages
    cdef int status
    memset(waits, 0, sizeof(waits))
    memset(&pages, 0, sizeof(pages))
    ticket.v = 99
    request.flags = sc.CALLER_SYNCED
    if what == "size":
        request.size = value
    elif what == "flags":
        request.flags |= value
    elif what == "no flag":
        request.flags = 0
    elif what == "marks":
        request.n_marks = value
    elif what == "upto":
        request.upto = NULL
    elif what == "groups":
        request.groups = value
    elif what == "priority":
        request.priority = value
    elif what == "bytes_ahead":
        request.bytes_ahead = value
    elif what == "page groups":
        request.n_page_groups = value
    elif what == "source pages":
        request.src_pages = &pages
    elif what == "target pages":
        request.dst_pages = &pages
    elif what == "waits":
        request.n_after, request.after = value, waits
    elif what == "no waits":
        request.n_after, request.after = value, NULL
    elif what == "kind of wait":
        waits[0].kind, waits[0].handle = value, <void *>99
        request.n_after, request.after = 1, waits
    else:
        raise ValueError(what)
    with nogil:
        status = sc.submit(data, &request, &ticket, &error)
        sc.submit(data, &request, &ticket, NULL)
    return status, error.reason, error.text.decode(), ticket.v
