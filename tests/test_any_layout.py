"""Copies of layouts and places of any shape, in memory of any kind, against tests/reference.py: every byte of both
sides, with the guards, under a schedule of its own each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import strata_copy as sc
from fixtures import SYNCED, Memory, after_copy, allocate, differences, read, release, untouched, write
from strata_copy import host_runtime
from strategies import copies, random_cases

pytestmark = pytest.mark.host
KINDS = ("device", "pinned", "pageable")
seeds = st.integers(0, 1 << 32)


@st.composite
def sides(draw, layout, fields):
    """(fields with kinds, whether it is one allocation) of one side."""
    kinds = draw(st.sampled_from([KINDS[:1], KINDS[1:2], KINDS[2:], KINDS[:2], KINDS]))
    return [{**one, "kind": draw(st.sampled_from(kinds))} for one in fields], draw(st.booleans())


def banks_for(draw, layout, fields):
    """Banks that every place of a group's running state has, for some groups; None where none is named."""
    banks = {}
    for group in layout.groups:
        have = [
            field["banks"]
            for part, field in zip(layout.parts, fields, strict=True)
            if part.group == group and part.growth.rule == "state"
        ]
        if have and draw(st.booleans()):
            banks[group] = draw(st.integers(0, min(have) - 1))
    return banks or None


@st.composite
def moves(draw):
    layout, upto, begin, *fields = draw(copies())
    groups = draw(st.none() | st.sampled_from([[group] for group in layout.groups]))
    how = {"begin": begin, "groups": groups}
    for name, side in zip(("src_bank", "dst_bank"), fields, strict=True):
        how[name] = banks_for(draw, layout, side)
        if how[name] is not None and groups is not None:
            how[name] = {group: bank for group, bank in how[name].items() if group in groups} or None
    return layout, upto, how, [draw(sides(layout, side)) for side in fields]


def without_a_way(layout, source, target):
    """Whether helpers would have to read a patch on a device: the one pair that has no route."""
    kinds = {
        (part.layer, part.name): (a["kind"], b["kind"]) for part, a, b in zip(layout.parts, source, target, strict=True)
    }
    read_by_helpers = {("pageable", "device"), ("pageable", "pageable"), ("pageable", "pinned"), ("pinned", "pageable")}
    return any(
        kinds[patch.layer, patch.part] in read_by_helpers and kinds[patch.layer, patch.source][0] == "device"
        for patch in layout.patches
    )


@given(moves(), seeds)
@random_cases
def test_any_copy_leaves_what_the_reference_says(case, seed):
    layout, upto, how, both = case
    host_runtime.configure(seed=seed)
    source, target = (
        Memory(layout, tag, lambda i, part, fields=fields: fields[i], together=together)
        for tag, (fields, together) in enumerate(both, 1)
    )
    with sc.Copier(tickets=2, layer_events=64, chunk=(seed % 5 + 1) * 23) as copier:
        if without_a_way(layout, both[0][0], both[1][0]):
            with pytest.raises(sc.Refused, match="pageable memory, its patch from a device"):
                copier.plan(source.state, target.state)
            assert untouched(target)
        else:
            assert copier.submit(source.state, target.state, upto=upto, after=SYNCED, **how).sync()
            assert differences(target, after_copy(source, target, upto, **how)) == []
    assert untouched(source)
    assert host_runtime.violations() == []
    source.free()
    target.free()
    host_runtime.configure(devices=2)


class Woven:
    """A state whose places of a layer share one stride: the parts' units lie beside each other, in any order, with gaps
    between and behind them, as engines that keep K and V of a token together have them."""

    def __init__(self, layout, tag, units, kind, offsets, stride):
        self.kind, self.tag = kind, tag
        layers = {part.layer: n for n, part in enumerate(layout.parts)}
        each = units * stride
        self.bytes = each * len(layers)
        self.base = allocate(kind, 0, self.bytes)
        self.at = [
            list(layers).index(part.layer) * each + offset for part, offset in zip(layout.parts, offsets, strict=True)
        ]
        self.places = [sc.Place(base=self.base + at, units=units, stride=stride, kind=kind) for at in self.at]
        write(self.base, self.pattern())
        self.state = sc.State(layout, self.places)

    def pattern(self):
        return np.random.default_rng(self.tag).integers(0, 256, self.bytes, np.uint8)


@st.composite
def woven(draw):
    marks, growths = (
        ("tokens", "other"),
        [sc.Growth.linear(2), sc.Growth.linear(2, ceil=True), sc.Growth.linear(1, mark=1)],
    )
    layers = draw(st.integers(1, 2))
    sizes = draw(st.lists(st.sampled_from([1, 4, 12, 60]), min_size=2, max_size=4))
    alike = draw(st.booleans())
    parts = [
        sc.Part(
            name=f"p{n}",
            layer=layer,
            unit_bytes=size,
            growth=growths[0] if alike else draw(st.sampled_from(growths)),
            order=draw(st.integers(0, 1)),
        )
        for layer in range(layers)
        for n, size in enumerate(sizes)
    ]
    both = []
    for _ in range(2):
        order = draw(st.permutations(range(len(sizes)))) if draw(st.booleans()) else range(len(sizes))
        gaps, end, offsets = draw(st.sampled_from([[0], [0, 0, 4], [8]])), 0, [0] * len(sizes)
        for n in order:
            end += draw(st.sampled_from(gaps))
            offsets[n] = end
            end += sizes[n]
        stride = end + draw(st.sampled_from([0, 0, 16]))
        both.append((draw(st.sampled_from(KINDS)), offsets * layers, stride))
    upto = tuple(draw(st.integers(0, 12)) for _ in marks)
    begin = draw(st.none() | st.tuples(*(st.integers(0, mark) for mark in upto)))
    return sc.Layout(parts, marks=marks), both, upto, begin


@given(woven(), seeds)
@random_cases
def test_parts_that_lie_between_one_anothers_units_arrive(case, seed):
    layout, both, upto, begin = case
    host_runtime.configure(seed=seed)
    source, target = (Woven(layout, tag, 12, *side) for tag, side in enumerate(both, 1))
    with sc.Copier(tickets=2, layer_events=8, chunk=(seed % 5 + 1) * 23) as copier:
        assert copier.submit(source.state, target.state, upto=upto, begin=begin, after=SYNCED).sync()
    had, wanted = source.pattern(), target.pattern()
    for i, to, j, from_, n in reference.moved_runs(layout, source.places, target.places, upto, begin):
        wanted[target.at[i] + to : target.at[i] + to + n] = had[source.at[j] + from_ : source.at[j] + from_ + n]
    assert np.array_equal(read(target.base, target.bytes), wanted)
    assert np.array_equal(read(source.base, source.bytes), had)
    assert host_runtime.violations() == []
    for side in (source, target):
        release(side.kind, side.base)
    host_runtime.configure(devices=2)
