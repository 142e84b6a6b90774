"""What changed moves, and nothing else, through any chain of states: random histories of an engine against the rules
said again (lineage_reference.py) and against what saving and restoring everything would have left.

STRATA_COPY_HISTORY=n runs history n alone."""

import contextlib
import gc
import os
import threading

import numpy as np
import pytest

import lineage_reference as rules
import strata_copy as sc
from fixtures import SYNCED
from lineage_world import BANKS, CAPACITY, DRAFT, LAYOUT, MAIN, NUMBER, Parked, World
from strata_copy import host_runtime, presets, runtime

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
            and source.lineage.stamps.get((NUMBER["dead"], 0)) == target.lineage.stamps.get((NUMBER["dead"], 0))
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


# ---- what a turn costs

TOKENS, NEW = 497_051, 383
FORMAT = {"k": 4 * 512, "v": 4 * 288, "k_scale": 4 * 16}  # bytes of a page of k8v4, which has 4 cells
RUNNING = 36 * 3_268_608 + 368_640 + 12 * (1536 + 4)  # recurrent rows, the window, tails and positions of 12 indexers
SPARE = 12 * 512


def rows(first, end):
    """Bytes of 12 layers: pages that hold cells [first, end), pooled rows of blocks finished there, the spare one."""
    pages, pooled = -(-end // 4) - first // 4, end // 4 + 1 - first // 4
    return 12 * (pages * sum(FORMAT.values()) + pooled * 512)


class Sessions:
    """Sessions with the real sizes and no bytes: copies are lost on their way."""

    def __init__(self, copier, names):
        layout = presets.qwen3_8_flash_next("k8v4", draft=False)
        self.copier, self.states = copier, {}
        for name in names:
            pinned = name.startswith("image")
            places = []
            for i, part in enumerate(layout.parts):
                units = layout.units(i, (600_000,))
                allocate = runtime.host_alloc if pinned else runtime.malloc
                places.append(
                    sc.Place(base=allocate(units * part.unit_bytes), units=units, kind="pinned" if pinned else "device")
                )
            self.states[name] = sc.State(layout, places)

    def __getitem__(self, name):
        return self.states[name]

    def copy(self, source, target, upto):
        for function in ("cudaMemcpyAsync", "cudaMemcpy2DAsync"):
            for nth in range(1, 600):
                host_runtime.skip(function, nth)
        ticket = self.copier.submit(self.states[source], self.states[target], upto=upto, after=SYNCED)
        host_runtime.clear_faults()
        extents = self.copier.plan(self.states[source], self.states[target]).extents(upto)
        assert extents == []  # the same again would move nothing
        assert ticket.sync(timeout=60)
        return ticket.bytes


@pytest.fixture
def sessions():
    host_runtime.configure(memory=1 << 40)
    with sc.Copier(tickets=8, layer_events=64) as copier:
        yield Sessions(copier, ["main", "slot", "other", "image", "image 2"])


def test_a_turn_of_383_tokens_in_497k_moves_what_changed(sessions):
    sessions["main"].advanced(TOKENS)
    whole = rows(0, TOKENS) + RUNNING + SPARE  # the constants of 12 indexers are as large as a spare row
    assert sessions.copy("main", "slot", TOKENS) == whole
    assert sessions.copy("slot", "image", TOKENS) == whole
    for turn in range(3):
        before, upto = TOKENS + turn * 2 * NEW, TOKENS + turn * 2 * NEW + NEW
        sessions["main"].advanced(upto)
        turn_bytes = rows(before, upto) + RUNNING
        assert turn_bytes < 123e6
        assert sessions.copy("main", "slot", upto) == turn_bytes
        sessions["slot"].advanced(upto + NEW)  # it decodes
        assert sessions.copy("slot", "image", upto + NEW) == rows(before, upto + NEW) + RUNNING  # park
        assert sessions.copy("slot", "main", upto + NEW) == rows(upto, upto + NEW) + RUNNING  # give back


def test_another_conversation_in_the_main_session_costs_nothing_more(sessions):
    sessions["main"].advanced(TOKENS)
    sessions.copy("main", "slot", TOKENS)
    sessions.copy("main", "image", TOKENS)
    sessions["main"].rewound(0)
    sessions["main"].advanced(9000)
    sessions.copy("main", "other", 9000)
    sessions["slot"].advanced(TOKENS + NEW)
    assert sessions.copy("slot", "image", TOKENS + NEW) == rows(TOKENS, TOKENS + NEW) + RUNNING
    sessions["slot"].advanced(TOKENS + NEW + 1)
    assert sessions.copy("slot", "image", TOKENS + NEW + 1) == rows(TOKENS + NEW, TOKENS + NEW + 1) + RUNNING


def test_a_take_after_a_park_without_decode_moves_nothing(sessions):
    sessions["slot"].advanced(TOKENS)
    sessions.copy("slot", "image", TOKENS)
    assert sessions.copy("image", "slot", TOKENS) == 0
    assert sessions.copy("slot", "image", TOKENS) == 0
    assert sessions.copy("image", "other", TOKENS) > 5e9
    assert sessions.copy("other", "slot", TOKENS) == 0


def test_a_decode_that_no_submit_reads_is_undone_by_the_same_copy(sessions):
    """Running state and the units that are being filled are not what they were."""
    sessions["main"].advanced(TOKENS)
    sessions.copy("main", "slot", TOKENS)
    sessions["slot"].advanced(TOKENS + 60)
    assert sessions.copy("main", "slot", TOKENS) == rows(TOKENS, TOKENS) + RUNNING
    assert sessions.copy("main", "slot", TOKENS) == 0


def test_images_and_slots_hand_on_through_any_chain(sessions):
    sessions["main"].advanced(TOKENS)
    sessions.copy("main", "image", TOKENS)
    sessions.copy("image", "slot", TOKENS)
    sessions["slot"].advanced(TOKENS + 26)
    sessions.copy("slot", "main", TOKENS + 26)
    sessions["main"].advanced(TOKENS + NEW)
    assert sessions.copy("main", "image", TOKENS + NEW) == rows(TOKENS, TOKENS + NEW) + RUNNING


# ---- one rule at a time


@pytest.fixture
def three(copier):
    """A small world of three states with a layout whose small parts move together."""
    world = World(copier, np.random.default_rng(3), {"main": "device", "slot": "device", "image": "pinned"})
    return world, *world.states


def test_a_state_that_was_told_nothing_moves_whole(three):
    world, main, slot, _ = three
    main.append((20, 9), say=False)
    for _ in range(3):
        moved, _, _ = world.copy(main, slot)
        assert moved == LAYOUT.bytes_at((20, 9))
    assert slot.state.lineage == {("main", "tokens"): [], ("draft", "draft"): []}
    assert world.wrong() == []


def test_what_the_engine_says_while_a_copy_is_in_flight_holds(three):
    """The copy that ends later does not lift what was rewound meanwhile."""
    world, main, slot, _ = three
    main.append((40, 20))
    world.copy(main, slot)
    slot.state.rewound((12, 8))
    slot.wait()
    assert [segments[-1][2] for segments in slot.state.lineage.values()] == [12, 8]


@pytest.mark.parametrize("function", ["cudaStreamWaitEvent", "cudaMemcpyAsync"])
def test_a_copy_that_fails_leaves_nothing_known(three, function):
    world, main, slot, _ = three
    main.append((40, 20))
    world.copy(main, slot, sync=True)
    main.append((5, 5))
    event, stream = runtime.event_create(), runtime.stream_create()
    runtime.event_record(event, stream)
    host_runtime.fail(function, 1, 1)
    with pytest.raises(sc.CopyError):
        world.plan(main, slot).submit(main.marks, after=sc.Event(event))
    host_runtime.clear_faults()
    if function == "cudaStreamWaitEvent":  # before the first byte: as it was
        assert slot.state.valid
        assert [segments[-1][2] for segments in slot.state.lineage.values()] == [40, 20]
        return
    assert not slot.state.valid
    whole = sum(extent[2] * extent[3] for extent in world.plan(main, slot).extents(main.marks))
    assert whole == LAYOUT.bytes_at(main.marks)
    slot.state.reset()
    slot.lineage.forget()
    assert world.copy(main, slot)[0] == whole
    assert world.wrong() == []


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_a_fed_copy_that_ends_badly_leaves_nothing_known(held, how, later):
    """It counted as done from its submit on, and so did what came behind it."""
    with sc.Copier(tickets=8, layer_events=16) as copier:
        world = World(copier, np.random.default_rng(3), {"main": "device", "slot": "device", "other": "device"})
        main, slot, other = world.states
        main.append((20, 9))
        world.copy(main, slot, sync=True)
        world.copy(main, other, sync=True)
        main.append((5, 5))
        other.append((1, 1))
        ticket = world.plan(main, slot).submit(main.marks, after=held.wait, feed=True)
        second = world.plan(other, slot).submit(other.marks, after=SYNCED, feed=True) if later else None
        if how == "fail":
            host_runtime.fail("cudaMemcpyAsync", 1, 1)
        else:
            ticket.cancel()
        held.open()
        for one in filter(None, (ticket, second)):
            with contextlib.suppress(sc.CopyError):
                one.sync(timeout=60)
        host_runtime.clear_faults()
        if slot.state.valid and ticket.error is not None:
            assert all(segments == [] for segments in slot.state.lineage.values())
        if not slot.state.valid:
            slot.state.reset()
        if ticket.error is not None:
            slot.lineage.forget()
            assert world.plan(main, slot).submit(main.marks, after=SYNCED).bytes == LAYOUT.bytes_at(main.marks)
        assert world.plan(main, slot).submit(main.marks, after=SYNCED).sync(timeout=60)
        world.restore(main, slot, main.marks, (0, 0), None)
        slot.tickets = []
        live = slot.unit("v", main.marks[MAIN]) - slot.unit("v", 0)
        at = slot.unit("v", 0)
        assert np.array_equal(slot.view[at : at + live], slot.bytes[at : at + live])


def test_a_full_table_forgets_and_never_claims_more(three):
    """More turns than there are segments, with states that stayed behind anywhere on the way."""
    world, main, slot, image = three
    random = np.random.default_rng(5)
    main.append((1, 1))
    world.copy(main, image)
    for turn in range(300):
        a, b = (main, slot) if turn % 2 else (slot, main)
        world.copy(b, a)
        if a.marks[MAIN] > CAPACITY - 4 or random.random() < 0.02:
            a.rewind([int(random.integers(1, 8)), int(random.integers(1, 8))])
        else:
            a.append((int(random.integers(0, 2)), int(random.integers(0, 2))))
        if random.random() < 0.05:
            assert world.copy(a, image)[0] <= LAYOUT.bytes_at(a.marks)
        assert all(len(segments) <= 64 for segments in a.state.lineage.values())
    world.copy(main, image)
    assert world.wrong() == []


def test_many_segments_cost_at_most_what_was_forgotten(copier):
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=1, growth=sc.Growth.linear())])
    a, b, c = (sc.State(layout, [sc.Place(base=runtime.malloc(1 << 20), units=1 << 20)]) for _ in range(3))
    a.advanced(1 << 10)
    assert copier.submit(a, c, upto=1 << 10, after=SYNCED).sync()
    upto = 1 << 10
    for _ in range(500):
        a, b = b, a
        assert copier.submit(b, a, upto=upto, after=SYNCED).sync()
        upto += 16
        a.advanced(upto)
    moved = copier.submit(a, c, upto=upto, after=SYNCED)
    assert moved.sync()
    assert moved.bytes == 500 * 16  # the oldest and longest is not what is forgotten


