"""Plans. The C side is declared in plan.pxd; the growth formulas are in layout.pyx, places in states.pyx."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp

from strata_copy.abi cimport (
    CONST, DEVICE, LINEAR, OK, PAGEABLE, PINNED, REASON_BANK, REASON_CAPACITY, REASON_GROUP, REASON_LAYOUT, REASON_MARK, REASON_MEMORY,
    REASON_REQUEST, REASON_SAME_STATE, REASON_UNSUPPORTED, REFUSED, STATE, WINDOW, Error, Growth, PartSpec, PlaceSpec, Request,
)
from strata_copy.atomics cimport add_i64
from strata_copy.cudart cimport outcome
from strata_copy.kinship cimport first_to_move, know, known_end
from strata_copy.layout cimport LayoutData, live_at, settled_at, units_at
from strata_copy.lineage cimport Known
from strata_copy.states cimport StateData, check_apart, one_address, place_run, state_drop, state_hold


cdef PlanData *plan_new(StateData **sources, int32_t n_sources, StateData *target, const int32_t *source_of_group,
                        Error *error) noexcept nogil:
    """A plan, or NULL with the error filled: REFUSED where a layout differs, states overlap, or a route is missing."""
    cdef PlanData *plan = <PlanData *>calloc(1, sizeof(PlanData))
    cdef int32_t i
    if plan != NULL:
        plan.parts = <PartRoute *>calloc(target.layout.n_parts, sizeof(PartRoute))
        plan.bundles = <Bundle *>calloc(2 * target.layout.n_parts, sizeof(Bundle))
        plan.part_bundle = <int32_t *>calloc(target.layout.n_parts, sizeof(int32_t))
        plan.patch_bundle = <int32_t *>calloc(target.layout.n_parts, sizeof(int32_t))
        plan.early = <uint64_t *>calloc(target.layout.n_layers, MAX_DEVICES * sizeof(uint64_t))
    if (plan == NULL or plan.parts == NULL or plan.bundles == NULL or plan.part_bundle == NULL or plan.patch_bundle == NULL
            or plan.early == NULL):
        free_plan(plan)
        outcome(error, REFUSED, REASON_MEMORY, "no host memory for a plan of %d parts", target.layout.n_parts)
        return NULL
    plan.references = 1
    plan.target = target
    state_hold(target)
    for i in range(n_sources):
        plan.sources[i] = sources[i]
        state_hold(sources[i])
    plan.n_sources = n_sources
    if check_states(plan, error) == OK and choose_routes(plan, source_of_group, error) == OK:
        return plan
    plan_drop(plan)
    return NULL


cdef void plan_hold(PlanData *plan) noexcept nogil:
    add_i64(&plan.references, 1)


cdef void plan_drop(PlanData *plan) noexcept nogil:
    cdef int32_t i
    if plan == NULL or add_i64(&plan.references, -1) > 1:
        return
    for i in range(plan.n_sources):
        state_drop(plan.sources[i])
    state_drop(plan.target)
    free_plan(plan)


cdef int units_to_move(const PlanData *plan, const Request *request, Units *units, int64_t *bytes, Known *known,
                       Error *error) noexcept nogil:
    cdef int status = units_asked(plan, request, units, bytes, known, error)
    return status if status != OK else check_room(plan, units, error)     # last, for more of it may be had


cdef int units_asked(const PlanData *plan, const Request *request, Units *units, int64_t *bytes, Known *known,
                     Error *error) noexcept nogil:
    cdef int status = check_request(plan.target.layout, request, error)
    if status != OK:
        return status
    know(plan, request, known)
    status = find_units(plan, request, units, known, error)
    known_end(plan)
    if status == OK:
        keep_together(plan, units)
        bytes[0] = count_bytes(plan.target.layout, units)
    return status


cdef int find_units(const PlanData *plan, const Request *request, Units *units, const Known *known, Error *error) noexcept nogil:
    cdef const LayoutData *layout = plan.target.layout
    cdef const PartSpec *part
    cdef uint64_t src_used = 0, dst_used = 0
    cdef bint banked = request.src_bank != NULL or request.dst_bank != NULL     # bank 0 is everywhere
    cdef int32_t i
    cdef int status
    for i in range(layout.n_parts):
        part = &layout.parts[i]
        units[i].first = units[i].end = units[i].sinks = 0
        if request.groups != 0 and not (request.groups >> part.group) & 1:
            continue
        error.part, error.layer = i, part.layer
        if banked:
            src_used |= <uint64_t>has_banks(plan.parts[i].source, i) << part.group
            dst_used |= <uint64_t>has_banks(plan.target, i) << part.group
            status = check_bank(plan.parts[i].source, i, request.src_bank, "source", error)
            if status == OK:
                status = check_bank(plan.target, i, request.dst_bank, "target", error)
            if status != OK:
                return status
        live_units(&part.growth, request.upto, &units[i])
        status = check_capacity(plan.parts[i].source, i, &units[i], "source", error)
        if status == OK and plan.target.image == NULL:
            status = check_capacity(plan.target, i, &units[i], "target", error)
        if status != OK:
            return status
        if not moves_whole(plan, i):
            units[i].first = (first_unit(part, request.begin, units[i].end) if request.begin != NULL else
                              first_to_move(known, plan, request, i, units[i].end))
    error.part = error.layer = -1
    status = check_banks_used(layout, request, request.src_bank, src_used, "source", error)
    return status if status != OK else check_banks_used(layout, request, request.dst_bank, dst_used, "target", error)


cdef int check_room(const PlanData *plan, const Units *units, Error *error) noexcept nogil:
    """Of a target that is an image."""
    cdef int32_t i
    cdef int status
    for i in range(plan.target.layout.n_parts if plan.target.image != NULL else 0):
        error.part, error.layer = i, plan.target.layout.parts[i].layer
        status = check_capacity(plan.target, i, &units[i], "target", error)
        if status != OK:
            return status
    error.part = error.layer = -1
    return OK


cdef void keep_together(const PlanData *plan, Units *units) noexcept nogil:
    """Parts of a bundle move together or not at all: where one has to, all do."""
    cdef int32_t i, bundle
    for i in range(plan.target.layout.n_parts):
        bundle = plan.part_bundle[i]
        if in_bundle(plan, bundle) and units[i].first < units[i].end:
            units[plan.bundles[bundle].part].first = units[i].first
    for i in range(plan.target.layout.n_parts):
        if in_bundle(plan, plan.part_bundle[i]):
            units[i].first = units[plan.bundles[plan.part_bundle[i]].part].first


cdef int64_t count_bytes(const LayoutData *layout, const Units *units) noexcept nogil:
    cdef int64_t bytes = 0
    cdef int32_t i
    for i in range(layout.n_parts):
        bytes += bytes_of(&layout.parts[i], &units[i])
    return bytes


cdef void plan_settle(PlanData *plan) noexcept nogil:
    cdef const LayoutData *layout = plan.target.layout
    cdef int32_t layer, k, part
    choose_bundles(plan)
    plan.n_events = count_ways(plan)
    for layer in range(layout.n_layers):
        for k in range(layout.first[layer], layout.first[layer + 1]):
            part = layout.order[k]
            if in_bundle(plan, plan.part_bundle[part]) or in_bundle(plan, plan.patch_bundle[part]):
                plan.early[layer * MAX_DEVICES + plan.parts[part].device_number] |= <uint64_t>1 << plan.parts[part].lane


cdef bint moves_early(const PlanData *plan, int32_t part) noexcept nogil:
    return in_bundle(plan, plan.part_bundle[part])


cdef int emit_bundle(Emission *emission, const PlanData *plan, const Request *request, const Bundle *bundle,
                     const Units *units) noexcept nogil:
    """Hands a bundle to the sink: a row for each of its parts. All of them move, or none: their growth is one."""
    cdef const LayoutData *layout = plan.target.layout
    cdef const PartSpec *part = &layout.parts[bundle.part]
    cdef int32_t source_part = bundle.part
    cdef int64_t target_unit = 0, left
    cdef size_t source_piece, target_piece
    cdef char *address
    cdef Extent extent
    if bundle.count == 1 or units.first == units.end:
        return OK
    if bundle.patches:
        source_part, target_unit = layout.patches[layout.patch_of[bundle.part]].source_part, units.end - 1
    place_of(plan, request, source_part, True, 0, &address, &left, &source_piece)
    extent.source = address
    place_of(plan, request, bundle.part, False, target_unit, &extent.target, &left, &target_piece)
    extent.width, extent.rows = part.growth.unit_bytes, bundle.count
    extent.source_pitch, extent.target_pitch = bundle.source_pitch, bundle.target_pitch
    return emit(emission, bundle.part, &extent, source_piece, target_piece)


cdef int emit_part(Emission *emission, const PlanData *plan, const Request *request, int32_t part,
                   const Units *units) noexcept nogil:
    """Hands the units of one part to the sink, and its patch behind them. The patched unit itself is copied once, by the patch."""
    cdef const LayoutData *layout = plan.target.layout
    cdef int32_t patch = layout.patch_of[part]
    cdef int64_t end = units.end
    cdef int status = OK
    if patch >= 0 and end > units.first:
        end -= 1
    if moves_early(plan, part):
        return OK
    if units.sinks > 0:
        status = emit_units(emission, plan, request, part, 0, part, 0, units.sinks)
    if status == OK and units.first < end:
        status = emit_units(emission, plan, request, part, units.first, part, units.first, end - units.first)
    if status == OK and end < units.end and not in_bundle(plan, plan.patch_bundle[part]):
        status = emit_units(emission, plan, request, layout.patches[patch].source_part, 0, part, end, 1)
    return status


cdef int emit_unmoved(Emission *emission, const PlanData *plan, const Request *request, int32_t part,
                      const Units *units) noexcept nogil:
    cdef const LayoutData *layout = plan.target.layout
    cdef int32_t patch = layout.patch_of[part]
    cdef bint patched = patch >= 0 and units.end > 0 and units.first == units.end
    cdef int status
    if units.first == 0 or moves_whole(plan, part):
        return OK
    status = emit_units(emission, plan, request, part, 0, part, 0, units.first - patched)
    if status == OK and patched:
        status = emit_units(emission, plan, request, layout.patches[patch].source_part, 0, part, units.end - 1, 1)
    return status


cdef int emit_end(Emission *emission) noexcept nogil:
    """Lets the pending extent go: the next one has another way."""
    cdef Extent extent = emission.pending
    if extent.rows == 0:
        return OK
    emission.pending.rows = 0
    return emission.take(emission.sink, &extent)


cdef int emit_units(Emission *emission, const PlanData *plan, const Request *request, int32_t source_part, int64_t source_unit,
                    int32_t target_part, int64_t target_unit, int64_t count) noexcept nogil:
    cdef const PlaceSpec *from_ = &plan.parts[source_part].source.places[source_part]
    cdef const PlaceSpec *to = &plan.target.places[target_part]
    cdef const PartSpec *part = &plan.target.layout.parts[target_part]
    cdef int64_t unit_bytes = part.growth.unit_bytes
    cdef int64_t source_left, target_left, n, _run
    cdef size_t source_piece, target_piece
    cdef char *source_address
    cdef char *target_address
    cdef bint dense = from_.stride == unit_bytes and to.stride == unit_bytes
    cdef Extent extent
    cdef int status
    while count > 0:
        place_of(plan, request, source_part, True, source_unit, &source_address, &source_left, &source_piece)
        place_of(plan, request, target_part, False, target_unit, &target_address, &target_left, &target_piece)
        n = min(count, source_left, target_left)
        extent.source, extent.target = source_address, target_address
        if dense:       # one row for each run of a unit
            extent.width, extent.rows = n * unit_bytes, part.rep
            extent.source_pitch, extent.target_pitch = from_.rep_stride, to.rep_stride
            status = emit(emission, target_part, &extent, source_piece, target_piece)
            if status != OK:
                return status
        else:           # one row for each unit, run after run
            extent.width, extent.rows = unit_bytes, n
            extent.source_pitch, extent.target_pitch = from_.stride, to.stride
            for _run in range(part.rep):
                status = emit(emission, target_part, &extent, source_piece, target_piece)
                if status != OK:
                    return status
                extent.source += from_.rep_stride
                extent.target += to.rep_stride
        count -= n
        source_unit += n
        target_unit += n
    return OK


cdef void place_of(const PlanData *plan, const Request *request, int32_t part, bint source, int64_t unit, char **address,
                   int64_t *left, size_t *piece) noexcept nogil:
    cdef const StateData *state = plan.parts[part].source if source else plan.target
    cdef const int64_t *banks = request.src_bank if source else request.dst_bank
    place_run(state, part, bank_of(banks, &plan.target.layout.parts[part], &state.places[part]), unit, address, left, piece)


cdef int emit(Emission *emission, int32_t part, const Extent *extent, size_t source_piece, size_t target_piece) noexcept nogil:
    """Merges an extent with the pending one where its rows follow that one's rows on both sides, within one allocation on each: a copy
    may not leave the allocation that it starts in."""
    cdef Extent *last = &emission.pending
    cdef int status
    if (last.rows == extent.rows and last.target + last.width == extent.target and last.source + last.width == extent.source
            and source_piece != 0 and source_piece == emission.source_piece
            and target_piece != 0 and target_piece == emission.target_piece
            and (last.rows == 1 or (last.source_pitch == extent.source_pitch and last.target_pitch == extent.target_pitch
                                    and last.width + extent.width <= min(last.source_pitch, last.target_pitch)))):
        last.width += extent.width
        flatten(last)
        return OK
    status = emit_end(emission)
    last[0], emission.part = extent[0], part
    flatten(last)
    emission.source_piece, emission.target_piece = source_piece, target_piece
    return status


cdef inline void flatten(Extent *extent) noexcept nogil:
    if extent.width == extent.source_pitch and extent.width == extent.target_pitch:
        extent.width, extent.rows = extent.width * extent.rows, 1
    if extent.rows == 1:
        extent.source_pitch = extent.target_pitch = extent.width


cdef inline bint moves_whole(const PlanData *plan, int32_t part) noexcept nogil:
    """Of a window, and into a ring, all that is live moves: what the target's rows of before are nobody has said."""
    return plan.target.layout.parts[part].growth.rule == WINDOW or plan.target.places[part].ring != 0


