"""Arenas. The C side is declared in arena.pxd."""

import atexit
import os
import warnings
import weakref
from pathlib import Path

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport INT32_MAX, INT64_MAX, SIZE_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free
from posix.time cimport timespec
from posix.unistd cimport getpid

from strata_copy.abi cimport OK, REASON_BUSY, REASON_CLOSED, REASON_MEMORY, REFUSED, Error
from strata_copy.atomics cimport add_i64
from strata_copy.cudart cimport Guard, clear, guard_enter, guard_leave, outcome, require_runtime, stand_on
from strata_copy.growing cimport MAX_TOUCHERS, from_now, grow
from strata_copy.pieces cimport ArenaData, Piece, pieces_attach, pieces_copy, pieces_give_back, pieces_register, pieces_unregister
from strata_copy.raising cimport raise_error
from strata_copy.system cimport (
    PAGE, pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_init, pthread_cond_timedwait, pthread_cond_wait, pthread_create,
    pthread_join, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, pthread_t,
)

from strata_copy import runtime
from strata_copy.errors import Refused
from strata_copy.places import address, memory, nanoseconds, whole

# Those that are open, so that none grows while the process ends.
_arenas = weakref.WeakSet()


@atexit.register
def _end_growth():
    cdef ArenaData *data
    for arena in list(_arenas):
        data = (<Arena>arena).data
        if data.pid == getpid():
            with nogil:
                arena_stop(data)


