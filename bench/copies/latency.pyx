"""How soon a conversation's first layer is ready: the main thread submits, a second one waits for the layer as soon as the ticket
has its number, and sees its event complete. Without the GIL."""

import threading

from libc.stdint cimport int32_t, int64_t, uintptr_t

cimport strata_copy as sc
from common.clock cimport now
from common.failure cimport check, noted
from common.request cimport request_up_to
from strata_copy.atomics cimport load_i32, load_u64, store_i32, store_u64
from strata_copy.cudart cimport cudaErrorNotReady, cudaEvent_t, cudaStream_t, rt

from strata_copy import runtime

cdef enum:
    STOP = -1
    LONGEST = 1000000000        # ns that the watcher waits for a layer to be queued


cdef class Watch:
    """Two threads and what they share. `round` is the submit that the watcher looks for, `seen` the last that it is done with."""

    cdef int32_t layer
    cdef int32_t round, seen        # atomic
    cdef sc.Ticket ticket           # atomic
    cdef int64_t ready              # ns; when the layer's event was found complete; read behind `seen`
    cdef int status                 # of the watcher; read behind `seen`
    cdef sc.Error error
    cdef cudaStream_t stream
    cdef cudaEvent_t event

    def __init__(self, int layer):
        self.layer = layer
        self.stream = <cudaStream_t><uintptr_t>runtime.stream_create()
        self.event = <cudaEvent_t><uintptr_t>runtime.event_create()

    def close(self):
        runtime.event_destroy(<uintptr_t>self.event)
        runtime.stream_destroy(<uintptr_t>self.stream)

    def run(self, plan, int64_t upto, int repetitions, int warm_up, feed=None):
        """ns of each repetition, from the call of submit until the layer is ready. feed: as of Plan.submit."""
        cdef sc.Plan *c_plan = sc.plan_of(plan)
        cdef sc.Request request = request_up_to(&upto, feed)
        cdef sc.Error error
        cdef int64_t start = 0
        cdef int i, status = 0
        store_i32(&self.round, 0)
        store_i32(&self.seen, 0)
        watcher = threading.Thread(target=self.watch, name="watch")
        watcher.start()
        found = []
        try:
            for i in range(-warm_up, repetitions):
                with nogil:
                    status = self.once(c_plan, &request, &start, &error)
                check(status, &error)
                check(self.status, &self.error)
                if i >= 0:
                    found.append(self.ready - start)
        finally:
            store_i32(&self.round, STOP)
            watcher.join()
        return found

    cdef int once(self, sc.Plan *plan, const sc.Request *request, int64_t *start, sc.Error *error) noexcept nogil:
        cdef sc.Ticket ticket
        cdef int32_t round = self.round + 1
        cdef int status = noted(rt.cudaDeviceSynchronize(), "cudaDeviceSynchronize", error)
        if status != 0:
            return status
        store_u64(&self.ticket.v, 0)
        store_i32(&self.round, round)
        pause(50000)        # the watcher is at its post before the clock starts
        start[0] = now()
        status = sc.submit(plan, request, &self.ticket, error)
        if status != 0:
            return status
        while load_i32(&self.seen) != round:
            pause(1000)
        ticket = self.ticket
        status = sc.sync(ticket, -1, error)
        sc.release(&ticket)
        return status

    def watch(self):
        """The second thread."""
        cdef int32_t round = 0
        with nogil:
            while True:
                while load_i32(&self.round) == round:
                    pause(1000)
                round = load_i32(&self.round)
                if round == STOP:
                    break
                while load_u64(&self.ticket.v) == 0 and load_i32(&self.round) == round:
                    pass
                if load_i32(&self.round) == round:
                    self.status = self.until_ready()
                    self.ready = now()
                    store_i32(&self.seen, round)

    cdef int until_ready(self) noexcept nogil:
        cdef sc.Ticket ticket
        cdef int code
        ticket.v = load_u64(&self.ticket.v)
        code = sc.wait_layer(ticket, self.layer, self.stream, LONGEST, &self.error)
        if code == 0:
            code = noted(rt.cudaEventRecord(self.event, self.stream), "cudaEventRecord", &self.error)
        while code == 0:
            code = rt.cudaEventQuery(self.event)
            if code != cudaErrorNotReady:
                return noted(code, "cudaEventQuery", &self.error)
            code = 0
        return code


cdef inline void pause(int64_t ns) noexcept nogil:
    """Spins: a nap of this length may take ten times as long."""
    cdef int64_t until = now() + ns
    while now() < until:
        pass
