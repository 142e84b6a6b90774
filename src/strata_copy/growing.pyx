"""How an arena grows. Declared in growing.pxd."""

from libc.stdint cimport int32_t, int64_t
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

from strata_copy.abi cimport OK, REASON_MEMORY, REFUSED, Error
from strata_copy.cudart cimport Guard, clear, cudaHostRegisterMapped, cudaHostRegisterPortable, cuda_failed, is_sticky, outcome, rt
from strata_copy.pieces cimport PIECE_MADE, ArenaData, budget_give, budget_take, pieces_add
from strata_copy.system cimport (
    HUGE_PAGE, MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PAGE, PROT_READ, PROT_WRITE, available_memory, madvise,
    mmap, munmap, populate, prefer_node, pthread_cond_timedwait, pthread_create, pthread_join, pthread_mutex_destroy, pthread_mutex_init,
    pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, pthread_t,
)

cdef enum:
    LEAST = 64 << 20            # smaller pieces than this, and than a 16th, are not tried where CUDA refuses larger ones
    TOUCH = 16 << 20            # bytes whose pages are made to be there at a time
    SPARE = 256 << 20           # bytes of the machine's memory that are left alone

# Memory of a piece that is not registered yet, and not of the budget.
cdef struct Mapped:
    ArenaData *arena
    char *base                  # NULL: it could not be had
    size_t bytes                # 0: none is wanted
    Error error
    pthread_t thread            # that maps it
    bint threaded


cdef int grow(ArenaData *arena, const Guard *guard, Error *error) noexcept nogil:
    """Touching a piece takes as long as registering two: the next one is touched meanwhile."""
    cdef Mapped ahead, this
    cdef int status = OK
    map_ahead(&ahead, arena)
    while ahead.bytes > 0:
        this = mapped_one(&ahead)
        trim_to_budget(&this)
        map_ahead(&ahead, arena)
        status = make_piece(&this, guard, error)
        if status != OK or not pause(arena):
            break
    if ahead.bytes > 0:
        this = mapped_one(&ahead)
        unmap(&this, 0)
    return status


cdef timespec from_now(int64_t ns) noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_REALTIME, &t)       # what pthread_cond_timedwait goes by
    t.tv_sec += (t.tv_nsec + ns) // 1000000000
    t.tv_nsec = (t.tv_nsec + ns) % 1000000000
    return t


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


cdef void trim_to_budget(Mapped *mapped) noexcept nogil:
    """Others may have used it up meanwhile: what it has no room for any more is given back."""
    if mapped.base != NULL:
        unmap(mapped, budget_take(mapped.arena, mapped.bytes))


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
            status = pieces_add(arena, <size_t>base + done, attempt, PIECE_MADE, error)
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
        budget_give(arena, bytes - done)
        error.wanted, error.found = arena.budget, arena.offered
    return status


# ---- memory that is mapped and touched

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
    mapped = <char *>mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if mapped == <char *>MAP_FAILED:
        outcome(error, REFUSED, REASON_MEMORY, "%ld bytes of memory could not be mapped", <int64_t>bytes)
        return NULL
    base = mapped + (HUGE_PAGE - <size_t>mapped % HUGE_PAGE) % HUGE_PAGE
    if base > mapped:
        munmap(mapped, base - mapped)
    munmap(base + bytes, mapped + HUGE_PAGE - base)
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
    cdef Share shares[MAX_TOUCHERS]
    cdef pthread_t running[MAX_TOUCHERS]
    cdef bint started[MAX_TOUCHERS]
    cdef size_t each = (bytes // threads + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE, at = 0
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
