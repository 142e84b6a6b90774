"""The worker: queues long tickets in windows, so that no submit is held up and others get in between.

Who owns what: a fed ticket has a job, in a static table, with a copy of its request, and for each of its devices a leg (legs.pxd), the
first of which has the gate event behind what the ticket waits for. Jobs and legs are used under the copier's lock. A step of the worker
(`worker_step`) holds the lock for as long as it takes to queue a few chunks; it is made by a thread of our own (worker_thread.pxd), by a
caller whose ticket can begin at once, and by a runtime that decides itself when things run (table.h: adopt_worker). It never takes the GIL.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error, Request, Ticket
from strata_copy.copier cimport Opening
from strata_copy.lanes cimport CopierData, Slot
from strata_copy.layout cimport MAX_GROUPS, MAX_MARKS
from strata_copy.legs cimport Leg
from strata_copy.plan cimport Units
from strata_copy.submit cimport Submission

cdef enum:
    MAX_JOBS = 16

cdef struct Job:
    Slot *slot                  # NULL: free
    uint64_t ticket
    Request request             # of its own; what it points to is below
    int64_t upto[MAX_MARKS]
    int64_t begin[MAX_MARKS]
    int64_t src_banks[MAX_GROUPS]
    int64_t dst_banks[MAX_GROUPS]
    Units *units
    Leg *legs                   # one for each device of the copier
    bint started                # its lanes are taken: later jobs leave them alone


# A free job, or NULL.
cdef Job *take_job(CopierData *copier) noexcept nogil
# Under the lock: takes over a submission whose slot is filled, and begins it where it can begin.
cdef int feed(Job *job, Submission *s) noexcept nogil
# Queues what can be queued now, and returns whether jobs are left that are not done.
cdef int worker_step() noexcept nogil
# OK: it stops at the next chunk and ends CANCELLED. AGAIN: everything is queued, it will land. The outcome where it has ended.
cdef int ticket_cancel(Ticket ticket, Error *error) noexcept nogil

# After the copier is opened and before it is closed; on a thread of its own likewise.
cdef int worker_open(CopierData *copier, const Opening *opening, Error *error) noexcept nogil
cdef void worker_close(CopierData *copier, Error *error) noexcept nogil
# Holds the caller until no job is left, once no submit comes in any more.
cdef void worker_finish(CopierData *copier) noexcept nogil
cdef int worker_reserve(int32_t parts, Error *error) noexcept nogil