cdef class Arena:
    """Pinned memory for images, in pieces that are registered one by one.

    budget: bytes that may be registered, in all and at any time; attached memory and memory registered in place count too. device: of
        the registrations' context; the pieces lie on its NUMA node where the machine tells which that is.
    background: return when the first piece can be used and go on growing; else return when the arena has grown.
    piece: bytes of a piece, 1 GiB; registering one holds up other threads' CUDA calls. pause: seconds between two, in which they get
        through. threads: that touch a piece's pages; 0 for one a core, 8 at most.

    What CUDA or the machine refuses ends the growth and is no error: `pinned` says what is there, `refusal` why it is not more. Raises
    Refused where not even one piece could be had. `close` it, or use `with`.
    """

    def __init__(self, budget, *, device=0, background=False, piece=1 << 30, pause=0.005, threads=0):
        cdef Error error
        cdef int32_t c_device, c_threads, node
        cdef size_t c_budget, c_piece
        cdef int64_t c_pause
        require_runtime()
        c_device = whole("device", device, 0, INT32_MAX)
        c_budget = whole("budget", budget, 0, INT64_MAX) // PAGE * PAGE
        c_piece = whole("piece", piece, PAGE, INT64_MAX) // PAGE * PAGE
        c_threads = whole("threads", threads, 0, MAX_TOUCHERS) or min(8, len(os.sched_getaffinity(0)))
        c_pause = nanoseconds("pause", pause, "for none")
        node = _node_of(device)
        if self.data != NULL:
            raise TypeError("an Arena is made once")
        clear(&error)
        self.data = arena_new(c_device, node, c_budget, c_piece, c_threads, c_pause, &error)
        if self.data == NULL or (c_budget > 0 and arena_grow(self.data, &error) != OK):
            raise_error(&error)
        _arenas.add(self)
        while c_budget > 0 and not waited(self.data, PAGE if background else SIZE_MAX, 50000000):
            PyErr_CheckSignals()
        if c_budget > 0 and self.pinned == 0:
            error = self.data.refusal
            self.close()
            raise_error(&error)

    def __dealloc__(self):
        if self.data != NULL:
            if not self.closed_ and self.data.pid == getpid() and self.data.registered > 0:
                warnings.warn("an Arena was dropped without close", ResourceWarning)
            arena_drop(self.data)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        """Closes. An exception that is under way goes first: what it holds may be why the arena cannot be closed, and without images it
        gives everything back by itself."""
        try:
            self.close()
        except Refused:
            if kind is None:
                raise

    def close(self):
        """Ends the growth and gives everything back. Raises Refused while an image has memory of it, and where CUDA would not
        unregister a piece, which is left mapped then. Where a copy between two devices hangs (`peers.hangs()`) no piece is unregistered,
        nor is memory that was attached: it stays so, and that is no error. Closing twice is allowed; where another
        thread closes, this waits for it."""
        cdef ArenaData *data = made(self)
        cdef Error error
        cdef int status
        if self.closed_:
            return
        clear(&error)
        with nogil:
            status = arena_close(data, &error)
        self.closed_ = status == OK or error.reason != REASON_BUSY
        if status != OK:
            raise_error(&error)

    def wait(self, bytes=None, timeout=None):
        """Until so many bytes are there in all (None: until growing has ended); False where that took longer than `timeout` seconds."""
        cdef int64_t left = nanoseconds("timeout", timeout), slice_ns
        cdef ArenaData *data = made(self)
        cdef size_t wanted = SIZE_MAX if bytes is None else whole("bytes", bytes, 0, INT64_MAX)
        while True:
            slice_ns = 50000000 if left < 0 or left > 50000000 else left
            if waited(data, wanted, slice_ns):
                return True
            PyErr_CheckSignals()
            if left >= 0:
                left -= slice_ns
                if left <= 0:
                    return False

    def attach(self, base, bytes):
        """Memory of the engine's (shared memory, huge pages) becomes a part of the arena until it closes; it must live as long. It is
        registered, within the budget; where somebody else has registered all of it already, that registration is used and left alone.
        Raises Refused, and ValueError for an array that is shorter."""
        cdef ArenaData *data = made(self)
        cdef Error error
        cdef size_t c_base, c_bytes
        cdef int status
        c_base, c_bytes = memory(base, bytes)
        clear(&error)
        with nogil:
            status = arena_attach(data, c_base, c_bytes, &error)
        if status != OK:
            raise_error(&error)

    def register(self, base, bytes):
        """Registers memory that the engine goes on using, in one registration, within the budget; memory that somebody else has
        registered already is left as it is. Places in it are "pinned" from now on. Raises Refused, and ValueError for an array that is
        shorter."""
        cdef ArenaData *data = made(self)
        cdef Error error
        cdef size_t c_base, c_bytes
        cdef int status
        c_base, c_bytes = memory(base, bytes)
        clear(&error)
        with nogil:
            status = arena_register(data, c_base, c_bytes, &error)
        if status != OK:
            raise_error(&error)

    def unregister(self, base):
        """Takes back `register` of the memory that begins at `base`, which no copy may use any more. Raises Refused."""
        cdef ArenaData *data = made(self)
        cdef Error error
        cdef size_t c_base = address(base)
        cdef int status
        clear(&error)
        with nogil:
            status = arena_unregister(data, c_base, &error)
        if status != OK:
            raise_error(&error)

    @property
    def budget(self):
        return made(self).budget

    @property
    def pinned(self):
        """Bytes that images can be given, used or not."""
        return made(self).offered

    @property
    def registered(self):
        """Bytes that this arena has registered, or is about to: never more than the budget."""
        return made(self).registered

    @property
    def used(self):
        """Bytes that images have."""
        return made(self).used

    @property
    def growing(self):
        return bool(made(self).growing)

    @property
    def refusal(self):
        """Why the arena did not grow to its budget, in words, or "" where it did or still grows."""
        cdef ArenaData *data = made(self)
        cdef Error error
        pthread_mutex_lock(&data.lock)
        error = data.refusal
        pthread_mutex_unlock(&data.lock)
        return error.text.decode(errors="replace") if error.status != OK else ""

    @property
    def node(self):
        """The NUMA node that the pieces were asked to lie on; None where the machine does not tell the device's, or the kernel refused."""
        cdef ArenaData *data = made(self)
        return data.node if data.node >= 0 and data.bound else None

    @property
    def pieces(self):
        """(address, bytes, kind) of each piece; kind is "made", "attached", "foreign" or "in place"."""
        cdef ArenaData *data = made(self)
        cdef Piece *pieces
        cdef int32_t n = 0
        kinds = ("made", "attached", "foreign", "in place")
        with nogil:
            pieces = pieces_copy(data, &n)
        if pieces == NULL:
            raise MemoryError
        try:
            return [(pieces[i].base, pieces[i].bytes, kinds[pieces[i].kind]) for i in range(n)]
        finally:
            free(pieces)

    def __repr__(self):
        return f"<Arena of {self.budget} bytes: {self.pinned} pinned, {self.used} used{', growing' if self.growing else ''}>"


