"""The engine: a main session, batch slots, and the verbs that move conversations between them."""

import os
import time
from typing import NamedTuple

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset

import numpy as np

cimport strata_copy as sc
from strata_copy import runtime
from strata_copy.probe import Ceilings

from engine_loop.cuda cimport noted, stream_done
from engine_loop.direct cimport DRAFT, KV, RUNNING, Move, move
from engine_loop.save_path cimport Save, images_at_once, keep_running, save_and_restore
from engine_loop.session cimport (
    MAX_STAGES, Landing, Session, SessionData, forget, landed, raise_error, take_ids, write_spare_row, written,
)
from engine_loop.parks import Parks
from engine_loop.session import Checkpoint, Refused, current

SWITCH = "STRATA_SLOT_COPY_DIRECT"
PROBE_BYTES = 256 << 20

cdef int64_t[2] NOTHING = [0, 0]


class Copied(NamedTuple):
    """What a copy was: tokens, their bytes, seconds, and whether the draft's rows came along. Where they did not, there is no
    speculation. moved: the bytes of them that the target did not have."""

    tokens: int
    bytes: int
    seconds: float
    draft: bool
    moved: int


cdef class Engine:
    """A main session and slots of one model, moved by strata_copy where `direct` is set, else on the save path.

    copier: an open strata_copy.Copier with the devices of all stages; the save path needs none. direct: by default what
    STRATA_SLOT_COPY_DIRECT says. pool: a strata_copy.Pool of the sessions' layout, for parked conversations, with direct copies only.
    host_memory: bytes that images of the save path may take at once, by default what is free. log: takes the lines.

    Raises Refused where a slot is not of the main session's layout: another format, rotation, model or split.
    """

    cdef readonly Session main
    cdef readonly list slots
    cdef readonly object copier, parks, log
    cdef readonly dict ceilings         # GB/s: "device", "bus"
    cdef public bint direct
    cdef public int64_t host_memory
    cdef object _plans, _streams
    cdef int64_t _serial
    cdef void *_copy_streams[MAX_STAGES]
    cdef uint64_t *_expected            # the generation that each slot's state has by this engine's own copies

    def __init__(self, Session main, slots, copier=None, *, direct=None, pool=None, host_memory=None, log=print):
        self.main, self.slots, self.copier, self.log = main, list(slots), copier, log
        self.direct = os.environ.get(SWITCH) == "1" if direct is None else direct
        self.host_memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if host_memory is None else host_memory
        self.ceilings, self._plans, self._streams = {}, {}, []
        if self.direct and copier is None:
            raise ValueError("direct copies need a Copier")
        if pool is not None and not self.direct:
            raise ValueError("a pool is filled by direct copies")
        self.parks = None if pool is None else Parks(pool, copier, main.layout)
        for slot in self.slots:
            difference = main.layout.difference((<Session?>slot).layout)
            if difference:
                raise Refused(f"{slot.name} and {main.name} differ in {difference}")
        self._expected = <uint64_t *>calloc(len(self.slots) + 1, sizeof(uint64_t))
        if self._expected == NULL:
            raise MemoryError
        for k, stage in enumerate(main.stages):
            with current(stage.device):
                self._streams.append(runtime.stream_create())
            self._copy_streams[<int32_t>k] = <void *><size_t>self._streams[-1]
        if copier is not None:
            for slot in self.slots:
                self._make_plans(slot)
            for session in (main, *self.slots):
                self._plans[session, "keep"] = copier.plan(session.state, session.checkpoints)
                self._plans[session, "rewind"] = copier.plan(session.checkpoints, session.state)

    def __dealloc__(self):
        free(self._expected)

    def _make_plans(self, slot):
        """Once for each pair: addresses never change. With a checkpoint the running state comes from another state than the rows."""
        main, plan = self.main, self.copier.plan
        self._plans[main, slot] = plan(main.state, slot.state)
        self._plans[slot, main] = plan(slot.state, main.state)
        rows = {"kv": slot.state, "draft": slot.state}
        self._plans[slot, main, "at"] = plan({**rows, "running": slot.checkpoints}, main.state)

    def close(self):
        """Gives back what the engine made, once parks have landed; the sessions and the pool are the caller's."""
        if self.parks is not None:
            self.parks.close()
        self._plans.clear()
        for stream in self._streams:
            runtime.stream_destroy(stream)
        self._streams = []

    # ---- the verbs

    def copy_to_slot(self, b, prompt, *, request=1, draft=True):
        """Slot b takes the main session's conversation, which must be `prompt`, for a request. draft=False declares that the draft's
        rows stay behind; it must be said where one of both has no draft.

        Raises Refused (nothing was written) and Failed (the slot holds no conversation any more).
        """
        cdef Session slot = self._slot(b)
        self._check_prompt(self.main, self.main.data.n_ids, prompt, True)
        copied = self._copy(self.main, slot, self.main.data.n_ids, self.main.data.n_draft, None, draft, request, 0)
        self._say(f"slot {b} takes {copied.tokens} tokens", copied, slot)
        return copied

    def copy_from_slot(self, b, prompt, at=None, *, request=None, draft=True):
        """The main session takes slot b's conversation, of which `prompt` is a continuation; as it was at a checkpoint, where one is
        given: rows of the slot, running state of the checkpoint. request: whom the slot must still serve.

        Raises Refused and Failed as copy_to_slot does.
        """
        cdef Session slot = self._slot(b)
        if request is not None and request != slot.data.request:
            raise Refused(f"slot {b} serves request {slot.data.request}, not {request}")
        if at is not None:
            self._check_checkpoint(slot, at)
        tokens, drafted = (slot.data.n_ids, slot.data.n_draft) if at is None else (at.tokens, at.draft)
        self._check_prompt(slot, tokens, prompt, False)
        copied = self._copy(slot, self.main, tokens, drafted, at, draft, 0, self._expected[<int32_t>b] if self.direct else 0)
        self._say(f"slot {b} gave back {copied.tokens} tokens", copied, slot)
        return copied

    def park(self, Session session not None, key, *, draft=True, wait=False):
        """Keeps a session's conversation in the pool, in the background: what its image lacks is read behind all that is queued on the
        session, while slots decode. What is parked is found once it has landed and `tend` was called; wait=True waits for that.

        Raises Refused where the pool has no room left that others could give.
        """
        self._pool().begin(session, key, draft)
        self._say_evicted()
        if wait:
            self._landed(key)

    def tend(self):
        """Shows what has landed of the parks: their keys. An engine calls it between steps."""
        ended = self._pool().ended()
        for key in ended:
            self._landed(key)
        return ended

    def take(self, b, key, prompt, *, request=1):
        """Slot b takes a parked conversation, which must be what `prompt` begins with, for a request; the draft with it where both have
        one. Where the slot has it still, for its park has not ended, that is cancelled, and nothing moves.

        Raises Refused and Failed as copy_to_slot does.
        """
        cdef Session slot = self._slot(b)
        copied = self._from_pool(slot, key, prompt, request)
        self._say(f"slot {b} takes {copied.tokens} tokens parked as {key}", copied, slot, "bus")
        return copied

    def restore(self, key, prompt):
        """The main session takes a parked conversation, as a slot does."""
        copied = self._from_pool(self.main, key, prompt, 0)
        self._say(f"{self.main.name} restores {copied.tokens} tokens parked as {key}", copied, self.main, "bus")
        return copied

    def checkpoint(self, Session session not None):
        """Keeps the running state of a session as it is now, in the bank that was not used for longest."""
        if session.data.n_banks == 0:
            raise Refused(f"{session.name} has no room for checkpoints")
        banks = {taken.serial: bank for bank, taken in session.taken.items()}
        bank = next((k for k in range(session.data.n_banks) if k not in session.taken), banks[min(banks)] if banks else 0)
        session.taken.pop(bank, None)
        self._running(session, "keep", bank, session.data.n_ids, session.data.n_draft)
        self._serial += 1
        made = Checkpoint(session, bank, session.data.n_ids, session.data.n_draft, (1 << len(session.stages)) - 1, self._serial)
        session.taken[bank] = made
        return made

    def rewind(self, Session session not None, at):
        """The session is again as it was at one of its checkpoints. Its rows are there still."""
        cdef sc.Error error
        cdef SessionData *s = &session.data
        cdef int64_t marks[2]
        cdef Landing landing
        cdef int32_t i
        cdef int status = sc.OK
        self._check_checkpoint(session, at)
        marks[0], marks[1] = at.tokens, at.draft
        written(session, marks, marks)
        self._running(session, "rewind", at.bank, at.tokens, at.draft)
        take_ids(s, s.ids, marks, s.request)
        landing.session, landing.marks = s, marks
        for i in range(s.n_kv):
            if status == sc.OK and s.kv[i].pooled != NULL and s.n_ids > 0:
                status = write_spare_row(s, &s.kv[i], &error)
            elif status == sc.OK and i == s.draft:      # the ring has lost pages that are in the window again
                status = noted(landed(&landing, s.n_layers, s.stages[s.kv[i].stage].device, s.kv[i].stream), "residency", &error)
        if status != sc.OK:
            raise_error(&error)
        for later in [bank for bank, taken in session.taken.items() if taken.tokens > at.tokens]:
            del session.taken[later]

    def probe(self, bytes=PROBE_BYTES):
        """What the devices of all stages give at once, for the log: within them, and from pinned memory over the bus. GB/s."""
        devices = sorted({stage.device for stage in self.main.stages})
        with Ceilings(bytes, bytes) as ceilings:
            for name, way in (("device", "d2d"), ("bus", "h2d")):
                self.ceilings[name] = ceilings.measure(way, devices).best
        return self.ceilings

    # ---- what they are made of

    def _slot(self, b):
        if not isinstance(b, int) or not 0 <= b < len(self.slots):
            raise Refused(f"slot {b} is asked for; there are {len(self.slots)}")
        return self.slots[b]

    def _pool(self):
        if self.parks is None:
            raise Refused("the engine has no pool")
        return self.parks

    def _check_prompt(self, Session session, int64_t tokens, prompt, bint whole):
        """The ids of a session up to `tokens` must be the prompt, or what it begins with."""
        check_ids(session.name, session.data.ids, tokens, prompt, whole)

    def _check_checkpoint(self, Session session, at):
        if at.owner is not session or at.bank not in session.taken or session.taken[at.bank].serial != at.serial:
            raise Refused(f"the checkpoint at {at.tokens} tokens is not one of {session.name}, or was given up")
        if at.stages != (1 << len(session.stages)) - 1:
            raise Refused(f"the checkpoint at {at.tokens} tokens lacks the part of a stage: it has {at.stages:#b}")
        if at.tokens > session.data.n_ids:
            raise Refused(f"the checkpoint is at {at.tokens} tokens, {session.name} holds {session.data.n_ids}")

    def _copy(self, Session source, Session target, int64_t tokens, int64_t drafted, at, bint draft, int64_t request, uint64_t generation):
        cdef sc.Error error
        cdef int64_t marks[2]
        cdef uint64_t turn = source.data.turn
        cdef int64_t start, ns, bank = -1 if at is None else at.bank, moved = 0
        cdef int status
        if draft and (source.data.draft < 0) != (target.data.draft < 0):
            without = source if source.data.draft < 0 else target
            raise Refused(f"{without.name} has no draft: declare it absent (draft=False)")
        draft = draft and source.data.draft >= 0
        if tokens > target.data.capacity:
            raise Refused(f"{target.name} has room for {target.data.capacity} tokens, {tokens} are asked for")
        marks[0], marks[1] = tokens, drafted if draft else 0
        start = time.monotonic_ns()
        status = (self._direct(source, target, marks, bank, draft, generation, &moved, &error) if self.direct else
                  self._save_path(source, target, marks, bank, draft, turn, &error))
        ns = time.monotonic_ns() - start
        if status == sc.OK:
            take_ids(&target.data, source.data.ids, marks, request)
        elif status != sc.REFUSED:
            forget(&target.data)        # half written: the prompt has to be read again
        if status != sc.REFUSED:
            target.taken.clear()
            self._note(target)
        if status != sc.OK:
            raise_error(&error)
        bytes = source.layout.bytes_at((marks[0], marks[1]))
        return Copied(tokens, bytes, ns / 1e9, bool(draft), moved if self.direct else bytes)

    cdef int _direct(self, Session source, Session target, const int64_t *marks, int64_t bank, bint draft, uint64_t generation,
                     int64_t *moved, sc.Error *error) except? 99:
        cdef Move m
        cdef int64_t banks[3]
        cdef int status
        memset(&m, 0, sizeof(m))
        banks[0], banks[1], banks[2] = 0, bank, 0
        m.plan = sc.plan_of(self._plans[(source, target) if bank < 0 else (source, target, "at")])
        m.to_state, m.source, m.target, m.marks = sc.state_of(target.state), &source.data, &target.data, marks
        m.src_bank = banks if bank >= 0 else NULL
        # Every source would be asked for its generation, and the checkpoints have one of their own.
        m.groups, m.generation, m.error = KV | RUNNING | (DRAFT if draft else 0), generation if bank < 0 else 0, error
        with nogil:
            status = move(&m)
        moved[0] = m.moved
        return status

    def _from_pool(self, Session session, key, prompt, int64_t request):
        cdef const int32_t[::1] ids
        cdef sc.Error error
        cdef int64_t marks[2]
        cdef Move m
        cdef int64_t start
        cdef int status
        cdef bint draft
        parks = self._pool()
        if parks.still_there(session, key):
            return self._still_there(session, key, prompt, request)
        if key in parks.in_flight:
            self._landed(key)
        image, ids, drafted = parks.image(key)
        marks[0], marks[1] = image.marks
        check_ids(f"the image of {key}", &ids[0] if ids.shape[0] > 0 else NULL, marks[0], prompt, False)
        if marks[0] > session.data.capacity:
            raise Refused(f"{session.name} has room for {session.data.capacity} tokens, {marks[0]} are parked as {key}")
        draft = session.data.draft >= 0 and drafted
        marks[1] = marks[1] if draft else 0
        plan = parks.plan(session, key, image, out=False)
        memset(&m, 0, sizeof(m))
        m.plan, m.to_state, m.target, m.marks = sc.plan_of(plan), sc.state_of(session.state), &session.data, marks
        m.groups, m.error = KV | RUNNING | (DRAFT if draft else 0), &error
        start = time.monotonic_ns()
        with nogil:
            status = move(&m)
        start = time.monotonic_ns() - start
        if status == sc.OK:
            take_ids(&session.data, &ids[0] if marks[0] > 0 else NULL, marks, request)
        elif status != sc.REFUSED:
            forget(&session.data)
        if status != sc.REFUSED:
            session.taken.clear()
            self._note(session)
        if status != sc.OK:
            raise_error(&error)
        return Copied(marks[0], session.layout.bytes_at((marks[0], marks[1])), start / 1e9, bool(draft), m.moved)

    def _still_there(self, Session session, key, prompt, int64_t request):
        """The conversation is back before its park has ended."""
        self._check_prompt(session, session.data.n_ids, prompt, False)
        draft = session.data.draft >= 0
        if self.parks.stop(key):
            self.log(f"the park of {key} is cancelled")
        session.data.request = request
        bytes = session.layout.bytes_at((session.data.n_ids, session.data.n_draft))
        return Copied(session.data.n_ids, bytes, 0.0, draft, 0)

    def _landed(self, key):
        park = self.parks.land(key)
        marks = park.image.marks
        copied = Copied(marks[0], park.image.layout.bytes_at(marks), park.ticket.seconds, park.draft, park.ticket.bytes)
        self._say(f"{park.session.name} parks {copied.tokens} tokens as {key}", copied, park.session, "bus")

    def _say_evicted(self):
        for key in self.parks.evicted():
            self.log(f"{key} went from the pool")

    cdef int _save_path(self, Session source, Session target, const int64_t *marks, int64_t bank, bint draft, uint64_t turn,
                        sc.Error *error) except? 99:
        cdef Save save
        cdef int64_t need = images_at_once(&source.data, marks)
        cdef int32_t k
        cdef int status = sc.OK
        if need > self.host_memory:
            raise Refused(f"{need} bytes of host memory are needed for images, {self.host_memory} may be taken")
        save.source, save.target, save.marks, save.bank, save.draft = &source.data, &target.data, marks, bank, draft
        save.streams, save.error = self._copy_streams, error
        with nogil:
            for k in range(source.data.n_stages):
                if status == sc.OK:
                    status = stream_done(source.data.stages[k].stream, error)
        if status == sc.OK and source.data.turn != turn:    # another thread has used the wait
            raise Refused(f"{source.name} was changed meanwhile")
        if status == sc.OK:
            written(target, NOTHING, marks)
        with nogil:
            if status == sc.OK:
                status = save_and_restore(&save)
        return status

    cdef int _running(self, Session session, str what, int64_t bank, int64_t tokens, int64_t drafted) except -1:
        """Running state between a session and a bank of it."""
        cdef sc.Error error
        cdef Move m
        cdef int64_t banks[3]
        cdef int64_t marks[2]
        cdef int32_t k
        cdef int status = sc.OK
        cdef bint keep = what == "keep"
        banks[0], banks[1], banks[2] = 0, bank, 0
        marks[0], marks[1] = tokens, drafted
        if self.direct:
            memset(&m, 0, sizeof(m))
            m.plan = sc.plan_of(self._plans[session, what])
            m.to_state = sc.state_of(session.checkpoints if keep else session.state)
            m.source, m.target, m.marks, m.groups, m.error = &session.data, &session.data, marks, RUNNING, &error
            if keep:
                m.dst_bank = banks
            else:
                m.src_bank = banks
        elif keep:
            for part in range(len(session.layout.parts)):
                if session.layout.parts[part].group == "running" and status == sc.OK:
                    status = sc.dirty(sc.state_of(session.checkpoints), part, bank, 1, &error)
        with nogil:
            if self.direct:
                status = move(&m)
            else:
                for k in range(session.data.n_stages):
                    if status == sc.OK:
                        status = keep_running(&session.data, k, bank, keep, self._copy_streams[k], &error)
        if status != sc.OK and status != sc.REFUSED and not keep:
            forget(&session.data)
        self._note(session)
        if status != sc.OK:
            raise_error(&error)
        return 0

    cdef int _note(self, Session session) except -1:
        """What this engine last did to a slot is what it expects to find there."""
        if session in self.slots:
            self._expected[<int32_t>self.slots.index(session)] = sc.generation(sc.state_of(session.state))
        return 0

    def _say(self, what, copied, Session slot, way=None):
        """As the engine's log has it, with the speed of it beside what the way gives."""
        rate = copied.moved / copied.seconds / 1e9 if copied.seconds else 0
        way = way or ("device" if self.main.mode == slot.mode == 0 else "bus")
        share = f", {100 * rate / self.ceilings[way]:.0f}% of the {way}'s {self.ceilings[way]:.1f}" if self.ceilings else ""
        part = "" if copied.moved == copied.bytes else f"; {copied.moved / 1e6:,.3f} of {copied.bytes / 1e6:,.3f} MB"
        draft = "" if copied.draft else "; no draft"
        self.log(f"{what} (copied in {1000 * copied.seconds:.1f} ms, {rate:.1f} GB/s{share}{part}{draft})")


cdef int check_ids(str name, const int32_t *ids, int64_t tokens, prompt, bint whole) except -1:
    """Token ids that are kept, up to `tokens`, must be the prompt, or what it begins with."""
    cdef const int32_t[::1] wanted = np.ascontiguousarray(prompt, np.int32)
    if wanted.shape[0] < tokens or (whole and wanted.shape[0] != tokens):
        raise Refused(f"{name} holds {tokens} tokens, the prompt has {wanted.shape[0]}")
    if tokens > 0 and memcmp(&wanted[0], ids, tokens * sizeof(int32_t)) != 0:
        raise Refused(f"the prompt does not go on from what {name} holds")
    return 0
