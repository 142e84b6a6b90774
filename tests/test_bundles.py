"""Small parts of several layers that are evenly spaced go in one copy, before the first layer: the same bytes, and
waited for by all."""

import numpy as np
import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, allocate, differences, needed_by, read, small_layout
from strata_copy import presets, rig, runtime

LAYOUT = small_layout("int8", layers=8)


def test_evenly_spaced_small_parts_of_all_layers_are_one_extent(memory, copier):
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    extents = copier.plan(source.state, target.state).extents(9)
    for name in ("recurrent", "idx_tail", "idx_block_pos"):
        layers = [part.layer for part in LAYOUT.parts if part.name == name]
        size = LAYOUT.parts[LAYOUT.index(layers[0], name)].unit_bytes
        first, second = (target.address(layer, name) for layer in layers[:2])
        assert [e[1:] for e in extents if e[0] == first] == [
            (source.address(layers[0], name), size, len(layers), second - first, second - first)
        ]


def test_large_parts_and_rows_that_grow_stay_with_their_layer(memory, copier):
    large = sc.Layout(
        [sc.Part(name="s", layer=layer, unit_bytes=20000, growth=sc.Growth.state()) for layer in range(3)]
    )
    rows = sc.Layout([sc.Part(name="k", layer=layer, unit_bytes=64, growth=sc.Growth.linear()) for layer in range(3)])
    for layout, marks in ((large, (1,)), (rows, (1,))):
        extents = copier.plan(memory(layout, 1).state, memory(layout, 2).state).extents(marks)
        assert [e[3] for e in extents] == [1, 1, 1]


def test_small_parts_of_one_layer_move_with_it(memory, copier):
    """They would hold up the layers before it."""
    state = sc.Growth.state()
    parts = [sc.Part(name="k", layer=0, unit_bytes=64, growth=sc.Growth.linear())]
    parts += [sc.Part(name=f"s{n}", layer=1, unit_bytes=100, growth=state) for n in range(3)]
    layout = sc.Layout(parts)
    source, target = memory(layout, 1), memory(layout, 2)
    extents = copier.plan(source.state, target.state).extents(5)
    assert [extent[0] for extent in extents] == [place.base for place in target.places]


def test_layers_in_falling_order_are_not_one_extent(memory, copier):
    """A pitch cannot be negative."""
    layout = sc.Layout([sc.Part(name="s", layer=layer, unit_bytes=100, growth=sc.Growth.state()) for layer in range(3)])
    source, rising = memory(layout, 1), memory(layout, 2)
    target = sc.State(layout, list(reversed(rising.places)))
    assert [extent[3] for extent in copier.plan(source.state, target).extents(5)] == [1, 1, 1]


def test_a_slot_of_the_model_takes_few_copies():
    """Part by part they would be 145."""
    layout = presets.qwen3_8_flash_next("int8", draft=False)
    with (
        rig.Session(layout, (64,), number=1) as source,
        rig.Session(layout, (64,), number=2) as target,
        sc.Copier(tickets=1) as copier,
    ):
        extents = copier.plan(source.state, target.state).extents(64)
    assert len(extents) <= 101
    assert sum(width * rows for _, _, width, rows, _, _ in extents) == layout.bytes_at([64])


def two_layers(*growths, groups="aa", patched=False):
    """A layout of one part of 64 bytes in each layer, and where it is patched its patch source."""
    parts, patches = [], []
    for layer, (growth, group) in enumerate(zip(growths, groups, strict=True)):
        parts.append(sc.Part(name="s", layer=layer, unit_bytes=64, growth=growth, group=group))
        if patched:
            parts.append(sc.Part(name="dead", layer=layer, unit_bytes=64, growth=sc.Growth.const(), group=group))
            patches.append(sc.Patch(layer=layer, part="s", source="dead"))
    return sc.Layout(parts, marks=("tokens", "other"), patches=patches)


