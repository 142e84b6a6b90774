"""Kinship. Declared in kinship.pxd; lineage.pxd says what tracks, tails and stamps are.

What the request names itself (`begin`) is the engine's to answer for: the target's lineage only says what it knew before.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

from strata_copy.abi cimport CONST, STATE, Growth, PartSpec, Request
from strata_copy.atomics cimport load_i32
from strata_copy.layout cimport MAX_MARKS, LayoutData, live_at, settled_at, units_at
from strata_copy.lineage cimport (
    Known, Lineage, Stamp, Track, advance, common, cut, end_of, extend, give_words, mark_before, new_epoch, stamp_of, take_words,
)
from strata_copy.plan cimport MAX_SOURCES, PlanData, bank_of


cdef void know(const PlanData *plan, const Request *request, Known *known) noexcept nogil:
    cdef const LayoutData *layout = plan.target.layout
    cdef Lineage *target = plan.target.lineage
    cdef int32_t i, t, s
    cdef Lineage *lineages[MAX_SOURCES + 1]
    take_words(lineages, all_of(plan, lineages))
    memset(known, 0, sizeof(Known))
    known.valid = load_i32(&plan.target.invalid) == 0
    known.target_version = target.version
    for s in range(plan.n_sources):
        known.source_version[s] = plan.sources[s].lineage.version
    for i in range(layout.n_parts):
        t = target.track_of[i]
        if request.groups != 0 and not (request.groups >> layout.parts[i].group) & 1:
            continue
        if t >= 0:
            if not (known.tracks >> t) & 1:
                compare(known, plan, request, i, t)
            known.tracks |= <uint64_t>1 << t
            known.banked |= <uint64_t>has_rows_in_bank(plan, request, i) << t
    for t in range(target.n_tracks):
        if (known.banked >> t) & 1:
            known.prefix[t], known.same_tail[t] = 0, False
    for i in range(layout.n_patches):
        t = target.track_of[layout.patches[i].part]
        if t >= 0 and (known.tracks >> t) & 1 and not has_patch(known, plan, request, i):
            known.repatch |= <uint64_t>1 << t


cdef void known_end(const PlanData *plan) noexcept nogil:
    cdef Lineage *lineages[MAX_SOURCES + 1]
    give_words(lineages, all_of(plan, lineages))


cdef int32_t all_of(const PlanData *plan, Lineage **lineages) noexcept nogil:
    cdef int32_t s
    lineages[0] = plan.target.lineage
    for s in range(plan.n_sources):
        lineages[s + 1] = plan.sources[s].lineage
    return plan.n_sources + 1


cdef void compare(Known *known, const PlanData *plan, const Request *request, int32_t part, int32_t t) noexcept nogil:
    cdef const Track *b = &plan.target.lineage.tracks[t]
    cdef const Track *a = &plan.parts[part].source.lineage.tracks[t]
    cdef int64_t upto = request.upto[b.mark]
    known.prefix[t] = min(common(a, b), upto)
    # All who have a tail have the units of one state at one time, as far as they go: but the last unit of a target may be a patch. Where
    # that hides full rows, they are no part of the prefix.
    known.same_tail[t] = end_of(a) >= upto and end_of(b) == upto and a.tail == b.tail and a.tail != 0
    if upto > end_of(a) and plan.parts[part].source.lineage.told:
        known.unsaid |= <uint64_t>1 << source_index(plan, part)


cdef bint has_patch(const Known *known, const PlanData *plan, const Request *request, int32_t patch) noexcept nogil:
    """Whether the last unit of the target is what the patch would set it to, where the tail is the same."""
    cdef int32_t part = plan.target.layout.patches[patch].part, source = plan.target.layout.patches[patch].source_part
    cdef uint64_t value = patch_value(plan, request, patch)
    if (known.unsaid >> source_index(plan, source)) & 1 and bank_of(
            request.src_bank, &plan.target.layout.parts[source], &plan.parts[source].source.places[source]) == 0:
        return False
    return value != 0 and value == plan.target.lineage.patched[part]


cdef uint64_t patch_value(const PlanData *plan, const Request *request, int32_t patch) noexcept nogil:
    """The stamp of what a patch sets a unit to; 0: like no other."""
    cdef int32_t part = plan.target.layout.patches[patch].source_part
    cdef const Stamp *stamp = stamp_of(plan.parts[part].source.lineage, part, bank_of(
        request.src_bank, &plan.target.layout.parts[part], &plan.parts[part].source.places[part]))
    return stamp.epoch if stamp != NULL else 0


cdef bint has_rows_in_bank(const PlanData *plan, const Request *request, int32_t i) noexcept nogil:
    cdef const PartSpec *part = &plan.target.layout.parts[i]
    return part.growth.rule != STATE and (bank_of(request.src_bank, part, &plan.parts[i].source.places[i]) != 0
                                          or bank_of(request.dst_bank, part, &plan.target.places[i]) != 0)


cdef int32_t source_index(const PlanData *plan, int32_t part) noexcept nogil:
    cdef int32_t s = 0
    while plan.sources[s] != plan.parts[part].source:
        s += 1
    return s


cdef int64_t first_to_move(const Known *known, const PlanData *plan, const Request *request, int32_t i, int64_t end) noexcept nogil:
    cdef const PartSpec *part = &plan.target.layout.parts[i]
    cdef int32_t t = plan.target.lineage.track_of[i]
    cdef int64_t marks[MAX_MARKS]
    cdef bint patched
    if not known.valid:
        return 0
    if part.growth.rule == STATE:
        return end if same_stamp(known, plan, request, i) else 0
    if t < 0:
        return 0
    if part.growth.rule == CONST:
        return end if (known.prefix[t] > 0 or known.same_tail[t]) and stamp_of(
            plan.parts[i].source.lineage, i, 0).epoch == stamp_of(plan.target.lineage, i, 0).epoch else 0
    patched = plan.target.layout.patch_of[i] >= 0 and end > 0
    if known.same_tail[t]:
        return end - 1 if patched and (known.repatch >> t) & 1 else end
    if known.prefix[t] == 0:     # with a shift there are units at mark 0 already
        return 0
    marks[part.growth.mark] = known.prefix[t]
    return min(settled_at(&part.growth, marks), end - patched)


cdef bint same_stamp(const Known *known, const PlanData *plan, const Request *request, int32_t i) noexcept nogil:
    """Whether running state is the same in the banks that the request names."""
    cdef const PartSpec *part = &plan.target.layout.parts[i]
    cdef Lineage *source = plan.parts[i].source.lineage
    cdef int64_t bank = bank_of(request.src_bank, part, &plan.parts[i].source.places[i])
    cdef const Stamp *a = stamp_of(source, i, bank)
    cdef const Stamp *b = stamp_of(plan.target.lineage, i, bank_of(request.dst_bank, part, &plan.target.places[i]))
    if not source.told or a == NULL or b == NULL or (bank == 0 and (known.unsaid >> source_index(plan, i)) & 1):
        return False
    return a.epoch != 0 and a.epoch == b.epoch


cdef void handed_on(const Known *known, const PlanData *plan, const Request *request) noexcept nogil:
    cdef const LayoutData *layout = plan.target.layout
    cdef Lineage *target = plan.target.lineage
    cdef Lineage *source
    cdef uint64_t tracks = known.tracks
    cdef int32_t i, t, s
    cdef bint unchanged
    cdef Lineage *lineages[MAX_SOURCES + 1]
    take_words(lineages, all_of(plan, lineages))
    unchanged = target.version == known.target_version
    for s in range(plan.n_sources):
        unchanged &= plan.sources[s].lineage.version == known.source_version[s]
    for s in range(plan.n_sources if unchanged else 0):
        if (known.unsaid >> s) & 1:
            speak_for(plan.sources[s].lineage, layout, known, plan, request)
    for i in range(layout.n_parts):
        if request.groups != 0 and not (request.groups >> layout.parts[i].group) & 1:
            continue
        source, t = plan.parts[i].source.lineage, target.track_of[i]
        target.held[i] = live_at(&layout.parts[i].growth, request.upto)
        # The engine spoke of a state while its request was taken: what it meant nobody can tell.
        hand_on_stamp(plan, request, i, unchanged and known.valid and source.told)
        if t >= 0 and (tracks >> t) & 1:
            tracks &= ~(<uint64_t>1 << t)
            hand_on_track(known, plan, request, t, source, unchanged and known.valid and source.told and not (known.banked >> t) & 1)
        target.told |= unchanged and known.valid and source.told
    for i in range(layout.n_patches):
        if request.groups == 0 or (request.groups >> layout.parts[layout.patches[i].part].group) & 1:
            source = plan.parts[layout.patches[i].part].source.lineage
            target.patched[layout.patches[i].part] = patch_value(plan, request, i) if (
                unchanged and known.valid and source.told and sets_unit(plan, request, layout.patches[i].part)) else 0
    target.version += 1
    give_words(lineages, plan.n_sources + 1)


cdef void speak_for(Lineage *source, const LayoutData *layout, const Known *known, const PlanData *plan,
                    const Request *request) noexcept nogil:
    """Rows of a source that the engine has not spoken of are its own from now on."""
    cdef int64_t marks[MAX_MARKS]
    cdef int32_t i, t
    for t in range(layout.n_marks):
        marks[t] = 0
    for t in range(source.n_tracks):
        marks[source.tracks[t].mark] = max(marks[source.tracks[t].mark], end_of(&source.tracks[t]))
    for i in range(layout.n_parts):
        t = source.track_of[i]
        if t >= 0 and (known.tracks >> t) & 1 and plan.parts[i].source.lineage == source:
            marks[source.tracks[t].mark] = max(marks[source.tracks[t].mark], request.upto[source.tracks[t].mark])
    advance(source, layout, marks)


cdef void hand_on_track(const Known *known, const PlanData *plan, const Request *request, int32_t t, const Lineage *source,
                        bint told) noexcept nogil:
    cdef Track *to = &plan.target.lineage.tracks[t]
    cdef const Track *from_ = &source.tracks[t]
    cdef int64_t upto = request.upto[to.mark], full = before_patches(plan, request, t)
    cdef int32_t n
    to.open, to.tail = False, new_epoch()
    if not told:
        to.n = 0
    elif request.begin != NULL and request.begin[to.mark] > known.prefix[t]:
        cut(to, min(known.prefix[t], full))
    else:
        to.tail = from_.tail
        for n in range(from_.n):
            to.segments[n] = from_.segments[n]
        to.n = from_.n
        cut(to, full)
        if full < upto:
            extend(to, upto)


cdef int64_t before_patches(const PlanData *plan, const Request *request, int32_t t) noexcept nogil:
    """The mark up to which the target has the source's full rows once patches have set units of it. A spare row is behind them all."""
    cdef const LayoutData *layout = plan.target.layout
    cdef const Growth *growth
    cdef const Lineage *source
    cdef int64_t mark = request.upto[plan.target.lineage.tracks[t].mark], unit
    cdef uint64_t value
    cdef int32_t i, part
    for i in range(layout.n_patches):
        part = layout.patches[i].part
        if plan.target.lineage.track_of[part] != t or not sets_unit(plan, request, part):
            continue
        growth, source, value = &layout.parts[part].growth, plan.parts[part].source.lineage, patch_value(plan, request, i)
        unit = units_at(growth, request.upto) - 1
        if value != 0 and source.patched[part] == value and end_of(&source.tracks[t]) == request.upto[growth.mark]:
            continue    # the source's own unit is the same patch
        if unit < settled_at(growth, request.upto):
            mark = min(mark, mark_before(growth, unit))
    return mark


