"""News: how a thread that waits for a ticket learns that it has got further. Its lock guards a condition, and nothing else."""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport OK
from strata_copy.atomics cimport load_i32
from strata_copy.lanes cimport Slot


# A ticket has got further: for those that wait for that.
cdef void tell_news() noexcept nogil
# Sleeps until so many layers of a ticket may be queued, or it may have ended (any ticket's news wake it), or it is `until`, by lanes.now.
cdef void wait_for_news(const Slot *slot, int32_t layers, int64_t until) noexcept nogil
# Whether it has neither ended badly nor been cut short.
cdef inline bint goes_on(const Slot *slot) noexcept nogil:
    return load_i32(&slot.status) >= OK and load_i32(&slot.verdict) == OK

# Sleeps a little; and lets a runtime that decides itself when things run do so: whether it did.
cdef void nap(int64_t ns) noexcept nogil
cdef bint ran_something() noexcept nogil
