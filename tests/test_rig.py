"""The rig has to find what it is there for: every wrong byte, wherever it is, and nothing where a copy is right.

Copies are made here with the save path, which shares nothing with the library's way.
"""

import numpy as np
import pytest

import strata_copy as sc
from strata_copy import host_runtime, rig, runtime, save_path

UPTO = 41  # 10 whole blocks of 4 and a partial one


def layout():
    """Rows with a patched spare one, rows in runs (heads), a running state, a constant, and a part of odd size."""
    return sc.Layout(
        [
            sc.Part(name="window", layer=-1, unit_bytes=333, growth=sc.Growth.state()),
            sc.Part(name="k", layer=0, unit_bytes=260, growth=sc.Growth.linear(4, ceil=True)),
            sc.Part(name="v", layer=0, unit_bytes=20, growth=sc.Growth.linear(4, ceil=True), rep=3),
            sc.Part(name="pooled", layer=0, unit_bytes=64, growth=sc.Growth.linear(4, extra=1)),
            sc.Part(name="dead", layer=0, unit_bytes=64, growth=sc.Growth.const()),
            sc.Part(name="recurrent", layer=1, unit_bytes=1000, growth=sc.Growth.state()),
        ],
        patches=[sc.Patch(layer=0, part="pooled", source="dead")],
    )


@pytest.fixture
def stream():
    handle = runtime.stream_create()
    yield handle
    runtime.stream_destroy(handle)


@pytest.fixture(params=["device", "pinned", "pageable"])
def pair(request):
    """Two filled sessions of other capacities."""
    kind = request.param
    with rig.Session(layout(), 50, kind=kind, number=1) as a, rig.Session(layout(), 70, kind=kind, number=2) as b:
        a.fill()
        b.fill()
        yield a, b


def flip(session, offset):
    session.write(offset, session.read(offset, 1) ^ 1)


def test_patterns_differ_by_state_part_and_offset():
    n = 1 << 20
    one = rig.pattern(1, 0, 0, n)
    for other in (
        rig.pattern(2, 0, 0, n),
        rig.pattern(1, 1, 0, n),
        rig.pattern(1, rig.GUARD, 0, n),
        rig.pattern(1, 0, 2048, n),
        rig.pattern(1, 0, 1 << 16, n),
        np.zeros(n, np.uint8),
    ):
        equal = (one == other).reshape(-1, 8)
        assert equal.mean(axis=0).max() < 2 / 256  # at each of the 8 bytes of a word
        assert not (equal.all(axis=1)).any()


@pytest.mark.parametrize(("offset", "n"), [(0, 0), (0, 1), (7, 9), (13, 4096), ((128 << 10) - 3, 300_000)])
def test_a_pattern_is_a_function_of_the_offset(offset, n):
    assert np.array_equal(rig.pattern(5, 3, offset, n), rig.pattern(5, 3, 0, offset + n)[offset:])


def test_a_filled_session_is_as_it_was_filled(pair):
    a, b = pair
    assert rig.changes(a) == rig.changes(b) == []
    a.fill(7)
    assert a.number == 7
    assert rig.changes(a) == []


@pytest.mark.parametrize("upto", [0, 1, 3, 4, 5, UPTO, 50])
def test_a_right_copy_has_no_mismatch(pair, stream, upto):
    a, b = pair
    save_path.save_and_restore(rig.runs(a, b, upto), stream)
    assert rig.mismatches(b, a, upto) == []
    assert rig.changes(a) == []


def test_every_planted_byte_is_found_alone(pair, stream):
    a, b = pair
    save_path.save_and_restore(rig.runs(a, b, UPTO), stream)
    k, v, pooled = (b.regions[b.layout.index(0, name)] for name in ("k", "v", "pooled"))
    for offset, where in (
        (0, "guard, offset 0 of"),
        (b.bytes - 1, f"guard, offset {b.bytes - 1} of"),
        (k.offset - 1, f"guard, offset {k.offset - 1} of"),
        (k.offset + k.bytes, f"guard, offset {k.offset + k.bytes} of"),
        (k.offset, "part 'k' of layer 0, offset 0:"),
        (k.offset + 11 * 260 - 1, "part 'k' of layer 0, offset 2859:"),  # the last moved byte
        (k.offset + 11 * 260, "part 'k' of layer 0, offset 2860:"),  # the first behind it
        (v.offset + 18 * 20, "part 'v' of layer 0, offset 360:"),  # the second run: 18 units fit
        (pooled.offset + 10 * 64 + 5, "part 'pooled' of layer 0, offset 645:"),  # the spare row
        (b.regions[0].offset + 332, "part 'window' of layer -1, offset 332:"),
    ):
        flip(b, offset)
        found = rig.mismatches(b, a, UPTO)
        assert len(found) == 1
        assert found[0].startswith(where)
        wanted, got = (int(number, 16) for number in found[0].split("wanted ")[1].split(", found "))
        assert wanted ^ got == 1
        flip(b, offset)
    assert rig.mismatches(b, a, UPTO) == []


def test_a_spare_row_without_its_patch_is_found(pair, stream):
    a, b = pair
    runs = rig.runs(a, b, UPTO)
    save_path.save_and_restore(runs[:-1], stream)
    found = rig.mismatches(b, a, UPTO)
    assert found
    assert all(line.startswith("part 'pooled' of layer 0, offset 6") for line in found)  # 640 to 703
    save_path.save_and_restore(runs[-1:], stream)
    assert rig.mismatches(b, a, UPTO) == []


