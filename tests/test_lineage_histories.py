"""What changed moves, and nothing else, through any chain of states: random histories of an engine against the rules
said again (lineage_reference.py) and against what saving and restoring everything would have left.

STRATA_COPY_HISTORY=n runs history n alone."""

import contextlib
import gc
import os

import numpy as np
import pytest

import lineage_reference as rules
import strata_copy as sc
from lineage_world import BANKS, CAPACITY, CONSTANTS, DRAFT, LAYOUT, MAIN, NUMBER, Parked, World
from strata_copy import host_runtime

pytestmark = pytest.mark.host
KINDS = {"main": "device", "slot": "device", "other": "device", "image": "pool", "second": "pinned", "third": "pool"}
SHORT, LONG, BATCH, STEPS = 200, 10_000, 50, 24


def histories():
    if os.environ.get("STRATA_COPY_HISTORY"):
        return [range(int(os.environ["STRATA_COPY_HISTORY"]), int(os.environ["STRATA_COPY_HISTORY"]) + 1)]
    return [
        pytest.param(range(at, at + BATCH), marks=() if at < SHORT else pytest.mark.long)
        for at in range(0, LONG, BATCH)
    ]


class History:
    """One history: a random choice of what an engine does, step by step."""

    def __init__(self, world, number):
        self.random = np.random.default_rng((number, 7))
        world.start(self.random)
        self.world, self.number, self.done = world, number, []

    def pick(self, *without):
        return self.random.choice([held for held in self.world.states if held not in without])

    def run(self, steps=STEPS):
        for _ in range(steps):
            act = self.random.choice(
                ["append", "speculate", "rewind", "copy", "turn", "dirty", "snapshot", "restart", "evict", "fork"],
                p=[0.16, 0.1, 0.08, 0.3, 0.1, 0.07, 0.07, 0.04, 0.03, 0.05],
            )
            getattr(self, act)()
            if self.random.random() < 0.2:
                self.check()
        self.check()

    def check(self):
        assert self.world.wrong() == [], self.story()

    def story(self):
        return f"history {self.number}:\n  " + "\n  ".join(self.done)

    def note(self, text):
        self.done.append(text)

    def counts(self, held, most=9):
        return [int(self.random.integers(0, min(most, CAPACITY - mark) + 1)) for mark in held.marks]

    def engine(self):
        """The states that an engine computes in."""
        return self.world.states[int(self.random.integers(0, 3))]

    def append(self):
        held, counts = self.engine(), None
        counts = self.counts(held)
        self.note(f"{held.name} at {held.marks} appends {counts}")
        held.append(counts)

    def speculate(self):
        held = self.engine()
        before, counts = list(held.marks), self.counts(held)
        held.append(counts)
        kept = [mark + int(self.random.integers(0, n + 1)) for mark, n in zip(before, counts, strict=True)]
        self.note(f"{held.name} at {before} speculates {counts} and keeps {kept}")
        held.rewind(kept)

    def rewind(self):
        held = self.engine()
        marks = [int(self.random.integers(0, mark + 1)) for mark in held.marks]
        self.note(f"{held.name} goes back from {held.marks} to {marks}")
        held.rewind(marks)

    def copy(self, source=None, target=None, **how):
        source = source or self.pick(*[held for held in self.world.states if not self.readable(held)])
        target = target or self.pick(source)
        draw = self.random.random()
        if not how and draw < 0.1:
            how["groups"] = [str(self.random.choice(["main", "draft"]))]
        elif not how and draw < 0.2:
            how["banks"] = int(self.random.integers(0, BANKS)), int(self.random.integers(0, BANKS))
        elif not how and draw < 0.3:
            how["upto"] = [int(self.random.integers(0, mark + 1)) for mark in source.marks]
        elif (
            not how
            and draw < 0.36
            and all(source.lineage.stamps.get((i, 0)) == target.lineage.stamps.get((i, 0)) for i in CONSTANTS)
        ):  # the engine may name what is known anyway
            tracks = {"main": MAIN, "draft": DRAFT}.items()
            how["begin"] = [
                rules.equal_to(source.lineage, target.lineage, track, source.marks[track[1]]) for track in tracks
            ]
        if isinstance(source, Parked) and not source.readable(how.get("groups"), how.get("banks", (0, 0))[0]):
            return
        how["sync"] = bool(self.random.random() < 0.5)
        self.note(f"{source.name} at {source.marks} to {target.name} {how}")
        moved, expected, units = self.world.copy(source, target, **how)
        assert moved == expected, f"{moved} bytes moved, {expected} by the rules: {units}\n{self.story()}"

    def readable(self, held):
        """Nothing was copied into a new image yet."""
        held.wait()
        return not isinstance(held, Parked) or held.state.published

    def turn(self):
        """Appends that nobody speaks of before the copy."""
        held = self.engine()
        counts = [max(1, n) for n in self.counts(held, 5)]
        if any(mark + n > CAPACITY for mark, n in zip(held.marks, counts, strict=True)):
            return
        self.note(f"{held.name} at {held.marks} appends {counts} unsaid")
        held.append(counts, say=False)
        self.copy(held, self.pick(held), upto=list(held.marks))

    def dirty(self):
        held = self.engine()
        name = str(self.random.choice([part.name for part in LAYOUT.parts]))
        part = LAYOUT.parts[NUMBER[name]]
        have = BANKS if part.growth.rule == "state" else rules.units(part.growth, held.marks[part.growth.mark])
        if have == 0:
            return
        first = int(self.random.integers(0, have))
        n = int(self.random.integers(1, have - first + 1))
        self.note(f"{held.name} at {held.marks} rewrites {n} of {name} from {first}")
        held.spoil(name, first, n)

    def snapshot(self):
        held, bank = self.engine(), int(self.random.integers(1, BANKS))
        target, to = self.pick(held), int(self.random.integers(0, BANKS))
        for _ in range(int(self.random.integers(1, 4))):
            self.note(f"{held.name} at {held.marks} takes snapshot {bank}")
            held.snapshot(bank)
            if self.random.random() < 0.5:
                self.copy(held, target, banks=(bank, to))

    def restart(self):
        """Another conversation without a reset, as an engine may have it."""
        held = self.engine()
        self.note(f"{held.name} starts another conversation")
        held.rewind([0, 0])
        held.append(self.counts(held))

    def evict(self):
        held = self.pick()
        self.note(f"{held.name} is evicted")
        held.start()
        self.world.forget_plans(held)

    def fork(self):
        """One image into two slots, which both go on and park in either order."""
        slots = self.world.states[:3]
        a, b = (slots[i] for i in self.random.permutation(3)[:2])
        image = self.world.states[int(self.random.integers(3, 6))]
        if not self.readable(image) or (isinstance(image, Parked) and not image.readable()):
            return
        for slot in (a, b):
            self.copy(image, slot, sync=True)
            counts = self.counts(slot)
            self.note(f"{slot.name} at {slot.marks} appends {counts}")
            slot.append(counts)
        for slot in (a, b) if self.random.random() < 0.5 else (b, a):
            self.copy(slot, image, sync=False)


