"""Lineage beside windows and rings: what is live of them moves with every copy, other parts only where they changed."""

import random

import numpy as np
import pytest

import lineage_reference as rules
import reference
import strata_copy as sc
from fixtures import HOST, SYNCED, after_copy, differences, write
from strata_copy import host_runtime

WINDOW, SINKS = 12, 2
AHEAD = 5  # tokens that an engine may speculate: so much longer than its window is a ring
RINGS = {(2, "sliding"): WINDOW + AHEAD, (3, "codes"): 100, (4, "pooled"): 30}
LAYOUT = sc.Layout(
    [
        sc.Part(name="conv", layer=0, unit_bytes=40, growth=sc.Growth.state()),
        sc.Part(name="k", layer=1, unit_bytes=32, growth=sc.Growth.linear(4, ceil=True)),
        sc.Part(name="pooled", layer=1, unit_bytes=16, growth=sc.Growth.linear(4, extra=1)),
        sc.Part(name="dead", layer=1, unit_bytes=16, growth=sc.Growth.const()),
        sc.Part(name="sliding", layer=2, unit_bytes=24, growth=sc.Growth.last(WINDOW, sinks=SINKS), rep=2),
        sc.Part(name="chunked", layer=2, unit_bytes=8, growth=sc.Growth(rule="window", lo="chunk", window=16)),
        sc.Part(name="codes", layer=3, unit_bytes=8, growth=sc.Growth.linear(mark=1), group="quantised"),
        sc.Part(
            name="residual",
            layer=3,
            unit_bytes=8,
            growth=sc.Growth(rule="window", lo="mark", lo_mark=1),
            group="quantised",
        ),
        sc.Part(name="pooled", layer=4, unit_bytes=16, growth=sc.Growth.linear(4, extra=1)),
        sc.Part(name="dead", layer=4, unit_bytes=16, growth=sc.Growth.const()),
    ],
    marks=("tokens", "quantised"),
    patches=[sc.Patch(layer=layer, part="pooled", source="dead") for layer in (1, 4)],
)
SLIDING = sc.Layout([sc.Part(name="sliding", layer=0, unit_bytes=8, growth=sc.Growth.last(WINDOW, sinks=SINKS))])


def ringed(i, part):
    """A session whose sliding window, and some of whose rows, lie in rings."""
    ring = RINGS.get((part.layer, part.name), 0)
    return {"ring": ring, "units": part.growth.sinks + ring} if ring else {}


class Session:
    """A state with its memory, and what the rules know of it."""

    def __init__(self, memory):
        self.memory, self.state, self.marks = memory, memory.state, (0, 0)
        self.lineage = rules.Lineage(LAYOUT)

    def append(self, marks, chance):
        self.state.advanced(marks)
        self.lineage.advanced(marks)
        if self.marks == (0, 0):
            self.write(range(len(LAYOUT.parts)), "const", chance)
        self.write(range(len(LAYOUT.parts)), "grows", chance, self.marks, marks)
        self.marks = marks

    def rewind(self, marks, chance):
        self.state.rewound(marks)
        self.lineage.rewound(marks)
        self.marks = marks
        self.write(range(len(LAYOUT.parts)), "grows", chance, marks, marks)  # running state, spare rows

    def write(self, numbers, what, chance, begin=(0, 0), to=(0, 0)):
        """New bytes in the units that an append from `begin` to `to` may write."""
        for i in numbers:
            part, place = LAYOUT.parts[i], self.memory.places[i]
            if (part.growth.rule == "const") != (what == "const"):
                continue
            grows = part.growth.rule in ("linear", "window")
            first = reference.local_tokens(part.growth, begin) // part.growth.q if grows else 0
            for unit in range(first, reference.units_at(part.growth, to)):
                for run in range(part.rep):
                    at = place.base + reference.run_offset(place, part, 0, unit, run)
                    write(at, np.frombuffer(chance.randbytes(part.unit_bytes), np.uint8))


def copy(copier, source, target, marks):
    """A copy that must leave what a whole one would, and move what the rules say: of windows and into rings all that is
    live."""
    units = rules.first_units(source.lineage, target.lineage, marks)
    rules.hand_on(source.lineage, target.lineage, marks)
    wanted = after_copy(
        source.memory, target.memory, marks, before=target.memory.bytes(), source_bytes=source.memory.bytes()
    )
    ticket = copier.submit(source.state, target.state, upto=marks, after=SYNCED)
    assert ticket.sync()
    target.marks = marks
    assert differences(target.memory, wanted) == []
    moves = {i: end - first for i, (first, end) in units.items()}
    for i, part in enumerate(LAYOUT.parts):
        if part.growth.rule == "window" or target.memory.places[i].ring:
            moves[i] = len(reference.live_units(part.growth, marks))
    assert ticket.bytes == sum(n * LAYOUT.parts[i].unit_bytes * LAYOUT.parts[i].rep for i, n in moves.items())
    return moves


