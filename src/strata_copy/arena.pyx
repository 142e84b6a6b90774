"""Arenas. The C side is declared in arena.pxd."""

import atexit
import os
import warnings
import weakref
from pathlib import Path

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport INT32_MAX, INT64_MAX, SIZE_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memmove
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec
from posix.unistd cimport getpid

from strata_copy.abi cimport OK, REASON_BUSY, REASON_CAPACITY, REASON_CLOSED, REASON_MEMORY, REASON_OVERLAP, REASON_PLACE, REFUSED, Error
from strata_copy.atomics cimport add_i64
from strata_copy.cudart cimport (
    Guard, clear, cudaHostRegisterMapped, cudaHostRegisterPortable, cudaMemoryTypeHost,
    cudaPointerAttributes, cuda_failed, guard_enter, guard_leave, is_sticky, outcome, require_runtime, rt, stand_on,
)
from strata_copy.raising cimport raise_error
from strata_copy.system cimport (
    MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_READ, PROT_WRITE, available_memory, madvise, mmap, munmap,
    populate, prefer_node, pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_init, pthread_cond_timedwait, pthread_create,
    pthread_join, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock, pthread_t,
)

from strata_copy import runtime
from strata_copy.errors import Refused
from strata_copy.places import address, nanoseconds, whole

cdef enum:
    PAGE = 4096
    HUGE = 2 << 20
    MAX_THREADS = 64
    LEAST = 64 << 20            # smaller pieces than this, and than a 16th, are not tried where CUDA refuses larger ones
    TOUCH = 16 << 20            # bytes whose pages are made to be there at a time
    SPARE = 256 << 20           # bytes of the machine's memory that are left alone


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
        if self.data != NULL:
            raise TypeError("an Arena is made once")
        require_runtime()
        c_device = whole("device", device, 0, INT32_MAX)
        c_budget = whole("budget", budget, 0, INT64_MAX) // PAGE * PAGE
        c_piece = whole("piece", piece, PAGE, INT64_MAX) // PAGE * PAGE
        c_threads = whole("threads", threads, 0, MAX_THREADS) or min(8, len(os.sched_getaffinity(0)))
        c_pause = nanoseconds(pause)
        node = _node_of(device)
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
        unregister a piece, which is left mapped then. Closing twice is allowed."""
        cdef Error error
        cdef int status
        if self.closed_:
            return
        clear(&error)
        with nogil:
            status = arena_close(self.data, &error)
        self.closed_ = status == OK or error.reason != REASON_BUSY
        if status != OK:
            raise_error(&error)

    def wait(self, bytes=None, timeout=None):
        """Until so many bytes are there in all (None: until growing has ended); False where that took longer than `timeout` seconds."""
        cdef int64_t left = nanoseconds(timeout), slice_ns
        cdef size_t wanted = SIZE_MAX if bytes is None else whole("bytes", bytes, 0, INT64_MAX)
        while True:
            slice_ns = 50000000 if left < 0 or left > 50000000 else left
            if waited(self.data, wanted, slice_ns):
                return True
            PyErr_CheckSignals()
            if left >= 0:
                left -= slice_ns
                if left <= 0:
                    return False

    def attach(self, base, bytes):
        """Memory of the engine's (shared memory, huge pages) becomes a part of the arena until it closes; it must live as long. It is
        registered, within the budget; where somebody else has registered all of it already, that registration is used and left alone.
        Raises Refused."""
        cdef Error error
        cdef size_t c_base = address(base), c_bytes = whole("bytes", bytes, 1, INT64_MAX)
        cdef int status
        clear(&error)
        with nogil:
            status = arena_attach(self.data, c_base, c_bytes, &error)
        if status != OK:
            raise_error(&error)

    def register(self, base, bytes):
        """Registers memory that the engine goes on using, in one registration, within the budget; memory that somebody else has
        registered already is left as it is. Places in it are "pinned" from now on. Raises Refused."""
        cdef Error error
        cdef size_t c_base = address(base), c_bytes = whole("bytes", bytes, 1, INT64_MAX)
        cdef int status
        clear(&error)
        with nogil:
            status = arena_register(self.data, c_base, c_bytes, &error)
        if status != OK:
            raise_error(&error)

    def unregister(self, base):
        """Takes back `register` of the memory that begins at `base`, which no copy may use any more. Raises Refused."""
        cdef Error error
        cdef size_t c_base = address(base)
        cdef int status
        clear(&error)
        with nogil:
            status = arena_unregister(self.data, c_base, &error)
        if status != OK:
            raise_error(&error)

    @property
    def budget(self):
        return self.data.budget

    @property
    def pinned(self):
        """Bytes that images can be given, used or not."""
        return self.data.offered

    @property
    def registered(self):
        """Bytes that this arena has registered, or is about to: never more than the budget."""
        return self.data.registered

    @property
    def used(self):
        """Bytes that images have."""
        return self.data.used

    @property
    def growing(self):
        return bool(self.data.growing)

    @property
    def refusal(self):
        """Why the arena did not grow to its budget, in words, or "" where it did or still grows."""
        cdef Error error
        pthread_mutex_lock(&self.data.lock)
        error = self.data.refusal
        pthread_mutex_unlock(&self.data.lock)
        return error.text.decode(errors="replace") if error.status != OK else ""

    @property
    def node(self):
        """The NUMA node that the pieces were asked to lie on; None where the machine does not tell the device's, or the kernel refused."""
        return self.data.node if self.data.node >= 0 and self.data.bound else None

    @property
    def pieces(self):
        """(address, bytes, kind) of each piece; kind is "made", "attached", "foreign" or "in place"."""
        cdef Piece *pieces
        cdef int32_t n = 0
        kinds = ("made", "attached", "foreign", "in place")
        with nogil:
            pieces = copy_of_pieces(self.data, &n)
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