def test_a_begin_beyond_what_is_known_moves_what_it_says_and_claims_no_more(three):
    world, main, slot, _ = three
    main.append((20, 9))
    assert world.copy(main, slot, (12, 9))[0] == LAYOUT.bytes_at((12, 9))
    world.copy(main, slot, (20, 9), begin=(16, 9))
    slot.wait()
    assert slot.state.lineage["main", "tokens"][-1][2] == 12
    assert world.plan(main, slot).submit((20, 9), after=SYNCED).bytes > 4 * 16  # what lies behind 12 again


def test_dirty_units_leave_the_rows_known_as_the_states_own(three):
    _, main, _, _ = three
    main.append((20, 9))
    main.spoil("k", 2, 1)
    assert [(begin, end) for _, begin, end in main.state.lineage["main", "tokens"]] == [(0, 11), (11, 20)]
    assert main.state.rewindable((20, 9))


def test_small_parts_that_move_together_move_where_one_of_them_is_dirty(copier, memory):
    layout = sc.Layout(
        [sc.Part(name="state", layer=layer, unit_bytes=64, growth=sc.Growth.state()) for layer in range(4)]
        + [sc.Part(name="k", layer=layer, unit_bytes=64, growth=sc.Growth.linear()) for layer in range(4)]
    )
    source, target = (
        memory(layout, 1, lambda i, part: {"banks": 2 if i < 4 else 1}),
        memory(layout, 2, lambda i, part: {"banks": 2 if i < 4 else 1}),
    )
    plan = copier.plan(source.state, target.state)
    source.state.advanced(8)
    assert plan.submit(8, after=SYNCED, src_bank=1).sync()
    assert plan.submit(8, after=SYNCED, src_bank=1).bytes == 0
    source.state.dirty(2, 1)
    assert plan.submit(8, after=SYNCED, src_bank=1).bytes == 4 * 64