cdef inline void live_units(const Growth *growth, const int64_t *marks, Units *units) noexcept nogil:
    """What is there at the marks. Sinks that the window still reaches belong to it, and where it is empty they are all that moves."""
    units.end = units_at(growth, marks)
    units.first = live_at(growth, marks)
    if units.first >= units.end:
        units.first, units.end = 0, min(<int64_t>growth.sinks, units.end)
    elif units.first <= growth.sinks:
        units.first = 0
    else:
        units.sinks = growth.sinks


cdef inline int64_t first_unit(const PartSpec *part, const int64_t *begin, int64_t end) noexcept nogil:
    """The first unit that an append after `begin` can have changed. A constant moves with the first token only, running state
    always."""
    cdef int64_t first = 0
    if part.growth.rule == LINEAR:
        first = settled_at(&part.growth, begin)
    elif part.growth.rule == CONST and begin[part.growth.mark] > 0:
        first = 1
    return min(first, end)


cdef int check_request(const LayoutData *layout, const Request *request, Error *error) noexcept nogil:
    cdef uint32_t i
    if request.size != sizeof(Request):
        error.wanted, error.found = sizeof(Request), request.size
        return outcome(error, REFUSED, REASON_REQUEST, "request of %u bytes, %zu expected: make it with request_new, and build "
                       "against the installed strata_copy", request.size, sizeof(Request))
    if request.upto == NULL or request.n_marks != <uint32_t>layout.n_marks:
        error.wanted, error.found = layout.n_marks, request.n_marks
        return outcome(error, REFUSED, REASON_MARK, "%u marks given, the layout has %d", request.n_marks, layout.n_marks)
    for i in range(request.n_marks):
        if not 0 <= request.upto[i] < (<int64_t>1 << 62) or (request.begin != NULL and not 0 <= request.begin[i] <= request.upto[i]):
            error.wanted, error.found = request.upto[i], 0 if request.begin == NULL else request.begin[i]
            return outcome(error, REFUSED, REASON_MARK, "mark %u: begin %ld, upto %ld; 0 <= begin <= upto < 2^62 is needed", i,
                           error.found, error.wanted)
    if request.groups != 0 and layout.n_groups < 64 and request.groups >> layout.n_groups != 0:
        return outcome(error, REFUSED, REASON_GROUP, "groups %#llx, the layout has %d", <unsigned long long>request.groups,
                       layout.n_groups)
    if request.n_page_groups != 0 or request.src_pages != NULL or request.dst_pages != NULL:
        return outcome(error, REFUSED, REASON_UNSUPPORTED, "page tables are not done by this release")
    if (request.priority != 0 and request.priority != -1) or request.bytes_ahead < 0:
        error.wanted, error.found = request.priority, request.bytes_ahead
        return outcome(error, REFUSED, REASON_REQUEST, "priority %d, bytes_ahead %ld; a priority is 0 or -1, bytes_ahead is 0 or more",
                       request.priority, error.found)
    return OK


