"""A copy leaves in the target what saving and restoring would have left there, and touches no other byte.

Memory is checked twice: against the patterns of rig.Session by its own arithmetic, and against tests/reference.py.
"""

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import strata_copy as sc
from fixtures import CAPACITY, HOST, KINDS, PAGES, after_copy, differences, small_layout, untouched
from looked_at import CELLS, FORMATS, LENGTHS, Cell
from strata_copy import host_runtime, rig, runtime, save_path

LAYOUTS = {format: small_layout(format, layers=6, draft=True) for format in PAGES}


@pytest.fixture
def session():
    """Makes filled rig.Sessions, and frees them after the test."""
    made = []

    def make(layout, kind, number, **how):
        made.append(rig.Session(layout, (CAPACITY,) * len(layout.marks), kind=kind, number=number, **how))
        made[-1].fill()
        return made[-1]

    yield make
    for one in made:
        one.free()


def save_and_restore(source, target, upto):
    stream = runtime.stream_create()
    save_path.save_and_restore(rig.runs(source, target, upto), stream)
    runtime.stream_destroy(stream)


def copy(copier, source, target, upto, **how):
    ticket = copier.submit(source.state, target.state, upto=upto, after=sc.CALLER_SYNCED, **how)
    assert ticket.sync(timeout=60)


WAY = {
    "direct": copy,
    "save + restore": lambda copier, source, target, upto: save_and_restore(source, target, upto),
}


def wrong_bytes(copier, cell, before=None, behind=None):
    """Does what a cell of the table says, and returns a line for each byte of the target or the source that is not as
    it must be.

    before, behind: called with the target before and behind the copy, to do harm.
    """
    layout, upto = LAYOUTS[cell.format], (cell.length,) * 2
    capacity = (CAPACITY,) * 2
    with (
        rig.Session(layout, capacity, kind=cell.source, number=1) as source,
        rig.Session(layout, capacity, kind=cell.target, number=2) as target,
    ):
        source.fill()
        target.fill()
        if before is not None:
            before(target)
        WAY[cell.way](copier, source, target, upto)
        if behind is not None:
            behind(target)
        return rig.mismatches(target, source, upto) + rig.changes(source)


@pytest.mark.parametrize("cell", range(len(CELLS)), ids=["-".join(map(str, cell)) for cell in CELLS])
def test_every_cell_of_the_table_is_right_to_the_byte(request, copier, cell):
    request.node.user_properties.append(("cell", cell))
    assert wrong_bytes(copier, CELLS[cell]) == []


@pytest.mark.parametrize("target_kind", KINDS)
@pytest.mark.parametrize("source_kind", KINDS)
@pytest.mark.parametrize("format", PAGES)
def test_a_copy_leaves_what_save_and_restore_leaves(copier, session, format, source_kind, target_kind):
    """Byte by byte, where the table compares both with patterns."""
    source = session(LAYOUTS[format], source_kind, 1)
    target, twin = (session(LAYOUTS[format], target_kind, 2) for _ in range(2))
    for length in LENGTHS:
        upto = (length, length)
        copy(copier, source, target, upto)
        save_and_restore(source, twin, upto)
        assert np.array_equal(target.read(0, target.bytes), twin.read(0, twin.bytes)), f"{length} tokens"
    assert rig.changes(source) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("upto", [(96, 0), (0, 96), (5, 64), (65, 4)])
def test_each_part_follows_its_own_mark(copier, session, kind, upto):
    layout = LAYOUTS["k8v4"]
    source, target = session(layout, "device", 1), session(layout, kind, 2)
    copy(copier, source, target, upto)
    assert rig.mismatches(target, source, upto) == []


@pytest.mark.parametrize("begin", [0, 1, 4, 5, 63, 64, 65])
@pytest.mark.parametrize(
    ("source_kind", "target_kind"), [("device", "device"), ("device", "pinned"), ("pinned", "device")]
)
def test_an_agents_turn_moves_only_what_may_have_changed(copier, memory, begin, source_kind, target_kind):
    layout = LAYOUTS["int8"]
    source, target = memory(layout, 1, source_kind), memory(layout, 2, target_kind)
    upto, begin = (65, 70), (begin, begin)
    copy(copier, source, target, upto, begin=begin)
    assert differences(target, after_copy(source, target, upto, begin=begin)) == []


@pytest.mark.parametrize("begin", [0, 1, 5, 64])
def test_rig_agrees_with_the_reference_on_a_turn(copier, session, begin):
    source, target = session(LAYOUTS["int8"], "device", 1), session(LAYOUTS["int8"], "pinned", 2)
    upto, begin = (65, 70), (begin, begin)
    copy(copier, source, target, upto, begin=begin)
    assert rig.mismatches(target, source, upto, begin) == []
    assert begin == (0, 0) or rig.mismatches(target, source, upto) != []


