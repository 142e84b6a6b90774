"""Images. The C side is declared in images.pxd."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.unistd cimport getpid

from strata_copy.abi cimport (
    AGAIN, LINEAR, OK, PINNED, REASON_BANK, REASON_BUSY, REASON_CAPACITY, REASON_CLOSED, REASON_GENERATION, REASON_INVALID, REASON_MARK,
    REASON_MEMORY, REASON_PLACE, REASON_UNSUPPORTED, REFUSED, STATE, WINDOW, Error, PartSpec, PlaceSpec, Request,
)
from strata_copy.arena cimport arena_drop, arena_hold
from strata_copy.atomics cimport add_i64, load_i32, load_u64, store_i32, store_i64, store_u64, swap_i32
from strata_copy.copier cimport the_tables
from strata_copy.cudart cimport outcome
from strata_copy.endings cimport sweep
from strata_copy.hooks cimport in_hook, of_hook
from strata_copy.layout cimport LayoutData, units_at
from strata_copy.lineage cimport lineage_new, lineage_reset
from strata_copy.pieces cimport ARENA_GRAIN, ArenaData, Range, arena_give, arena_take
from strata_copy.plan cimport SMALL, PlanData
from strata_copy.states cimport DISCARDED, UNPUBLISHED, VISIBLE, Run, Runs, StateData, state_drop, state_new
from strata_copy.system cimport pthread_mutex_lock, pthread_mutex_unlock


cdef StateData *image_new(ArenaData *arena, LayoutData *layout, int64_t banks, int64_t chunk, bint scrub, Error *error) noexcept nogil:
    cdef StateData *state = state_new(layout, error) if check_caller(arena, "image", error) == OK else NULL
    cdef ImageData *image
    cdef int status = OK
    if state == NULL:
        return NULL
    image = <ImageData *>calloc(1, sizeof(ImageData))
    state.image, state.runs = image, <Runs **>calloc(layout.n_parts, sizeof(Runs *))
    if image == NULL or state.runs == NULL:
        status = outcome(error, REFUSED, REASON_MEMORY, "no host memory for an image of %d parts", layout.n_parts)
    else:
        arena_hold(arena)
        image.arena, image.scrub, state.visibility = arena, scrub, UNPUBLISHED
        state.release, state.forget = release, forget
        status = place_parts(state, banks, chunk, error)
    if status == OK:
        state.lineage = lineage_new(layout, state.places)
        if state.lineage != NULL:
            return state
        outcome(error, REFUSED, REASON_MEMORY, "no host memory for the lineage of %d parts", layout.n_parts)
    if state.release == NULL:
        free(state.image)
        free(state.runs)
    state_drop(state)
    return NULL


cdef void release(StateData *state) noexcept nogil:
    """The last reference is gone, and so no copy is in flight."""
    cdef ImageData *image = <ImageData *>state.image
    cdef Runs *runs
    cdef int32_t i
    if image.arena.pid == getpid():     # the parent's, who has it still; its lock may be held by a thread that is not there
        give_memory(state)
    for i in range(state.layout.n_parts):
        while state.runs[i] != NULL:
            runs = state.runs[i].before
            free(state.runs[i])
            state.runs[i] = runs
    arena_drop(image.arena)
    drop_blobs(image)
    free(image)
    free(state.runs)


cdef void forget(StateData *state) noexcept nogil:
    cdef ImageData *image = <ImageData *>state.image
    image.landed = False
    memset(image.banks, 0, sizeof(image.banks))
    memset(image.upto, 0, sizeof(image.upto))
    swap_i32(&state.visibility, VISIBLE, UNPUBLISHED)       # one that was discarded stays that


cdef int image_anew(StateData *state, Error *error) noexcept nogil:
    cdef int status = check_caller((<ImageData *>state.image).arena, "reset", error)
    if status == OK:
        status = check_kept(state, error)
    if status == OK:
        drop_blobs(<ImageData *>state.image)
    return status


cdef void drop_blobs(ImageData *image) noexcept nogil:
    blob_drop(image.coming)
    blob_drop(image.blob)
    image.coming = image.blob = NULL


# ---- places

cdef int place_parts(StateData *state, int64_t banks, int64_t chunk, Error *error) noexcept nogil:
    """Parts that grow begin with an empty table; the others lie in a block, small ones first and by layer, so that they lie evenly."""
    cdef const LayoutData *layout = state.layout
    cdef ImageData *image = <ImageData *>state.image
    cdef size_t bytes = 0, piece = 0
    cdef int32_t i, k
    cdef int status
    cdef bint small
    for i in range(layout.n_parts):
        if layout.parts[i].growth.rule == WINDOW:
            error.part, error.layer = i, layout.parts[i].layer
            return outcome(error, REFUSED, REASON_UNSUPPORTED, "part '%.32s' of layer %d: images keep no windows", layout.parts[i].name,
                           layout.parts[i].layer)
        status = fill_place(state, i, banks, chunk, &bytes, error)
        if status != OK:
            return status
    if bytes == 0:
        return OK
    if not arena_take(image.arena, bytes, bytes, 0, &image.block, &piece):
        return no_room(state, bytes, error)
    image.bytes += bytes
    bytes = image.block.start
    for small in (True, False):
        for k in range(layout.n_parts):
            i = layout.order[k]
            if layout.parts[i].growth.rule != LINEAR and (unit_size(&layout.parts[i]) <= SMALL) == small:
                state.places[i].base = state.places[i].host_base = <void *>bytes
                state.piece[i] = piece
                bytes += grains(unit_size(&layout.parts[i])) * state.places[i].banks
    return OK


cdef int fill_place(StateData *state, int32_t i, int64_t banks, int64_t chunk, size_t *block, Error *error) noexcept nogil:
    """The place of a part but its address; `block` grows by the bytes that it needs there. No product of these numbers is formed that
    does not fit."""
    cdef const PartSpec *part = &state.layout.parts[i]
    cdef PlaceSpec *place = &state.places[i]
    cdef int64_t unit, units
    place.kind, place.device, place.page_group = PINNED, -1, -1
    place.stride, place.banks = part.growth.unit_bytes, banks if part.growth.rule == STATE else 1
    if part.growth.unit_bytes > INT64_MAX // part.rep:
        return too_large(state, i, 1, error)
    unit = unit_size(part)
    if part.growth.rule != LINEAR:
        if unit > (INT64_MAX - <int64_t>block[0]) // place.banks - ARENA_GRAIN:
            return too_large(state, i, place.banks, error)
        place.units, place.rep_stride, place.bank_stride = 1, part.growth.unit_bytes, grains(unit)
        block[0] += grains(unit) * place.banks
        return OK
    units = max((chunk + part.growth.q - 1) // part.growth.q, 1)
    if units > INT64_MAX // unit - ARENA_GRAIN:
        return too_large(state, i, units, error)
    while units * unit % ARENA_GRAIN != 0:      # at most 255 more
        units += 1
    place.rep_stride = units * part.growth.unit_bytes
    place.bank_stride = place.rep_stride * part.rep
    state.runs[i] = <Runs *>calloc(1, sizeof(Runs))
    if state.runs[i] == NULL:
        return outcome(error, REFUSED, REASON_MEMORY, "no host memory for an image of %d parts", state.layout.n_parts)
    state.runs[i].chunk_units, state.runs[i].chunk_bytes = units, units * unit
    return OK


cdef int too_large(const StateData *state, int32_t i, int64_t units, Error *error) noexcept nogil:
    cdef const PartSpec *part = &state.layout.parts[i]
    error.part, error.layer, error.wanted = i, part.layer, units
    return outcome(error, REFUSED, REASON_PLACE, "part '%.32s' of layer %d: %ld units in a row of %ld runs of %ld bytes are more than 2^63 "
                   "bytes: make chunks smaller, or banks fewer", part.name, part.layer, units, part.rep, part.growth.unit_bytes)


cdef inline int64_t unit_size(const PartSpec *part) noexcept nogil:
    return part.growth.unit_bytes * part.rep


cdef inline size_t grains(int64_t bytes) noexcept nogil:
    return (bytes + ARENA_GRAIN - 1) // ARENA_GRAIN * ARENA_GRAIN


cdef int no_room(const StateData *state, size_t bytes, Error *error) noexcept nogil:
    cdef const ArenaData *arena = (<ImageData *>state.image).arena
    error.wanted, error.found = bytes, <int64_t>(arena.offered - arena.used)
    return outcome(error, REFUSED, REASON_CAPACITY, "%ld bytes more are needed in one or more pieces; the arena has %ld free of %ld",
                   error.wanted, error.found, <int64_t>arena.offered)


# ---- growing

cdef int image_reserve(StateData *state, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef int32_t i
    cdef int status = check_marks(state, marks, n, error)
    if status == OK:
        status = take_word(state, "reserve", error)
    if status != OK:
        return status
    for i in range(state.layout.n_parts):
        if status == OK and state.layout.parts[i].growth.rule == LINEAR:
            status = grow_part(state, i, units_at(&state.layout.parts[i].growth, marks), error)
    give_word(state)
    return status


cdef int grow_part(StateData *state, int32_t i, int64_t units, Error *error) noexcept nogil:
    cdef ImageData *image = <ImageData *>state.image
    cdef Runs *runs = state.runs[i]
    cdef int64_t chunks
    cdef Run run
    cdef Range found
    while state.places[i].units < units:
        runs = state.runs[i]
        chunks = (units - state.places[i].units + runs.chunk_units - 1) // runs.chunk_units
        if chunks > INT64_MAX // runs.chunk_bytes or not arena_take(
                image.arena, chunks * runs.chunk_bytes, runs.chunk_bytes, end_of_last(runs), &found, &run.piece):
            error.part, error.layer = i, state.layout.parts[i].layer
            return no_room(state, min(chunks, INT64_MAX // runs.chunk_bytes) * runs.chunk_bytes, error)
        run.first, run.units = state.places[i].units, <int64_t>found.bytes // runs.chunk_bytes * runs.chunk_units
        run.base, run.bytes = <char *>found.start, found.bytes
        if append_run(state, i, &run) != OK:
            arena_give(image.arena, found.start, found.bytes)
            return outcome(error, REFUSED, REASON_MEMORY, "no host memory for a table of %d chunks", runs.n + 1)
        image.bytes += found.bytes
        store_i64(&state.places[i].units, run.first + run.units)
    return OK


cdef size_t end_of_last(const Runs *runs) noexcept nogil:
    return <size_t>runs.items[runs.n - 1].base + runs.items[runs.n - 1].bytes if runs.n > 0 else 0


cdef int append_run(StateData *state, int32_t i, const Run *run) noexcept nogil:
    """A longer table takes the place of the one that others may be looking at."""
    cdef Runs *old = state.runs[i]
    cdef Runs *grown = <Runs *>malloc(sizeof(Runs) + old.n * sizeof(Run))
    if grown == NULL:
        return REFUSED
    memcpy(grown, old, sizeof(Runs) + max(old.n - 1, 0) * sizeof(Run))
    grown.before = old
    if old.n > 0 and end_of_last(old) == <size_t>run.base and old.items[old.n - 1].piece == run.piece:
        grown.items[old.n - 1].units += run.units
        grown.items[old.n - 1].bytes += run.bytes
    else:
        grown.items[old.n] = run[0]
        grown.n = old.n + 1
    store_u64(<uint64_t *>&state.runs[i], <uint64_t>grown)
    return OK


cdef void give_memory(StateData *state) noexcept nogil:
    """And there are no units any more: no address is formed in it."""
    cdef ImageData *image = <ImageData *>state.image
    cdef int32_t i, r
    for i in range(state.layout.n_parts if image.bytes > 0 else 0):
        for r in range(state.runs[i].n if state.runs[i] != NULL else 0):
            give_range(image, <size_t>state.runs[i].items[r].base, state.runs[i].items[r].bytes)
        store_i64(&state.places[i].units, 0)
        if state.runs[i] != NULL:
            store_i32(&state.runs[i].n, 0)
    if image.block.bytes > 0:
        give_range(image, image.block.start, image.block.bytes)
    image.bytes = image.block.bytes = 0


cdef void give_range(ImageData *image, size_t start, size_t bytes) noexcept nogil:
    if image.scrub:
        memset(<void *>start, 0, bytes)
    arena_give(image.arena, start, bytes)


# ---- what others see

cdef int image_blob(StateData *state, const void *bytes, size_t n, Error *error) noexcept nogil:
    cdef ImageData *image = <ImageData *>state.image
    cdef Blob *blob
    cdef Blob *old
    cdef int status
    if image == NULL:
        return not_an_image(error)
    blob = <Blob *>malloc(sizeof(Blob) + n) if n <= <size_t>INT64_MAX - sizeof(Blob) else NULL
    if blob == NULL:
        return outcome(error, REFUSED, REASON_MEMORY, "no host memory for a blob of %zu bytes", n)
    blob.references, blob.n = 1, n
    if n > 0:
        memcpy(blob.bytes, bytes, n)
    status = take_word(state, "blob", error)
    if status != OK:
        free(blob)
        return status
    pthread_mutex_lock(&the_tables().lock)
    old, image.coming = image.coming, blob
    pthread_mutex_unlock(&the_tables().lock)
    blob_drop(old)
    give_word(state)
    return OK


cdef Blob *image_shown(StateData *state) noexcept nogil:
    cdef bint locked = lock_unless_hook()
    cdef Blob *blob = (<ImageData *>state.image).blob
    if blob != NULL:
        add_i64(&blob.references, 1)
    if locked:
        pthread_mutex_unlock(&the_tables().lock)
    return blob


cdef void blob_drop(Blob *blob) noexcept nogil:
    if blob != NULL and add_i64(&blob.references, -1) == 1:
        free(blob)


cdef bint image_marks(StateData *state, int64_t *marks) noexcept nogil:
    cdef bint locked = lock_unless_hook()
    cdef bint visible = image_visible(state)
    if visible:
        least_marks(state, marks)
    if locked:
        pthread_mutex_unlock(&the_tables().lock)
    return visible


cdef bint image_visible(const StateData *state) noexcept nogil:
    return load_i32(&state.visibility) == VISIBLE and load_i32(&state.invalid) == 0


cdef void least_marks(const StateData *state, int64_t *marks) noexcept nogil:
    cdef const ImageData *image = <const ImageData *>state.image
    cdef const PartSpec *part
    cdef int32_t i, m
    for m in range(state.layout.n_marks):
        marks[m] = INT64_MAX
    for i in range(state.layout.n_parts):
        part = &state.layout.parts[i]
        if image.banks[part.group] != 0:
            marks[part.growth.mark] = min(marks[part.growth.mark], image.upto[part.group][part.growth.mark])
    for m in range(state.layout.n_marks):
        if marks[m] == INT64_MAX:
            marks[m] = 0


cdef bint lock_unless_hook() noexcept nogil:
    """The copier's lock, which the thread of a hook has already."""
    if in_hook():
        return False
    pthread_mutex_lock(&the_tables().lock)
    return True


