"""The extents of a plan against plain integer arithmetic, for layouts, places and marks of any shape."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import reference
import strata_copy as sc
from fixtures import SYNCED, Memory, after_copy, differences, needed_by, small_layout
from strata_copy import host_runtime, runtime
from strategies import copies, random_cases

pytestmark = pytest.mark.host


def bytes_of(extents):
    """(target, source) of every byte, in the order of the extents."""
    pairs = []
    for target, source, width, rows, target_pitch, source_pitch in extents:
        for row in range(rows):
            starts = np.array([target + row * target_pitch, source + row * source_pitch], np.int64)
            pairs.append(starts[None, :] + np.arange(width)[:, None])
    return np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64)


def is_rectangle(extent):
    """Whether cudaMemcpy2D takes it: rows that do not overlap, by rising address."""
    _, _, width, rows, target_pitch, source_pitch = extent
    return rows > 0 and 0 < width <= min(target_pitch, source_pitch)


def wanted_bytes(layout, source, target, upto, begin=None):
    runs = reference.moved_runs(layout, source, target, upto, begin)
    starts = [(target[i].base + to, source[j].base + from_, size) for i, to, j, from_, size in runs]
    return bytes_of([(to, from_, size, 1, size, size) for to, from_, size in starts])


def in_order(pairs):
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


def runs_layer_by_layer(layout, extents, target):
    """The layer that needs each extent, by the target's places."""
    needed = []
    for address, *_ in extents:
        (part,) = [
            part
            for part, place in zip(layout.parts, target, strict=True)
            if place.base <= address < place.base + reference.span(place, part)
        ]
        needed.append(needed_by(part))
    return needed


@given(copies())
@random_cases
def test_each_byte_that_moves_is_in_one_extent_and_no_other_is(case):
    layout, upto, begin, source_fields, target_fields = case
    host_runtime.configure()
    source = Memory(layout, 1, lambda i, part: source_fields[i], together=False)
    target = Memory(layout, 2, lambda i, part: target_fields[i], together=False)
    with sc.Copier(tickets=2, layer_events=8) as copier:
        plan = copier.plan(source.state, target.state)
        extents = plan.extents(upto, begin)
    found, wanted = bytes_of(extents), wanted_bytes(layout, source.places, target.places, upto, begin)
    assert np.array_equal(in_order(found), in_order(wanted))
    needed = runs_layer_by_layer(layout, extents, target.places)
    assert needed == sorted(needed)
    assert all(is_rectangle(extent) for extent in extents)
    host_runtime.configure(devices=2)


