"""Legs: a fed ticket on one device. Its course, and its window: what is queued and has not landed. Under the copier's lock, while one is
open."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error, Request
from strata_copy.courses cimport Course
from strata_copy.cudart cimport Guard, cudaEvent_t, cudaStream_t
from strata_copy.lanes cimport CopierData, DeviceLanes
from strata_copy.plan cimport PlanData

cdef enum:
    MAX_MARKERS = 32
    LEAST_BESIDE = 4            # shares of the helpers that are left at least, or they would be the last to end

# What is not known to have landed: events behind steps, in a ring.
cdef struct Window:
    cudaEvent_t events[MAX_MARKERS]
    int64_t bytes[MAX_MARKERS]
    int64_t counted[MAX_MARKERS]    # of them in bytes_ahead: not what a step is longer for a boundary (end_on_boundary in lanes.pyx)
    int32_t calls[MAX_MARKERS]
    int32_t lanes[MAX_MARKERS]      # that they are on,
    int64_t upto[MAX_MARKERS]       # and entries of these that they are behind; of the lane `in` those that the ring has sent on
    int64_t sent[MAX_MARKERS]
    int32_t first, n
    int64_t bytes_ahead
    int32_t calls_ahead

cdef struct Leg:
    Course course
    Window window
    int64_t step, ahead         # bytes that are queued at a time, and that may be queued and not landed
    int64_t least               # bytes of the window worth a step while others are in it: a slot, or a step; half of `ahead` at most
    cudaEvent_t hooked          # behind so many entries of the hook's stream, which come off as it is complete; NULL: none
    int64_t hooks_upto
    int64_t helped              # bytes that helpers take at a time beside a ring, or 0
    # Of the ticket's first leg, for all:
    cudaStream_t gate_stream    # that nothing else waits on
    cudaEvent_t gate            # behind what the request waits for


# Streams and events, made as the copier opens. leg_open leaves the device current.
cdef int leg_open(Leg *leg, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil
cdef void leg_close(Leg *leg, const DeviceLanes *device, const Guard *guard, Error *error) noexcept nogil

# For a ticket that has nothing in its window yet.
cdef void leg_size(Leg *leg, const CopierData *copier, const Request *request, const PlanData *plan, int32_t d) noexcept nogil
# Behind a step of so many bytes, of those that were asked for, and copy calls.
cdef int leg_mark(Leg *leg, int64_t bytes, int64_t asked, int32_t calls, const Guard *guard, Error *error) noexcept nogil
# Takes what has landed out of the window, and adds its bytes to `landed`.
cdef int leg_look(Leg *leg, int64_t *landed, const Guard *guard, Error *error) noexcept nogil