cdef int image_publish(StateData *state, uint64_t generation, Error *error) noexcept nogil:
    cdef int status = take_word(state, "publish", error) if state.image != NULL else not_an_image(error)
    if status != OK:
        return status
    pthread_mutex_lock(&the_tables().lock)
    status = check_landed(state, generation, error)
    if status == OK:
        show(state)
    pthread_mutex_unlock(&the_tables().lock)
    give_word(state)
    return status


cdef int check_landed(StateData *state, uint64_t generation, Error *error) noexcept nogil:
    cdef uint64_t found
    sweep(the_tables())
    found = load_u64(&state.generation)
    if load_i32(&state.holds) != 0:
        return AGAIN
    if load_i32(&state.invalid):
        return outcome(error, REFUSED, REASON_INVALID, "the image is INVALID: its last copy failed and it was not reset")
    if not (<ImageData *>state.image).landed:
        return outcome(error, REFUSED, REASON_INVALID, "nothing was copied into the image since it was made or reset")
    if generation != 0 and generation != found:
        error.wanted, error.found = <int64_t>generation, <int64_t>found
        return outcome(error, REFUSED, REASON_GENERATION, "the image has generation %ld, %ld was named: it was written since",
                       error.found, error.wanted)
    return OK


cdef void show(StateData *state) noexcept nogil:
    cdef ImageData *image = <ImageData *>state.image
    if image.coming != NULL:
        blob_drop(image.blob)
        image.blob, image.coming = image.coming, NULL
    store_i32(&state.visibility, VISIBLE)


