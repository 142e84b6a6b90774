"""Tickets: how a submitted copy is waited for, looked at, and ends.

A ticket is a value, (generation << 8) | slot. `pin` finds the slot behind it, or NULL where the ticket was released or never
given out; a pinned slot is not freed. A copy has ended when the device has set the word of each device that it used: `poll` is
those loads and never a CUDA call.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport Error, Progress, Ticket
from strata_copy.cudart cimport Guard
from strata_copy.lanes cimport CopierData, Slot
from strata_copy.states cimport StateData

cdef enum:
    QUEUING = 2         # a slot's status until everything is queued, by submit or by the worker; AGAIN for everybody else
    ENDING = 3          # while a thread ends it badly; likewise


cdef Slot *pin(Ticket ticket) noexcept nogil
cdef void unpin(Slot *slot) noexcept nogil

# The outcome, or AGAIN: a memory load.
cdef int slot_status(CopierData *copier, Slot *slot) noexcept nogil
# Under the copier's lock: lets go of the states of tickets that have ended, and frees the slots of those that were released.
cdef void sweep(CopierData *copier) noexcept nogil
# Under the lock: ends a ticket that is QUEUING or ENDING badly, and with it all that wait to read its target. Its devices are drained.
cdef void end_badly(CopierData *copier, Slot *slot, int status, const Error *error) noexcept nogil
# Under the lock: drains the devices of a ticket in whose queueing a call has failed, and ends it. Returns how.
cdef int give_up(CopierData *copier, Slot *slot, int status, const Guard *guard, Error *error) noexcept nogil
# Under the lock: nothing more is queued for a ticket that is QUEUING, which ends so once what is queued has landed; and all that wait to
# read its target fail.
cdef void cut_short(CopierData *copier, Slot *slot, int status, const Error *error) noexcept nogil
# Under the lock: whether everything of a ticket is queued, or it has ended.
cdef bint queued_to_end(CopierData *copier, uint64_t ticket) noexcept nogil
# A ticket has got further: for those that wait for that.
cdef void tell_news() noexcept nogil
# REFUSED: the library is called from a hook.
cdef int of_hook(const char *call, Error *error) noexcept nogil
# Sleeps a little; and lets a runtime that decides itself when things run do so: whether it did.
cdef void nap(int64_t ns) noexcept nogil
cdef bint ran_something() noexcept nogil
cdef int no_ticket(Ticket ticket, Error *error) noexcept nogil

cdef int ticket_wait_layer(Ticket ticket, int32_t layer, void *stream, int64_t timeout_ns, Error *error) noexcept nogil
cdef int ticket_wait_done(Ticket ticket, void *stream, int64_t timeout_ns, Error *error) noexcept nogil
cdef int ticket_poll(Ticket ticket, Progress *progress) noexcept nogil
# As poll, but CUDA is asked (once in the copier's patience) for a ticket that is late.
cdef int ticket_look(Ticket ticket) noexcept nogil
cdef int tickets_finished(CopierData *copier, Ticket *out, int32_t n) noexcept nogil
cdef int ticket_sync(Ticket ticket, int64_t timeout_ns, Error *error) noexcept nogil
cdef void ticket_release(Ticket *ticket) noexcept nogil

# How many tickets in flight read or write the state.
cdef int state_users(StateData *state) noexcept nogil
# OK, or REFUSED where there are some.
cdef int reset_state(StateData *state, Error *error) noexcept nogil
# Lets no more submits in and holds the caller until no ticket is in flight: before the copier closes.
cdef void end_all(CopierData *copier) noexcept nogil
# Frees every slot, released or not, once no thread looks at it any more: the last thing before the copier closes.
cdef void free_all(CopierData *copier) noexcept nogil

# REFUSED where a stream that somebody named may not be used: a default stream, without any call; one that captures.
cdef int check_not_default(void *stream, Error *error) noexcept nogil
cdef int check_not_capturing(void *stream, const Guard *guard, Error *error) noexcept nogil
