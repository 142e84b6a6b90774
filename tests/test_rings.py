"""Windows and rings: which units are still there, where they lie, and that nothing else is moved or touched."""

import dataclasses
import random

import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, untouched

last = sc.Growth.last
# Families of models: growth, and how far a ring reaches beyond the window, None where none lies in a ring.
FAMILIES = {
    "sliding window": (last(12), 6),
    "sliding window in pages": (last(11, 4, ceil=True), 1),
    "sinks": (last(12, sinks=4), 6),
    "compressor state": (last(8), 3),
    "chunked local": (sc.Growth(rule="window", lo="chunk", window=16), None),
    "residual behind what is quantised": (sc.Growth(rule="window", lo="mark", lo_mark=1), None),
    "rank of a split context": (dataclasses.replace(last(6), cp_size=2, cp_rank=1, cp_interleave=2), 2),
    "rows that all fit": (sc.Growth.linear(4, ceil=True), None),
}
LENGTHS = (0, 1, 3, 4, 5, 11, 12, 13, 16, 17, 18, 19, 31, 32, 40, 63, 64, 65, 96)


def layout(growth, rep=1):
    """Two parts of the family in a layer, between others."""
    parts = [
        sc.Part(name="a", layer=0, unit_bytes=24, growth=growth, rep=rep),
        sc.Part(name="b", layer=0, unit_bytes=8, growth=growth),
        sc.Part(name="k", layer=1, unit_bytes=16, growth=sc.Growth.linear()),
        sc.Part(name="state", layer=1, unit_bytes=40, growth=sc.Growth.state()),
    ]
    return sc.Layout(parts, marks=("tokens", "quantised"))


def ring_units(growth, beyond):
    return -(-growth.window // growth.q) + beyond


def places(growth, ring, **fields):
    """Fields of the family's places, for a Memory."""

    def where(i, part):
        if part.growth != growth or not ring:
            return {}
        return {"units": growth.sinks + ring, "ring": ring, **fields}

    return where


@pytest.mark.parametrize("rings", [(0, 0), (1, 0), (0, 1), (1, 1), (1, 3)], ids=lambda r: f"{r[0]} to {r[1]}")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_live_arrives_and_nothing_else(copier, memory, family, rings):
    """Rings of the family's size, and larger by 2: source and target need not agree."""
    growth, beyond = FAMILIES[family]
    if beyond is None:
        rings = (0, 0)
    sizes = [ring_units(growth, beyond) + r - 1 if r else 0 for r in rings]
    shape = layout(growth, rep=2)
    source = memory(shape, 1, places(growth, sizes[0]))
    target = memory(shape, 2, places(growth, sizes[1]))
    plan = copier.plan(source.state, target.state)
    for n in LENGTHS:
        target.fill()
        marks = (n, n * 3 // 4)
        ticket = plan.submit(marks, after=SYNCED)
        ticket.sync()
        assert differences(target, after_copy(source, target, marks)) == [], n
        assert ticket.bytes == shape.bytes_at(marks)
    assert untouched(source)


def test_a_ring_is_read_and_written_in_at_most_two_runs(copier, memory):
    growth = last(32)
    shape = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=64, growth=growth)])
    source, target = memory(shape, 1, "pinned", marks=(200,)), memory(shape, 2, places(growth, 40))
    found = copier.plan(source.state, target.state).extents((100,))
    base, other = target.places[0].base, source.places[0].base
    assert [(to - base, from_ - other, width) for to, from_, width, *_ in found] == [
        (68 % 40 * 64, 68 * 64, 12 * 64),
        (0, 80 * 64, 20 * 64),
    ]


@pytest.mark.parametrize("ring", [0, 20], ids=["dense", "ring"])
def test_begin_leaves_a_window_whole(copier, memory, ring):
    """What the target's rows of before are, nobody has said: a ring may have been overwritten since."""
    growth = last(12)
    shape = layout(growth)
    source, target = memory(shape, 1, places(growth, ring)), memory(shape, 2, places(growth, ring))
    copier.submit(source.state, target.state, upto=(60, 0), begin=(55, 0), after=SYNCED).sync()
    assert differences(target, after_copy(source, target, (60, 0), begin=(55, 0))) == []


def test_rows_that_a_ring_has_lost_are_refused(copier, memory):
    growth = sc.Growth.linear()
    shape = layout(growth)
    ringed, dense = memory(shape, 1, places(growth, 30)), memory(shape, 2)
    copier.submit(ringed.state, dense.state, upto=(30, 0), after=SYNCED).sync()
    for a, b, side in ((ringed, dense, "source"), (dense, ringed, "target")):
        with pytest.raises(sc.Refused, match=f"31 units needed, the {side} has 30 in its ring") as refused:
            copier.submit(a.state, b.state, upto=(31, 0), after=SYNCED)
        assert refused.value.reason == "capacity"


def test_a_window_that_does_not_fit_its_ring_is_refused(copier, memory):
    growth = last(12, sinks=2)
    source, target = memory(layout(growth), 1), memory(layout(growth), 2, places(growth, 11))
    copier.submit(source.state, target.state, upto=(13, 0), after=SYNCED).sync()
    with pytest.raises(sc.Refused, match="12 units needed, the target has 11 in its ring"):
        copier.submit(source.state, target.state, upto=(14, 0), after=SYNCED)


def test_windows_move_through_any_chain_of_copies(copier, memory, seed):
    """Between two rings and dense memory, at random lengths."""
    rng = random.Random(seed)
    growth, beyond = FAMILIES[rng.choice([name for name in FAMILIES if FAMILIES[name][1] is not None])]
    shape, ring = layout(growth), ring_units(growth, beyond)
    memories = [memory(shape, 1 + k, places(growth, r)) for k, r in enumerate((0, ring, ring + rng.randint(0, 9)))]
    holds = [one.bytes() for one in memories]
    for _ in range(6):
        a, b = rng.sample(range(3), 2)
        marks = (rng.randint(0, 96), 0)
        copier.submit(memories[a].state, memories[b].state, upto=marks, after=SYNCED).sync()
        holds[b] = after_copy(memories[a], memories[b], marks, before=holds[b], source_bytes=holds[a])
        assert differences(memories[b], holds[b]) == []


def test_patches_of_a_ring_move_where_those_of_dense_rows_need_not(copier, memory):
    """Small patches of many layers move together only where all of them move or none."""
    parts = []
    for layer in (0, 1):
        parts.append(sc.Part(name="rows", layer=layer, unit_bytes=16, growth=sc.Growth.linear(4)))
        parts.append(sc.Part(name="dead", layer=layer, unit_bytes=16, growth=sc.Growth.const()))
    shape = sc.Layout(parts, patches=[sc.Patch(layer=layer, part="rows", source="dead") for layer in (0, 1)])

    def second_ringed(i, part):
        return {"units": 30, "ring": 30} if i == 2 else {"units": 30 if part.name == "rows" else 1}

    source, target = memory(shape, 1), memory(shape, 2, second_ringed)
    copier.submit(source.state, target.state, upto=(8,), begin=(8,), after=SYNCED).sync()
    assert differences(target, after_copy(source, target, (8,), begin=(8,))) == []
