"""Submit: a request becomes copies on lanes, and a ticket."""

from strata_copy.abi cimport Error, Request, Ticket
from strata_copy.plan cimport PlanData


cdef int submit_plan(PlanData *plan, const Request *request, Ticket *ticket, Error *error) noexcept nogil