PLACES = {"dense": "device", "ringed": ringed}


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_windows_and_rings_move_always_and_the_rest_what_is_new(copier, memory, source, target):
    chance = random.Random(1)
    main, slot = Session(memory(LAYOUT, 1, PLACES[source])), Session(memory(LAYOUT, 2, PLACES[target]))
    main.append((40, 30), chance)
    assert all(copy(copier, main, slot, (40, 30)).values())
    again = {LAYOUT.parts[i].name: n for i, n in copy(copier, main, slot, (40, 30)).items() if n}
    windows = {"sliding": 14, "chunked": 8, "residual": 10}
    assert again == (windows if target == "dense" else {**windows, "codes": 30, "pooled": 11})
    main.append((47, 33), chance)
    new = {(LAYOUT.parts[i].layer, LAYOUT.parts[i].name): n for i, n in copy(copier, main, slot, (47, 33)).items()}
    assert (new[1, "k"], new[1, "pooled"], new[1, "dead"], new[0, "conv"]) == (2, 2, 0, 1)
    assert (new[3, "codes"], new[4, "pooled"]) == ((3, 2) if target == "dense" else (33, 12))


def test_random_turns_between_dense_and_ringed_sessions(copier, memory, seed):
    """Appends, speculation, rewinds, and copies along any chain."""
    chance = random.Random(seed)
    kinds = ("device", ringed, "pinned", ringed)
    sessions = [Session(memory(LAYOUT, n, where)) for n, where in enumerate(kinds, 1)]
    for _ in range(25):
        a, b = chance.sample(sessions, 2)
        kept = min(a.marks[0] + chance.randint(0, 9), 90), min(a.marks[1] + chance.randint(0, 4), a.marks[0])
        a.append((kept[0] + chance.randint(0, AHEAD), kept[1]), chance)
        a.rewind(kept, chance)
        copy(copier, a, b, kept)
    if HOST:
        assert host_runtime.violations() == []


class Cells:
    """Which unit of a sliding window each cell of its place holds, as an engine's writes leave it."""

    def __init__(self, ring):
        self.ring, self.end, self.cells = ring, 0, {}

    def cell(self, unit):
        return unit if unit < SINKS or not self.ring else SINKS + (unit - SINKS) % self.ring

    def append(self, end):
        for unit in range(self.end, end):
            self.cells[self.cell(unit)] = unit
        self.end = end

    def rewind(self, end):
        self.cells = {cell: unit for cell, unit in self.cells.items() if unit < end}
        self.end = end

    def take(self, end):
        self.cells = {self.cell(unit): unit for unit in needed(end)}
        self.end = end

    def has(self, end):
        return end <= self.end and all(self.cells.get(self.cell(unit)) == unit for unit in needed(end))


def needed(end):
    return reference.live_units(SLIDING.parts[0].growth, (end,))


def test_rewindable_knows_what_windows_have_lost(copier, memory, seed):
    """To rings, and to copies, which bring only what is live."""
    chance = random.Random(seed)
    held = []
    for n, ring in enumerate((0, WINDOW + AHEAD, WINDOW), 1):
        fields = {"ring": ring, "units": SINKS + ring} if ring else {"units": 200}
        held.append((memory(SLIDING, n, lambda i, part, fields=fields: fields).state, Cells(ring)))
    for _ in range(60):
        (state, cells), (other, others) = chance.sample(held, 2)
        what = chance.choice(["append", "append", "rewind", "copy", "reset"] if chance.random() < 0.5 else ["append"])
        if what == "append":
            to = min(cells.end + chance.randint(1, 8), 200)
            state.advanced(to)
            cells.append(to)
        elif what == "rewind":
            to = chance.randint(0, cells.end)
            state.rewound(to)
            cells.rewind(to)
        elif what == "copy":
            copier.submit(other, state, upto=others.end, after=SYNCED).sync()
            cells.take(others.end)
        else:
            state.reset()
            cells.rewind(0)
        asked = range(cells.end + 2)
        assert [to for to in asked if state.rewindable(to)] == [to for to in asked if cells.has(to)], what
    assert all(state.rewind_blocker(201).name == "sliding" for state, _ in held)