def test_rewindable_names_what_stands_in_the_way(three):
    world, main, slot, _ = three
    assert main.state.rewind_blocker((0, 0)).name == "window"  # nothing was said of it
    main.append((20, 9))
    assert main.state.rewindable((20, 9))
    main.snapshot(1)
    main.append((10, 3))
    assert main.state.rewindable((30, 12))
    assert main.state.rewindable((20, 9))
    assert main.state.rewind_blocker((19, 9)).name == "window"
    assert main.state.rewind_blocker((20, 11)).name == "hidden"
    assert main.state.rewind_blocker((31, 12)).name == "window"
    world.copy(main, slot, (20, 9), banks=(1, 0))
    assert slot.state.rewindable((20, 9))
    assert not slot.state.rewindable((30, 12))
    for wrong in ((20,), (20, -1), (20, 9, 1)):
        with pytest.raises((sc.Refused, ValueError)):
            main.state.rewindable(wrong)


def test_numbers_without_a_meaning_are_refused(three):
    _, main, _, _ = three
    for act in (
        lambda: main.state.advanced((1,)),
        lambda: main.state.advanced((1, -1)),
        lambda: main.state.rewound((1, 1 << 62)),
        lambda: main.state.dirty(len(LAYOUT.parts)),
        lambda: main.state.dirty(0, -1),
        lambda: main.state.dirty(0, 0, 0),
        lambda: main.state.dirty(0, (1 << 63) - 1, 2),
    ):
        before = main.state.lineage
        with pytest.raises((sc.Refused, ValueError)):
            act()
        assert main.state.lineage == before


