"""The face of strata_copy: what a user imports and cimports. Statuses become exceptions here, and nowhere else.

The rooms behind it, in the order in which a copy passes them: layout, states, plan, submit, lanes, tickets; and cudart, the
runtime under them all. The C functions are declared in _core.pxd and, for C and C++, in include/strata_copy.h.
"""

import atexit
import gc
import os
import time
import warnings
import weakref
from _thread import allocate_lock
from collections import deque
from typing import NamedTuple

from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_New
from cpython.pythread cimport PyThread_get_thread_ident
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cimport strata_copy.abi as abi
from strata_copy.abi cimport AGAIN, API_VERSION, FAILED, OK, REASON_CLOSED, REASON_LAYOUT, REASON_PLACE, REASON_UNSUPPORTED, REFUSED, Error
from strata_copy.arena cimport Arena, arena_data
from strata_copy.atomics cimport load_i32, load_u64
from strata_copy.checks cimport check_states_now
from strata_copy.copier cimport Opening, the_copier
from strata_copy.cudart cimport clear, observed, outcome, published, require_runtime
from strata_copy.hooks cimport in_hook, of_hook
from strata_copy.images cimport (
    MAX_IMAGE_BANKS, Blob, ImageData, blob_drop, image_discard, image_marks, image_new, image_shown, image_visible,
)
from strata_copy.images cimport image_blob as set_blob, image_publish as show_image, image_reserve as make_room
from strata_copy.lineage cimport (
    Known, Lineage, Track, give_words, lineage_advanced, lineage_dirty, lineage_rewindable, lineage_rewound, take_words,
)
from strata_copy.lanes cimport ALIGNMENT, LINK_NONE, MAX_RING, CopierData, DeviceLanes, device_index
from strata_copy.layout cimport MAX_GROUPS, MAX_MARKS, Layout, LayoutData, layout_data
from strata_copy.news cimport nap, ran_something
from strata_copy.on_thread cimport at_work
from strata_copy.opening cimport close_on_thread, flies, in_flight, let_no_more_in, link_on_thread, open_on_thread
from strata_copy.pieces cimport ArenaData
from strata_copy.plan cimport (
    MAX_DEVICES, MAX_SOURCES, ROUTE_PEER, Emission, Extent, PlanData, Units, emit_bundle, emit_end, emit_part, plan_drop, plan_new,
    units_to_move,
)
from strata_copy.pool cimport (
    MAX_KEY, Entry, Gone, Key, PoolData, pool_close, pool_drop, pool_find, pool_gone, pool_hold, pool_image, pool_new, pool_pin,
    pool_remove, pool_reserve, pool_table, room_missing,
)
from strata_copy.raising cimport raise_error
from strata_copy.states cimport MAX_TICKETS, StateData, check_places, state_drop, state_new
from strata_copy.submit cimport adopt_plan, submit_ahead, submit_plan
from strata_copy.tickets cimport (
    check_not_default, reset_state, state_users, ticket_look, ticket_poll, ticket_release, ticket_sync, ticket_wait_done,
    ticket_wait_layer, tickets_finished,
)
from strata_copy.values cimport RequestValues, fill_marks, fill_place, fill_request, fill_way
from strata_copy.worker cimport ticket_cancel, worker_dismiss

from strata_copy import host_runtime, peers
from strata_copy.errors import CopyError
from strata_copy.places import handle, nanoseconds, whole

ROUTE_NAMES = ("local", "out", "in", "ring", "unstage", "stage", "host", "peer", "relay")

STAGE_CHUNKS = 4

EXIT_PATIENCE = 5.0     # seconds in which nothing lands, after which the end of the interpreter waits for copies no longer

_owner = None           # a weak reference to the Copier that is open
_ending = False         # no copier opens any more
# The States of each ticket that was not found to have ended, by its value: the worker and the devices go on with them whether or not
# anybody has the Copier, the Plan or the Ticket, and the collector, which finalizes all that it finds dropped, must not find them. As a
# C variable it stays where it is when modules are taken apart.
cdef dict _held = {}

cdef enum:
    LOOK_NS = 100000        # between two looks at the end of the interpreter


cdef class Turn:
    """Held while a copier opens, links or closes, which let the GIL go. No other lock is taken outside of it.

    Signal handlers and finalizers run meanwhile, on the thread that has it and on the one that works for that: they would wait for
    themselves, and ask `mine` first.
    """

    cdef object lock
    cdef object deed            # what is done to a copier, or None
    cdef unsigned long thread

    def __cinit__(self):
        self.lock = allocate_lock()

    cdef object mine(self):
        """What this thread, or the one that it works for, is doing to a copier, or None."""
        return self.deed if self.thread == PyThread_get_thread_ident() or at_work() else None

    cdef int take(self, str deed) except -1:
        self.lock.acquire()
        self.thread, self.deed = PyThread_get_thread_ident(), deed      # nothing that runs Python comes in between

    cdef int give(self) except -1:
        self.thread, self.deed = 0, None
        self.lock.release()


cdef Turn _turn = Turn()


def _after_fork():
    global _turn
    _turn = Turn()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _end_copies():
    """No more are submitted, and those in flight end before the memory is taken apart that they copy; it stays where one does not end.
    Nothing is given back, as that would wait for everything that the engine has on the devices: the process does it."""
    if _end_flight() == 0:
        _held.clear()
    else:
        warnings.warn(f"copies are in flight as the interpreter ends, and nothing of them has landed for {EXIT_PATIENCE:g} s: they are "
                      "left to the process, with their memory. Close the copier before", RuntimeWarning)


cdef int32_t _end_flight() except? -1:
    """How many tickets are left, -1 where that could not be seen."""
    global _ending
    cdef CopierData *copier
    cdef int32_t flying
    _ending = True
    # Another thread's close waits for what does not end, or a slow way between devices is tried: the copier may be taken apart meanwhile.
    if not _turn.lock.acquire(timeout=EXIT_PATIENCE):
        return -1
    copier = the_copier()
    if copier != NULL:
        let_no_more_in(copier)
    _turn.lock.release()
    if copier == NULL:
        return 0
    flying = _wait_for_all(copier)
    worker_dismiss()
    return flying


cdef int32_t _wait_for_all(CopierData *copier) except? -1:
    """Until none is left, or nothing more lands."""
    cdef int64_t landed = 0
    cdef int32_t flying
    seen, since = None, time.monotonic()
    while True:
        with nogil:
            flying = in_flight(copier, &landed)
            if flying != 0 and not ran_something():
                nap(LOOK_NS)
        if flying >= 0 and (flying, landed) != seen:
            seen, since = (flying, landed), time.monotonic()
        if flying == 0 or time.monotonic() - since > EXIT_PATIENCE:
            return flying
        PyErr_CheckSignals()


