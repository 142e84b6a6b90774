"""The face of strata_copy: the Copier, and the functions that other Cython modules cimport and C finds in a table.

What a user has in Python besides stands in face_state, face_image, face_pool, face_plan and face_ticket. The rooms behind, in the order
in which a copy passes them: layout, states, plan, submit, lanes, tickets; and cudart, the runtime under them all. The C functions are
declared in _core.pxd and, for C and C++, in include/strata_copy.h.
"""

import time
import warnings
import weakref
from collections import deque

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t

cimport strata_copy.abi as abi
from strata_copy.abi cimport AGAIN, API_VERSION, OK, REASON_CLOSED, REASON_LAYOUT, REASON_UNSUPPORTED, REFUSED, Error
from strata_copy.at_exit cimport interpreter_ends
from strata_copy.atomics cimport load_i32, load_u64
from strata_copy.copier cimport Opening, the_copier
from strata_copy.cudart cimport clear, outcome, require_runtime
from strata_copy.face_image cimport Image
from strata_copy.face_plan cimport Plan, plan_data
from strata_copy.face_state cimport State, check_era, state_data
from strata_copy.face_ticket cimport Ticket, new_ticket
from strata_copy.flight cimport wait_for_flight
from strata_copy.held cimport hold, let_go_of_ended, take_held
from strata_copy.hooks cimport in_hook, of_hook
from strata_copy.images cimport image_blob as set_blob, image_publish as show_image, image_reserve as make_room
from strata_copy.lanes cimport ALIGNMENT, LINK_NONE, MAX_RING, CopierData, DeviceLanes, device_index
from strata_copy.latch cimport latch_check, latch_deed, latch_give, latch_take
from strata_copy.layout cimport MAX_GROUPS
from strata_copy.lineage cimport lineage_advanced, lineage_dirty, lineage_rewindable, lineage_rewound
from strata_copy.opening cimport close_on_thread, link_on_thread, open_on_thread
from strata_copy.plan cimport MAX_DEVICES, MAX_SOURCES, ROUTE_PEER, PlanData, plan_new
from strata_copy.pool cimport PoolData, pool_reserve, room_missing
from strata_copy.raising cimport raise_error
from strata_copy.states cimport MAX_TICKETS, StateData
from strata_copy.submit cimport adopt_plan, submit_ahead, submit_plan
from strata_copy.tickets cimport (
    reset_state, ticket_poll, ticket_release, ticket_sync, ticket_wait_done, ticket_wait_layer, tickets_finished,
)
from strata_copy.values cimport RequestValues, fill_request, fill_way
from strata_copy.worker cimport ticket_cancel

from strata_copy import peers
from strata_copy.errors import CopyError
from strata_copy.places import nanoseconds, whole

STAGE_CHUNKS = 4

_owner = None           # a weak reference to the Copier that is open


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
        opening.chunk, opening.patience = whole("chunk", chunk, 1, 1 << 40), nanoseconds("patience", patience, "for never")
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
        latch_check()
        if _owner is not None and _owner() is not None:
            let_go_of_ended()
        left = None         # what it held: dropped once the latch is given
        latch_take("opened")
        try:
            if interpreter_ends():
                raise RuntimeError("the interpreter is ending: no copier opens any more")
            if the_copier() != NULL:
                if _owner() is not None:
                    raise RuntimeError("a copier is open in this process: use that one, or close it")
                close_on_thread(the_copier(), None)       # its Copier was dropped without close
                left = take_held()
            _owner = weakref.ref(self)
            self.data = open_on_thread(&opening)
        finally:
            latch_give()

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
        """Waits for the tickets in flight, then gives everything back. Tickets keep what they last knew. Closing twice is allowed. What a
        signal handler raises meanwhile (Ctrl-C) ends the waiting, and the copier stays open.

        In a signal handler or a finalizer that has interrupted a close it returns at once: that close goes on."""
        cdef Error error
        if in_hook():
            clear(&error)
            of_hook("close", &error)
            raise_error(&error)
        if self.data == NULL or (latch_deed() is not None and self.closed) or latch_deed() == "closed":
            return
        latch_check()
        latch_take("closed")
        try:
            if not self.closed:
                if wait_for_flight(self.data):
                    close_on_thread(self.data, self._ended)
        finally:
            latch_give()

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

    def __repr__(self):
        return f"<Copier of devices {self.devices}, {'closed' if self.closed else 'open'}>"

    cdef int _link(self, const PlanData *plan) except -1:
        """The lanes or rings of the pairs that a new plan needs and no earlier one did."""
        cdef int32_t i, source, target
        for i in range(plan.target.layout.n_parts):
            if in_hook():       # adopt_plan refuses it
                return 0
            if plan.parts[i].route != ROUTE_PEER:
                continue
            self._alive()       # a close that is interrupted lets plans in again: none without its lanes
            source, target = device_index(self.data, plan.parts[i].device), device_index(self.data, plan.parts[i].other)
            if source >= 0 and target >= 0 and self.data.devices[source].links[target] == LINK_NONE:
                self._link_pair(source, target)
        return 0

    cdef int _link_pair(self, int32_t source, int32_t target) except -1:
        latch_check()
        latch_take("linked")
        try:
            self._alive()
            if self.data.devices[source].links[target] == LINK_NONE:
                self._link_in_turn(source, target)
        finally:
            latch_give()
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
                hold(ticket.value, plan.states)
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