@pytest.mark.parametrize("groups", [["main"], ["draft"], ["main", "draft"], None])
def test_only_the_groups_that_are_named_move(copier, memory, groups):
    layout = LAYOUTS["fp16"]
    source, target = memory(layout, 1), memory(layout, 2, "pinned")
    copy(copier, source, target, (17, 18), groups=groups)
    assert differences(target, after_copy(source, target, (17, 18), groups=groups)) == []


def test_each_group_comes_from_the_source_that_is_named_for_it(copier, memory):
    layout = LAYOUTS["q4_0"]
    main, draft, target = memory(layout, 1), memory(layout, 2, "pinned"), memory(layout, 3)
    plan = copier.plan({"main": main.state, "draft": draft.state}, target.state)
    assert plan.submit((30, 31), after=sc.CALLER_SYNCED).sync()
    half = after_copy(main, target, (30, 31), groups=["main"])
    assert differences(target, after_copy(draft, target, (30, 31), before=half, groups=["draft"])) == []


@pytest.mark.parametrize(
    ("src_bank", "dst_bank"), [(None, None), (2, None), (None, 1), (2, 1), ({"main": 1}, {"main": 2})]
)
def test_a_bank_is_of_running_state_and_leaves_other_parts_alone(copier, memory, src_bank, dst_bank):
    """Rows that grow are kept once: a bank that is named must not move them."""
    layout = small_layout("int8")
    states = [part.name for part in layout.parts if part.growth.rule == "state"]

    def where(i, part):
        return {"banks": 3 if part.name in states else 1}

    source, target = memory(layout, 1, where), memory(layout, 2, where)
    copy(copier, source, target, (21,), src_bank=src_bank, dst_bank=dst_bank)
    assert differences(target, after_copy(source, target, 21, src_bank=src_bank, dst_bank=dst_bank)) == []


def strided(seed):
    """Places with gaps between units, runs and banks, of any kind: as engines that pad, interleave heads or map at
    will."""
    random = np.random.default_rng(seed)

    def where(i, part):
        stride = part.unit_bytes + int(random.choice([0, 8, 40]))
        units = 30 if part.growth.rule == "linear" else 1
        fields = {"kind": str(random.choice(KINDS)), "units": units, "stride": stride}
        if part.rep > 1 and random.random() < 0.5:  # the runs of a unit beside each other
            fields["rep_stride"], fields["stride"] = stride, part.rep * stride
            fields["bank_stride"] = units * part.rep * stride
        return fields

    return where


@pytest.mark.parametrize("case", range(12))
def test_strides_runs_and_kinds_of_any_mixture(copier, memory, case):
    print(f"case {case}")
    growth = sc.Growth.linear(4, ceil=True)
    parts = [
        sc.Part(name=name, layer=layer, unit_bytes=48 + 16 * n, rep=1 + (n + layer) % 3, growth=growth)
        for layer in range(3)
        for n, name in enumerate(("k", "v", "k_scale"))
    ]
    parts += [sc.Part(name="state", layer=layer, unit_bytes=100, growth=sc.Growth.state()) for layer in range(3)]
    layout = sc.Layout(parts)
    source, target = memory(layout, 1, strided((case, 0))), memory(layout, 2, strided((case, 1)))
    copy(copier, source, target, (3 + 9 * case,))
    assert differences(target, after_copy(source, target, 3 + 9 * case)) == []
    assert untouched(source)


def test_a_copy_between_two_devices_memories_stays_on_each(memory, second_device):
    layout = small_layout()

    def where(i, part):
        return {"device": part.layer % 2 if part.layer >= 0 else 0}

    source, target = memory(layout, 1, where), memory(layout, 2, where)
    with sc.Copier((0, second_device), tickets=2, layer_events=16) as copier:
        copy(copier, source, target, (33,))
    assert differences(target, after_copy(source, target, 33)) == []


def test_copies_go_through_any_chain_of_states(copier, memory):
    layout = small_layout()
    first, image, slot, last = (
        memory(layout, 1),
        memory(layout, 2, "pinned"),
        memory(layout, 3),
        memory(layout, 4, "pinned"),
    )
    for source, target in ((first, image), (image, slot), (slot, last)):
        copy(copier, source, target, (77,))
    assert differences(last, after_copy(first, last, 77)) == []


def test_pageable_memory_is_a_place_like_others(copier, session):
    layout = LAYOUTS["k8v4"]
    source, image, target = session(layout, "device", 1), session(layout, "pageable", 2), session(layout, "device", 3)
    copy(copier, source, image, (50, 51))
    assert rig.mismatches(image, source, (50, 51)) == []
    copy(copier, image, target, (50, 51))
    assert rig.mismatches(target, source, (50, 51)) == []


# ---- the check itself can fail