cdef Piece *copy_of_pieces(ArenaData *arena, int32_t *n) noexcept nogil:
    """For the caller to free: Python's objects are not made while the lock is held."""
    cdef Piece *copy
    pthread_mutex_lock(&arena.lock)
    copy = <Piece *>malloc((arena.n_pieces + 1) * sizeof(Piece))
    if copy != NULL:
        n[0] = arena.n_pieces
        memcpy(copy, arena.pieces, n[0] * sizeof(Piece))
    pthread_mutex_unlock(&arena.lock)
    return copy


def _node_of(device):
    """The NUMA node of a device, or -1 where Linux does not tell."""
    try:
        name = runtime.pci_bus_id(device).lower()
        return int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
    except (OSError, ValueError, runtime.CudaError):
        return -1


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
            job.status = attach(job, &guard)
        elif job.kind == JOB_REGISTER:
            job.status = register_in_place(job, &guard)
        elif job.kind == JOB_UNREGISTER:
            job.status = unregister_in_place(job, &guard)
        elif job.kind == JOB_CLOSE:
            job.status = give_back(job, &guard)
        else:
            job.status = grow(job, &guard)
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
    cdef Job job
    cdef pthread_t thread
    job.arena, job.kind, job.base, job.bytes, job.status = arena, kind, base, bytes, OK
    job.error = error[0]
    if arena.pid != getpid():
        return outcome(error, REFUSED, REASON_CLOSED, "this process is a fork of the one that made the arena")
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
    pthread_mutex_unlock(&arena.lock)
    if joins:
        pthread_join(arena.grower, NULL)


cdef int arena_close(ArenaData *arena, Error *error) noexcept nogil:
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
    return run(arena, JOB_CLOSE, 0, 0, error) if arena.n_pieces > 0 else OK


# ---- growing

# Memory of a piece that is not registered yet, and not of the budget.
cdef struct Mapped:
    ArenaData *arena
    char *base                  # NULL: it could not be had
    size_t bytes                # 0: none is wanted
    Error error
    pthread_t thread            # that maps it
    bint threaded


cdef int grow(Job *job, const Guard *guard) noexcept nogil:
    """Touching a piece takes as long as registering two: the next one is touched meanwhile."""
    cdef ArenaData *arena = job.arena
    cdef Mapped ahead, this
    cdef int status = OK
    map_ahead(&ahead, arena)
    while ahead.bytes > 0:
        this = mapped_one(&ahead)
        take_of_budget(&this)
        map_ahead(&ahead, arena)
        status = make_piece(&this, guard, &job.error)
        if status != OK or not pause(arena):
            break
    if ahead.bytes > 0:
        this = mapped_one(&ahead)
        unmap(&this, 0)
    return status