cdef int check_bank(const StateData *state, int32_t i, const int64_t *banks, const char *side, Error *error) noexcept nogil:
    cdef const PartSpec *part = &state.layout.parts[i]
    cdef int64_t bank = bank_of(banks, part, &state.places[i])
    if 0 <= bank < state.places[i].banks:
        return OK
    error.wanted, error.found = bank, state.places[i].banks
    return outcome(error, REFUSED, REASON_BANK, "part '%.32s' of layer %d: %s bank %ld asked, the place has %ld", part.name, part.layer,
                   side, bank, error.found)


cdef inline bint has_banks(const StateData *state, int32_t i) noexcept nogil:
    return state.places[i].banks > 1 or state.layout.parts[i].growth.rule == STATE


cdef int check_banks_used(const LayoutData *layout, const Request *request, const int64_t *banks, uint64_t used, const char *side,
                          Error *error) noexcept nogil:
    """A bank that is named for a group in which no part has banks would be dropped without a word."""
    cdef int32_t g
    for g in range(layout.n_groups if banks != NULL else 0):
        if banks[g] != 0 and (request.groups == 0 or (request.groups >> g) & 1) and not (used >> g) & 1:
            error.wanted = banks[g]
            return outcome(error, REFUSED, REASON_BANK, "%s bank %ld asked of group %d, in which no part has banks", side, banks[g], g)
    return OK