def one_allocation(layout, units, kind="device", device=0):
    """Places that follow each other without a gap."""
    sizes = [units * part.unit_bytes if part.growth.rule == "linear" else part.unit_bytes for part in layout.parts]
    base = runtime.malloc(sum(sizes)) if kind == "device" else runtime.host_alloc(sum(sizes))
    places = []
    for part, size in zip(layout.parts, sizes, strict=True):
        places.append(sc.Place(base=base, units=size // part.unit_bytes, kind=kind, device=device))
        base += size
    return places


def states_of(layer, first=0):
    return [
        sc.Part(name=f"s{n}", layer=layer, unit_bytes=10 + n, growth=sc.Growth.state()) for n in range(first, first + 3)
    ]


def test_neighbours_of_a_layer_are_merged(copier):
    """And not those of two layers: a layer's event stands for all of its bytes."""
    layout = sc.Layout(
        [sc.Part(name=f"s{n}", layer=n // 3, unit_bytes=10 + n, growth=sc.Growth.linear()) for n in range(6)]
    )
    source, target = one_allocation(layout, 4), one_allocation(layout, 4, "pinned")
    plan = copier.plan(sc.State(layout, source), sc.State(layout, target))
    sizes = [4 * (10 + 11 + 12), 4 * (13 + 14 + 15)]
    assert plan.extents(4) == [
        (target[i].base, source[i].base, size, 1, size, size) for i, size in zip((0, 3), sizes, strict=True)
    ]


@pytest.mark.parametrize("cut", ["source", "target"])
def test_neighbours_in_two_registrations_are_not_merged(copier, cut):
    layout = sc.Layout(states_of(0))
    memory = np.zeros(3 * 4096, np.uint8)
    page = -(-memory.ctypes.data // 4096) * 4096
    runtime.host_register(page, 4096)
    runtime.host_register(page + 4096, 4096)
    base = page + 4096 - 21  # the third part begins with the second registration
    split = [sc.Place(base=base + offset, kind="pinned") for offset in (0, 10, 21)]
    whole = one_allocation(layout, 1)
    source, target = (split, whole) if cut == "source" else (whole, split)
    extents = copier.plan(sc.State(layout, source), sc.State(layout, target)).extents(5)
    assert extents == [
        (target[0].base, source[0].base, 21, 1, 21, 21),
        (target[2].base, source[2].base, 12, 1, 12, 12),
    ]


def test_neighbours_in_two_allocations_are_not_merged(copier):
    """Even where the addresses follow each other by chance."""
    layout = sc.Layout(states_of(0)[:2])
    blocks = sorted(runtime.malloc(4096) for _ in range(16))
    low, high = next((a, b) for a, b in itertools.pairwise(blocks) if b - a == 4096)
    source = [sc.Place(base=low + 4096 - 10), sc.Place(base=high)]
    target = one_allocation(layout, 1)
    assert len(copier.plan(sc.State(layout, source), sc.State(layout, target)).extents(5)) == 2


def test_rows_of_two_sources_that_share_bytes_are_not_merged(copier):
    """Beside each other in their first row, they would be wider than the source's pitch."""
    growth = sc.Growth.linear()
    layout = sc.Layout([sc.Part(name=g, layer=0, unit_bytes=60, growth=growth, group=g) for g in "ab"])
    near, far, to = (runtime.malloc(4096) for _ in range(3))

    def state(*bases, stride=100):
        return sc.State(layout, [sc.Place(base=base, units=9, stride=stride) for base in bases])

    sources = {"a": state(near, far), "b": state(far, near + 60)}
    extents = copier.plan(sources, state(to, to + 60, stride=120)).extents(9)
    assert extents == [(to, near, 60, 9, 120, 100), (to + 60, near + 60, 60, 9, 120, 100)]


def test_a_patched_row_is_copied_once_and_from_the_patch_source(memory, copier):
    layout = small_layout()
    source, target = memory(layout, 1), memory(layout, 2)
    extents = copier.plan(source.state, target.state).extents(9)
    row = target.address(1, "pooled") + 2 * 512
    assert [(e[1], e[2]) for e in extents if e[0] <= row < e[0] + e[2]] == [(source.address(1, "idx_dead"), 512)]


def test_bytes_of_a_layout_are_the_bytes_of_its_extents(memory, copier):
    layout = small_layout()
    plan = copier.plan(memory(layout, 1).state, memory(layout, 2).state)
    for upto in range(0, 97):
        assert sum(width * rows for _, _, width, rows, _, _ in plan.extents(upto)) == layout.bytes_at([upto])


@st.composite
def huge_places(draw, part, units):
    """A place of the part: strides of any size up to 2^42, few enough bytes in all for the address space."""
    stride = part.unit_bytes + draw(st.sampled_from([0, 0, 1, 1 << 31, (1 << 32) + 1, 1 << 40]))
    apart = draw(st.sampled_from([0, 1, 1 << 32]))
    if draw(st.booleans()):
        return {"units": units, "stride": stride, "rep_stride": units * stride + apart}
    rep_stride = part.unit_bytes + apart  # the runs of a unit beside each other
    return {"units": units, "stride": part.rep * rep_stride + stride - part.unit_bytes, "rep_stride": rep_stride}


@st.composite
def huge_copies(draw):
    size = draw(st.sampled_from([1, 3, 1 << 31, (1 << 32) - 1, (1 << 36) + 1, 1 << 40]) | st.integers(1, 1 << 40))
    q = draw(st.sampled_from([1, 4, (1 << 31) - 1]))
    shift = draw(st.sampled_from([0, -1, q, 1 - (1 << 31)]))
    growth = sc.Growth(
        rule="linear", q=q, ceil=draw(st.booleans()), extra=draw(st.integers(0, 1)), shift=shift, settle=1
    )
    part = sc.Part(name="k", layer=0, unit_bytes=size, rep=draw(st.integers(1, 3)), growth=growth)
    upto = max(0, draw(st.integers(0, 9)) * q - shift + draw(st.integers(-1, 1)))
    begin = draw(st.none() | st.integers(0, upto))
    return part, upto, begin, size


@given(st.data(), huge_copies())
@random_cases
def test_numbers_beyond_32_bits(data, case):
    """Sizes, strides and pitches up to 2^42, and marks as far. Address space only: nothing of it is touched."""
    part, upto, begin, size = case
    host_runtime.configure(memory=1 << 46)
    layout = sc.Layout([part])
    units = max(1, reference.units_at(part.growth, (upto,)))
    fields = [data.draw(huge_places(part, units)) for _ in range(2)]
    spans = [reference.span(sc.Place(base=0, **one), part) for one in fields]
    assume(sum(spans) < 1 << 46)
    source, target = ([sc.Place(base=runtime.malloc(n), **one)] for n, one in zip(spans, fields, strict=True))
    begin = None if begin is None else (begin,)
    with sc.Copier(tickets=1, layer_events=2) as copier:
        plan = copier.plan(sc.State(layout, source), sc.State(layout, target))
        extents = plan.extents(upto, begin)
    wanted = sorted(
        (target[0].base + to, source[0].base + from_, n)
        for _, to, _, from_, n in reference.moved_runs(layout, source, target, (upto,), begin)
    )
    assert sorted(pieces(extents, size)) == wanted
    host_runtime.configure(devices=2)


def pieces(extents, unit_bytes):
    """Extents cut into runs of unit_bytes."""
    for target, source, width, rows, target_pitch, source_pitch in extents:
        for row in range(rows):
            for at in range(0, width, unit_bytes):
                yield target + row * target_pitch + at, source + row * source_pitch + at, unit_bytes


# ---- small parts of several layers, which move together where they are evenly spaced

PAGE = 4096


def alike(layers, sizes, patched, groups):
    """Layers with the same small parts, and a row that grows, with a patch if asked."""
    parts, patches = [], []
    for layer in range(layers):
        group = groups[layer % len(groups)]
        for n, (size, rule) in enumerate(sizes):
            parts.append(sc.Part(name=f"s{n}", layer=layer, unit_bytes=size, growth=sc.Growth(rule=rule), group=group))
        growth = sc.Growth.linear(2, extra=1)
        parts.append(sc.Part(name="row", layer=layer, unit_bytes=64, growth=growth, group=group))
        if patched:
            parts.append(sc.Part(name="dead", layer=layer, unit_bytes=64, growth=sc.Growth.const(), group=group))
            patches.append(sc.Patch(layer=layer, part="row", source="dead"))
    return sc.Layout(parts, patches=patches)


@st.composite
def layers_alike(draw):
    sizes = draw(
        st.lists(
            st.tuples(st.sampled_from([1, 4, 100, 16384, 16385]), st.sampled_from(["const", "state"])),
            min_size=1,
            max_size=2,
        )
    )
    layout = alike(draw(st.integers(1, 5)), sizes, draw(st.booleans()), draw(st.sampled_from(["a", "ab", "aab"])))
    sides = []
    for _ in range(2):
        # One more page before a block here and there: the spacing does not go on.
        gaps = [PAGE if draw(st.integers(0, 5)) == 0 else 0 for _ in layout.parts]
        banks = draw(st.sampled_from([1, 1, 3]))
        kind = draw(st.sampled_from(["device", "pinned"]))
        sides.append((kind, gaps, banks))
    upto = draw(st.integers(0, 20))
    how = {"begin": draw(st.none() | st.integers(0, upto).map(lambda mark: (mark,)))}
    how["groups"] = draw(st.sampled_from([None, list(layout.groups[:1])]))
    banked = any(rule == "state" for _, rule in sizes)
    if banked and sides[0][2] == 3:
        how["src_bank"] = draw(st.integers(0, 2))
    if banked and sides[1][2] == 3:
        how["dst_bank"] = draw(st.integers(0, 2))
    return layout, sides, upto, how


def memory_of(layout, tag, side):
    kind, gaps, banks = side

    def where(i, part):
        return {"kind": kind, "banks": banks if part.growth.rule == "state" else 1}

    return Memory(layout, tag, where, marks=(20,), gaps=gaps)


@given(case=layers_alike(), seed=st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None, print_blob=True)
def test_any_spacing_of_layers_gives_the_same_bytes(case, seed):
    layout, sides, upto, how = case
    host_runtime.configure(seed=seed)
    source, target = (memory_of(layout, tag, side) for tag, side in enumerate(sides, 1))
    with sc.Copier(tickets=2, layer_events=24) as copier:
        assert copier.submit(source.state, target.state, upto=upto, after=SYNCED, **how).sync()
    assert differences(target, after_copy(source, target, upto, **how)) == []
    assert host_runtime.violations() == []
    host_runtime.configure(devices=2)


@st.composite
def tight_layers(draw):
    """Layers alike, part behind part without a gap, or with the same one in every layer but for a rare gap more; the
    last part first now and then."""
    sizes = draw(
        st.lists(st.sampled_from([(1, "state"), (4, "const"), (100, "state"), (64, "state")]), min_size=1, max_size=4)
    )
    layout = alike(draw(st.integers(1, 5)), sizes, draw(st.booleans()), ["a"])
    upto = (draw(st.integers(0, 20)),)
    sides = []
    for _ in range(2):
        usual = {part.name: draw(st.sampled_from([0, 0, 0, 16])) for part in layout.parts}
        end, offsets = 0, [0] * len(layout.parts)
        numbers = range(len(layout.parts))
        for i in reversed(numbers) if draw(st.integers(0, 3)) == 0 else numbers:
            part = layout.parts[i]
            end += usual[part.name] + (8 if draw(st.integers(0, 9)) == 0 else 0)
            offsets[i] = end
            end += part.unit_bytes * (11 if part.growth.rule == "linear" else 1)
        sides.append((draw(st.sampled_from(["device", "pinned"])), offsets, end))
    return layout, sides, upto, draw(st.none() | st.tuples(st.integers(0, upto[0])))


@given(tight_layers())
@random_cases
def test_parts_side_by_side_in_any_number_of_layers_give_the_same_bytes(case):
    layout, sides, upto, begin = case
    host_runtime.configure()
    places = []
    for kind, offsets, size in sides:
        base = runtime.malloc(size) if kind == "device" else runtime.host_alloc(size)
        units = [11 if part.growth.rule == "linear" else 1 for part in layout.parts]
        places.append(
            [sc.Place(base=base + offset, units=n, kind=kind) for offset, n in zip(offsets, units, strict=True)]
        )
    with sc.Copier(tickets=2, layer_events=64) as copier:
        extents = copier.plan(*(sc.State(layout, side) for side in places)).extents(upto, begin)
    found = bytes_of(extents)
    assert np.array_equal(in_order(found), in_order(wanted_bytes(layout, *places, upto, begin)))
    assert all(is_rectangle(extent) for extent in extents)
    host_runtime.configure(devices=2)
