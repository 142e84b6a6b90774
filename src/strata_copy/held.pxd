"""The States of each ticket that was not found to have ended.

The worker and the devices go on with them whether or not anybody has the Copier, the Plan or the Ticket, and the collector, which
finalizes all that it finds dropped, must not find them.
"""

from libc.stdint cimport uint64_t


cdef int hold(uint64_t ticket, tuple states) except -1
cdef int let_go(uint64_t ticket) except -1
# Of tickets that have ended unseen: owners of memory may lead to a Copier that was dropped, so that it is still there.
cdef int let_go_of_ended() except -1
# All of them, which are held no more. The caller drops them where no lock is taken: owners may be taken apart with them.
cdef list take_held()