class Progress(NamedTuple):
    """How far a ticket is: layers queued, bytes landed (known chunk by chunk where the worker queues it, else 0 until all have) and in all,
    seconds inside submit, seconds since the call of submit (until the copy was first seen to have ended)."""

    layers_queued: int
    bytes: int
    bytes_total: int
    submit_seconds: float
    seconds: float


cdef class State:
    """Where one session, slot or image keeps the parts of `layout`.

    places: one Place for each part, in the order of layout.parts. owner: any object that keeps the memory alive; it is held as long
        as this state is.

    The memory is looked at once, here: kind and device of the first and last byte of each part, allocation borders of host memory,
    overlaps. Raises Refused, naming the part, where something does not fit. A new state is valid: the engine says what it holds.
    """

    cdef StateData *data
    cdef readonly Layout layout
    cdef readonly tuple places
    cdef readonly object owner
    cdef object era             # of the host runtime: its memory is gone once that has started anew

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
            self._place(layout_values)
        except BaseException:
            state_drop(self.data)
            self.data = NULL            # as if __init__ had not run
            raise

    cdef int _place(self, const LayoutData *layout) except -1:
        cdef Error error
        cdef int status
        for i, place in enumerate(self.places):
            try:
                fill_place(place, &layout.parts[<int32_t>i], &self.data.places[<int32_t>i])
            except (TypeError, ValueError) as wrong:
                part = self.layout.parts[i]
                raise type(wrong)(f"part {part.name!r} of layer {part.layer}: {wrong}") from None
        clear(&error)
        with nogil:
            status = check_places(self.data, &error)
        if status != OK:
            raise_error(&error)
        return 0

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
        self._say(lineage_advanced, marks)

    def rewound(self, marks):
        """Rows from `marks` on were or will be rewritten."""
        self._say(lineage_rewound, marks)

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

    cdef _say(self, int (*what)(Lineage *, const LayoutData *, const int64_t *, uint64_t, Error *) noexcept nogil, marks):
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef int64_t values[MAX_MARKS]
        cdef uint32_t n = fill_marks(self.layout, marks, values)
        clear(&error)
        if what(data.lineage, data.layout, values, n, &error) != OK:
            raise_error(&error)

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


cdef class Image(State):
    """A state in an arena that grows without moving, and that is read only once it is published.

    arena: where its memory is. banks: of running state. chunk: tokens of a chunk, in which parts that grow are kept. scrub: its memory
        is zeroed before the arena gives it out again.

    A copy into an image makes room for its marks first, and hides it; `publish` shows it again, with what `blob` was set to. An image is
    discarded when nothing refers to it any more, or by `discard`. Raises Refused where the arena has no room.
    """

    cdef PoolData *pool         # that it belongs to, or NULL
    cdef object __weakref__

    def __init__(self, Arena arena, Layout layout, *, banks=1, chunk=4096, scrub=False):
        cdef Error error
        cdef ArenaData *memory = arena_data(arena)
        cdef LayoutData *layout_values = layout_data(layout)
        cdef int64_t c_banks, c_chunk
        cdef bint c_scrub = scrub
        if self.data != NULL:
            raise TypeError("an Image is made once")
        c_banks, c_chunk = whole("banks", banks, 1, MAX_IMAGE_BANKS), whole("chunk", chunk, 1, 1 << 40)
        self.layout, self.places, self.owner, self.era = layout, (), arena, host_runtime.configuration()
        clear(&error)
        with nogil:
            self.data = image_new(memory, layout_values, c_banks, c_chunk, c_scrub, &error)
        if self.data == NULL:
            raise_error(&error)

    def __dealloc__(self):
        pool_drop(self.pool)

    def reserve(self, marks):
        """Room for `marks`, without moving a byte. Images of a pool get it from others where the arena is full. Raises Refused where
        there is none left; where all that may go would not be enough, nobody has gone for it."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef int64_t values[MAX_MARKS]
        cdef uint32_t n = fill_marks(self.layout, marks, values)
        cdef int status
        clear(&error)
        with nogil:
            status = (make_room(data, values, n, &error) if self.pool == NULL else
                      pool_reserve(self.pool, data, values, n, NULL, 0, &error))
        if status != OK:
            raise_error(&error)

    def publish(self, generation=0):
        """Shows what has landed, and the blob: True. False while a ticket uses the image. Raises Refused where nothing has landed or the
        last copy failed, and where it has another generation than the one that is named (0: any)."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef uint64_t wanted = whole("generation", generation, 0, (1 << 64) - 1)
        cdef int status
        clear(&error)
        with nogil:
            status = show_image(data, wanted, &error)
        if status < OK:
            raise_error(&error)
        return status == OK

    def discard(self):
        """Gives the memory back now; copies from and into the image are refused from then on. Raises Refused while a ticket uses it."""
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef int status
        clear(&error)
        with nogil:
            status = image_discard(data, &error)
        if status != OK:
            raise_error(&error)

    @property
    def published(self):
        """Whether it may be copied from."""
        return image_visible(state_data(self))

    @property
    def marks(self):
        """The marks up to which it may be copied from, or None where it is not published. Where groups that share a mark were copied to
        different lengths, it is the least of them."""
        cdef StateData *data = state_data(self)
        cdef int64_t values[MAX_MARKS]
        cdef bint visible
        image_data(self)
        with nogil:
            visible = image_marks(data, values)
        return tuple(values[m] for m in range(len(self.layout.marks))) if visible else None

    @property
    def bytes(self):
        """Bytes of the arena that it has."""
        return image_data(self).bytes

    @property
    def blob(self):
        """What was published with the rows, as bytes: token ids, and whatever the engine wants with them. Setting it, to anything that has
        bytes (bytes, an array), is for the next `publish`. A `reset` drops both."""
        cdef StateData *data = state_data(self)
        cdef Blob *blob
        image_data(self)
        with nogil:
            blob = image_shown(data)
        try:
            return blob.bytes[:blob.n] if blob != NULL else b""
        finally:
            blob_drop(blob)

    @blob.setter
    def blob(self, value):
        cdef Error error
        cdef StateData *data = state_data(self)
        cdef bytes copied = memoryview(value).tobytes()
        cdef const char *first = copied
        cdef size_t n = len(copied)
        cdef int status
        clear(&error)
        with nogil:
            status = set_blob(data, first, n, &error)
        if status != OK:
            raise_error(&error)


