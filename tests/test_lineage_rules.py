"""The rules of lineage one at a time: what the engine says, how a copy ends, what is forgotten, what is refused."""

import contextlib
import threading

import numpy as np
import pytest

import strata_copy as sc
from fixtures import SYNCED, read
from lineage_world import CAPACITY, LAYOUT, MAIN, World
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host


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
        world.restore(main, slot, main.marks, (0, 0), None, None)
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
    assert world.copy(main, slot, (13, 9))[0] == LAYOUT.bytes_at((13, 9))
    world.copy(main, slot, (20, 9), begin=(16, 9))
    slot.wait()
    assert slot.state.lineage["main", "tokens"][-1][2] == 13
    assert world.plan(main, slot).submit((20, 9), after=SYNCED).bytes > 4 * 16  # what lies behind 13 again


def of_patched(copier, growth):
    """A copy between two of four states with one patched part, which says what moved and what the part then holds."""
    layout = sc.Layout(
        [
            sc.Part(name="rows", layer=0, unit_bytes=8, growth=growth),
            sc.Part(name="dead", layer=0, unit_bytes=8, growth=sc.Growth.const()),
        ],
        patches=[sc.Patch(layer=0, part="rows", source="dead")],
    )
    bases = [runtime.malloc(17 * 8) for _ in range(4)]
    for n, base in enumerate(bases):
        runtime.view(base, 17 * 8)[:] = n
    runtime.view(bases[0], 17 * 8)[16 * 8 :] = 0xDD
    states = [sc.State(layout, [sc.Place(base=b, units=16), sc.Place(base=b + 16 * 8)]) for b in bases]

    def copy(source, target, upto, **how):
        ticket = copier.submit(states[source], states[target], upto=upto, after=SYNCED, **how)
        assert ticket.sync(timeout=60)
        return ticket.bytes, read(bases[target], 8 * layout.units(0, (upto,)))[::8].tolist()

    return states, copy


def test_a_spare_row_is_patched_in_the_state_that_wrote_it_and_only_once(copier):
    states, copy = of_patched(copier, sc.Growth.linear(4, extra=1))
    states[0].advanced(8)
    patched = [0, 0, 0xDD]
    assert copy(0, 1, 8) == (4 * 8, patched)
    assert copy(1, 0, 8) == (8, patched)  # what its engine had there is its own
    assert copy(1, 0, 8) == copy(0, 1, 8) == (0, patched)
    assert copy(1, 2, 8) == (4 * 8, patched)
    assert copy(2, 0, 8) == copy(0, 2, 8) == (0, patched)
    states[0].rewound(8)  # it may have written its spare row
    assert copy(1, 0, 8) == (8, patched)
    assert host_runtime.violations() == []


def test_a_row_that_a_patch_hid_comes_back_with_the_next_rows(copier):
    states, copy = of_patched(copier, sc.Growth.linear())
    states[0].advanced(4)
    assert copy(0, 1, 4) == (5 * 8, [0, 0, 0, 0xDD])
    assert copy(0, 1, 4) == copy(0, 1, 4) == (0, [0, 0, 0, 0xDD])
    assert copy(1, 2, 4)[1] == [0, 0, 0, 0xDD]
    states[0].advanced(6)
    assert copy(0, 1, 6) == (3 * 8, [0, 0, 0, 0, 0, 0xDD])
    assert copy(0, 2, 6) == (3 * 8, [0, 0, 0, 0, 0, 0xDD])
    states[2].advanced(7)
    assert copy(2, 1, 7) == (2 * 8, [0, 0, 0, 0, 0, 0xDD, 0xDD])  # the row that was hidden in both
    assert copy(0, 3, 6) == (7 * 8, [0, 0, 0, 0, 0, 0xDD])
    assert host_runtime.violations() == []


def test_a_begin_behind_a_full_last_row_sets_no_patch(copier):
    states, copy = of_patched(copier, sc.Growth.linear())
    states[0].advanced(4)
    assert copy(0, 1, 4)[1] == [0, 0, 0, 0xDD]
    states[0].advanced(6)
    assert copy(0, 1, 6, begin=3)[1] == [0, 0, 0, 0, 0, 0xDD]
    assert copy(0, 1, 5)[1] == [0, 0, 0, 0, 0xDD]
    assert copy(0, 1, 5, begin=5) == (0, [0, 0, 0, 0, 0xDD])
    assert copy(0, 1, 5) == (8, [0, 0, 0, 0, 0xDD])
    assert host_runtime.violations() == []


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
