"""Tickets: how a submitted copy is waited for and looked at; how it ends is endings.pxd.

A ticket is a value, (generation << 8) | slot. `pin` finds the slot behind it, or NULL where the ticket was released or never
given out; a pinned slot is not freed. `poll` is memory loads and never a CUDA call.
"""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error, Progress, Ticket
from strata_copy.cudart cimport Guard
from strata_copy.lanes cimport CopierData, Slot
from strata_copy.states cimport StateData


cdef Slot *pin(Ticket ticket) noexcept nogil
cdef void unpin(Slot *slot) noexcept nogil
# REFUSED: it was released, or never given out.
cdef int no_ticket(Ticket ticket, Error *error) noexcept nogil

cdef int ticket_wait_layer(Ticket ticket, int32_t layer, void *stream, int64_t timeout_ns, Error *error) noexcept nogil
cdef int ticket_wait_done(Ticket ticket, void *stream, int64_t timeout_ns, Error *error) noexcept nogil
cdef int ticket_poll(Ticket ticket, Progress *progress) noexcept nogil
# As poll, but CUDA is asked (once in the copier's patience) for a ticket that is late.
cdef int ticket_look(Ticket ticket) noexcept nogil
# As sync does where nobody syncs: CUDA is asked, now and then, for every ticket whose word is not there.
cdef void tickets_look(CopierData *copier) noexcept nogil
cdef int tickets_finished(CopierData *copier, Ticket *out, int32_t n) noexcept nogil
cdef int ticket_sync(Ticket ticket, int64_t timeout_ns, Error *error) noexcept nogil
cdef void ticket_release(Ticket *ticket) noexcept nogil

# How many tickets in flight read or write the state.
cdef int state_users(StateData *state) noexcept nogil
# OK, or REFUSED where there are some.
cdef int reset_state(StateData *state, Error *error) noexcept nogil

# REFUSED where a stream that somebody named may not be used: a default stream, without any call; one that captures.
cdef int check_not_default(void *stream, Error *error) noexcept nogil
cdef int check_not_capturing(void *stream, const Guard *guard, Error *error) noexcept nogil