cdef bint waited(ArenaData *arena, size_t bytes, int64_t timeout_ns):
    cdef bint there
    with nogil:
        there = arena_wait(arena, bytes, timeout_ns)
    return there


def _node_of(device):
    """The NUMA node of a device, or -1 where Linux does not tell."""
    try:
        name = runtime.pci_bus_id(device).lower()
        return int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
    except (OSError, ValueError, runtime.CudaError):
        return -1


cdef ArenaData *made(Arena arena) except NULL:
    if arena.data == NULL:
        raise TypeError("an Arena is needed, not one whose __init__ did not run")
    return arena.data


cdef ArenaData *arena_data(Arena arena) except NULL:
    if arena is None or arena.data == NULL or arena.closed_:
        raise TypeError("an open Arena is needed")
    return arena.data


cdef ArenaData *arena_new(int32_t device, int32_t node, size_t budget, size_t piece_bytes, int32_t threads, int64_t pause,
                          Error *error) noexcept nogil:
    cdef ArenaData *arena = <ArenaData *>calloc(1, sizeof(ArenaData))
    if arena == NULL:
        outcome(error, REFUSED, REASON_MEMORY, "no host memory for an arena")
        return NULL
    arena.references, arena.pid = 1, getpid()
    arena.device, arena.node, arena.bound, arena.threads = device, node, True, threads
    arena.budget, arena.piece_bytes, arena.pause = budget, piece_bytes, pause
    pthread_mutex_init(&arena.lock, NULL)
    pthread_cond_init(&arena.changed, NULL)
    clear(&arena.refusal)
    return arena


cdef void arena_hold(ArenaData *arena) noexcept nogil:
    add_i64(&arena.references, 1)


cdef void arena_drop(ArenaData *arena) noexcept nogil:
    cdef Error ignored
    if arena == NULL or add_i64(&arena.references, -1) > 1:
        return
    clear(&ignored)
    if arena.pid == getpid():
        arena_close(arena, &ignored)
    pthread_mutex_destroy(&arena.lock)
    pthread_cond_destroy(&arena.changed)
    free(arena.pieces)
    free(arena.free)
    free(arena)


# ---- threads: whatever needs a current device runs on one of its own

cdef enum JobKind:
    JOB_GROW
    JOB_ATTACH
    JOB_REGISTER
    JOB_UNREGISTER
    JOB_CLOSE

cdef struct Job:
    ArenaData *arena
    JobKind kind
    size_t base, bytes
    int status
    Error error


cdef void *job_main(void *argument) noexcept nogil:
    cdef Job *job = <Job *>argument
    cdef Guard guard
    job.status = stand_on(job.arena.device, REFUSED, &job.error)
    if job.status == OK:
        job.status = guard_enter(&guard, &job.error)
    if job.status == OK:
        if job.kind == JOB_ATTACH:
            job.status = pieces_attach(job.arena, job.base, job.bytes, &guard, &job.error)
        elif job.kind == JOB_REGISTER:
            job.status = pieces_register(job.arena, job.base, job.bytes, &guard, &job.error)
        elif job.kind == JOB_UNREGISTER:
            job.status = pieces_unregister(job.arena, job.base, &guard, &job.error)
        elif job.kind == JOB_CLOSE:
            job.status = pieces_give_back(job.arena, &guard, &job.error)
        else:
            job.status = grow(job.arena, &guard, &job.error)
        guard_leave(&guard, job.status, &job.error)
    return NULL


cdef void *grower_main(void *argument) noexcept nogil:
    """The thread that grows; its job is its own."""
    cdef Job *job = <Job *>argument
    cdef ArenaData *arena = job.arena
    job_main(job)
    pthread_mutex_lock(&arena.lock)
    arena.refusal = job.error
    arena.growing = False
    pthread_cond_broadcast(&arena.changed)
    pthread_mutex_unlock(&arena.lock)
    free(job)
    return NULL


