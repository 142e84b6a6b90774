"""Flight. Declared in flight.pxd."""

import time

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint64_t

from strata_copy.abi cimport AGAIN
from strata_copy.atomics cimport load_i32, load_i64, store_i32, swap_i32
from strata_copy.endings cimport slot_status, sweep
from strata_copy.lanes cimport CLOSING, OPEN, Slot
from strata_copy.news cimport nap, ran_something
from strata_copy.states cimport slot_of
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_trylock, pthread_mutex_unlock
from strata_copy.tickets cimport tickets_look
from strata_copy.worker_thread cimport LOOK_NS


cdef bint flies(CopierData *copier, uint64_t ticket) noexcept nogil:
    cdef Slot *slot = &copier.slots[slot_of(ticket)]
    cdef bint in_flight
    pthread_mutex_lock(&copier.lock)
    in_flight = slot.ticket == ticket and slot_status(copier, slot) == AGAIN
    pthread_mutex_unlock(&copier.lock)
    return in_flight


cdef void let_no_more_in(CopierData *copier) noexcept nogil:
    store_i32(&copier.state, CLOSING)       # without the lock: CUDA may hold up a thread that has it


cdef void let_in_again(CopierData *copier) noexcept nogil:
    swap_i32(&copier.state, CLOSING, OPEN)


cdef bint wait_for_flight(CopierData *copier) except? False:
    cdef int64_t landed = 0
    cdef int32_t flying = 1
    let_no_more_in(copier)
    try:
        while flying != 0 and load_i32(&copier.state) == CLOSING:       # in a child of fork it is closed
            with nogil:
                flying = in_flight(copier, &landed)
                if flying != 0:
                    tickets_look(copier)        # for a device may have ended, and nobody else asks
                    if not ran_something():
                        nap(LOOK_NS)            # what is in flight lands without us
            PyErr_CheckSignals()
    except BaseException:
        let_in_again(copier)
        raise
    return load_i32(&copier.state) == CLOSING


cdef int32_t wait_while_it_lands(CopierData *copier, double seconds) except? -1:
    cdef int64_t landed = 0
    cdef int32_t flying
    seen, since = None, time.monotonic()
    while True:
        with nogil:
            flying = in_flight(copier, &landed)
            if flying != 0 and not ran_something():
                nap(LOOK_NS)                    # likewise
        if flying >= 0 and (flying, landed) != seen:
            seen, since = (flying, landed), time.monotonic()
        if flying == 0 or time.monotonic() - since > seconds:
            return flying
        PyErr_CheckSignals()


cdef int32_t in_flight(CopierData *copier, int64_t *landed) noexcept nogil:
    """The tickets that have not ended, and how many bytes of them have landed; -1 where another thread has the lock."""
    cdef int32_t i, n = 0
    if pthread_mutex_trylock(&copier.lock) != 0:
        return -1
    sweep(copier)
    landed[0] = 0
    for i in range(copier.n_slots):
        if copier.slots[i].ticket != 0 and slot_status(copier, &copier.slots[i]) == AGAIN:
            landed[0] += load_i64(&copier.slots[i].landed)
            n += 1
    pthread_mutex_unlock(&copier.lock)
    return n
