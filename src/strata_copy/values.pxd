"""From Python's values to C's: places, and requests with everything that they point to."""

from libc.stdint cimport int64_t, uint32_t

from strata_copy.abi cimport PartSpec, PlaceSpec, Request, Wait
from strata_copy.lanes cimport MAX_AFTER
from strata_copy.layout cimport MAX_GROUPS, MAX_MARKS, Layout

# A request and what it points to; it may not be moved once it is filled.
cdef struct RequestValues:
    Request request
    int64_t upto[MAX_MARKS]
    int64_t begin[MAX_MARKS]
    int64_t src_banks[MAX_GROUPS]
    int64_t dst_banks[MAX_GROUPS]
    Wait waits[MAX_AFTER]


cdef int fill_place(place, const PartSpec *part, PlaceSpec *spec) except -1
# Only what has no meaning in C either is refused here; the library's own checks come with the submit.
cdef int fill_request(RequestValues *values, Layout layout, upto, after, begin, groups, src_bank, dst_bank) except -1
cdef int fill_way(RequestValues *values, src_generation, dst_generation, priority, bytes_ahead, feed, hook, hook_arg) except -1
# How many there are; fewer or more than the layout has are left to the library's checks.
cdef uint32_t fill_marks(Layout layout, marks, int64_t *values) except 0
