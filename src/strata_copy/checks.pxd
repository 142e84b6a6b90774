"""What a submit checks before it queues anything: the copier, the devices, the states, and what the request waits for.

The marks, banks and capacities of a request are checked with the plan (plan.pyx: units_to_move).
"""

from libc.stdint cimport int32_t, uint64_t

from strata_copy.abi cimport Error, Request
from strata_copy.lanes cimport CopierData
from strata_copy.plan cimport PlanData
from strata_copy.submit cimport Submission


# All: OK, or the outcome with the error filled.
cdef int check_open(const CopierData *copier, uint64_t number, Error *error) noexcept nogil
# POISONED where a device of the plan failed before: it is not called any more.
cdef int check_devices(Submission *s) noexcept nogil
cdef int check_plan_now(Submission *s) noexcept nogil
# The same of a request that nobody submits.
cdef int check_states_now(const PlanData *plan, const Request *request, Error *error) noexcept nogil
cdef int check_waits(Submission *s) noexcept nogil

cdef bint uses_device(const PlanData *plan, int32_t device) noexcept nogil
