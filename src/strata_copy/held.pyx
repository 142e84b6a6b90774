"""What tickets in flight read and write is kept alive here. Declared in held.pxd."""

import gc

from strata_copy.copier cimport the_copier
from strata_copy.flight cimport flies
from strata_copy.lanes cimport CopierData
from strata_copy.latch cimport latch_give, latch_take


# By a ticket's value. As a C variable it stays where it is when modules are taken apart.
cdef dict held = {}


cdef int hold(uint64_t ticket, tuple states) except -1:
    held[ticket] = states
    return 0


cdef int let_go(uint64_t ticket) except -1:
    held.pop(ticket, None)
    return 0


cdef int let_go_of_ended() except -1:
    cdef CopierData *copier
    cdef uint64_t ticket
    cdef bint flying
    ended = []
    latch_take("opened")
    try:
        copier = the_copier()
        for ticket in list(held) if copier != NULL else ():
            with nogil:
                flying = flies(copier, ticket)
            if not flying:
                ended.append(ticket)
    finally:
        latch_give()
    left = [held.pop(value, None) for value in ended]
    if left:
        left.clear()
        gc.collect()
    return 0


cdef list take_held():
    states = list(held.values())
    held.clear()
    return states
