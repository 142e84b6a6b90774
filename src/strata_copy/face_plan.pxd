"""Plans as Python has them."""

from strata_copy.face_state cimport State
from strata_copy.plan cimport PlanData


cdef class Plan:
    cdef PlanData *data
    cdef readonly dict sources      # group name to State
    cdef readonly State target
    cdef readonly object copier     # the Copier, which knows plans: not the other way round
    cdef tuple states               # all of them


# TypeError for None, and for one that Copier.plan did not make.
cdef PlanData *plan_data(Plan plan) except NULL
