"""Endings: how a ticket ends, well or badly, and who lets go of what then.

A copy has ended when the device has set the word of each device that it used; whoever sees that first says so. One that a failed
call or a cancel ends takes those with it that wait to read its target. A slot is freed when nobody pins it any more.
"""

from libc.stdint cimport int32_t, uint64_t

from strata_copy.abi cimport Error
from strata_copy.cudart cimport Guard
from strata_copy.lanes cimport CopierData, Slot

cdef enum:
    QUEUING = 2         # a slot's status until everything is queued, by submit or by the worker; AGAIN for everybody else
    ENDING = 3          # while a thread ends it badly; likewise


# The outcome, or AGAIN: a memory load.
cdef int slot_status(CopierData *copier, Slot *slot) noexcept nogil
# Under the copier's lock: lets go of the states of tickets that have ended, and frees the slots of those that were released.
cdef void sweep(CopierData *copier) noexcept nogil
# Under the lock: drains the devices of a ticket in whose queueing a call has failed, and ends it. Returns how.
cdef int give_up(CopierData *copier, Slot *slot, int status, const Guard *guard, Error *error) noexcept nogil
# Under the lock: nothing more is queued for a ticket that is QUEUING, which ends so once what is queued has landed; and all that wait to
# read its target fail.
cdef void cut_short(CopierData *copier, Slot *slot, int status, const Error *error) noexcept nogil
# Under the lock: whether everything of a ticket is queued, or it has ended.
cdef bint queued_to_end(CopierData *copier, uint64_t ticket) noexcept nogil
# Takes the lock: ends a ticket in flight one of whose event queries has failed, on device `d`. All devices are drained. Returns how.
cdef int fail_in_flight(CopierData *copier, Slot *slot, int32_t d, int status, const Guard *guard, Error *error) noexcept nogil
# All of its words, or events, are there: it has ended well, or where it was cut short. Any thread may be the first to see it.
cdef int end_by_word(CopierData *copier, Slot *slot) noexcept nogil
# Frees every slot, released or not, once no thread looks at it any more: the last thing before the copier closes.
cdef void free_all(CopierData *copier) noexcept nogil
# Under the lock: one ticket more (or less) is in flight through the rings between devices that this one goes through.
cdef void count_relays(CopierData *copier, const Slot *slot, int32_t tickets) noexcept nogil