cdef int image_discard(StateData *state, Error *error) noexcept nogil:
    cdef int status = take_word(state, "discard", error) if state.image != NULL else not_an_image(error)
    if status != OK:
        return status
    pthread_mutex_lock(&the_tables().lock)
    sweep(the_tables())
    if load_i32(&state.holds) != 0:
        error.found = load_i32(&state.holds)
        status = outcome(error, REFUSED, REASON_BUSY, "the image is in use by %ld tickets: wait for them first", error.found)
    else:
        store_i32(&state.visibility, DISCARDED)
        drop_blobs(<ImageData *>state.image)
    pthread_mutex_unlock(&the_tables().lock)
    if status == OK:            # no submit takes it any more
        lineage_reset(state.lineage)
        give_memory(state)
    give_word(state)
    return status


cdef void image_written(StateData *state, const Request *request) noexcept nogil:
    cdef ImageData *image = <ImageData *>state.image
    cdef const PartSpec *part
    cdef int32_t i
    for i in range(state.layout.n_parts):
        part = &state.layout.parts[i]
        if moves(request, part.group):
            image.upto[part.group][part.growth.mark] = request.upto[part.growth.mark]
            image.banks[part.group] |= <uint64_t>1 << (request.dst_bank[part.group] if request.dst_bank != NULL else 0)
    image.landed = True
    store_i32(&state.visibility, UNPUBLISHED)