cdef class Pool:
    """Images by key, in an arena: where it is full, the one that was used longest ago goes.

    arena, layout, banks, chunk, scrub: as for Image. Keys are str, or bytes, of 1 to 64 bytes. An image that is pinned does not go, nor
    one that a ticket uses. Raises Refused where nothing more may go.
    """

    cdef PoolData *data
    cdef readonly Arena arena
    cdef readonly Layout layout
    cdef dict names, images     # from a key's bytes: the key as it was given, the Image
    cdef list evicted_          # keys that were not asked for yet

    def __init__(self, Arena arena, Layout layout, *, banks=1, chunk=4096, scrub=False):
        cdef Error error
        cdef ArenaData *memory = arena_data(arena)
        if self.data != NULL:
            raise TypeError("a Pool is made once")
        self.arena, self.layout, self.names, self.images, self.evicted_ = arena, layout, {}, {}, []
        clear(&error)
        self.data = pool_new(memory, layout_data(layout), whole("banks", banks, 1, MAX_IMAGE_BANKS), whole("chunk", chunk, 1, 1 << 40),
                             scrub, &error)
        if self.data == NULL:
            raise_error(&error)

    def __dealloc__(self):
        if self.data != NULL:
            pool_close(self.data)       # images that were handed out refer to the pool's C side
            pool_drop(self.data)

    def image(self, key, upto=None, *, blob=None):
        """The image of `key`, made where there is none, with room for the marks `upto` if they are given. blob: what its next `publish`
        shows. Others may be evicted for it; so may this one, once others are asked for, where it is not pinned or in use."""
        cdef Error error
        cdef PoolData *data = pool_data(self, "image")
        cdef Key c_key
        cdef StateData *found
        cdef int64_t marks[MAX_MARKS]
        cdef uint32_t n = fill_marks(self.layout, upto, marks) if upto is not None else 0
        cdef bytes copied = None if blob is None else memoryview(blob).tobytes()
        name = fill_key(key, &c_key)
        clear(&error)
        with nogil:
            found = pool_image(data, &c_key, marks if n > 0 else NULL, n, &error)
        self._tell()
        if found == NULL:
            raise_error(&error)
        self.names.setdefault(name, key)
        image = self._wrapped(name, found)
        if copied is not None:
            image.blob = copied
        return image

    def __getitem__(self, key):
        """The image of `key`, which counts as used now. Raises KeyError."""
        cdef PoolData *data = pool_data(self, "pool[key]")
        cdef Key c_key
        cdef StateData *found
        name = fill_key(key, &c_key)
        with nogil:
            found = pool_find(data, &c_key)
        self._tell()
        if found == NULL:
            raise KeyError(key)
        return self._wrapped(name, found)

    def __delitem__(self, key):
        """Takes the image out and gives its memory back. Raises KeyError, and Refused where it is pinned or in use."""
        cdef Error error
        cdef PoolData *data = pool_data(self, "del pool[key]")
        cdef Key c_key
        cdef int status
        fill_key(key, &c_key)
        clear(&error)
        with nogil:
            status = pool_remove(data, &c_key, &error)
        self._tell()
        if status != OK and error.reason == REASON_PLACE:
            raise KeyError(key)
        if status != OK:
            raise_error(&error)

    def __contains__(self, key):
        return bytes_of(key) in self._bytes_of_keys()

    def __len__(self):
        return len(self._table())

    def __iter__(self):
        return iter(self.keys())

    def keys(self):
        """The keys, the one that was used longest ago first."""
        return [self.names.get(name, name) for name in self._bytes_of_keys()]

    def pin(self, key):
        """The image of `key` is not evicted until it is unpinned as often. Raises KeyError."""
        self._pin(key, 1)

    def unpin(self, key):
        """Takes back a `pin`. Raises KeyError where there is none."""
        self._pin(key, -1)

    def evicted(self):
        """The keys of the images that were evicted since the last call, the first one first."""
        self._tell()
        found, self.evicted_ = self.evicted_, []
        return found

    def usage(self):
        """A dict: images, pinned (of them), bytes (that they have), free (in the arena), hits and misses of `pool[key]`, evictions."""
        table = self._table()
        return {
            "images": len(table),
            "pinned": sum(pins > 0 for _, _, pins, _ in table),
            "bytes": sum(size for *_, size in table),
            "free": self.arena.pinned - self.arena.used,
            "hits": self.data.hits,
            "misses": self.data.misses,
            "evictions": self.data.evictions,
        }

    def __repr__(self):
        return f"<Pool of {self.data.n if self.data != NULL else 0} images in {self.arena!r}>"

    def _pin(self, key, int32_t pins):
        cdef PoolData *data = pool_data(self, "pin")
        cdef Key c_key
        cdef bint done
        fill_key(key, &c_key)
        with nogil:
            done = pool_pin(data, &c_key, pins)
        if not done:
            raise KeyError(key)

    def _bytes_of_keys(self):
        return [name for _, name, _, _ in sorted(self._table())]

    def _table(self):
        """(when it was used, key in bytes, pins, bytes) of each image."""
        cdef PoolData *data = pool_data(self, "keys")
        cdef int32_t n = 0
        cdef Entry *table
        with nogil:
            table = pool_table(data, &n)
        if table == NULL:
            raise MemoryError
        try:
            return [(table[i].used, table[i].key.bytes[:table[i].key.n], table[i].pins, table[i].bytes) for i in range(n)]
        finally:
            free(table)

    def _tell(self):
        """Learns which images are gone, whoever was the cause."""
        cdef PoolData *data = pool_data(self, "evicted")
        cdef Gone gone
        cdef bint found
        while True:
            with nogil:
                found = pool_gone(data, &gone)
            if not found:
                break
            name = gone.key.bytes[:gone.key.n]
            self.images.pop(name, None)
            key = self.names.pop(name, name)
            if gone.evicted:
                self.evicted_.append(key)

    cdef _wrapped(self, name, StateData *found):
        """The Image of a state that is held for the caller."""
        cdef Image image = self.images.get(name)
        if image is not None and image.data == found:
            state_drop(found)
            return image
        image = Image.__new__(Image)
        image.data, image.layout, image.places, image.owner, image.pool = found, self.layout, (), self.arena, self.data
        image.era = host_runtime.configuration()
        pool_hold(self.data)
        self.images[name] = image
        return image


