"""Lineage. Declared, with what it is, in lineage.pxd; how a copy reads and hands it on is kinship.pyx."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memmove

from strata_copy.abi cimport (
    CONST, OK, REASON_BANK, REASON_BUSY, REASON_MARK, REASON_PLACE, REFUSED, STATE, Error, Growth, PartSpec, PlaceSpec,
)
from strata_copy.atomics cimport add_i64, load_i32, store_i32, swap_i32
from strata_copy.cudart cimport outcome
from strata_copy.layout cimport MAX_MARKS, LayoutData, live_at, settled_at, units_at
from strata_copy.system cimport sched_yield

cdef int64_t epochs = 0     # atomic; the latest one of the process

# Who has a lineage's word.
cdef enum:
    FREE
    ENGINE
    SUBMIT


cdef uint64_t new_epoch() noexcept nogil:
    return <uint64_t>add_i64(&epochs, 1) + 1


cdef Lineage *lineage_new(const LayoutData *layout, const PlaceSpec *places) noexcept nogil:
    cdef Lineage *lineage = <Lineage *>calloc(1, sizeof(Lineage))
    cdef int32_t i, n = 0
    if lineage == NULL:
        return NULL
    for i in range(layout.n_parts):
        n += <int32_t>min(places[i].banks, <int64_t>MAX_BANKS)
    lineage.track_of = <int32_t *>calloc(layout.n_parts, sizeof(int32_t))
    lineage.first_stamp = <int32_t *>calloc(layout.n_parts + 1, sizeof(int32_t))
    lineage.stamps = <Stamp *>calloc(n, sizeof(Stamp))
    lineage.ring = <int64_t *>calloc(layout.n_parts, sizeof(int64_t))
    lineage.held = <int64_t *>calloc(layout.n_parts, sizeof(int64_t))
    lineage.patched = <uint64_t *>calloc(layout.n_parts, sizeof(uint64_t))
    if (lineage.track_of != NULL and lineage.first_stamp != NULL and lineage.stamps != NULL and lineage.ring != NULL
            and lineage.held != NULL and lineage.patched != NULL):
        lineage.n_tracks = count_tracks(layout, lineage.track_of)
        lineage.tracks = <Track *>calloc(lineage.n_tracks, sizeof(Track))
    if lineage.tracks == NULL:
        lineage_free(lineage)
        return NULL
    lineage.n_parts = layout.n_parts
    for i in range(layout.n_parts):
        lineage.ring[i] = places[i].ring
        lineage.first_stamp[i + 1] = lineage.first_stamp[i] + <int32_t>min(places[i].banks, <int64_t>MAX_BANKS)
        if lineage.track_of[i] >= 0:
            lineage.tracks[lineage.track_of[i]].group = layout.parts[i].group
            lineage.tracks[lineage.track_of[i]].mark = layout.parts[i].growth.mark
    lineage.n_stamps = n
    forget(lineage)
    return lineage


cdef int32_t count_tracks(const LayoutData *layout, int32_t *track_of) noexcept nogil:
    """Gives each part the track of its group and mark. A layout has at least one part, and so one track."""
    cdef int32_t i, j, n = 0
    for i in range(layout.n_parts):
        for j in range(i):
            if layout.parts[j].group == layout.parts[i].group and layout.parts[j].growth.mark == layout.parts[i].growth.mark:
                track_of[i] = track_of[j]
                break
        else:
            track_of[i] = n if n < <int32_t>MAX_TRACKS else -1
            n = min(n + 1, <int32_t>MAX_TRACKS)
    return n


cdef void lineage_free(Lineage *lineage) noexcept nogil:
    if lineage != NULL:
        free(lineage.tracks)
        free(lineage.track_of)
        free(lineage.first_stamp)
        free(lineage.stamps)
        free(lineage.ring)
        free(lineage.held)
        free(lineage.patched)
        free(lineage)


# ---- the word

cdef int take_word(Lineage *lineage, Error *error) noexcept nogil:
    """For the engine: one thread at a time says something of a state; that there are two is a mistake of the engine's, and is told."""
    while not swap_i32(&lineage.word, FREE, ENGINE):
        if load_i32(&lineage.word) == ENGINE:
            return outcome(error, REFUSED, REASON_BUSY, "another thread says something of this state's content at the same time")
        sched_yield()
    return OK