STATE, CONST = sc.Growth.state(), sc.Growth.const()
# A layout, what the request says besides the marks, and fields of the places of layers 0 and 1.
UNLIKE = {
    "the rule": (two_layers(STATE, CONST), {"begin": (1, 0)}, {}, {}),
    "the mark": (two_layers(CONST, sc.Growth(rule="const", mark=1)), {"begin": (1, 0)}, {}, {}),
    "the group": (two_layers(STATE, STATE, groups="ab"), {"groups": ["a"]}, {}, {}),
    "the growth of patched rows": (two_layers(sc.Growth.linear(2), sc.Growth.linear(4), patched=True), {}, {}, {}),
    "the banks": (
        two_layers(STATE, STATE),
        {"src_bank": 1, "dst_bank": 1},
        {"banks": 2, "bank_stride": 64},
        {"banks": 2, "bank_stride": 80},
    ),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_small_parts_that_are_not_alike_are_not_one_extent(memory, copier, unlike):
    layout, how, *fields = UNLIKE[unlike]

    def where(i, part):
        return fields[part.layer]

    source, target = memory(layout, 1, where), memory(layout, 2, where)
    assert copier.submit(source.state, target.state, upto=(9, 9), after=SYNCED, **how).sync()
    assert differences(target, after_copy(source, target, (9, 9), **how)) == []


OUT, IN, HOST, LOCAL = ("device", "pinned"), ("pinned", "device"), ("pinned", "pinned"), ("device", "device")
ROUTES = {
    "rows everywhere": {"k": OUT, "v": IN, "recurrent": OUT, "idx_tail": IN, "k_scale": HOST, "v_scale": LOCAL},
    "rows on one lane": {
        "k": OUT,
        "v": OUT,
        "k_scale": OUT,
        "v_scale": OUT,
        "pooled": OUT,
        "idx_dead": OUT,
        "idx_tail": IN,
    },
    "no rows but small parts": {"recurrent": IN, "idx_tail": OUT, "idx_block_pos": HOST},
}


def where(routes, side):
    """The kinds of one side; local where no route is named."""
    return lambda i, part: {"kind": routes.get(part.name, LOCAL)[side]}


@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("order", [range(8), range(7, -1, -1), [5, 0, 7]], ids=["up", "down", "some"])
def test_every_layer_waits_for_the_small_parts_that_moved_before_it(memory, routes, order, seed):
    """They go on other lanes than the rest of the layer."""
    source, target = memory(LAYOUT, 1, where(routes, 0)), memory(LAYOUT, 2, where(routes, 1))
    wanted, seen = after_copy(source, target, 9), []
    copier = sc.Copier(tickets=2, layer_events=64)
    ticket = copier.submit(source.state, target.state, upto=9, after=SYNCED)
    for layer in order:
        stream = runtime.stream_create()
        assert ticket.wait_layer(layer, stream)
        for i, (part, (kind, base, size)) in enumerate(zip(LAYOUT.parts, target.blocks, strict=True)):
            if needed_by(part) == layer:
                copy = allocate("pinned" if kind == "device" else "device", 0, size)
                runtime.memcpy_async(copy, base, size, stream)
                seen.append((i, stream, kind, copy, size))
    for i, stream, kind, copy, size in seen:
        runtime.stream_synchronize(stream)
        assert np.array_equal(read(copy, size), wanted[i]), LAYOUT.parts[i]
        (runtime.host_free if kind == "device" else runtime.free)(copy)
    for stream in {stream for _, stream, _, _, _ in seen}:
        runtime.stream_destroy(stream)
    assert ticket.sync()
    copier.close()
    assert differences(target, wanted) == []


@pytest.mark.parametrize(("rows", "small"), [(OUT, IN), (IN, OUT), (LOCAL, OUT), (OUT, LOCAL)])
def test_a_layer_on_one_lane_waits_for_small_parts_on_another(memory, rows, small, seed):
    """As little as can be, so that few steps lead to the layer's end and what it does not wait for is still undone."""
    parts = []
    for layer in range(2):
        parts.append(sc.Part(name="k", layer=layer, unit_bytes=512, growth=sc.Growth.linear()))
        parts.append(sc.Part(name="beside", layer=layer, unit_bytes=256, growth=sc.Growth.state()))
        parts.append(sc.Part(name="apart", layer=layer, unit_bytes=256, growth=sc.Growth.state()))
    layout, routes = sc.Layout(parts), {"k": rows, "beside": rows, "apart": small}
    source, target = memory(layout, 1, where(routes, 0)), memory(layout, 2, where(routes, 1))
    i = layout.index(0, "apart")
    kind, base, size = target.blocks[i]
    stream, seen = runtime.stream_create(), allocate("pinned" if kind == "device" else "device", 0, size)
    with sc.Copier(tickets=2, layer_events=8) as copier:
        ticket = copier.submit(source.state, target.state, upto=1, after=SYNCED)
        assert ticket.wait_layer(0, stream)
        runtime.memcpy_async(seen, base, size, stream)
        runtime.stream_synchronize(stream)
        assert np.array_equal(read(seen, size), after_copy(source, target, 1)[i])
    runtime.stream_destroy(stream)
    (runtime.host_free if kind == "device" else runtime.free)(seen)