cdef int image_writable(const StateData *state, const Request *request, Error *error) noexcept nogil:
    cdef const ImageData *image = <const ImageData *>state.image
    cdef const PartSpec *part
    cdef int32_t i, g, m
    if load_i32(&state.visibility) == DISCARDED:
        return outcome(error, REFUSED, REASON_CLOSED, "the target is an image that was discarded")
    for i in range(state.layout.n_parts if request.begin != NULL and has_marks(request, state.layout) else 0):
        part = &state.layout.parts[i]
        g, m = part.group, part.growth.mark
        if moves(request, g) and request.begin[m] > image.upto[g][m]:
            error.wanted, error.found = request.begin[m], image.upto[g][m]
            return outcome(error, REFUSED, REASON_MARK, "group %d, mark %d: begin is %ld, but the image has what was copied into it up to "
                           "%ld", g, m, error.wanted, error.found)
    return OK


cdef inline bint moves(const Request *request, int32_t group) noexcept nogil:
    return request.groups == 0 or (request.groups >> group) & 1


cdef inline bint has_marks(const Request *request, const LayoutData *layout) noexcept nogil:
    """Else the request is refused later."""
    return request.upto != NULL and request.n_marks == <uint32_t>layout.n_marks


cdef int image_readable(const StateData *state, const PlanData *plan, const Request *request, Error *error) noexcept nogil:
    cdef int32_t i, visibility = load_i32(&state.visibility)
    if visibility != VISIBLE:
        return outcome(error, REFUSED, REASON_CLOSED if visibility == DISCARDED else REASON_INVALID, "the image %s",
                       <const char *>"was discarded" if visibility == DISCARDED else
                       <const char *>"is not published: publish it once its copy has landed")
    for i in range(state.layout.n_parts):
        if (plan.parts[i].source == state and moves(request, state.layout.parts[i].group)
                and part_readable(state, &state.layout.parts[i], request, error) != OK):
            return REFUSED
    return OK