cdef class Plan:
    """A source (or one for each group) and a target, checked against each other; used again for every copy between them.

    Made by Copier.plan. It knows no length: each submit brings its marks.
    """

    cdef PlanData *data
    cdef readonly dict sources      # group name to State
    cdef readonly State target
    cdef readonly Copier copier
    cdef tuple states               # all of them

    def __init__(self):
        raise TypeError("plans are made by Copier.plan")

    def __dealloc__(self):
        plan_drop(self.data)

    @property
    def address(self):
        """The strata_plan pointer for C and C++, as an int. It lives as long as this object."""
        return <size_t>plan_data(self)

    @property
    def layout(self):
        plan_data(self)
        return self.target.layout

    def routes(self):
        """The routes of this plan's parts with the devices that carry them: a set of (route, device)."""
        plan_data(self)
        return {(ROUTE_NAMES[self.data.parts[i].route], self.data.parts[i].device) for i in range(self.data.target.layout.n_parts)}

    def submit(self, upto, *, after=None, begin=None, groups=None, src_bank=None, dst_bank=None, src_generation=0, dst_generation=0,
               priority=0, bytes_ahead=0, feed=None, hook=0, hook_arg=0):
        """Queues the copy and returns its Ticket, or None where no ticket is free, or where 16 are being fed or `feed=False` comes behind
        one that is (nothing happened then: try later). Where the target is an image it is given room for the marks first; others of its
        pool are evicted for that only once nothing else is in the way.

        upto: the marks up to which rows move, one int for each of layout.marks. begin: the marks up to which the target has them
            already; None for what the states' lineages say, which is 0 where the source was never spoken of.
        after: what the copy waits for (who wrote the source, who still reads the target): Event and Stream values, or CALLER_SYNCED
            where both are known to be done. There is no default.
        groups: names of the groups that move; None for all. src_bank, dst_bank: the bank of parts that have several, an int or a
            dict from group to int. src_generation, dst_generation: refuse where the state has another; 0 for any.
        feed: whether the worker queues the copy in windows (True) or this call queues it whole (False, None again behind a copy that the
            worker still queues); None for what suits its length. priority: 0, or -1 for a copy that those of priority 0 overtake.
            bytes_ahead: bytes that may be queued and not landed, at least 1024; 0 for the copier's window.
        hook, hook_arg: addresses of a strata_hook (strata_copy.h) and its argument; 0 for none.

        Source and target are held until the ticket ends. Raises Refused (nothing was written; where an image got no room, or another
        thread changed a state meanwhile, some of its pool may have been evicted), Failed (the target is INVALID),
        Poisoned.
        """
        plan_data(self)
        return self.copier._submit(self, upto, (after, begin, groups, src_bank, dst_bank),
                                   (src_generation, dst_generation, priority, bytes_ahead, feed, hook, hook_arg))

    def extents(self, upto, begin=None):
        """What a submit would copy now: a list of (target, source, width, rows, target_pitch, source_pitch), in bytes, in order.

        Extents of a layer are merged where they follow each other; small parts of many layers that lie evenly spaced are one extent,
        before the first layer. Nothing is copied. Raises Refused as submit does.
        """
        cdef Error error
        cdef RequestValues values
        cdef int64_t bytes = 0
        cdef int32_t layer, k, i
        cdef const LayoutData *layout = plan_data(self).target.layout
        cdef int status
        cdef Units *units
        cdef Emission emission
        cdef Known known
        found = []
        fill_request(&values, self.target.layout, upto, None, begin, None, None, None)
        units = <Units *>calloc(layout.n_parts, sizeof(Units))
        if units == NULL:
            raise MemoryError
        try:
            clear(&error)
            with nogil:
                status = check_states_now(self.data, &values.request, &error)
            if status != OK or units_to_move(self.data, &values.request, units, &bytes, &known, &error) != OK:
                raise_error(&error)
            emission.take, emission.sink, emission.pending.rows = collect, <void *>found, 0
            for i in range(self.data.n_bundles):
                if emit_bundle(&emission, self.data, &values.request, &self.data.bundles[i],
                               &units[self.data.bundles[i].part]) != OK:
                    raise MemoryError
            if emit_end(&emission) != OK:
                raise MemoryError
            for layer in range(layout.n_layers):
                for k in range(layout.first[layer], layout.first[layer + 1]):
                    i = layout.order[k]
                    if emit_part(&emission, self.data, &values.request, i, &units[i]) != OK:
                        raise MemoryError
                if emit_end(&emission) != OK:
                    raise MemoryError
        finally:
            free(units)
        return found


