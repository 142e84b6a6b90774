"""A small conversation, 24 pages and two layers of each kind, is moved every way at once while an engine reads and
writes it, under every seed: no byte is wrong and nothing is unordered."""

import functools
import random

import pytest

import strata_copy as sc
from fixtures import CAPACITY, HOST, PAGES, SYNCED, after_copy, allocate, differences, needed_by, read, small_layout
from strata_copy import host_runtime, runtime

LAYOUTS = {format: small_layout(format, layers=4, draft=True) for format in PAGES}
BANKS = 3
EDGES = (0, 1, 3, 4, 5, 63, 64, 65, 96)
GROUPS = (None, None, ["main"], ["draft"], ["main", "draft"])
FURTHER = 18  # copies of any kind, besides those that every seed makes


def mixed(i, part):
    return {"kind": "pinned" if i % 2 else "device"}


def banked(kind):
    return lambda i, part: {"kind": kind, "banks": BANKS if part.growth.rule == "state" else 1}


# Where seven sessions keep their states, and the copies between them that every seed makes.
PLACES = ["device", "device", "pinned", "pinned", mixed, banked("device"), banked("pinned")]
ALWAYS = [(0, 1), (0, 2), (2, 1), (2, 3), (1, 4), (4, 5), (5, 6)]  # local, out, in, ring, and mixtures


class Engine:
    """Sessions that are copied, read and written, and what each must hold once all is done in the order of the calls.

    Its own work on a session comes behind the copies that it has to wait for, and copies behind its own work.
    """

    def __init__(self, memory, copier, layout, chance):
        self.copier, self.layout, self.chance = copier, layout, chance
        self.sessions = [memory(layout, n, where) for n, where in enumerate(PLACES, 1)]
        self.wanted = [one.pattern() for one in self.sessions]
        self.streams, self.scratch = [], []
        self.last = {}  # session -> stream and event of the engine's latest work on it
        self.flying = []  # ticket, sources, target
        self.seen = []  # address, bytes, what should be there
        self.routes = set()

    def copy(self, sources, target):
        """sources: a session, or one for each group."""
        chance, begin = self.chance, None
        upto = tuple(chance.choice([*EDGES, chance.randint(0, CAPACITY)]) for _ in self.layout.marks)
        if chance.random() < 0.3:
            begin = tuple(chance.randint(0, mark) for mark in upto)
        how = {
            "begin": begin,
            "groups": chance.choice(GROUPS),
            "src_bank": self.bank(sources[0]),
            "dst_bank": self.bank(target),
        }
        given = {group: self.sessions[x].state for group, x in zip(("main", "draft"), sources, strict=True)}
        after = self.after([*sources, target])
        ticket = None
        while ticket is None:
            ticket = self.copier.submit(
                given["main"] if sources[0] == sources[1] else given,
                self.sessions[target].state,
                upto=upto,
                after=after,
                **how,
            )
            if ticket is None:
                self.end_one()
        self.routes |= {route for route, _ in ticket.routes}
        self.flying.append((ticket, sources, target))
        groups = how.pop("groups") or ["main", "draft"]
        for group, x in zip(("main", "draft"), sources, strict=True):
            if group in groups:
                self.wanted[target] = after_copy(
                    self.sessions[x],
                    self.sessions[target],
                    upto,
                    before=self.wanted[target],
                    source_bytes=self.wanted[x],
                    groups=[group],
                    **how,
                )

    def bank(self, session):
        if session < 5 or self.chance.random() < 0.2:
            return None
        return {"main": self.chance.randrange(BANKS)}

    def after(self, sessions):
        """What a copy has to wait for: the engine's latest work on its sessions."""
        edges = [self.last[x] for x in dict.fromkeys(sessions) if x in self.last]
        waits = [sc.Event(event) if self.chance.random() < 0.5 else sc.Stream(stream) for stream, event in edges]
        return waits or SYNCED

    def write(self, session):
        """A kernel writes some bytes of some parts, behind every copy that reads or writes the session."""
        stream = self.behind_own_work(session)
        for ticket, sources, target in self.flying:
            if target == session:
                assert ticket.wait_done(stream, timeout=60)
            elif session in sources:
                assert ticket.wait_source(stream, timeout=60)
        for i in self.chance.sample(range(len(self.layout.parts)), 4):
            _, base, size = self.sessions[session].blocks[i]
            first = self.chance.randrange(size)
            n, value = self.chance.randint(1, size - first), self.chance.randrange(256)
            runtime.memset_async(base + first, value, n, stream)
            self.wanted[session][i] = self.wanted[session][i].copy()
            self.wanted[session][i][first : first + n] = value
        self.own_work(session, stream)

    def read(self, session):
        """A kernel reads one layer, or all, behind every copy that writes it."""
        stream = self.behind_own_work(session)
        layer = self.chance.choice([None, *range(self.layout.layers)])
        for ticket, _, target in self.flying:
            if target == session:
                wait = ticket.wait_done if layer is None else functools.partial(ticket.wait_layer, layer)
                assert wait(stream, timeout=60)
        for i, part in enumerate(self.layout.parts):
            if layer is None or needed_by(part) == layer:
                kind, base, size = self.sessions[session].blocks[i]
                copy = allocate("device" if kind == "pinned" else "pinned", 0, size)
                self.scratch.append((kind, copy))
                runtime.memcpy_async(copy, base, size, stream)
                self.seen.append((copy, size, self.wanted[session][i]))
        self.own_work(session, stream)

    def behind_own_work(self, session):
        stream = runtime.stream_create()
        self.streams.append((stream, runtime.event_create()))
        if session in self.last:
            runtime.stream_wait_event(stream, self.last[session][1])
        return stream

    def own_work(self, session, stream):
        event = self.streams[-1][1]
        runtime.event_record(event, stream)
        self.last[session] = stream, event

    def end_one(self):
        ticket, _, _ = self.flying.pop(self.chance.randrange(len(self.flying)))
        assert ticket.sync(timeout=60)
        self.copier.finished()

    def end(self):
        """Waits for everything, and returns what is not as it should be."""
        while self.flying:
            self.end_one()
        for stream, _ in self.streams:
            runtime.stream_synchronize(stream)
        wrong = [n for n, (copy, size, wanted) in enumerate(self.seen) if (read(copy, size) != wanted).any()]
        for kind, copy in self.scratch:
            (runtime.free if kind == "pinned" else runtime.host_free)(copy)
        for stream, event in self.streams:
            runtime.stream_destroy(stream)
            runtime.event_destroy(event)
        held = [differences(one, wanted) for one, wanted in zip(self.sessions, self.wanted, strict=True)]
        return wrong, held