cdef int check_capacity(const StateData *state, int32_t i, const Units *units, const char *side, Error *error) noexcept nogil:
    """A dense place holds every unit from the first on; a ring those that are live behind the sinks."""
    cdef const PartSpec *part = &state.layout.parts[i]
    cdef const PlaceSpec *place = &state.places[i]
    cdef int64_t needed = units.end, room = place.units
    if place.ring > 0:
        needed, room = units.end - max(units.first, <int64_t>part.growth.sinks), place.ring
    if needed <= room:
        return OK
    error.wanted, error.found = needed, room
    return outcome(error, REFUSED, REASON_CAPACITY, "part '%.32s' of layer %d: %ld units needed, the %s has %ld%s", part.name, part.layer,
                   needed, side, room, " in its ring" if place.ring > 0 else "")


cdef int check_states(const PlanData *plan, Error *error) noexcept nogil:
    cdef int32_t i
    cdef int status
    for i in range(plan.n_sources):
        if plan.sources[i] == plan.target:
            return outcome(error, REFUSED, REASON_SAME_STATE, "source %d is the target", i)
        if memcmp(plan.sources[i].layout.fingerprint, plan.target.layout.fingerprint, 32) != 0:
            return outcome(error, REFUSED, REASON_LAYOUT, "the layouts of source %d and target differ", i)
        status = check_apart(plan.sources[i], plan.target, error)
        if status != OK:
            return status
    return OK


