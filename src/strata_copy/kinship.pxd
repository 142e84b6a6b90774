"""Kinship: what the lineages of a plan's states let a copy leave out, and what the copy makes of the target's lineage."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Request
from strata_copy.lineage cimport Known
from strata_copy.plan cimport PlanData

# Between the two the words of all the plan's lineages are taken.
cdef void know(const PlanData *plan, const Request *request, Known *known) noexcept nogil
cdef void known_end(const PlanData *plan) noexcept nogil

# The first unit that has to move of a part that is no window, where there are `end`: `end` where none has to. Between know and known_end.
cdef int64_t first_to_move(const Known *known, const PlanData *plan, const Request *request, int32_t part, int64_t end) noexcept nogil

# The request was accepted and will be carried out behind everything that was accepted before: the target is what the source is.
cdef void handed_on(const Known *known, const PlanData *plan, const Request *request) noexcept nogil