cdef class Copier:
    """The lanes, events and tickets of this process, on the devices that are named. One is open at a time; `close` it, or use `with`.

    devices: ordinals of the devices whose memory is copied; (0,). tickets: copies that may be in flight or not yet looked at; 64.
        layer_events: events that a ticket may take on a device, one for each layer and route in it; 128. chunk: bytes after which a long
        copy between device and host leaves a gap for others; 32 MiB. patience: seconds after which CUDA is asked for a ticket whose end
        was not told; 10, None for never. window: chunks that a long copy, which a worker thread queues, has ahead on a device, 8 times as
        long ones by P2P; 8. device_memory: bytes on each device for the ring of `ring_slots` chunks through which pinned memory is
        copied to pinned memory; 12 MiB in 4. pinned_memory: bytes of pinned memory for each device for the 4 chunks through which pageable
        memory is reached; 64 MiB. helpers: threads that copy host memory beside the worker: between these chunks and pageable memory, and a
        share of what is fed from pinned to pinned memory without a hook or `bytes_ahead` (0 where that is write-combined, which processors
        read slowly); 7. relay_memory: bytes of pinned memory for each direction between two devices without P2P, made when a plan needs it;
        32 MiB in `relay_slots` chunks, 4. Where several directions are in use they hold about as much together.

    Opening makes everything that copies need, so that none of them allocates. It opens the runtime: the CUDA runtime, or what
    STRATA_COPY_RUNTIME says; there is no fallback. Raises RuntimeUnavailable, Refused where something cannot be had, ValueError for a
    STRATA_COPY_P2P that is none, and RuntimeError where another copier is open.
    """

    cdef CopierData *data
    cdef readonly tuple devices
    cdef object flying, ended, __weakref__
    cdef dict _links            # of device ordinals
    cdef int submitting         # threads between their call of submit and the Ticket of it; under the GIL

    def __init__(self, devices=(0,), *, tickets=64, layer_events=128, chunk=32 << 20, patience=10.0, window=8, device_memory=12 << 20,
                 ring_slots=4, pinned_memory=64 << 20, helpers=7, relay_memory=32 << 20, relay_slots=4):
        cdef Opening opening
        if self.data != NULL:
            raise TypeError("a Copier is made once")
        if hasattr(devices, "__index__"):
            raise TypeError(f"devices is {devices!r}; a list of ordinals is needed")
        self.devices = tuple(whole("device", device, 0, (1 << 31) - 1) for device in devices)
        self.flying, self.ended, self._links = {}, deque(maxlen=1024), {}
        if not 1 <= len(self.devices) <= MAX_DEVICES or len(set(self.devices)) != len(self.devices):
            raise ValueError(f"devices {self.devices}; 1 to {MAX_DEVICES}, each once")
        tickets, layer_events = whole("tickets", tickets, 1, MAX_TICKETS), whole("layer_events", layer_events, 1, 1 << 16)
        opening.tickets, opening.layer_events, opening.n_devices = tickets, layer_events, len(self.devices)
        opening.chunk, opening.patience = whole("chunk", chunk, 1, 1 << 40), nanoseconds(patience)
        if opening.patience < 0:
            opening.patience = INT64_MAX
        opening.window = whole("window", window, 1, 1 << 16)
        device_memory, ring_slots = whole("device_memory", device_memory, 0, 1 << 40), whole("ring_slots", ring_slots, 1, MAX_RING)
        opening.ring_slots = ring_slots if device_memory else 0
        opening.ring_slot_bytes = device_memory // ring_slots // ALIGNMENT * ALIGNMENT
        if device_memory and not opening.ring_slot_bytes:
            raise ValueError(f"device_memory={device_memory} is less than {ALIGNMENT} bytes for each of {ring_slots} slots")
        pinned_memory = whole("pinned_memory", pinned_memory, 0, 1 << 40)
        opening.stage_slots = STAGE_CHUNKS if pinned_memory else 0
        opening.stage_chunk_bytes = pinned_memory // STAGE_CHUNKS // ALIGNMENT * ALIGNMENT
        opening.helpers = whole("helpers", helpers, 0, 16)
        if pinned_memory and not opening.stage_chunk_bytes:
            raise ValueError(f"pinned_memory={pinned_memory} is less than {ALIGNMENT} bytes for each of {STAGE_CHUNKS} chunks")
        relay_slots = whole("relay_slots", relay_slots, 1, MAX_RING)
        relay_memory = whole("relay_memory", relay_memory, ALIGNMENT * relay_slots, 1 << 40)
        opening.relay_slots, opening.relay_slot_bytes = relay_slots, relay_memory // relay_slots // ALIGNMENT * ALIGNMENT
        peers.mode()
        for i, device in enumerate(self.devices):
            opening.devices[<int32_t>i] = device
        require_runtime()
        global _owner
        check_turn()
        if _owner is not None and _owner() is not None:
            let_go_of_ended()
        left = []
        _turn.take("opened")
        try:
            if _ending:
                raise RuntimeError("the interpreter is ending: no copier opens any more")
            if the_copier() != NULL:
                if _owner() is not None:
                    raise RuntimeError("a copier is open in this process: use that one, or close it")
                close_on_thread(the_copier(), None)       # its Copier was dropped without close
                left.extend(_held.values())       # dropped once the turn is given: owners may be taken apart with them
                _held.clear()
            _owner = weakref.ref(self)
            self.data = open_on_thread(&opening)
        finally:
            _turn.give()

    def __dealloc__(self):
        # Without close there is no thread to wait on here; in a fork the handles are the parent's.
        if self.data != NULL and self.data == the_copier():
            warnings.warn("a Copier was dropped without close: its lanes stay open, and the memory of its copies in flight is held, until "
                          "the next one opens", ResourceWarning)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        """Closes. An exception that is under way goes first."""
        try:
            self.close()
        except CopyError:
            if kind is None:
                raise

    @property
    def address(self):
        """The strata_copier pointer for C and C++, as an int; 0 once closed."""
        return <size_t>self.data

    @property
    def closed(self):
        return self.data == NULL or self.data != the_copier()

    def close(self):
        """Waits for the tickets in flight, then gives everything back. Tickets keep what they last knew. Closing twice is allowed.

        In a signal handler or a finalizer that has interrupted a close it returns at once: that close goes on."""
        cdef Error error
        if in_hook():
            clear(&error)
            of_hook("close", &error)
            raise_error(&error)
        if self.data == NULL or (_turn.mine() is not None and self.closed) or _turn.mine() == "closed":
            return
        check_turn()
        _turn.take("closed")
        try:
            if not self.closed:
                close_on_thread(self.data, self._ended)
        finally:
            _turn.give()

    def _ended(self):
        while self.submitting:      # their tickets have ended, and want to be told so; nothing there runs Python
            time.sleep(0.0001)
        self._collect()
        self.data = NULL

    def plan(self, source, State target not None):
        """A Plan from `source` to `target`. source: a State, or a dict from each group's name to the State that it comes from.

        Raises Refused where the layouts differ (the first difference is named), where states overlap or are one, where a place is on
        a device that is not open, or where no route leads there; with STRATA_COPY_P2P=on also where two devices have no P2P.

        The first plan that leads from a device to another one finds out how, which takes a tenth of a second: see `links`.
        """
        cdef Error error
        cdef StateData *states[MAX_SOURCES]
        cdef int32_t source_of_group[MAX_GROUPS]
        cdef int32_t n_sources
        cdef uint64_t number
        cdef Plan plan = Plan.__new__(Plan)
        self._alive()
        number = self.data.number
        state_data(target)
        plan.copier, plan.target = self, target
        plan.sources = dict(source) if isinstance(source, dict) else dict.fromkeys(target.layout.groups, source)
        if set(plan.sources) != set(target.layout.groups):
            raise ValueError(f"sources for {sorted(plan.sources)}; the layout's groups are {sorted(target.layout.groups)}")
        distinct = list({id(state): state for state in plan.sources.values()}.values())
        if len(distinct) > MAX_SOURCES:
            raise ValueError(f"{len(distinct)} sources; at most {MAX_SOURCES}")
        clear(&error)
        check_era(target)
        for i, state in enumerate(distinct):
            states[<int32_t>i] = state_data(state)
            check_era(state)
            difference = (<State>state).layout.difference(target.layout).encode()
            if difference:
                outcome(&error, REFUSED, REASON_LAYOUT, "the layouts of source and target differ in %s", <const char *>difference)
                raise_error(&error)
        for g, group in enumerate(target.layout.groups):
            source_of_group[<int32_t>g] = next(i for i, state in enumerate(distinct) if state is plan.sources[group])
        n_sources = len(distinct)
        with nogil:
            plan.data = plan_new(states, n_sources, target.data, source_of_group, &error)
        if plan.data != NULL:
            self._link(plan.data)
            with nogil:
                adopt_plan(plan.data, number, &error)
        if error.status != OK:
            raise_error(&error)
        plan.states = (*distinct, target)
        return plan

    @property
    def links(self):
        """How plans of this copier lead from device to device: a tuple of strata_copy.peers.PeerLink, one for each ordered pair that one
        of them has needed."""
        return tuple(self._links.values())

    cdef int _link(self, const PlanData *plan) except -1:
        """The lanes or rings of the pairs that a new plan needs and no earlier one did."""
        cdef int32_t i, source, target
        for i in range(plan.target.layout.n_parts):
            if in_hook() or self.closed:        # adopt_plan refuses it
                return 0
            if plan.parts[i].route != ROUTE_PEER:
                continue
            source, target = device_index(self.data, plan.parts[i].device), device_index(self.data, plan.parts[i].other)
            if source >= 0 and target >= 0 and self.data.devices[source].links[target] == LINK_NONE:
                self._link_pair(source, target)
        return 0

    cdef int _link_pair(self, int32_t source, int32_t target) except -1:
        check_turn()
        _turn.take("linked")
        try:
            if not self.closed and self.data.devices[source].links[target] == LINK_NONE:
                self._link_in_turn(source, target)
        finally:
            _turn.give()
        return 0

    cdef int _link_in_turn(self, int32_t source, int32_t target) except -1:
        cdef Error error
        cdef DeviceLanes *devices = self.data.devices
        if load_i32(&devices[source].poisoned) != 0 or load_i32(&devices[target].poisoned) != 0:
            return 0    # submit says so
        link = peers.link(devices[source].device, devices[target].device)
        if not link.p2p and peers.mode() == "on":
            clear(&error)
            text = f"{peers.P2P_VARIABLE}=on, and {link.reason}".encode()
            error.device = link.source
            outcome(&error, REFUSED, REASON_UNSUPPORTED, "%s", <const char *>text)
            raise_error(&error)
        link_on_thread(self.data, source, target, link.p2p)
        self._links[link.source, link.target] = link
        return 0

    def submit(self, source, State target not None, *, upto, **how):
        """`plan(source, target).submit(upto, **how)`: for one copy between these states."""
        return self.plan(source, target).submit(upto, **how)

    def finished(self):
        """The tickets that have ended since the last call, the oldest 1,024 at most. Memory loads; CUDA is asked only for a ticket that
        is older than `patience`."""
        for ticket in list(self.flying.values()):
            (<Ticket>ticket)._ask_if_late()
        self._collect()
        found = list(self.ended)
        self.ended.clear()
        return found

    def _submit(self, Plan plan, upto, what, how):
        after, begin, groups, src_bank, dst_bank = what
        src_generation, dst_generation, priority, bytes_ahead, feed, hook, hook_arg = how
        cdef Error error
        cdef RequestValues values
        cdef Ticket ticket
        cdef PoolData *pool = (<Image>plan.target).pool if isinstance(plan.target, Image) else NULL
        cdef int status
        self._alive()
        fill_request(&values, plan.target.layout, upto, after, begin, groups, src_bank, dst_bank)
        fill_way(&values, src_generation, dst_generation, priority, bytes_ahead, feed, hook, hook_arg)
        self._collect()
        clear(&error)
        ticket = new_ticket(plan)
        # Nothing from here on runs Python, neither handlers nor finalizers: a close waits until it is over, and they might call it.
        self.submitting += 1
        try:
            with nogil:
                status = room_in_target(plan.data, pool, &values.request, &error)
                if status == OK:
                    status = submit_plan(plan.data, &values.request, &ticket.ticket, &error)
            if status == OK:
                ticket.value, ticket.status = ticket.ticket.v, AGAIN
                _held[ticket.value] = plan.states
                self.flying[ticket.value] = ticket
        finally:
            self.submitting -= 1
        if status == AGAIN:
            return None
        if status != OK:
            raise_error(&error)
        ticket._look()
        return ticket

    def _alive(self):
        cdef Error error
        if self.closed:
            clear(&error)
            outcome(&error, REFUSED, REASON_CLOSED, "the copier is closed, or this process is a fork of the one that opened it")
            raise_error(&error)

    def _collect(self):
        """Takes the tickets that have ended out of flight. They know how they ended, and their slots are free."""
        for ticket in [ticket for ticket in list(self.flying.values()) if ticket.done]:
            self.flying.pop(ticket.value, None)
            self.ended.append(ticket)