cdef int choose_routes(PlanData *plan, const int32_t *source_of_group, Error *error) noexcept nogil:
    cdef const LayoutData *layout = plan.target.layout
    cdef const PlaceSpec *from_
    cdef const PlaceSpec *to
    cdef PartRoute *part
    cdef int32_t i
    for i in range(layout.n_parts):
        part = &plan.parts[i]
        part.source = plan.sources[0 if source_of_group == NULL else source_of_group[layout.parts[i].group]]
        from_, to = &part.source.places[i], &plan.target.places[i]
        part.device, part.other = to.device if to.kind == DEVICE else from_.device, -1
        if from_.kind == DEVICE and to.kind == DEVICE and from_.device != to.device:
            part.route = ROUTE_PEER         # the copier may not have it: then it is ROUTE_RELAY
            part.device, part.other = from_.device, to.device
        elif from_.kind == DEVICE and to.kind == DEVICE:
            part.route = ROUTE_LOCAL
        elif from_.kind == DEVICE:
            part.route = ROUTE_UNSTAGE if to.kind == PAGEABLE else ROUTE_OUT
        elif to.kind == DEVICE:
            part.route = ROUTE_STAGE if from_.kind == PAGEABLE else ROUTE_IN
        else:
            part.route = ROUTE_RING if from_.kind == PINNED and to.kind == PINNED else ROUTE_HOST
            part.device = max(to.device, from_.device)      # -1: the copier's first
        if part.route == ROUTE_HOST and not (one_address(from_) and one_address(to)):
            error.part, error.layer = i, layout.parts[i].layer
            return outcome(error, REFUSED, REASON_UNSUPPORTED, "part '%.32s' of layer %d goes between pageable and pinned memory that "
                           "devices use by another address, which is not done by this release", layout.parts[i].name, layout.parts[i].layer)
        if layout.patch_of[i] >= 0:
            from_ = &part.source.places[layout.patches[layout.patch_of[i]].source_part]
            if from_.kind == DEVICE and (part.route == ROUTE_STAGE or part.route == ROUTE_HOST):
                error.part, error.layer = i, layout.parts[i].layer
                return outcome(error, REFUSED, REASON_UNSUPPORTED, "part '%.32s' of layer %d comes from or goes to pageable memory, its "
                               "patch from a device, which is not done by this release", layout.parts[i].name, layout.parts[i].layer)
            if (part.route == ROUTE_STAGE or part.route == ROUTE_HOST) and not one_address(from_):
                error.part, error.layer = i, layout.parts[i].layer
                return outcome(error, REFUSED, REASON_UNSUPPORTED, "part '%.32s' of layer %d comes from or goes to pageable memory, its "
                               "patch from pinned memory that devices use by another address, which is not done by this release",
                               layout.parts[i].name, layout.parts[i].layer)
            if part.route == ROUTE_PEER and from_.kind != DEVICE:
                error.part, error.layer = i, layout.parts[i].layer
                return outcome(error, REFUSED, REASON_UNSUPPORTED, "part '%.32s' of layer %d goes from device to device, its patch comes "
                               "from host memory, which is not done by this release", layout.parts[i].name, layout.parts[i].layer)
            if from_.kind == DEVICE and from_.device != part.device:
                error.part, error.layer, error.wanted, error.found = i, layout.parts[i].layer, part.device, from_.device
                return outcome(error, REFUSED, REASON_UNSUPPORTED, "part '%.32s' of layer %d: its patch comes from device %d, it goes over "
                               "device %d, which is not done by this release", layout.parts[i].name, layout.parts[i].layer, from_.device,
                               part.device)
    return OK


