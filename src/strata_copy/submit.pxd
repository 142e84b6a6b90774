"""Submit: a request becomes copies on lanes, and a ticket."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error, Request, Ticket
from strata_copy.cudart cimport Guard
from strata_copy.lanes cimport MAX_DEVICES, CopierData, DeviceLanes, Lane, Slot
from strata_copy.lineage cimport Known
from strata_copy.plan cimport ROUTES, Emission, PlanData


# One submit under way. It lives on the caller's stack, under the copier's lock.
cdef struct Submission:
    CopierData *copier
    PlanData *plan
    const Request *request
    Slot *slot
    Guard guard
    Error *error
    DeviceLanes *device         # where the extents that are being emitted go
    Lane *lane
    Emission emission
    Lane *lanes[MAX_DEVICES][ROUTES]    # those that took bytes since the latest events
    int64_t unmarked            # bytes since then
    int32_t first_unmarked      # the first layer without events
    int32_t recorded            # events so far
    Known known                 # what the lineages let it leave out
    bint started                # the first copy call was made: from here on the target may differ


# Ties a new plan to the copier, which will carry it: OK, or REFUSED where that is closed or has not what the plan needs.
cdef int adopt_plan(PlanData *plan, Error *error) noexcept nogil
cdef int submit_plan(PlanData *plan, const Request *request, Ticket *ticket, Error *error) noexcept nogil