cdef class Ticket:
    """One submitted copy. Made by Plan.submit and Copier.submit; it holds source and target until the copy has ended.

    Waits return True where the stream now depends on the bytes and False where they were not queued within `timeout` seconds. They
    raise the copy's own exception where it did not end well.
    """

    cdef abi.Ticket ticket
    cdef readonly Plan plan
    cdef readonly uint64_t value
    cdef int status
    cdef object last, failure, __weakref__

    def __init__(self):
        raise TypeError("tickets are made by Plan.submit")

    def __dealloc__(self):
        ticket_release(&self.ticket)

    def wait_layer(self, layer, stream, timeout=0.0):
        """`stream` waits for all bytes that `layer` needs."""
        return self._wait(whole("layer", layer, 0, ticket_plan(self).target.layout.layers - 1), stream, timeout)

    def wait_done(self, stream, timeout=0.0):
        """`stream` waits for the whole copy: the target may be read behind it."""
        return self._wait(-1, stream, timeout)

    def wait_source(self, stream, timeout=0.0):
        """`stream` waits for the last read of the source: it may be overwritten or freed behind it."""
        return self._wait(-1, stream, timeout)

    def sync(self, timeout=None):
        """Holds the caller (not the GIL) until the copy has ended; False where it has not within `timeout` seconds."""
        cdef Error error
        cdef int status = AGAIN
        cdef int64_t slice_ns, left = nanoseconds(timeout)
        clear(&error)
        self._look()
        while self.status == AGAIN:
            slice_ns = 50000000 if left < 0 or left > 50000000 else left    # so that signals are seen
            with nogil:
                status = ticket_sync(self.ticket, slice_ns, &error)
            PyErr_CheckSignals()
            self._look()
            if status < OK and (not error.restored or self.status == AGAIN):    # of this thread, not of the ticket
                raise_error(&error)
            if left >= 0:
                left -= slice_ns
                if left <= 0:
                    break
        if self.failure is not None:
            raise self.failure
        return self.status == OK

    def cancel(self):
        """Stops the copy at its next chunk: it ends with Cancelled, once what is queued has landed. False where everything is queued
        already, and the copy goes on to its end, or has ended."""
        cdef Error error
        cdef abi.Ticket ticket = self.ticket
        cdef int status
        self._look()
        if self.status != AGAIN:
            return False
        clear(&error)
        with nogil:
            status = ticket_cancel(ticket, &error)
        self._look()
        if status < OK and self.status == AGAIN:
            raise_error(&error)
        return status == OK

    def poll(self):
        """A Progress, from memory alone. Raises where the copy did not end well."""
        progress = self._look()
        if self.failure is not None:
            raise self.failure
        return progress

    @property
    def done(self):
        """True once the copy has ended, well or not."""
        self._look()
        return self.status != AGAIN

    @property
    def error(self):
        """The exception that the copy ended with, or None."""
        self._look()
        return self.failure

    @property
    def target(self):
        return ticket_plan(self).target

    @property
    def routes(self):
        return ticket_plan(self).routes()

    @property
    def bytes(self):
        """Bytes that the copy moves."""
        return self._look().bytes_total

    @property
    def seconds(self):
        """From the call of submit to now, or to when the copy was first seen to have ended."""
        return self._look().seconds

    def __repr__(self):
        progress = self._look()
        how = "in flight" if self.status == AGAIN else "done" if self.status == OK else type(self.failure).__name__
        return f"<Ticket {self.value:#x}: {progress.bytes_total} bytes, {how}>"

    def _wait(self, int32_t layer, stream, timeout):
        """layer -1: the whole copy."""
        cdef Error error
        cdef void *stream_handle = <void *><size_t>handle(stream)
        cdef int64_t ns = nanoseconds(timeout)
        cdef int status
        clear(&error)
        if check_not_default(stream_handle, &error) != OK:      # whatever the ticket's state: it must not depend on the time
            raise_error(&error)
        self._look()
        if self.failure is not None:
            raise self.failure
        if self.status == OK:       # the bytes have landed
            return True
        with nogil:
            status = (ticket_wait_done(self.ticket, stream_handle, ns, &error) if layer < 0 else
                      ticket_wait_layer(self.ticket, layer, stream_handle, ns, &error))
        if status == REFUSED:           # another thread may have seen the end meanwhile and given the ticket back
            self._look()
            if self.failure is not None:
                raise self.failure
            if self.status == OK:
                return True
        if status < OK:
            raise_error(&error)
        return status == OK

    def _ask_if_late(self):
        cdef abi.Ticket ticket = self.ticket
        with nogil:
            ticket_look(ticket)

    def _look(self):
        """The latest Progress. The first look that finds the end keeps it and gives the slot back."""
        cdef abi.Progress p
        cdef Error error
        cdef abi.Ticket ticket = self.ticket
        cdef int status
        ticket_plan(self)
        if self.status != AGAIN:
            observed(<void *>self)      # another thread may have been the first
            return self.last
        clear(&error)
        status = ticket_poll(ticket, &p)
        if status < OK:
            ticket_sync(ticket, 0, &error)      # tells why; at once, for the GIL may move to another look below
        if status == REFUSED:                   # released by another look, or in a fork
            if self.status == AGAIN:
                self.failure, self.status = as_exception(&error), REFUSED
                _held.pop(self.value, None)
            observed(<void *>self)
            return self.last
        last = Progress(p.layers_queued, p.bytes, p.bytes_total, p.ns_submit / 1e9, p.ns_total / 1e9)
        failure = as_exception(&error) if status < OK else None
        if self.status != AGAIN:                # another thread had the GIL meanwhile
            observed(<void *>self)
            return self.last
        self.last = last
        if status != AGAIN:
            published(<void *>self)
            self.failure, self.status = failure, status
            ticket_release(&self.ticket)
            _held.pop(self.value, None)
        return last