cdef void choose_bundles(PlanData *plan) noexcept nogil:
    """Puts each small part, and each patch, behind the one before it of another layer where the spacing goes on."""
    cdef const LayoutData *layout = plan.target.layout
    cdef int32_t k, part
    for k in range(layout.n_parts):
        part = layout.order[k]
        plan.part_bundle[part] = bundle_up(plan, part, False)
        plan.patch_bundle[part] = bundle_up(plan, part, True) if layout.patch_of[part] >= 0 else -1


cdef int32_t bundle_up(PlanData *plan, int32_t part, bint patches) noexcept nogil:
    """The bundle that takes the part (or its patch), which may be a new one; -1 where it is not small or not one unit."""
    cdef const LayoutData *layout = plan.target.layout
    cdef const PartSpec *spec = &layout.parts[part]
    cdef Bundle *bundle
    cdef int64_t target_pitch, source_pitch
    cdef int32_t b
    if spec.rep != 1 or spec.growth.unit_bytes > SMALL or not (patches or spec.growth.rule == CONST or spec.growth.rule == STATE):
        return -1
    for b in range(plan.n_bundles):
        bundle = &plan.bundles[b]
        if bundle.patches != patches or not alike(plan, bundle.last, part, patches):
            continue
        target_pitch = distance(plan.target, bundle.last, plan.target, part)
        source_pitch = distance(plan.parts[bundle.last].source, source_of(layout, bundle.last, patches),
                                plan.parts[part].source, source_of(layout, part, patches))
        if bundle.count == 1:
            bundle.target_pitch, bundle.source_pitch = target_pitch, source_pitch
        if (target_pitch == bundle.target_pitch and source_pitch == bundle.source_pitch
                and target_pitch >= spec.growth.unit_bytes and source_pitch >= spec.growth.unit_bytes):
            bundle.last = part
            bundle.count += 1
            return b
    bundle = &plan.bundles[plan.n_bundles]
    bundle.part = bundle.last = part
    bundle.count, bundle.patches = 1, patches
    plan.n_bundles += 1
    return plan.n_bundles - 1