cdef int run(ArenaData *arena, JobKind kind, size_t base, size_t bytes, Error *error) noexcept nogil:
    """One job at a time: each looks at the pieces, and then changes them by what it saw."""
    cdef int status
    if arena.pid != getpid():       # first: the thread that holds the lock may be one of the other process
        return outcome(error, REFUSED, REASON_CLOSED, "this process is a fork of the one that made the arena")
    pthread_mutex_lock(&arena.lock)
    while arena.busy:
        pthread_cond_wait(&arena.changed, &arena.lock)
    arena.busy = True
    pthread_mutex_unlock(&arena.lock)
    if kind == JOB_CLOSE:
        status = close_alone(arena, error)
    elif arena.closing and kind != JOB_UNREGISTER:
        status = outcome(error, REFUSED, REASON_CLOSED, "the arena is closed")
    else:
        status = on_its_thread(arena, kind, base, bytes, error)
    pthread_mutex_lock(&arena.lock)
    arena.busy = False
    pthread_cond_broadcast(&arena.changed)
    pthread_mutex_unlock(&arena.lock)
    return status


cdef int on_its_thread(ArenaData *arena, JobKind kind, size_t base, size_t bytes, Error *error) noexcept nogil:
    cdef Job job
    cdef pthread_t thread
    job.arena, job.kind, job.base, job.bytes, job.status = arena, kind, base, bytes, OK
    job.error = error[0]
    if pthread_create(&thread, NULL, job_main, &job) != 0:
        return outcome(error, REFUSED, REASON_MEMORY, "no thread could be had")
    pthread_join(thread, NULL)
    error[0] = job.error
    return job.status


cdef int arena_attach(ArenaData *arena, size_t base, size_t bytes, Error *error) noexcept nogil:
    return run(arena, JOB_ATTACH, base, bytes, error)


cdef int arena_register(ArenaData *arena, size_t base, size_t bytes, Error *error) noexcept nogil:
    return run(arena, JOB_REGISTER, base, bytes, error)


cdef int arena_unregister(ArenaData *arena, size_t base, Error *error) noexcept nogil:
    return run(arena, JOB_UNREGISTER, base, 0, error)


cdef int arena_grow(ArenaData *arena, Error *error) noexcept nogil:
    cdef Job *job = <Job *>calloc(1, sizeof(Job))
    if job != NULL:
        job.arena, job.kind = arena, JOB_GROW
        clear(&job.error)
        arena.growing = True
        if pthread_create(&arena.grower, NULL, grower_main, job) == 0:
            arena.has_grower = True
            return OK
        arena.growing = False
        free(job)
    return outcome(error, REFUSED, REASON_MEMORY, "no thread could be had that makes the arena grow")


cdef bint arena_wait(ArenaData *arena, size_t bytes, int64_t timeout_ns) noexcept nogil:
    cdef timespec until = from_now(timeout_ns)
    cdef bint there
    pthread_mutex_lock(&arena.lock)
    while arena.growing and arena.offered < bytes:
        if pthread_cond_timedwait(&arena.changed, &arena.lock, &until) != 0:
            break
    there = not arena.growing or arena.offered >= bytes
    pthread_mutex_unlock(&arena.lock)
    return there


cdef void arena_stop(ArenaData *arena) noexcept nogil:
    cdef bint joins
    pthread_mutex_lock(&arena.lock)
    arena.stop = True
    joins = arena.has_grower
    arena.has_grower = False
    pthread_cond_broadcast(&arena.changed)
    while arena.growing and not joins:      # another thread joins it
        pthread_cond_wait(&arena.changed, &arena.lock)
    pthread_mutex_unlock(&arena.lock)
    if joins:
        pthread_join(arena.grower, NULL)


cdef int arena_close(ArenaData *arena, Error *error) noexcept nogil:
    return run(arena, JOB_CLOSE, 0, 0, error)


cdef int close_alone(ArenaData *arena, Error *error) noexcept nogil:
    """No other job is at work, nor is one let in before the end."""
    pthread_mutex_lock(&arena.lock)
    if arena.used > 0:
        error.found = arena.used
        outcome(error, REFUSED, REASON_BUSY, "%ld bytes of the arena are used by images: discard them, or delete their keys from "
                "the pool; a plan or a ticket holds its image", error.found)
    else:
        arena.closing = True
    pthread_mutex_unlock(&arena.lock)
    if error.status != OK:
        return error.status
    arena_stop(arena)
    return on_its_thread(arena, JOB_CLOSE, 0, 0, error) if arena.n_pieces > 0 else OK