cdef int part_readable(const StateData *state, const PartSpec *part, const Request *request, Error *error) noexcept nogil:
    cdef const ImageData *image = <const ImageData *>state.image
    cdef int32_t g = part.group, m = part.growth.mark
    cdef int64_t bank = request.src_bank[g] if request.src_bank != NULL else 0
    if not 0 <= bank < MAX_IMAGE_BANKS or not (image.banks[g] >> bank) & 1:
        error.wanted = bank
        return outcome(error, REFUSED, REASON_BANK, "group %d: nothing was copied into bank %ld of the image", g, bank)
    if has_marks(request, state.layout) and request.upto[m] > image.upto[g][m]:
        error.wanted, error.found = request.upto[m], image.upto[g][m]
        return outcome(error, REFUSED, REASON_MARK, "group %d, mark %d: %ld asked, the image is published up to %ld", g, m, error.wanted,
                       error.found)
    return OK


# ---- helpers

cdef int not_an_image(Error *error) noexcept nogil:
    return outcome(error, REFUSED, REASON_PLACE, "the state is not an image")


cdef int check_marks(const StateData *state, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef uint64_t i
    if state.image == NULL:
        return not_an_image(error)
    if marks == NULL or n != <uint64_t>state.layout.n_marks:
        error.wanted, error.found = state.layout.n_marks, n
        return outcome(error, REFUSED, REASON_MARK, "%lu marks given, the layout has %d", n, state.layout.n_marks)
    for i in range(n):
        if not 0 <= marks[i] < <int64_t>1 << 62:
            error.found = marks[i]
            return outcome(error, REFUSED, REASON_MARK, "mark %lu is %ld; 0 <= mark < 2^62 is needed", i, marks[i])
    return OK


cdef int take_word(StateData *state, const char *call, Error *error) noexcept nogil:
    cdef ImageData *image = <ImageData *>state.image
    cdef int status = check_caller(image.arena, call, error)
    if status != OK:
        return status
    if not swap_i32(&image.word, 0, 1):
        return outcome(error, REFUSED, REASON_BUSY, "another thread changes the image at the same time")
    status = check_kept(state, error)
    if status != OK:
        give_word(state)
    return status


cdef inline void give_word(StateData *state) noexcept nogil:
    store_i32(&(<ImageData *>state.image).word, 0)


cdef int check_kept(const StateData *state, Error *error) noexcept nogil:
    if load_i32(&state.visibility) == DISCARDED:
        return outcome(error, REFUSED, REASON_CLOSED, "the image was discarded")
    return OK


cdef int check_caller(const ArenaData *arena, const char *call, Error *error) noexcept nogil:
    """In a hook the copier's lock is held, and a forked child may find any lock held by a thread that is not there."""
    if in_hook():
        return of_hook(call, error)
    if arena.pid != getpid():
        return outcome(error, REFUSED, REASON_CLOSED, "%s: this process is a fork of the one that made the arena", call)
    return OK
