"""How an arena grows: memory that is mapped, touched and registered, one piece after another with a pause, for registering holds up the
CUDA calls of every other thread; the next piece is mapped and touched meanwhile.
"""

from libc.stdint cimport int64_t
from posix.time cimport timespec

from strata_copy.abi cimport Error
from strata_copy.cudart cimport Guard
from strata_copy.pieces cimport ArenaData

cdef enum:
    MAX_TOUCHERS = 64           # threads that touch a piece

# Makes pieces until the budget is used up, the arena is to stop, or something is refused, which is told.
cdef int grow(ArenaData *arena, const Guard *guard, Error *error) noexcept nogil
# So many ns from now, as pthread_cond_timedwait counts.
cdef timespec from_now(int64_t ns) noexcept nogil
