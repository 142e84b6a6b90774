"""States as Python has them."""

from strata_copy.layout cimport Layout
from strata_copy.states cimport StateData


cdef class State:
    cdef StateData *data
    cdef readonly Layout layout
    cdef readonly tuple places
    cdef readonly object owner
    cdef object era             # of the host runtime: its memory is gone once that has started anew


# TypeError for None, and for one whose __init__ did not run.
cdef StateData *state_data(State state) except NULL
# Raises Refused for a state of an earlier era. Pageable memory is nobody's of the host runtime. An image names no places.
cdef int check_era(State state) except -1