# ---- the functions of _core.pxd and of the C table

cdef int submit(abi.Plan *plan, const abi.Request *request, abi.Ticket *ticket, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return submit_plan(<PlanData *>plan, request, ticket, cleared(error, &unread))


cdef int wait_layer(abi.Ticket ticket, int32_t layer, void *stream, int64_t timeout_ns, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return ticket_wait_layer(ticket, layer, stream, timeout_ns, cleared(error, &unread))


cdef int wait_done(abi.Ticket ticket, void *stream, int64_t timeout_ns, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return ticket_wait_done(ticket, stream, timeout_ns, cleared(error, &unread))


cdef int wait_source(abi.Ticket ticket, void *stream, int64_t timeout_ns, abi.Error *error) noexcept nogil:
    # On every route of this release the last read of the source and the last write of the target are one copy.
    return wait_done(ticket, stream, timeout_ns, error)


cdef int poll(abi.Ticket ticket, abi.Progress *progress) noexcept nogil:
    return ticket_poll(ticket, progress)


cdef int finished(abi.Copier *copier, abi.Ticket *out, int32_t n) noexcept nogil:
    return tickets_finished(<CopierData *>copier, out, n)


cdef int sync(abi.Ticket ticket, int64_t timeout_ns, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return ticket_sync(ticket, timeout_ns, cleared(error, &unread))


cdef void release(abi.Ticket *ticket) noexcept nogil:
    ticket_release(ticket)


cdef uint64_t generation(const abi.State *state) noexcept nogil:
    return load_u64(&(<const StateData *>state).generation)


cdef int reset(abi.State *state, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return reset_state(<StateData *>state, cleared(error, &unread))


cdef int cancel(abi.Ticket ticket, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return ticket_cancel(ticket, cleared(error, &unread))


cdef int advanced(abi.State *state, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return lineage_advanced((<StateData *>state).lineage, (<StateData *>state).layout, marks, n_marks, cleared(error, &unread))


cdef int rewound(abi.State *state, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return lineage_rewound((<StateData *>state).lineage, (<StateData *>state).layout, marks, n_marks, cleared(error, &unread))


cdef int dirty(abi.State *state, int32_t part, int64_t first_unit, int64_t n, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return lineage_dirty((<StateData *>state).lineage, (<StateData *>state).layout, part, first_unit, n, cleared(error, &unread))


cdef int rewindable(abi.State *state, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return lineage_rewindable((<StateData *>state).lineage, (<StateData *>state).layout, marks, n_marks, cleared(error, &unread))


cdef int image_reserve(abi.State *image, const int64_t *marks, uint32_t n_marks, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return make_room(<StateData *>image, marks, n_marks, cleared(error, &unread))


cdef int image_blob(abi.State *image, const void *bytes, size_t n, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return set_blob(<StateData *>image, bytes, n, cleared(error, &unread))


cdef int image_publish(abi.State *image, uint64_t generation, abi.Error *error) noexcept nogil:
    cdef abi.Error unread
    return show_image(<StateData *>image, generation, cleared(error, &unread))


cdef abi.Plan *plan_of(object plan) except NULL:
    return <abi.Plan *>plan_data(plan)


cdef abi.State *state_of(object state) except NULL:
    return <abi.State *>state_data(state)


cdef abi.Copier *copier_of(object copier) except NULL:
    if (<Copier?>copier).data == NULL:
        raise RuntimeError("the copier is closed")
    return <abi.Copier *>(<Copier>copier).data


cdef inline abi.Error *cleared(abi.Error *error, abi.Error *unread) noexcept nogil:
    """The caller's error, or a place for one that nobody reads."""
    if error == NULL:
        error = unread
    clear(error)
    return error


cdef extern from "strata_copy.h" nogil:
    ctypedef struct Table "strata_copy_api":
        uint32_t version, size
        int (*submit)(abi.Plan *, const abi.Request *, abi.Ticket *, abi.Error *) noexcept nogil
        int (*wait_layer)(abi.Ticket, int32_t, void *, int64_t, abi.Error *) noexcept nogil
        int (*wait_done)(abi.Ticket, void *, int64_t, abi.Error *) noexcept nogil
        int (*wait_source)(abi.Ticket, void *, int64_t, abi.Error *) noexcept nogil
        int (*poll)(abi.Ticket, abi.Progress *) noexcept nogil
        int (*finished)(abi.Copier *, abi.Ticket *, int32_t) noexcept nogil
        int (*sync)(abi.Ticket, int64_t, abi.Error *) noexcept nogil
        void (*release)(abi.Ticket *) noexcept nogil
        uint64_t (*state_generation)(const abi.State *) noexcept nogil
        int (*state_reset)(abi.State *, abi.Error *) noexcept nogil
        int (*cancel)(abi.Ticket, abi.Error *) noexcept nogil
        int (*state_advanced)(abi.State *, const int64_t *, uint32_t, abi.Error *) noexcept nogil
        int (*state_rewound)(abi.State *, const int64_t *, uint32_t, abi.Error *) noexcept nogil
        int (*state_dirty)(abi.State *, int32_t, int64_t, int64_t, abi.Error *) noexcept nogil
        int (*state_rewindable)(abi.State *, const int64_t *, uint32_t, abi.Error *) noexcept nogil
        int (*image_reserve)(abi.State *, const int64_t *, uint32_t, abi.Error *) noexcept nogil
        int (*image_blob)(abi.State *, const void *, size_t, abi.Error *) noexcept nogil
        int (*image_publish)(abi.State *, uint64_t, abi.Error *) noexcept nogil


cdef Table table
table.version, table.size = API_VERSION, sizeof(Table)
table.submit, table.wait_layer, table.wait_done, table.wait_source = submit, wait_layer, wait_done, wait_source
table.poll, table.finished, table.sync, table.release = poll, finished, sync, release
table.state_generation, table.state_reset, table.cancel = generation, reset, cancel
table.state_advanced, table.state_rewound = advanced, rewound
table.state_dirty, table.state_rewindable = dirty, rewindable
table.image_reserve, table.image_blob, table.image_publish = image_reserve, image_blob, image_publish
_C_API = PyCapsule_New(&table, "strata_copy._core._C_API", NULL)


# ---- helpers

cdef int collect(void *sink, const Extent *e) noexcept nogil:
    with gil:
        try:
            (<list>sink).append((<size_t>e.target, <size_t>e.source, e.width, e.rows, e.target_pitch, e.source_pitch))
            return OK
        except MemoryError:
            return FAILED

cdef bytes bytes_of(key):
    if not isinstance(key, (str, bytes)) or not 1 <= len(key) <= MAX_KEY:
        raise TypeError(f"key {key!r}; a str, or bytes, of 1 to {MAX_KEY} bytes is needed")
    return key.encode() if isinstance(key, str) else key


cdef bytes fill_key(key, Key *c_key):
    cdef bytes name = bytes_of(key)
    cdef const char *first = name
    if len(name) > MAX_KEY:
        raise TypeError(f"key {key!r} has {len(name)} bytes; 1 to {MAX_KEY} are possible")
    c_key.n = len(name)
    memcpy(c_key.bytes, first, c_key.n)
    return name


cdef object as_exception(const Error *error):
    try:
        raise_error(error)
    except Exception as failure:
        return failure


cdef StateData *state_data(State state) except NULL:
    if state is None or state.data == NULL:
        raise TypeError(f"a State is needed, not {None if state is None else 'one whose __init__ did not run'}")
    return state.data


cdef ImageData *image_data(Image image) except NULL:
    if state_data(image).image == NULL:
        raise TypeError("an Image is needed, not one whose __init__ did not run")
    return <ImageData *>image.data.image


cdef PoolData *pool_data(Pool pool, const char *call) except NULL:
    """For a call that takes the pool's lock: who has it may wait for the copier's, which hooks run under."""
    cdef Error error
    if pool.data == NULL:
        raise TypeError("a Pool is needed, not one whose __init__ did not run")
    if in_hook():
        clear(&error)
        of_hook(call, &error)
        raise_error(&error)
    return pool.data


cdef int room_in_target(PlanData *plan, PoolData *pool, const abi.Request *request, Error *error) noexcept nogil:
    """Where the target is an image that lacks it: once nothing else is in the way of the copy, for others may have to go for it."""
    cdef int status
    if room_missing(plan.target, request.upto, request.n_marks) == 0:
        return OK
    status = submit_ahead(plan, request, error)
    if status != OK:
        return status
    if pool == NULL:
        return make_room(plan.target, request.upto, request.n_marks, error)
    return pool_reserve(pool, plan.target, request.upto, request.n_marks, plan.sources, plan.n_sources, error)


cdef int check_era(State state) except -1:
    """Pageable memory is nobody's of the host runtime. An image names no places."""
    cdef Error error
    if state.era != host_runtime.configuration() and not (state.places and all(p.kind == "pageable" for p in state.places)):
        clear(&error)
        outcome(&error, REFUSED, REASON_PLACE, "the host runtime started anew after the state was made, and its memory is gone: make the "
                "state anew")
        raise_error(&error)
    return 0


cdef PlanData *plan_data(Plan plan) except NULL:
    if plan is None or plan.data == NULL:
        raise TypeError("a Plan that Copier.plan made is needed")
    return plan.data


cdef Plan ticket_plan(Ticket ticket):
    if ticket.plan is None:
        raise TypeError("a Ticket that Plan.submit made is needed")
    return ticket.plan


cdef Ticket new_ticket(Plan plan):
    """One that is not submitted yet."""
    cdef Ticket ticket = Ticket.__new__(Ticket)
    ticket.plan, ticket.last = plan, Progress(0, 0, 0, 0.0, 0.0)
    return ticket


cdef int let_go_of_ended() except -1:
    """Owners of memory may lead to a Copier that was dropped, so that it is still there: not for tickets that have ended unseen."""
    cdef CopierData *copier
    cdef uint64_t ticket
    cdef bint flying
    ended = []
    _turn.take("opened")
    try:
        copier = the_copier()
        for ticket in list(_held) if copier != NULL else ():
            with nogil:
                flying = flies(copier, ticket)
            if not flying:
                ended.append(ticket)
    finally:
        _turn.give()
    left = [_held.pop(value, None) for value in ended]
    if left:
        left.clear()
        gc.collect()
    return 0


cdef int check_turn() except -1:
    deed = _turn.mine()
    if deed is not None:
        raise RuntimeError(f"a copier is being {deed} on this thread, which a signal handler or a finalizer has interrupted: open, link or "
                           "close one once that is done")
    return 0