cdef void map_ahead(Mapped *ahead, ArenaData *arena) noexcept nogil:
    """Begins to map what the budget has room for at present."""
    ahead.arena, ahead.base, ahead.threaded = arena, NULL, False
    clear(&ahead.error)
    pthread_mutex_lock(&arena.lock)
    ahead.bytes = 0 if arena.stop else min(arena.piece_bytes, arena.budget - arena.registered)
    pthread_mutex_unlock(&arena.lock)
    if ahead.bytes > 0:
        ahead.threaded = pthread_create(&ahead.thread, NULL, map_main, ahead) == 0


cdef void *map_main(void *argument) noexcept nogil:
    cdef Mapped *mapped = <Mapped *>argument
    mapped.base = map_piece(mapped.arena, mapped.bytes, &mapped.error)
    return NULL


cdef Mapped mapped_one(Mapped *ahead) noexcept nogil:
    """Waits for the thread that maps it: for as long as touching takes."""
    if ahead.threaded:
        pthread_join(ahead.thread, NULL)
    else:
        map_main(ahead)
    return ahead[0]


cdef void take_of_budget(Mapped *mapped) noexcept nogil:
    """Others may have used it up meanwhile: what it has no room for any more is given back."""
    if mapped.base != NULL:
        unmap(mapped, reserve(mapped.arena, mapped.bytes))


cdef void unmap(Mapped *mapped, size_t keep) noexcept nogil:
    if mapped.base != NULL and keep < mapped.bytes:
        munmap(mapped.base + keep, mapped.bytes - keep)
    mapped.bytes = keep


cdef bint pause(ArenaData *arena) noexcept nogil:
    """Other threads' CUDA calls get through. False where there is nothing to go on for."""
    cdef timespec until = from_now(arena.pause)
    cdef bint go_on
    pthread_mutex_lock(&arena.lock)
    while not arena.stop and arena.registered < arena.budget:
        if pthread_cond_timedwait(&arena.changed, &arena.lock, &until) != 0:
            break
    go_on = not arena.stop and arena.registered < arena.budget
    pthread_mutex_unlock(&arena.lock)
    return go_on


cdef timespec from_now(int64_t ns) noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_REALTIME, &t)       # what pthread_cond_timedwait goes by
    t.tv_sec += (t.tv_nsec + ns) // 1000000000
    t.tv_nsec = (t.tv_nsec + ns) % 1000000000
    return t


cdef size_t reserve(ArenaData *arena, size_t wanted) noexcept nogil:
    """Takes bytes from the budget before CUDA is asked: as many as are left, 0 where the arena is to stop."""
    cdef size_t bytes
    pthread_mutex_lock(&arena.lock)
    bytes = 0 if arena.stop else min(wanted, arena.budget - arena.registered)
    arena.registered += bytes
    pthread_mutex_unlock(&arena.lock)
    return bytes


cdef void unreserve(ArenaData *arena, size_t bytes) noexcept nogil:
    pthread_mutex_lock(&arena.lock)
    arena.registered -= bytes
    pthread_mutex_unlock(&arena.lock)


