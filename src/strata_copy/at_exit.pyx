"""What is in flight as the interpreter ends. Declared in at_exit.pxd."""

import atexit
import warnings

from libc.stdint cimport int32_t

from strata_copy.copier cimport the_copier
from strata_copy.flight cimport let_no_more_in, wait_while_it_lands
from strata_copy.held cimport take_held
from strata_copy.lanes cimport CopierData
from strata_copy.latch cimport latch_give, latch_take_within
from strata_copy.worker_thread cimport thread_dismiss

from strata_copy import arena, host_runtime  # no-cython-lint: what they do at the end comes behind this, as they register before it

PATIENCE = 5.0      # seconds in which nothing lands, after which copies are waited for no longer

cdef bint ending = False


cdef bint interpreter_ends() noexcept:
    return ending


@atexit.register
def _end_copies():
    """No more are submitted, and those in flight end before the memory is taken apart that they copy; it stays where one does not end.
    Nothing is given back, as that would wait for everything that the engine has on the devices: the process does it."""
    if end_flight() == 0:
        take_held()
    else:
        warnings.warn(f"copies are in flight as the interpreter ends, and nothing of them has landed for {PATIENCE:g} s: they are "
                      "left to the process, with their memory. Close the copier before", RuntimeWarning)


cdef int32_t end_flight() except? -1:
    """How many tickets are left, -1 where that could not be seen."""
    global ending
    cdef CopierData *copier
    cdef int32_t flying
    ending = True
    # Another thread's close waits for what does not end, or a slow way between devices is tried: the copier may be taken apart meanwhile.
    if not latch_take_within(PATIENCE, "ended"):
        return -1
    copier = the_copier()
    if copier != NULL:
        let_no_more_in(copier)
    latch_give()
    if copier == NULL:
        return 0
    flying = wait_while_it_lands(copier, PATIENCE)
    thread_dismiss()
    return flying