@pytest.mark.parametrize("format", PAGES)
def test_the_small_conversation_is_24_pages_and_two_layers_of_each_kind(format):
    layout = LAYOUTS[format]
    upto = (CAPACITY, CAPACITY)
    paged = {part.layer for part in layout.parts if part.name == "k" and part.group == "main"}
    recurrent = {part.layer for part in layout.parts if part.name == "recurrent"}
    assert [layout.units(layout.index(layer, "k"), upto) for layer in sorted(paged)] == [24, 24]
    assert len(recurrent) == 2
    assert not paged & recurrent
    assert len(layout.patches) == 2


def run(memory, seed, kind=Engine):
    """A random programme, as the seed decides; (engine, what it saw that was wrong, what its sessions hold that is)."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    layout = LAYOUTS[list(PAGES)[seed % len(PAGES)]]
    pairs = [(x, x, y) for x, y in ALWAYS]
    for _ in range(FURTHER):
        target, *sources = chance.sample(range(len(PLACES)), 3)
        pairs.append((sources[0], sources[chance.choice([0, 0, 1])], target))
    chance.shuffle(pairs)
    how = {"chunk": chance.choice([700, 4000, 1 << 20]), "pinned_memory": 4 * chance.choice([512, 1 << 20])}
    with sc.Copier(tickets=6, layer_events=24, **how) as copier:
        engine = kind(memory, copier, layout, chance)
        for *sources, target in pairs:
            act = chance.choice([engine.write, engine.read, None])
            if act is not None:
                act(chance.randrange(len(PLACES)))
            engine.copy(sources, target)
            if HOST:
                host_runtime.step(chance.choice([0, 3, 40]))
        return engine, *engine.end()


def test_every_way_at_once_under_an_engine_that_reads_and_writes(memory, seed):
    engine, seen, held = run(memory, seed)
    assert engine.routes == {"local", "out", "in", "ring"}
    assert engine.seen
    assert seen == []
    assert held == [[]] * len(PLACES)


class Careless(Engine):
    """Its copies do not wait for its own work."""

    def after(self, sessions):
        return SYNCED


@pytest.mark.host
def test_an_engine_whose_copies_do_not_wait_is_found_out(memory):
    """Else the test above could not fail."""
    wrong = 0
    for seed in range(10):
        host_runtime.configure(seed=seed)
        _, seen, held = run(memory, seed, Careless)
        wrong += seen != [] or held != [[]] * len(PLACES)
        assert "race: " in host_runtime.violations()[0]
    host_runtime.configure()
    assert wrong > 0