cdef int make_piece(const Mapped *mapped, const Guard *guard, Error *error) noexcept nogil:
    """Registers what is mapped; what cannot be registered is given back and ends the growth."""
    cdef ArenaData *arena = mapped.arena
    cdef char *base = mapped.base
    cdef size_t bytes = mapped.bytes, done = 0, attempt = bytes, least = min(<size_t>LEAST, arena.piece_bytes // 16)
    cdef int code, refusals = 0, status = OK
    if base == NULL:
        error[0] = mapped.error
        return error.status
    while done < bytes and status == OK:
        attempt = min(attempt, bytes - done)
        code = rt.cudaHostRegister(base + done, attempt, cudaHostRegisterPortable | cudaHostRegisterMapped)
        if code == 0:
            status = add_piece(arena, <size_t>base + done, attempt, PIECE_MADE, guard, error)
            done += attempt if status == OK else 0
            continue
        status = cuda_failed(REFUSED, code, "cudaHostRegister", arena.device, guard, error)
        refusals += 1
        if refusals > 1:            # it fails now and then for no reason, and on some kernels for large pieces
            attempt = attempt // 2 // PAGE * PAGE
        if attempt > 0 and (attempt >= least or refusals == 1) and not is_sticky(code):
            clear(error)
            status = OK
    if done < bytes:
        munmap(base + done, bytes - done)
        unreserve(arena, bytes - done)
        error.wanted, error.found = arena.budget, arena.offered
    return status


cdef char *map_piece(ArenaData *arena, size_t bytes, Error *error) noexcept nogil:
    """Memory on the device's node, touched, huge pages where the kernel has them; NULL where it cannot be had."""
    cdef long long available = available_memory()
    cdef char *mapped
    cdef char *base
    if available >= 0 and available < <long long>bytes + SPARE:
        error.wanted, error.found = bytes + SPARE, available
        outcome(error, REFUSED, REASON_MEMORY, "a piece of %ld bytes, and %ld that stay free, are needed; the machine has %ld left",
                <int64_t>bytes, <int64_t>SPARE, error.found)
        return NULL
    mapped = <char *>mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if mapped == <char *>MAP_FAILED:
        outcome(error, REFUSED, REASON_MEMORY, "%ld bytes of memory could not be mapped", <int64_t>bytes)
        return NULL
    base = mapped + (HUGE - <size_t>mapped % HUGE) % HUGE
    if base > mapped:
        munmap(mapped, base - mapped)
    munmap(base + bytes, mapped + HUGE - base)
    madvise(base, bytes, MADV_HUGEPAGE)     # where the kernel will not, pages are small and registering takes longer
    if arena.node >= 0 and prefer_node(base, bytes, arena.node) != 0:
        arena.bound = False
    if touch(base, bytes, arena.threads) == OK:
        return base
    munmap(base, bytes)
    outcome(error, REFUSED, REASON_MEMORY, "%ld bytes were mapped, but the machine has no memory for them", <int64_t>bytes)
    return NULL


cdef struct Share:
    char *start
    size_t bytes
    pthread_mutex_t *gate
    int failed


cdef void *touch_share(void *argument) noexcept nogil:
    """Some pages at a time: the process can map nothing meanwhile, no other thread's memory either."""
    cdef Share *share = <Share *>argument
    cdef size_t at = 0, n
    pthread_mutex_lock(share.gate)
    pthread_mutex_unlock(share.gate)
    while at < share.bytes and share.failed == 0:
        n = min(<size_t>TOUCH, share.bytes - at)
        share.failed = populate(share.start + at, n, PAGE)
        at += n
    return NULL


cdef int touch(char *base, size_t bytes, int32_t threads) noexcept nogil:
    """Each thread makes a share of the pages be there; the caller does its own, and those of threads that could not be had. None begins
    before all are made: a thread needs a stack, which cannot be mapped while pages are touched."""
    cdef pthread_mutex_t gate
    cdef Share shares[MAX_THREADS]
    cdef pthread_t running[MAX_THREADS]
    cdef bint started[MAX_THREADS]
    cdef size_t each = (bytes // threads + HUGE - 1) // HUGE * HUGE, at = 0
    cdef int32_t i, n = 0
    cdef int failed = 0
    pthread_mutex_init(&gate, NULL)
    pthread_mutex_lock(&gate)
    while at < bytes:
        shares[n].start, shares[n].bytes, shares[n].gate, shares[n].failed = base + at, min(each, bytes - at), &gate, 0
        at += shares[n].bytes
        started[n] = at < bytes and pthread_create(&running[n], NULL, touch_share, &shares[n]) == 0
        n += 1
    pthread_mutex_unlock(&gate)
    for i in range(n):
        if not started[i]:
            touch_share(&shares[i])
    for i in range(n):
        if started[i]:
            pthread_join(running[i], NULL)
        failed |= shares[i].failed
    pthread_mutex_destroy(&gate)
    return OK if failed == 0 else REFUSED


# ---- pieces

cdef int add_piece(ArenaData *arena, size_t base, size_t bytes, int32_t kind, const Guard *guard, Error *error) noexcept nogil:
    """Notes a piece that is registered; where there is no room for the note it is unregistered again."""
    cdef bint noted
    pthread_mutex_lock(&arena.lock)
    noted = room(arena, 1, 1) == OK
    if noted:
        insert_piece(arena, base, bytes, kind)
        if kind != PIECE_IN_PLACE:
            arena.offered += bytes
            insert_free(arena, base, bytes)
        pthread_cond_broadcast(&arena.changed)
    pthread_mutex_unlock(&arena.lock)
    if noted:
        return OK
    if kind != PIECE_FOREIGN:
        rt.cudaHostUnregister(<void *>base)
    return outcome(error, REFUSED, REASON_MEMORY, "no host memory for an arena of %d pieces", arena.n_pieces + 1)


cdef int room(ArenaData *arena, int32_t pieces, int32_t ranges) noexcept nogil:
    """Room for so many more. Each range that is out may come back as one more, which must not fail."""
    cdef int32_t n
    cdef void *grown
    if arena.n_pieces + pieces > arena.room_for_pieces:
        n = 2 * arena.room_for_pieces + 16
        grown = realloc(arena.pieces, n * sizeof(Piece))
        if grown == NULL:
            return REFUSED
        arena.pieces, arena.room_for_pieces = <Piece *>grown, n
    if arena.n_free + arena.taken + ranges > arena.room_for_free:
        n = 2 * (arena.n_free + arena.taken + ranges) + 64
        grown = realloc(arena.free, n * sizeof(Range))
        if grown == NULL:
            return REFUSED
        arena.free, arena.room_for_free = <Range *>grown, n
    return OK


cdef void insert_piece(ArenaData *arena, size_t base, size_t bytes, int32_t kind) noexcept nogil:
    cdef int32_t i = arena.n_pieces
    while i > 0 and arena.pieces[i - 1].base > base:
        arena.pieces[i] = arena.pieces[i - 1]
        i -= 1
    arena.pieces[i].base, arena.pieces[i].bytes, arena.pieces[i].kind, arena.pieces[i].stuck = base, bytes, kind, False
    arena.n_pieces += 1


cdef const Piece *piece_of(const ArenaData *arena, size_t start) noexcept nogil:
    """The piece that holds the address; NULL: none."""
    cdef int32_t low = 0, high = arena.n_pieces, middle
    while low < high:
        middle = (low + high) // 2
        if arena.pieces[middle].base <= start:
            low = middle + 1
        else:
            high = middle
    return &arena.pieces[low - 1] if low > 0 and start - arena.pieces[low - 1].base < arena.pieces[low - 1].bytes else NULL


cdef int attach(Job *job, const Guard *guard) noexcept nogil:
    """In registrations of a piece each; or, where all of it is registered by others, in theirs."""
    cdef ArenaData *arena = job.arena
    cdef size_t base = job.base, end = job.base + job.bytes, at = job.base, n = 0
    cdef int status = OK
    if has_piece_in(arena, base, end):
        return outcome(&job.error, REFUSED, REASON_OVERLAP, "a part of [%#zx, +%zu) belongs to the arena already", base, job.bytes)
    if foreign_end(base) != 0 or foreign_end(end - 1) != 0:
        return attach_foreign(job, guard)
    if reserve_all(job) != OK:
        return REFUSED
    while at < end and status == OK:
        n = min(arena.piece_bytes, end - at)
        status = register_range(arena, at, n, guard, &job.error)
        at += n if status == OK else 0
    end = at
    while at > base and status == OK:
        n = (at - base - 1) % arena.piece_bytes + 1
        at -= n
        status = add_piece(arena, at, n, PIECE_ATTACHED, guard, &job.error)
    if status == OK:
        return OK
    unreserve(arena, job.bytes if at == end else at + n - base)
    while at > base:            # the last one first
        n = (at - base - 1) % arena.piece_bytes + 1
        at -= n
        rt.cudaHostUnregister(<void *>at)
    return status


cdef bint has_piece_in(ArenaData *arena, size_t base, size_t end) noexcept nogil:
    cdef int32_t i
    cdef bint found = False
    pthread_mutex_lock(&arena.lock)
    for i in range(arena.n_pieces):
        if arena.pieces[i].base < end and base < arena.pieces[i].base + arena.pieces[i].bytes:
            found = True
    pthread_mutex_unlock(&arena.lock)
    return found


cdef int attach_foreign(Job *job, const Guard *guard) noexcept nogil:
    cdef size_t base = job.base, end = job.base + job.bytes, stop = 0
    cdef int status = OK
    while base < end:           # looked at before any of it is given out
        stop = foreign_end(base)
        if stop == 0:
            job.error.found = base - job.base
            return outcome(&job.error, REFUSED, REASON_PLACE, "somebody has registered a part of [%#zx, +%zu), but not byte %zu: attach "
                           "what is registered, or what is not", job.base, job.bytes, base - job.base)
        base = stop
    base = job.base
    while base < end and status == OK:
        stop = min(foreign_end(base), end)
        status = add_piece(job.arena, base, stop - base, PIECE_FOREIGN, guard, &job.error)
        base = stop
    return status


cdef size_t foreign_end(size_t at) noexcept nogil:
    """Where the pinned memory that holds this byte ends; 0 where it is not pinned."""
    cdef cudaPointerAttributes found
    cdef void *start = NULL
    cdef size_t bytes = 0
    if rt.cudaPointerGetAttributes(&found, <void *>at) != 0 or found.type != cudaMemoryTypeHost:
        return 0
    return <size_t>start + bytes if rt.pointer_range(<void *>at, &start, &bytes) == 0 else 0


cdef int reserve_all(Job *job) noexcept nogil:
    cdef ArenaData *arena = job.arena
    cdef size_t left
    if job.base % PAGE != 0 or job.bytes % PAGE != 0:
        return outcome(&job.error, REFUSED, REASON_PLACE, "[%#zx, +%zu) does not begin and end with a page of %d bytes, and CUDA registers "
                       "whole ones", job.base, job.bytes, <int>PAGE)
    pthread_mutex_lock(&arena.lock)
    left = arena.budget - arena.registered
    if job.bytes <= left and not arena.stop:
        arena.registered += job.bytes
        left = job.bytes
    else:
        job.error.wanted, job.error.found = job.bytes, left
        outcome(&job.error, REFUSED, REASON_CAPACITY, "%zu bytes to register, the arena's budget has %zu left", job.bytes, left)
    pthread_mutex_unlock(&arena.lock)
    return job.error.status


cdef int register_range(ArenaData *arena, size_t base, size_t bytes, const Guard *guard, Error *error) noexcept nogil:
    cdef int code = rt.cudaHostRegister(<void *>base, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped)
    return OK if code == 0 else cuda_failed(REFUSED, code, "cudaHostRegister", arena.device, guard, error)


cdef int register_in_place(Job *job, const Guard *guard) noexcept nogil:
    cdef int status
    if foreign_end(job.base) >= job.base + job.bytes:
        return OK
    status = reserve_all(job)
    if status != OK:
        return status
    status = register_range(job.arena, job.base, job.bytes, guard, &job.error)
    if status == OK:
        status = add_piece(job.arena, job.base, job.bytes, PIECE_IN_PLACE, guard, &job.error)
    if status != OK:
        unreserve(job.arena, job.bytes)
    return status


cdef int unregister_in_place(Job *job, const Guard *guard) noexcept nogil:
    cdef ArenaData *arena = job.arena
    cdef const Piece *piece
    cdef Piece found
    cdef int code
    pthread_mutex_lock(&arena.lock)
    piece = piece_of(arena, job.base)
    if piece != NULL:
        found = piece[0]
    pthread_mutex_unlock(&arena.lock)
    if piece == NULL or found.base != job.base or found.kind != PIECE_IN_PLACE:
        return outcome(&job.error, REFUSED, REASON_PLACE, "no memory that begins at %#zx was registered in place by this arena", job.base)
    code = rt.cudaHostUnregister(<void *>found.base)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaHostUnregister", arena.device, guard, &job.error)
    pthread_mutex_lock(&arena.lock)
    remove_piece(arena, <int32_t>(piece_of(arena, job.base) - arena.pieces))
    arena.registered -= found.bytes
    pthread_mutex_unlock(&arena.lock)
    return OK


cdef void remove_piece(ArenaData *arena, int32_t i) noexcept nogil:
    arena.n_pieces -= 1
    memmove(&arena.pieces[i], &arena.pieces[i + 1], (arena.n_pieces - i) * sizeof(Piece))


cdef int give_back(Job *job, const Guard *guard) noexcept nogil:
    """Nothing is given out and nothing grows. A piece that CUDA does not take back stays mapped, and in the count."""
    cdef ArenaData *arena = job.arena
    cdef Piece *piece
    cdef Error later
    cdef int32_t i
    cdef int code
    for i in range(arena.n_pieces - 1, -1, -1):
        piece = &arena.pieces[i]
        if piece.stuck:
            continue
        code = rt.cudaHostUnregister(<void *>piece.base) if piece.kind != PIECE_FOREIGN else 0
        if code != 0:
            clear(&later)
            cuda_failed(REFUSED, code, "cudaHostUnregister", arena.device, guard, &job.error if job.error.status == OK else &later)
            piece.stuck = True
            continue
        if piece.kind == PIECE_MADE:
            munmap(<void *>piece.base, piece.bytes)
        pthread_mutex_lock(&arena.lock)
        if piece.kind != PIECE_FOREIGN:
            arena.registered -= piece.bytes
        remove_piece(arena, i)
        pthread_mutex_unlock(&arena.lock)
    pthread_mutex_lock(&arena.lock)
    arena.n_free = 0
    arena.offered = 0
    pthread_mutex_unlock(&arena.lock)
    return job.error.status


# ---- what is free

cdef bint arena_take(ArenaData *arena, size_t bytes, size_t grain, size_t near, Range *found, size_t *piece) noexcept nogil:
    cdef int32_t i
    cdef size_t n
    cdef bint taken = False
    pthread_mutex_lock(&arena.lock)
    i = range_for(arena, bytes, grain, near) if not arena.closing else -1
    if i >= 0 and room(arena, 0, 1) == OK:
        n = min(bytes, arena.free[i].bytes) // grain * grain
        found.start, found.bytes = arena.free[i].start, n
        piece[0] = piece_of(arena, found.start).base
        arena.free[i].start += n
        arena.free[i].bytes -= n
        if arena.free[i].bytes == 0:
            remove_free(arena, i)
        arena.taken += 1
        arena.used += n
        taken = True
    pthread_mutex_unlock(&arena.lock)
    return taken


cdef int32_t range_for(const ArenaData *arena, size_t bytes, size_t grain, size_t near) noexcept nogil:
    cdef int32_t i, whole_ = -1, largest = -1
    for i in range(arena.n_free):
        if arena.free[i].bytes < grain:
            continue
        if near != 0 and arena.free[i].start == near:
            return i
        if whole_ < 0 and arena.free[i].bytes >= bytes:
            whole_ = i
        if largest < 0 or arena.free[i].bytes > arena.free[largest].bytes:
            largest = i
    return whole_ if whole_ >= 0 else largest


cdef void arena_give(ArenaData *arena, size_t start, size_t bytes) noexcept nogil:
    pthread_mutex_lock(&arena.lock)
    insert_free(arena, start, bytes)
    arena.taken -= 1
    arena.used -= bytes
    pthread_mutex_unlock(&arena.lock)


cdef void insert_free(ArenaData *arena, size_t start, size_t bytes) noexcept nogil:
    """One range with its neighbours where they are of one piece."""
    cdef int32_t i = arena.n_free
    while i > 0 and arena.free[i - 1].start > start:
        i -= 1
    if i > 0 and joined(arena, &arena.free[i - 1], start):
        i -= 1
        arena.free[i].bytes += bytes
    else:
        memmove(&arena.free[i + 1], &arena.free[i], (arena.n_free - i) * sizeof(Range))
        arena.free[i].start, arena.free[i].bytes = start, bytes
        arena.n_free += 1
    if i + 1 < arena.n_free and joined(arena, &arena.free[i], arena.free[i + 1].start):
        arena.free[i].bytes += arena.free[i + 1].bytes
        remove_free(arena, i + 1)


cdef inline bint joined(const ArenaData *arena, const Range *before, size_t start) noexcept nogil:
    return before.start + before.bytes == start and piece_of(arena, before.start) == piece_of(arena, start)


cdef void remove_free(ArenaData *arena, int32_t i) noexcept nogil:
    arena.n_free -= 1
    memmove(&arena.free[i], &arena.free[i + 1], (arena.n_free - i) * sizeof(Range))