cdef bint sets_unit(const PlanData *plan, const Request *request, int32_t part) noexcept nogil:
    """Whether the patch of a part is written, or was left out because it holds. A `begin` behind the last unit leaves that as it is."""
    cdef const Growth *growth = &plan.target.layout.parts[part].growth
    cdef int64_t units = units_at(growth, request.upto)
    return units > 0 and (request.begin == NULL or plan.target.places[part].ring != 0 or settled_at(growth, request.begin) < units)


cdef void hand_on_stamp(const PlanData *plan, const Request *request, int32_t i, bint known) noexcept nogil:
    cdef const PartSpec *part = &plan.target.layout.parts[i]
    cdef Stamp *from_
    cdef Stamp *to
    if part.growth.rule != STATE and part.growth.rule != CONST:
        return
    from_ = stamp_of(plan.parts[i].source.lineage, i, bank_of(request.src_bank, part, &plan.parts[i].source.places[i]))
    to = stamp_of(plan.target.lineage, i, bank_of(request.dst_bank, part, &plan.target.places[i]))
    if to == NULL:
        return
    if not known or from_ == NULL:
        to.epoch, to.at = (0 if part.growth.rule == STATE else new_epoch()), -1
        return
    if part.growth.rule == STATE and from_.epoch == 0:
        from_.epoch = new_epoch()       # a bank that was never spoken of: from now on it is known by this
    if part.growth.rule == STATE or request.begin == NULL or request.begin[part.growth.mark] == 0:      # else a constant has not moved
        to[0] = from_[0]