def run_histories(world, numbers):
    for number in numbers:
        History(world, number).run()


@pytest.fixture
def world():
    made, arenas = [], []

    def make(seed):
        host_runtime.configure(devices=1, seed=seed)
        made.append(sc.Copier(tickets=64, layer_events=16))
        arenas.append(sc.Arena(1 << 20, piece=1 << 16, pause=0.0, threads=1))
        return World(made[-1], np.random.default_rng(seed), KINDS, arenas[-1])

    yield make
    for copier in made:
        copier.close()
    for image in [thing for thing in gc.get_objects() if isinstance(thing, sc.Image)]:
        with contextlib.suppress(sc.Refused):
            image.discard()
    for arena in arenas:
        arena.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("numbers", histories(), ids=lambda numbers: f"{numbers[0]}-{numbers[-1]}")
def test_a_history_of_copies_leaves_what_saving_and_restoring_would(world, numbers):
    """No wrong byte, and no byte that need not have moved."""
    everything = world(numbers[0])
    run_histories(everything, numbers)
    assert host_runtime.violations() == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", rules.RULES)
def test_a_rule_that_is_broken_is_found(world, monkeypatch, rule):
    """Else the test above would not hold the library to it."""
    monkeypatch.setattr(rules.Lineage, "broken", rule)
    everything = world(1)
    with pytest.raises((AssertionError, sc.Refused), match=r"by the rules|mark \d: begin is"):
        run_histories(everything, range(200))
