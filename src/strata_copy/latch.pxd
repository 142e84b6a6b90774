"""One thread at a time opens, links or closes a copier, which lets the GIL go. No lock but the GIL is taken outside of this one.

Signal handlers and finalizers run meanwhile, on the thread that has it and on the one that works for that: they would wait for
themselves, and ask first.
"""

# What this thread, or the one that it works for, is doing to a copier ("opened", "linked", "closed"), or None.
cdef object latch_deed()
# Raises RuntimeError where that is anything.
cdef int latch_check() except -1
cdef int latch_take(str what) except -1
# False where it was not to be had within that time.
cdef bint latch_take_within(double seconds, str what) except -1
cdef int latch_give() except -1