@pytest.mark.host
@pytest.mark.parametrize("nth", [1, 4, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_one_changed_byte_is_found(copier, session, kind, nth):
    layout = LAYOUTS["int8"]
    source, target, twin = (session(layout, k, n) for k, n in (("device", 1), (kind, 2), (kind, 2)))
    plan = copier.plan(source.state, target.state)
    wrong = plan.extents((64, 64))[nth - 1]
    host_runtime.corrupt(nth)
    assert plan.submit((64, 64), after=sc.CALLER_SYNCED).sync()
    assert host_runtime.clear_faults() == 1
    (line,) = rig.mismatches(target, source, (64, 64))
    save_and_restore(source, twin, (64, 64))
    (at,) = np.flatnonzero(target.read(0, target.bytes) != twin.read(0, twin.bytes))
    if kind != "device":  # one lane executes in order, so the nth copy is the nth extent
        first, _, width, rows, pitch, _ = wrong
        assert any(first <= target.address(0) + at - row * pitch < first + width for row in range(rows))
    part = next(i for i, r in enumerate(target.regions) if r.offset <= at < r.offset + r.bytes)
    assert line.startswith(f"part {layout.parts[part].name!r} of layer {layout.parts[part].layer}, ")


def harm(how, chance):
    """What wrong_bytes takes to get one byte wrong: in a copy, or by a store behind it."""
    if how == "copy":
        return {"before": lambda target: host_runtime.corrupt(chance.randint(1, 4))}
    return {"behind": lambda target: flip(target, chance.choice(target.regions), chance)}


def flip(session, region, chance):
    at = region.offset + chance.randrange(region.bytes)
    session.write(at, session.read(at, 1) ^ np.uint8(chance.randint(1, 255)))


@pytest.mark.parametrize("how", ["store", *(["copy"] if HOST else [])])
@pytest.mark.parametrize("format", FORMATS)
def test_one_changed_byte_makes_exactly_its_cell_fail(copier, format, how):
    chance = random.Random(f"{format} {how}")
    cells = [cell for cell in CELLS if cell.format == format]
    harmed = chance.choice(cells)
    found = {cell: wrong_bytes(copier, cell, **(harm(how, chance) if cell == harmed else {})) for cell in cells}
    assert [cell for cell in cells if found[cell]] == [harmed]
    assert len(found[harmed]) == 1
    assert how == "store" or host_runtime.clear_faults() == 1


@pytest.mark.parametrize("length", [0, 65])
def test_one_changed_byte_in_any_part_makes_the_cell_fail(copier, length):
    layout, chance = LAYOUTS["k8v4"], random.Random(length)
    for i, part in enumerate(layout.parts):
        (line,) = wrong_bytes(
            copier,
            Cell("k8v4", "device", "pinned", "direct", length),
            behind=lambda target, i=i: flip(target, target.regions[i], chance),
        )
        assert line.startswith(f"part {part.name!r} of layer {part.layer}, ")


def test_a_run_without_some_cell_fails():
    """And so does one in which a cell was skipped."""
    program = """
        import sys
        import pytest

        class Drop:
            @pytest.hookimpl(trylast=True)
            def pytest_collection_modifyitems(self, items):
                cells = [item for item in items if "cell" in getattr(getattr(item, "callspec", None), "params", ())]
                items[:] = cells[5:8]
                items[0].add_marker(pytest.mark.skip(reason="on purpose"))

        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", sys.argv[1]], plugins=[Drop()]))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(Path(__file__))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    assert "2 passed, 1 skipped" in run.stdout
    assert f"2 of {len(CELLS)} cells verified, 0 wrong, {len(CELLS) - 2} not run" in run.stdout
    assert "not run: 0 1 3 4 5 63 96" in run.stdout


@pytest.mark.parametrize("where", ["guard", "moved", "behind the mark"])
def test_a_byte_planted_anywhere_is_found(copier, session, where):
    layout = LAYOUTS["k8v4"]
    source, target = session(layout, "device", 1), session(layout, "pinned", 2)
    copy(copier, source, target, (40, 40))
    region = target.regions[layout.index(1, "v")]
    at = {"guard": region.offset - 1, "moved": region.offset + 1152 * 9, "behind the mark": region.offset + 1152 * 10}[
        where
    ]
    target.write(at, target.read(at, 1) ^ np.uint8(1))
    assert len(rig.mismatches(target, source, (40, 40))) == 1


def test_a_source_that_was_written_is_found(session):
    source = session(LAYOUTS["k8v4"], "device", 1)
    source.write(12345, source.read(12345, 1) ^ np.uint8(255))
    assert len(rig.changes(source)) == 1


def test_patterns_of_two_states_differ_at_every_length(session):
    """Else a copy that moves nothing could pass."""
    source, target = session(LAYOUTS["k8v4"], "device", 1), session(LAYOUTS["k8v4"], "device", 2)
    for length in LENGTHS:
        assert len(rig.mismatches(target, source, (length, length), limit=10**6)) > 2000