def test_a_copy_that_is_one_token_short_or_long_is_found(pair, stream):
    a, b = pair
    save_path.save_and_restore(rig.runs(a, b, UPTO), stream)
    for upto in (UPTO - 1, UPTO + 4):
        assert rig.mismatches(b, a, upto)
    assert rig.mismatches(b, a, UPTO + 1) == []  # the same units


def test_no_more_lines_than_asked_for(pair):
    a, b = pair
    assert len(rig.mismatches(b, a, UPTO)) == 8
    assert len(rig.mismatches(b, a, UPTO, limit=3)) == 3


@pytest.mark.parametrize("begin", [0, 1, 4, 7, 40, UPTO])
def test_a_copy_from_begin_on_leaves_settled_rows_and_constants(copier, begin):
    with rig.Session(layout(), 50, number=1) as a, rig.Session(layout(), 50, number=2) as b:
        a.fill()
        b.fill()
        copier.submit(a.state, b.state, upto=UPTO, begin=begin, after=sc.CALLER_SYNCED).sync()
        assert rig.mismatches(b, a, UPTO, begin) == []
        assert bool(rig.mismatches(b, a, UPTO)) == (begin > 0)


def test_parts_lie_aligned_with_guards_between():
    with rig.Session(layout(), 50, guard=100) as session:
        ends = [0, *(region.offset + region.bytes for region in session.regions)]
        begins = [*(region.offset for region in session.regions), session.bytes]
        assert all(begin - end >= 100 for begin, end in zip(begins, ends, strict=True))
        assert all(region.offset % 256 == 0 for region in session.regions)
        assert [place.base - session.address(0) for place in session.places] == [
            region.offset for region in session.regions
        ]


def test_context_parallel_and_shifted_parts_are_counted():
    growth = sc.Growth(rule="linear", q=2, ceil=True, shift=-1, cp_size=4, cp_rank=1, cp_interleave=3)
    rows = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=8, growth=growth)])
    for capacity in range(60):
        with rig.Session(rows, capacity, kind="pageable") as session:
            assert session.regions[0].units == rows.units(0, (capacity,))


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="'managed'; may be device, pinned, pageable"):
        rig.Session(layout(), 50, kind="managed")


def test_freed_twice_is_freed_once():
    session = rig.Session(layout(), 50, kind="pinned")
    session.free()
    session.free()


@pytest.mark.host
def test_sessions_and_the_save_path_leave_nothing(stream):
    before = host_runtime.live()
    with rig.Session(layout(), 50, device=1) as a, rig.Session(layout(), 50, kind="pinned") as b:
        assert runtime.get_device() == 0
        a.fill()
        assert runtime.get_device() == 0
        save_path.save_and_restore(rig.runs(a, b, UPTO), stream)
    assert host_runtime.live() == before


def test_parts_of_several_kinds_are_filled_moved_and_checked(stream):
    def kind(part):
        return {"k": "pinned", "v": "pageable"}.get(part.name, "device")

    with (
        rig.Session(layout(), 50, kind=kind, number=1) as a,
        rig.Session(layout(), 70, kind=kind, number=2) as b,
    ):
        assert [place.kind for place in b.places] == ["device", "pinned", "pageable", "device", "device", "device"]
        a.fill()
        b.fill()
        assert rig.changes(a) == rig.changes(b) == []
        save_path.save_and_restore(rig.runs(a, b, UPTO), stream)
        assert rig.mismatches(b, a, UPTO) == []
        for i, part in enumerate(b.layout.parts):
            flip(b, b.regions[i].offset)
            assert [line.split(",")[0] for line in rig.mismatches(b, a, UPTO)] == [
                f"part {part.name!r} of layer {part.layer}"
            ]
            flip(b, b.regions[i].offset)
        flip(b, b.bytes - 1)
        assert rig.mismatches(b, a, UPTO)[0].startswith(f"guard, offset {b.bytes - 1} of")


def test_the_save_path_takes_rows_of_many_segments(stream):
    rows = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=1 << 20, growth=sc.Growth.linear(1))])
    with rig.Session(rows, 40, number=1) as a, rig.Session(rows, 40, number=2) as b:
        a.fill()
        b.fill()
        save_path.save_and_restore(rig.runs(a, b, 39), stream)
        assert rig.mismatches(b, a, 39) == []


@pytest.mark.host
@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_the_save_path_raises_where_a_call_fails(stream, function, nth):
    with rig.Session(layout(), 50, kind="pinned") as a, rig.Session(layout(), 50, kind="pinned") as b:
        host_runtime.fail(function, nth, 999)
        with pytest.raises(runtime.CudaError) as raised:
            save_path.save_and_restore(rig.runs(a, b, UPTO), stream)
        assert (raised.value.call, raised.value.code) == (function, 999)
        assert host_runtime.clear_faults() == 1


def test_the_save_path_refuses_other_rows(stream):
    with pytest.raises(ValueError, match="not 3"):
        save_path.save_and_restore(np.zeros((2, 3), np.int64), stream)
    save_path.save_and_restore(np.zeros((0, 4), np.int64), stream)
