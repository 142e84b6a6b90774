"""Submit: a request becomes a ticket, and copies on lanes: at once by the caller, or fed by the worker."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from strata_copy.abi cimport Error, Request, Ticket
from strata_copy.cudart cimport Guard
from strata_copy.lanes cimport CopierData, Slot
from strata_copy.lineage cimport Known
from strata_copy.plan cimport MAX_DEVICES, PlanData


# One submit under way. It lives on the caller's stack, under the copier's lock.
cdef struct Submission:
    CopierData *copier
    PlanData *plan
    const Request *request
    Slot *slot
    Guard guard
    Error *error
    int64_t bytes, chunks       # that move; `chunks` of the busiest device
    int64_t entries[MAX_DEVICES]    # of each device: how many one of its streams may get of it at most,
    uint64_t lanes[MAX_DEVICES]     # lanes that they may use, as bits,
    uint32_t relays[MAX_DEVICES]    # and rings from these device numbers, as bits
    uint32_t devices, others    # those that something moves on, as bits; those at the other end
    bint staged                 # some of it goes through staging
    Known known                 # what the lineages let it leave out
    bint behind_fed             # it comes behind a ticket that is not queued to its end
    int32_t waits               # at most, before its first copy on a stream


# Ties a new plan to the copier of this number, which will carry it: OK, or REFUSED where that is closed or has not what the plan needs.
cdef int adopt_plan(PlanData *plan, uint64_t number, Error *error) noexcept nogil
cdef int submit_plan(PlanData *plan, const Request *request, Ticket *ticket, Error *error) noexcept nogil
# What submit_plan would say now before it takes a ticket, but for the room in a target that is an image: OK, AGAIN, REFUSED or POISONED.
cdef int submit_ahead(PlanData *plan, const Request *request, Error *error) noexcept nogil
