"""Submit: a request becomes copies on lanes, and a ticket."""

from strata_copy.abi cimport Error, Request, Ticket
from strata_copy.plan cimport PlanData


# Ties a new plan to the copier, which will carry it: OK, or REFUSED where that is closed or has not what the plan needs.
cdef int adopt_plan(PlanData *plan, Error *error) noexcept nogil
cdef int submit_plan(PlanData *plan, const Request *request, Ticket *ticket, Error *error) noexcept nogil