def test_many_threads_may_say_something_and_submit(three):
    """Each word is whole: what is known afterwards is one of them, or nothing; two at once are told so."""
    world, main, slot, _ = three
    main.append((40, 20))
    stop, failed, reasons = threading.Event(), [], set()

    def say():
        try:
            while not stop.is_set():
                try:
                    main.state.rewound((20, 10))
                    main.state.advanced((40, 20))
                except sc.Refused as refused:
                    reasons.add(refused.reason)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=say) for _ in range(3)]
    for thread in threads:
        thread.start()
    plan = world.plan(main, slot)
    for _ in range(300):
        assert plan.submit((40, 20), after=SYNCED).sync(timeout=60)
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert reasons <= {"busy"}
    assert all(begin < end <= 40 for segments in main.state.lineage.values() for _, begin, end in segments)


# ---- the referee


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("name", ["k", "recurrent", "v", "dead"])
def test_a_write_that_was_not_told_is_found(who, name):
    host_runtime.configure(devices=1, seed=4)
    with sc.Copier(tickets=8, layer_events=16) as copier:
        world = World(copier, np.random.default_rng(3), {"main": "device", "slot": "device"})
        main, slot = world.states
        main.append((20, 9))
        world.copy(main, slot, sync=True)
        world.copy(main, slot, sync=True)
        assert host_runtime.violations() == []
        written = main if who == "source" else slot
        at = written.unit(name, 0)
        stream = runtime.stream_create()
        runtime.memset_async(written.base + at, int(written.view[at]) ^ 0xFF, 1, stream)
        runtime.stream_synchronize(stream)
        assert world.plan(main, slot).submit((20, 9), after=SYNCED).sync(timeout=60)
        found = host_runtime.violations()
        assert all(text.startswith("lineage: ") for text in found)
        assert f"{slot.base + slot.unit(name, 0):x}" in found[-1]
        assert "advanced, rewound, dirty or reset is missing" in found[-1]
    host_runtime.configure()


def test_the_referee_sees_an_append_without_a_word():
    """As where an engine decodes in a slot and forgets to say so."""
    host_runtime.configure(devices=1, seed=4)
    with sc.Copier(tickets=8, layer_events=16) as copier:
        world = World(copier, np.random.default_rng(3), {"main": "device", "slot": "device"})
        main, slot = world.states
        main.append((20, 9))
        world.copy(main, slot, sync=True)
        slot.append((1, 1), say=False)
        assert world.plan(main, slot).submit((20, 9), after=SYNCED).sync(timeout=60)
        assert any(text.startswith("lineage: ") for text in host_runtime.violations())
    host_runtime.configure()
