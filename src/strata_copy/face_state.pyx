"""State: where one session or slot keeps its parts, and what the engine says of them. Declared in face_state.pxd."""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t

from strata_copy.abi cimport OK, REASON_PLACE, REFUSED, Error
from strata_copy.atomics cimport load_i32, load_u64
from strata_copy.cudart cimport clear, outcome, require_runtime
from strata_copy.layout cimport MAX_MARKS, LayoutData, layout_data
from strata_copy.lineage cimport (
    Lineage, Track, give_words, lineage_advanced, lineage_dirty, lineage_rewindable, lineage_rewound, take_words,
)
from strata_copy.raising cimport raise_error
from strata_copy.states cimport check_places, state_drop, state_new
from strata_copy.tickets cimport reset_state, state_users
from strata_copy.values cimport fill_marks, fill_place

from strata_copy import host_runtime
from strata_copy.places import whole


cdef class State:
    """Where one session, slot or image keeps the parts of `layout`.

    places: one Place for each part, in the order of layout.parts. owner: any object that keeps the memory alive; it is held as long
        as this state is.

    The memory is looked at once, here: kind and device of the first and last byte of each part, allocation borders of host memory,
    overlaps. Raises Refused, naming the part, where something does not fit. A new state is valid: the engine says what it holds.
    """

    def __init__(self, Layout layout, places, *, owner=None):
        cdef Error error
        cdef LayoutData *layout_values = layout_data(layout)
        if self.data != NULL:
            raise TypeError("a State is made once")
        require_runtime()
        self.layout = layout
        self.places = tuple(places)
        self.owner = owner
        self.era = host_runtime.configuration()
        if len(self.places) != layout_values.n_parts:
            raise ValueError(f"{len(self.places)} places for the {layout_values.n_parts} parts of the layout")
        clear(&error)
        self.data = state_new(layout_values, &error)
        if self.data == NULL:
            raise_error(&error)
        try:
            take_places(self, layout_values)
        except BaseException:
            state_drop(self.data)
            self.data = NULL            # as if __init__ had not run
            raise

    def __dealloc__(self):
        state_drop(self.data)

    @property
    def address(self):
        """The strata_state pointer for C and C++, as an int. It lives as long as this object."""
        return <size_t>self.data

    @property
    def generation(self):
        """Counts what changed the content: copies submitted into this state, and resets."""
        return load_u64(&state_data(self).generation)

    @property
    def valid(self):
        """False from a failed or cancelled copy into this state until `reset`."""
        return load_i32(&state_data(self).invalid) == 0

    @property
    def busy(self):
        """True while a ticket in flight reads or writes this state."""
        cdef StateData *data = state_data(self)
        cdef int users
        with nogil:
            users = state_users(data)
        return users != 0

    def advanced(self, marks):
        """Rows up to `marks`, and running state with them, were or will be written by the engine: said before the first kernel that
        writes them. Marks below what is known of the state cut it, as `rewound` does.

        From the first such word on copies of this state move what changed, and the engine is held to it: whoever appends says
        `advanced`, and whoever rewrites says `rewound`, `dirty` or `reset` before. Each makes running state another one. All are legal
        while copies are in flight. Raise Refused for marks without a meaning, and where another thread says something of the same
        state at the same time.
        """
        say(self, lineage_advanced, marks)

    def rewound(self, marks):
        """Rows from `marks` on were or will be rewritten."""
        say(self, lineage_rewound, marks)

    def dirty(self, part, first_unit=0, n=1):
        """Units [first_unit, first_unit + n) of part number `part` were or will be rewritten (a K-shift, an eviction, another
        quantization); what lies behind them in its group counts as rewritten too. Of running state a unit is a bank: said of a snapshot
        that is taken, at the marks that were said last."""
        cdef Error error
        cdef StateData *data = state_data(self)
        part = whole("part", part, 0, data.layout.n_parts - 1)
        clear(&error)
        if lineage_dirty(data.lineage, data.layout, part, whole("first_unit", first_unit, 0, INT64_MAX), whole("n", n, 1, INT64_MAX),
                         &error) != OK:
            raise_error(&error)

    def rewindable(self, marks):
        """Whether the engine could go back to `marks`: rows are known up to there, and running state of exactly these marks is there, live
        or in a bank. `rewind_blocker` names the part that says no."""
        return self.rewind_blocker(marks) is None

    def rewind_blocker(self, marks):
        """The first Part that cannot go back to `marks`, or None where all can."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef int64_t values[MAX_MARKS]
        cdef uint32_t n = fill_marks(self.layout, marks, values)
        clear(&error)
        if lineage_rewindable(data.lineage, data.layout, values, n, &error) == OK:
            return None
        if error.part < 0:
            raise_error(&error)
        return self.layout.parts[error.part]

    @property
    def lineage(self):
        """Which rows are known, for logs: a dict from (group, mark) to a list of (epoch, begin, end). Equal epochs are equal rows."""
        cdef Lineage *lineage = state_data(self).lineage
        cdef Track track
        found = {}
        for t in range(lineage.n_tracks):
            take_words(&lineage, 1)
            track = lineage.tracks[<int32_t>t]
            give_words(&lineage, 1)
            found[self.layout.groups[track.group], self.layout.marks[track.mark]] = [
                (track.segments[s].epoch, track.segments[s].begin, track.segments[s].end) for s in range(track.n)]
        return found

    def reset(self):
        """The content starts anew: valid again after a failed copy, with a new generation and nothing known of it; an image has no blob
        then, neither published nor set. Raises Refused while a ticket uses it, and for an image that was discarded."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef int status
        clear(&error)
        with nogil:
            status = reset_state(data, &error)
        if status != OK:
            raise_error(&error)

    def __repr__(self):
        return (f"<State of {self.layout!r}, generation {self.generation}"
                f"{'' if self.valid else ', INVALID'}{', busy' if self.busy else ''}>")


cdef StateData *state_data(State state) except NULL:
    if state is None or state.data == NULL:
        raise TypeError(f"a State is needed, not {None if state is None else 'one whose __init__ did not run'}")
    return state.data


cdef int check_era(State state) except -1:
    cdef Error error
    if state.era != host_runtime.configuration() and not (state.places and all(p.kind == "pageable" for p in state.places)):
        clear(&error)
        outcome(&error, REFUSED, REASON_PLACE, "the host runtime started anew after the state was made, and its memory is gone: make the "
                "state anew")
        raise_error(&error)
    return 0


cdef int take_places(State state, const LayoutData *layout) except -1:
    cdef Error error
    cdef int status
    for i, place in enumerate(state.places):
        try:
            fill_place(place, &layout.parts[<int32_t>i], &state.data.places[<int32_t>i])
        except (TypeError, ValueError) as wrong:
            part = state.layout.parts[i]
            raise type(wrong)(f"part {part.name!r} of layer {part.layer}: {wrong}") from None
    clear(&error)
    with nogil:
        status = check_places(state.data, &error)
    if status != OK:
        raise_error(&error)
    return 0


cdef int say(State state, int (*what)(Lineage *, const LayoutData *, const int64_t *, uint64_t, Error *) noexcept nogil,
             marks) except -1:
    cdef Error error
    cdef StateData *data = state_data(state)
    cdef int64_t values[MAX_MARKS]
    cdef uint32_t n = fill_marks(state.layout, marks, values)
    clear(&error)
    if what(data.lineage, data.layout, values, n, &error) != OK:
        raise_error(&error)
    return 0