cdef void take_words(Lineage **lineages, int32_t n) noexcept nogil:
    """For a submit: in the order of their addresses, each once."""
    cdef Lineage *last = NULL
    cdef Lineage *next_
    cdef int32_t i, _
    for _ in range(n):
        next_ = NULL
        for i in range(n):
            if lineages[i] > last and (next_ == NULL or lineages[i] < next_):
                next_ = lineages[i]
        if next_ == NULL:
            return
        while not swap_i32(&next_.word, FREE, SUBMIT):
            sched_yield()
        last = next_


cdef void give_words(Lineage **lineages, int32_t n) noexcept nogil:
    cdef int32_t i
    for i in range(n):
        store_i32(&lineages[i].word, FREE)


# ---- what the engine says

cdef int lineage_advanced(Lineage *lineage, const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef int status = begin_change(lineage, layout, marks, n, error)
    if status == OK:
        advance(lineage, layout, marks)
        store_i32(&lineage.word, FREE)
    return status


cdef int lineage_rewound(Lineage *lineage, const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef int status = begin_change(lineage, layout, marks, n, error)
    cdef int32_t t
    if status == OK:
        for t in range(lineage.n_tracks):
            give_up(lineage, layout, t, marks)
        renew(lineage, layout, marks)
        store_i32(&lineage.word, FREE)
    return status


cdef int lineage_dirty(Lineage *lineage, const LayoutData *layout, int32_t part, int64_t first_unit, int64_t n,
                       Error *error) noexcept nogil:
    cdef int status
    if not 0 <= part < layout.n_parts or first_unit < 0 or n < 1 or first_unit > INT64_MAX - n:
        error.wanted, error.found = layout.n_parts, part
        return outcome(error, REFUSED, REASON_PLACE, "part %d of %d, units %ld and %ld more", part, layout.n_parts, first_unit, n)
    status = take_word(lineage, error)
    if status == OK:
        spoil(lineage, layout, part, first_unit, n)
        renew(lineage, layout, NULL)
        store_i32(&lineage.word, FREE)
    return status


cdef void lineage_reset(Lineage *lineage) noexcept nogil:
    take_words(&lineage, 1)
    forget(lineage)
    store_i32(&lineage.word, FREE)


cdef int lineage_rewindable(Lineage *lineage, const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef int32_t i
    cdef int status = check_marks(layout, marks, n, error)
    if status != OK:
        return status
    take_words(&lineage, 1)
    for i in range(layout.n_parts):
        status = check_rewind(lineage, layout, i, marks, error)
        if status != OK:
            break
    store_i32(&lineage.word, FREE)
    return status


cdef int check_marks(const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef uint64_t i
    if marks == NULL or n != <uint64_t>layout.n_marks:
        error.wanted, error.found = layout.n_marks, n
        return outcome(error, REFUSED, REASON_MARK, "%lu marks given, the layout has %d", n, layout.n_marks)
    for i in range(n):
        if not 0 <= marks[i] < <int64_t>1 << 62:
            error.found = marks[i]
            return outcome(error, REFUSED, REASON_MARK, "mark %lu is %ld; 0 <= mark < 2^62 is needed", i, marks[i])
    return OK


cdef int begin_change(Lineage *lineage, const LayoutData *layout, const int64_t *marks, uint64_t n, Error *error) noexcept nogil:
    cdef int status = check_marks(layout, marks, n, error)
    return status if status != OK else take_word(lineage, error)


cdef int check_rewind(const Lineage *lineage, const LayoutData *layout, int32_t i, const int64_t *marks, Error *error) noexcept nogil:
    cdef const PartSpec *part = &layout.parts[i]
    cdef int64_t mark = marks[part.growth.mark], first, held
    cdef int32_t b
    if part.growth.rule == CONST:
        return OK
    error.part, error.layer, error.wanted = i, part.layer, mark
    if part.growth.rule == STATE:
        for b in range(lineage.first_stamp[i], lineage.first_stamp[i + 1]):
            if lineage.stamps[b].epoch != 0 and lineage.stamps[b].at == mark:
                error.part = error.layer = -1
                return OK
        return outcome(error, REFUSED, REASON_BANK, "part '%.32s' of layer %d has no running state at mark %ld, live or in a bank",
                       part.name, part.layer, mark)
    error.found = end_of(&lineage.tracks[lineage.track_of[i]]) if lineage.track_of[i] >= 0 else 0
    if error.found < mark:
        return outcome(error, REFUSED, REASON_MARK, "part '%.32s' of layer %d is known up to mark %ld, not %ld", part.name, part.layer,
                       error.found, mark)
    first, held = max(live_at(&part.growth, marks), <int64_t>part.growth.sinks), first_held(lineage, layout, i)
    if first < min(held, units_at(&part.growth, marks)):
        error.wanted, error.found = first, held
        return outcome(error, REFUSED, REASON_MARK, "part '%.32s' of layer %d needs its units from %ld on at mark %ld; those before %ld "
                       "are lost", part.name, part.layer, first, mark, held)
    error.part = error.layer = -1
    return OK


# ---- changes; the word is taken

cdef void forget(Lineage *lineage) noexcept nogil:
    cdef int32_t i
    for i in range(lineage.n_tracks):
        lineage.tracks[i].n, lineage.tracks[i].open, lineage.tracks[i].tail = 0, False, 0
    for i in range(lineage.n_stamps):
        lineage.stamps[i].epoch, lineage.stamps[i].at = 0, -1
    for i in range(lineage.n_parts):
        lineage.held[i], lineage.patched[i] = 0, 0
    lineage.told = False
    lineage.version += 1


cdef void advance(Lineage *lineage, const LayoutData *layout, const int64_t *marks) noexcept nogil:
    cdef int32_t t
    for t in range(lineage.n_tracks):
        give_up(lineage, layout, t, marks)
    begin_constants(lineage, layout, marks)
    for t in range(lineage.n_tracks):
        extend(&lineage.tracks[t], marks[lineage.tracks[t].mark])
    renew(lineage, layout, marks)


cdef void begin_constants(Lineage *lineage, const LayoutData *layout, const int64_t *marks) noexcept nogil:
    """A constant is written with the first row."""
    cdef const Growth *growth
    cdef int32_t i, t
    for i in range(layout.n_parts):
        growth, t = &layout.parts[i].growth, lineage.track_of[i]
        if growth.rule == CONST and t >= 0 and end_of(&lineage.tracks[t]) == 0 and marks[growth.mark] > 0:
            lineage.stamps[lineage.first_stamp[i]].epoch = new_epoch()


cdef void give_up(Lineage *lineage, const LayoutData *layout, int32_t t, const int64_t *marks) noexcept nogil:
    """Rows of a track from its mark on. What rings have lost by then stays lost, but for units that will be written again."""
    cdef int32_t i
    if end_of(&lineage.tracks[t]) <= marks[lineage.tracks[t].mark]:
        return
    for i in range(layout.n_parts):
        if lineage.track_of[i] == t:
            lineage.held[i] = min(first_held(lineage, layout, i), units_at(&layout.parts[i].growth, marks))
    cut(&lineage.tracks[t], marks[lineage.tracks[t].mark])


cdef int64_t first_held(const Lineage *lineage, const LayoutData *layout, int32_t i) noexcept nogil:
    """The first unit of a part, behind the sinks, that is still there: a ring of C loses a unit when the one C behind it is written."""
    cdef int64_t marks[MAX_MARKS]
    if lineage.ring[i] == 0 or lineage.track_of[i] < 0:
        return lineage.held[i]
    marks[layout.parts[i].growth.mark] = end_of(&lineage.tracks[lineage.track_of[i]])
    return max(lineage.held[i], units_at(&layout.parts[i].growth, marks) - lineage.ring[i])


cdef void renew(Lineage *lineage, const LayoutData *layout, const int64_t *marks) noexcept nogil:
    """A new tail for every track, last units with it, and a new stamp for all live running state, which is at the marks now; NULL: where
    it was."""
    cdef uint64_t epoch = new_epoch()
    cdef int32_t i
    for i in range(lineage.n_tracks):
        lineage.tracks[i].tail = epoch
    for i in range(layout.n_parts):
        lineage.patched[i] = 0
        if layout.parts[i].growth.rule == STATE:
            lineage.stamps[lineage.first_stamp[i]].epoch = epoch
            if marks != NULL:
                lineage.stamps[lineage.first_stamp[i]].at = marks[layout.parts[i].growth.mark]
    lineage.told = True
    lineage.version += 1


cdef void spoil(Lineage *lineage, const LayoutData *layout, int32_t part, int64_t first_unit, int64_t n) noexcept nogil:
    """Units of a part are not what they were. Of running state a unit is a bank."""
    cdef const Growth *growth = &layout.parts[part].growth
    cdef int32_t first = lineage.first_stamp[part], b
    cdef Track *track
    cdef int64_t end
    cdef uint64_t epoch = new_epoch()
    if growth.rule == CONST:
        lineage.stamps[first].epoch = epoch
    elif growth.rule == STATE:
        for b in range(first, lineage.first_stamp[part + 1]):
            if first_unit <= b - first < first_unit + n:
                lineage.stamps[b].epoch, lineage.stamps[b].at = epoch, lineage.stamps[first].at
    elif lineage.track_of[part] >= 0:
        track = &lineage.tracks[lineage.track_of[part]]
        end = end_of(track)
        cut(track, mark_before(growth, first_unit))
        extend(track, end)


cdef int64_t mark_before(const Growth *growth, int64_t unit) noexcept nogil:
    cdef int64_t marks[MAX_MARKS]
    cdef int64_t low = 0, high = (<int64_t>1 << 62) - 1, middle
    while low < high:
        middle = low + (high - low + 1) // 2
        marks[growth.mark] = middle
        if settled_at(growth, marks) <= unit:
            low = middle
        else:
            high = middle - 1
    return low


cdef Stamp *stamp_of(Lineage *lineage, int32_t part, int64_t bank) noexcept nogil:
    cdef int64_t i = lineage.first_stamp[part] + bank
    return &lineage.stamps[i] if i < lineage.first_stamp[part + 1] else NULL


# ---- tracks

cdef int64_t end_of(const Track *track) noexcept nogil:
    return track.segments[track.n - 1].end if track.n > 0 else 0


cdef void cut(Track *track, int64_t mark) noexcept nogil:
    """Rows from the mark on are not what they were."""
    if end_of(track) <= mark:
        return
    while track.n > 0 and track.segments[track.n - 1].begin >= mark:
        track.n -= 1
    if track.n > 0:
        track.segments[track.n - 1].end = min(track.segments[track.n - 1].end, mark)
    track.open = False


cdef void extend(Track *track, int64_t mark) noexcept nogil:
    """Rows up to the mark are this state's own."""
    cdef int64_t end = end_of(track)
    if mark <= end:
        return
    if track.open:
        track.segments[track.n - 1].end = mark
        return
    if track.n == MAX_SEGMENTS:
        forget_one(track)
    track.segments[track.n].epoch, track.segments[track.n].begin, track.segments[track.n].end = new_epoch(), end, mark
    track.n += 1
    track.open = True


cdef void forget_one(Track *track) noexcept nogil:
    """The segment without which the gap is smallest: whoever shares it and nothing later falls back to the one before. Never the last,
    which says where the track ends."""
    cdef int32_t i, best = 0
    cdef int64_t gap, smallest = INT64_MAX
    for i in range(track.n - 1):
        gap = track.segments[i + 1].begin - (track.segments[i - 1].end if i > 0 else 0)
        if gap < smallest:
            best, smallest = i, gap
    track.n -= 1
    memmove(&track.segments[best], &track.segments[best + 1], (track.n - best) * sizeof(Segment))


cdef int64_t common(const Track *a, const Track *b) noexcept nogil:
    """Up to where two tracks are equal. An epoch begins at one mark wherever it is."""
    cdef int32_t i = a.n - 1, j = b.n - 1
    while i >= 0 and j >= 0:
        if a.segments[i].epoch == b.segments[j].epoch:
            return min(a.segments[i].end, b.segments[j].end)
        if a.segments[i].begin >= b.segments[j].begin:
            i -= 1
        else:
            j -= 1
    return 0