cdef bint alike(const PlanData *plan, int32_t a, int32_t b, bint patches) noexcept nogil:
    """Whether two parts, or their patches, move at the same marks, by the same banks, on one way, within one allocation on each side."""
    cdef const LayoutData *layout = plan.target.layout
    cdef const PartSpec *x = &layout.parts[a]
    cdef const PartSpec *y = &layout.parts[b]
    cdef int32_t source_a = source_of(layout, a, patches), source_b = source_of(layout, b, patches)
    return (x.needed_by < y.needed_by and x.group == y.group and memcmp(&x.growth, &y.growth, sizeof(Growth)) == 0 and y.rep == 1
            and layout.parts[source_a].growth.rule == layout.parts[source_b].growth.rule
            and same_way(&plan.parts[a], &plan.parts[b])
            and evenly_placed(plan.target, a, plan.target, b)
            and evenly_placed(plan.parts[a].source, source_a, plan.parts[b].source, source_b))


cdef bint evenly_placed(const StateData *state_a, int32_t a, const StateData *state_b, int32_t b) noexcept nogil:
    cdef const PlaceSpec *x = &state_a.places[a]
    cdef const PlaceSpec *y = &state_b.places[b]
    return (state_a == state_b and state_a.piece[a] != 0 and state_a.piece[a] == state_a.piece[b]
            and x.stride == y.stride and x.banks == y.banks and x.bank_stride == y.bank_stride and x.ring == y.ring)


cdef inline int32_t source_of(const LayoutData *layout, int32_t part, bint patches) noexcept nogil:
    return layout.patches[layout.patch_of[part]].source_part if patches else part


cdef inline int64_t distance(const StateData *state_a, int32_t a, const StateData *state_b, int32_t b) noexcept nogil:
    return <char *>state_b.places[b].base - <char *>state_a.places[a].base


cdef inline bint same_way(const PartRoute *a, const PartRoute *b) noexcept nogil:
    return a.route == b.route and a.device == b.device and a.other == b.other


cdef inline bint in_bundle(const PlanData *plan, int32_t bundle) noexcept nogil:
    return bundle >= 0 and plan.bundles[bundle].count > 1


cdef int32_t count_ways(const PlanData *plan) noexcept nogil:
    """How often a layer uses a way, and the bundles before them: each time ends with an event."""
    cdef const LayoutData *layout = plan.target.layout
    cdef const PartRoute *a
    cdef const PartRoute *b
    cdef int32_t layer, k, j, ways = 0
    for layer in range(layout.n_layers):
        for k in range(layout.first[layer], layout.first[layer + 1]):
            a = &plan.parts[layout.order[k]]
            for j in range(layout.first[layer], k):
                b = &plan.parts[layout.order[j]]
                if same_way(a, b):
                    break
            else:
                ways += 1
    for k in range(plan.n_bundles):
        if plan.bundles[k].count > 1:
            ways += 1
    return ways


cdef void free_plan(PlanData *plan) noexcept nogil:
    if plan != NULL:
        free(plan.parts)
        free(plan.bundles)
        free(plan.part_bundle)
        free(plan.patch_bundle)
        free(plan.early)
        free(plan)
