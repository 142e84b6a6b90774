"""States. The C side is declared in states.pxd."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free, qsort

from strata_copy.abi cimport (
    CONST, DEVICE, OK, PAGEABLE, PINNED, REASON_MEMORY, REASON_OVERLAP, REASON_PLACE, REASON_UNSUPPORTED, REFUSED, STATE, Error,
    PartSpec, PlaceSpec,
)
from strata_copy.atomics cimport add_i64, load_u64
from strata_copy.cudart cimport (
    Guard, cudaMemoryTypeDevice, cudaMemoryTypeHost, cudaMemoryTypeUnregistered, cudaPointerAttributes, cuda_failed,
    guard_enter, guard_leave, outcome, rt,
)
from strata_copy.layout cimport LayoutData, layout_drop, layout_hold
from strata_copy.lineage cimport lineage_free, lineage_new


cdef void state_hold(StateData *state) noexcept nogil:
    add_i64(&state.references, 1)


cdef void state_drop(StateData *state) noexcept nogil:
    if state == NULL or add_i64(&state.references, -1) > 1:
        return
    if state.release != NULL:
        state.release(state)
    layout_drop(state.layout)
    lineage_free(state.lineage)
    free(state.places)
    free(state.piece)
    free(state.extremes)
    free(state)


cdef void place_run(const StateData *state, int32_t part, int64_t bank, int64_t unit, char **address, int64_t *units_left,
                    size_t *piece) noexcept nogil:
    cdef const PlaceSpec *place = &state.places[part]
    cdef const Runs *runs = load_runs(state, part) if state.runs != NULL else NULL
    cdef int64_t sinks = state.layout.parts[part].growth.sinks
    if runs != NULL:
        chunk_run(runs, place.stride, state.layout.parts[part].rep, unit, address, units_left, piece)
        return
    units_left[0] = place.units - unit
    if place.ring > 0 and unit < sinks:
        units_left[0] = sinks - unit
    elif place.ring > 0:
        unit = sinks + (unit - sinks) % place.ring
        units_left[0] = sinks + place.ring - unit
    address[0] = <char *>place.base + bank * place.bank_stride + unit * place.stride
    piece[0] = state.piece[part]


cdef inline const Runs *load_runs(const StateData *state, int32_t part) noexcept nogil:
    return <const Runs *>load_u64(<const uint64_t *>&state.runs[part])


cdef void chunk_run(const Runs *runs, int64_t stride, int64_t rep, int64_t unit, char **address, int64_t *units_left,
                    size_t *piece) noexcept nogil:
    """Units of one run each follow each other through its chunks; those of several only within a chunk."""
    cdef int32_t low = 0, high = runs.n, middle
    cdef const Run *run
    cdef int64_t within
    while high - low > 1:
        middle = (low + high) // 2
        if runs.items[middle].first <= unit:
            low = middle
        else:
            high = middle
    run = &runs.items[low]
    within = (unit - run.first) % runs.chunk_units
    address[0] = run.base + (unit - run.first) // runs.chunk_units * runs.chunk_bytes + within * stride
    units_left[0] = run.first + run.units - unit if rep == 1 else runs.chunk_units - within
    piece[0] = run.piece


cdef int check_apart(const StateData *a, const StateData *b, Error *error) noexcept nogil:
    """A sweep over both lists of extremes, which are sorted: only places whose extremes meet are looked at closely."""
    cdef int32_t i, j, from_ = 0
    cdef const Extreme *x
    cdef const Extreme *y
    for i in range(a.layout.n_parts):
        x = &a.extremes[i]
        while from_ < b.layout.n_parts and ends_before(b, from_, x.start):
            from_ += 1
        for j in range(i + 1 if a == b else from_, b.layout.n_parts):
            y = &b.extremes[j]
            if y.start >= x.end:
                break
            if y.end <= x.start or x.start == x.end or y.start == y.end or interleaved(a, x.part, b, y.part):
                continue
            error.part = x.part
            error.layer = a.layout.parts[x.part].layer
            error.wanted, error.found = <int64_t>x.start, <int64_t>y.start
            return outcome(error, REFUSED, REASON_OVERLAP,
                           "part '%.32s' of layer %d shares bytes with '%.32s' of layer %d: [%#zx, %#zx) and [%#zx, %#zx)",
                           a.layout.parts[x.part].name, a.layout.parts[x.part].layer,
                           b.layout.parts[y.part].name, b.layout.parts[y.part].layer, x.start, x.end, y.start, y.end)
    return OK


cdef inline bint ends_before(const StateData *state, int32_t i, size_t start) noexcept nogil:
    return state.extremes[i].end <= start


# How a place repeats: `count` times, `stride` bytes apart. A dense place has one block and no repeat.
cdef struct Repeat:
    int64_t count, stride


cdef void rising(const PlaceSpec *place, const PartSpec *part, Repeat *levels) noexcept nogil:
    """The three repeats of a place (units, runs of a unit, banks), the smallest stride first."""
    cdef Repeat swap
    cdef int i, j
    levels[0].count, levels[0].stride = place.units, place.stride
    levels[1].count, levels[1].stride = part.rep, place.rep_stride
    levels[2].count, levels[2].stride = place.banks, place.bank_stride
    for i in range(2):
        for j in range(2 - i):
            if levels[j].stride > levels[j + 1].stride:
                swap = levels[j]
                levels[j] = levels[j + 1]
                levels[j + 1] = swap


cdef int64_t repeats(const StateData *state, int32_t part, Repeat *outer) noexcept nogil:
    """The repeats of a place by falling stride, those that follow each other without a gap folded away, in outer[0..3). Returns the
    bytes of the block that repeats."""
    cdef const PlaceSpec *place = &state.places[part]
    cdef const PartSpec *spec = &state.layout.parts[part]
    cdef int64_t block = spec.growth.unit_bytes
    cdef Repeat levels[3]
    cdef Repeat swap
    cdef int i, n = 0
    rising(place, spec, levels)
    for i in range(3):
        if levels[i].count > 1 and levels[i].stride == block:
            block *= levels[i].count
        elif levels[i].count > 1:
            outer[n] = levels[i]
            n += 1
    for i in range(n, 3):
        outer[i].count, outer[i].stride = 1, 0
    if n > 1:       # the largest stride first
        swap = outer[0]
        outer[0] = outer[n - 1]
        outer[n - 1] = swap
    return block


cdef bint interleaved(const StateData *a, int32_t part_a, const StateData *b, int32_t part_b) noexcept nogil:
    """True where two places with meeting extremes still share no byte: their strides are equal, and within a stride the blocks lie
    beside each other. Other ways of interleaving are taken for an overlap."""
    cdef Repeat outer_a[3]
    cdef Repeat outer_b[3]
    cdef int64_t block_a = repeats(a, part_a, outer_a)
    cdef int64_t block_b = repeats(b, part_b, outer_b)
    cdef int64_t stride = outer_a[0].stride, offset
    cdef int level
    if stride == 0 or stride != outer_b[0].stride:
        return False
    for level in range(1, 3):
        if outer_a[level].count > 1:
            block_a += (outer_a[level].count - 1) * outer_a[level].stride
        if outer_b[level].count > 1:
            block_b += (outer_b[level].count - 1) * outer_b[level].stride
    offset = (<int64_t>(<size_t>b.places[part_b].base % <size_t>stride) -
              <int64_t>(<size_t>a.places[part_a].base % <size_t>stride))
    if offset < 0:
        offset += stride
    return offset >= block_a and offset + block_b <= stride


cdef StateData *state_new(LayoutData *layout, Error *error) noexcept nogil:
    cdef StateData *state = <StateData *>calloc(1, sizeof(StateData))
    if state != NULL:
        state.references = 1
        state.layout = layout
        layout_hold(layout)
        state.places = <PlaceSpec *>calloc(layout.n_parts, sizeof(PlaceSpec))
        state.piece = <size_t *>calloc(layout.n_parts, sizeof(size_t))
        state.extremes = <Extreme *>calloc(layout.n_parts, sizeof(Extreme))
        if state.places != NULL and state.piece != NULL and state.extremes != NULL:
            state.generation = 1
            return state
        state_drop(state)
    outcome(error, REFUSED, REASON_MEMORY, "no host memory for a state of %d parts", layout.n_parts)
    return NULL


cdef int check_places(StateData *state, Error *error) noexcept nogil:
    cdef Guard guard
    cdef int32_t i
    cdef int status = guard_enter(&guard, error)
    if status == OK:
        for i in range(state.layout.n_parts):
            error.part, error.layer = i, state.layout.parts[i].layer
            status = check_place(state, i, &guard, error)
            if status != OK:
                break
        guard_leave(&guard, status, error)
    if status != OK:
        return status
    error.part = error.layer = -1
    qsort(state.extremes, state.layout.n_parts, sizeof(Extreme), by_start)
    status = check_apart(state, state, error)
    return status if status != OK else begin_lineage(state, error)


cdef int begin_lineage(StateData *state, Error *error) noexcept nogil:
    """Once the places are known: running state is followed in each bank."""
    state.lineage = lineage_new(state.layout, state.places)
    if state.lineage == NULL:
        return outcome(error, REFUSED, REASON_MEMORY, "no host memory for the lineage of %d parts", state.layout.n_parts)
    return OK


cdef int by_start(const void *a, const void *b) noexcept nogil:
    cdef size_t x = (<const Extreme *>a).start, y = (<const Extreme *>b).start
    return -1 if x < y else x > y


cdef int check_place(StateData *state, int32_t i, const Guard *guard, Error *error) noexcept nogil:
    cdef const PlaceSpec *place = &state.places[i]
    cdef const PartSpec *part = &state.layout.parts[i]
    cdef int64_t bytes = place_span(place, part)
    cdef size_t start = <size_t>place.base
    cdef int status
    if place.ring < 0 or place.page_group != -1:
        return outcome(error, REFUSED, REASON_UNSUPPORTED, "part '%.32s' of layer %d: rolled rows and pages are not done by this release",
                       part.name, part.layer)
    if place.ring > 0 and (part.growth.rule == CONST or part.growth.rule == STATE or part.growth.sinks > place.units - place.ring):
        error.wanted, error.found = part.growth.sinks + place.ring, place.units
        return outcome(error, REFUSED, REASON_PLACE, "part '%.32s' of layer %d: a ring of %ld units behind %d sinks; the place has %ld, "
                       "and only parts that grow lie in rings", part.name, part.layer, place.ring, part.growth.sinks, place.units)
    if bytes < 0:
        error.wanted, error.found = part.growth.unit_bytes, place.stride
        return outcome(error, REFUSED, REASON_PLACE, "part '%.32s' of layer %d: units %ld, stride %ld, rep_stride %ld, banks %ld, "
                       "bank_stride %ld do not hold %ld runs of %ld bytes side by side", part.name, part.layer, place.units,
                       place.stride, place.rep_stride, place.banks, place.bank_stride, part.rep, part.growth.unit_bytes)
    if place.units > 0 and (start == 0 or start + <size_t>bytes < start):
        return outcome(error, REFUSED, REASON_PLACE, "part '%.32s' of layer %d: no memory at %#zx", part.name, part.layer, start)
    state.extremes[i].start, state.extremes[i].end, state.extremes[i].part = start, start + bytes, i
    if bytes == 0:
        return OK
    status = check_memory(place, part, start, start, guard, error)
    if status == OK:
        status = check_memory(place, part, start + bytes - 1, start, guard, error)
    if status == OK:
        status = check_piece(state, i, start, bytes, error)
    return status


cdef int64_t place_span(const PlaceSpec *place, const PartSpec *part) noexcept nogil:
    cdef Repeat levels[3]
    cdef int64_t bytes = part.growth.unit_bytes
    cdef int i
    if place.units < 0 or place.banks < 1 or place.stride < 1 or place.rep_stride < 0 or place.bank_stride < 0:
        return -1
    if place.units == 0:
        return 0
    rising(place, part, levels)
    for i in range(3):
        if levels[i].count == 1:
            continue
        if levels[i].stride < bytes or levels[i].stride > (INT64_MAX - bytes) // (levels[i].count - 1):
            return -1
        bytes += (levels[i].count - 1) * levels[i].stride
    return bytes


cdef int check_memory(const PlaceSpec *place, const PartSpec *part, size_t at, size_t start, const Guard *guard,
                      Error *error) noexcept nogil:
    """Whether CUDA says of one byte what the place says."""
    cdef cudaPointerAttributes found
    cdef int wanted = (cudaMemoryTypeDevice if place.kind == DEVICE else
                       cudaMemoryTypeHost if place.kind == PINNED else cudaMemoryTypeUnregistered)
    cdef int code
    if place.kind != DEVICE and place.kind != PINNED and place.kind != PAGEABLE:
        return outcome(error, REFUSED, REASON_PLACE, "kind %d of a place; may be 0 to 2", place.kind)
    code = rt.cudaPointerGetAttributes(&found, <void *>at)
    if code != 0:
        return cuda_failed(REFUSED, code, "cudaPointerGetAttributes", place.device, guard, error)
    if <int>found.type == wanted and (place.kind != DEVICE or found.device == place.device):
        return OK
    error.wanted, error.found = wanted, found.type
    return outcome(error, REFUSED, REASON_PLACE,
                   "part '%.32s' of layer %d: byte %zu should be %s memory of device %d, CUDA says %s of device %d", part.name, part.layer,
                   at - start, kind_name(place.kind), place.device, memory_name(found.type), found.device)


cdef int check_piece(StateData *state, int32_t i, size_t start, int64_t bytes, Error *error) noexcept nogil:
    """Notes the allocation that holds the place. A copy may not leave the registration that it starts in (CUDA refuses it), so host
    memory must lie in one."""
    cdef void *piece = NULL
    cdef size_t size = 0
    if state.places[i].kind == PAGEABLE or rt.pointer_range(<void *>start, &piece, &size) != 0:
        return OK
    if start + <size_t>bytes <= <size_t>piece + size:
        state.piece[i] = <size_t>piece
        return OK
    if state.places[i].kind == DEVICE:      # mapped from several allocations: one address range for every copy
        return OK
    error.wanted, error.found = bytes, <int64_t>(<size_t>piece + size - start)
    return outcome(error, REFUSED, REASON_PLACE, "part '%.32s' of layer %d: %ld bytes of pinned memory, but the registration that "
                   "holds them ends after %ld", state.layout.parts[i].name, state.layout.parts[i].layer, error.wanted, error.found)


cdef const char *kind_name(int kind) noexcept nogil:
    return "device" if kind == DEVICE else "pinned" if kind == PINNED else "pageable"


cdef const char *memory_name(int type_) noexcept nogil:
    return ("device memory" if type_ == cudaMemoryTypeDevice else "pinned memory" if type_ == cudaMemoryTypeHost else
            "pageable memory" if type_ == cudaMemoryTypeUnregistered else "managed memory")
