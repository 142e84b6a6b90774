"""The sizes of the presets against the numbers that are published for these models, and how a copy of one is cut."""

import pytest

import strata_copy as sc
from strata_copy import presets, rig

FORMATS = ("fp16", "int8", "int8-rotated", "q4_0", "k8v4")
RUNNING_STATE = 118_063_152  # 36 recurrent rows, the session's window, and 2,052 bytes of each of the 12 indexers
SPARE_ROWS = 12 * 512

# With the draft's K/V: megabytes of a whole copy.
MEGABYTES = {
    "fp16": {430: 130, 8_700: 363, 46_000: 1_413, 117_000: 3_413, 497_051: 14_115},
    "int8": {430: 125, 8_700: 251, 46_000: 820, 117_000: 1_904, 497_051: 7_705},
    "int8-rotated": {430: 125, 8_700: 251, 46_000: 820, 117_000: 1_904, 497_051: 7_705},
    "q4_0": {430: 122, 8_700: 197, 46_000: 533, 117_000: 1_174, 497_051: 4_603},
    "k8v4": {430: 123, 8_700: 226, 46_000: 688, 117_000: 1_567, 497_051: 6_274},
}


@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_copy_has_the_published_size(format):
    layout = presets.qwen3_8_flash_next(format)
    assert {n: round(layout.bytes_at((n, n)) / 1e6) for n in MEGABYTES[format]} == MEGABYTES[format]


@pytest.mark.parametrize(
    ("format", "with_draft", "draft"),
    [("fp16", 28_160, 2_048), ("int8", 15_264, 1_056), ("q4_0", 9_024, 576), ("k8v4", 12_384, 1_056)],
)
def test_a_token_has_the_published_size(format, with_draft, draft):
    layout = presets.qwen3_8_flash_next(format)
    assert (layout.bytes_at((8, 8)) - layout.bytes_at((4, 4))) / 4 == with_draft
    assert (layout.bytes_at((8, 8)) - layout.bytes_at((8, 4))) / 4 == draft
    without = presets.qwen3_8_flash_next(format, draft=False)
    assert (without.bytes_at((8,)) - without.bytes_at((4,))) / 4 == with_draft - draft


@pytest.mark.parametrize("format", FORMATS)
def test_what_does_not_grow_has_the_published_size(format):
    layout = presets.qwen3_8_flash_next(format)
    assert layout.bytes_at((0, 0)) == RUNNING_STATE
    assert layout.bytes_at((4, 0)) - layout.bytes_at((3, 0)) == SPARE_ROWS  # a block is finished, no page is begun


@pytest.mark.parametrize(
    ("format", "pages"),
    [
        ("fp16", {"k": 4096, "v": 4096}),
        ("int8", {"k": 2048, "v": 2048, "k_scale": 64, "v_scale": 64}),
        ("q4_0", {"k": 1152, "v": 1152}),
        ("k8v4", {"k": 2048, "v": 1152, "k_scale": 64}),
    ],
)
def test_a_layer_has_its_parts_in_the_order_of_engines(format, pages):
    layout = presets.qwen3_8_flash_next(format)
    of_layer = {
        layer: [(part.name, part.unit_bytes) for part in layout.parts if part.layer == layer] for layer in range(-1, 49)
    }
    indexer = [("pooled", 512), ("idx_tail", 1536), ("idx_dead", 512), ("idx_block_pos", 4)]
    assert of_layer[-1] == [("ple", 368_640)]
    for layer in range(48):
        assert of_layer[layer] == ([*pages.items(), *indexer] if layer % 4 == 3 else [("gdn", 3_268_608)])
    int8 = {"k": 2048, "v": 2048, "k_scale": 64, "v_scale": 64}
    assert of_layer[48] == list((int8 if format == "k8v4" else pages).items())


def test_the_draft_has_a_group_and_a_mark_of_its_own():
    layout = presets.qwen3_8_flash_next()
    assert layout.marks == ("tokens", "draft")
    assert layout.groups == ("main", "draft")
    assert {part.layer for part in layout.parts if part.group == "draft"} == {48}
    assert {part.layer for part in layout.parts if part.growth.mark == 1} == {48}
    without = presets.qwen3_8_flash_next(draft=False)
    assert (without.marks, without.groups, without.layers) == (("tokens",), ("main",), 48)


def test_equal_sizes_are_not_equal_layouts():
    layouts = {format: presets.qwen3_8_flash_next(format) for format in FORMATS}
    assert len({layout.fingerprint for layout in layouts.values()}) == len(FORMATS)
    assert "format" in layouts["int8"].difference(layouts["int8-rotated"])
    assert presets.qwen3_8_flash_next(identity=b"adapter") != layouts["int8"]
    assert presets.qwen3_8_flash_next("int8") == layouts["int8"]


def test_a_copy_between_slots_takes_101_copies():
    """The small parts of the 12 attention layers and their patches are 4 of them, not 48."""
    layout = presets.qwen3_8_flash_next(draft=False)
    with sc.Copier() as copier, rig.Session(layout, 64) as source, rig.Session(layout, 64) as target:
        extents = copier.plan(source.state, target.state).extents(61)
    assert len(extents) == 12 * 5 + 36 + 1 + 4
    assert sum(width * rows for _, _, width, rows, _, _ in extents) == layout.bytes_at((61,))


def test_another_format_is_refused_by_name():
    with pytest.raises(ValueError, match="'int4'; may be fp16, int8, int8-rotated, q4_0, k8v4"):
        presets.qwen3_8_flash_next("int4")


@pytest.mark.parametrize(("page", "units"), [(1, 10), (4, 3), (16, 1)])
def test_uniform_layers_have_k_and_v_in_pages(page, units):
    layout = presets.uniform(3, 8, 128, page=page, format="bf16", identity=b"weights")
    assert [(part.layer, part.name) for part in layout.parts] == [(layer, name) for layer in range(3) for name in "kv"]
    assert {part.unit_bytes for part in layout.parts} == {page * 8 * 128 * 2}
    assert [layout.units(i, (10,)) for i in range(6)] == [units] * 6
    assert (layout.format, layout.identity) == ("bf16", b"weights")
    assert layout == sc.Layout.from_bytes(layout.to_bytes())


def test_uniform_layers_of_bytes_and_impossible_numbers():
    assert presets.uniform(1, 2, 64, bytes_per_element=1).bytes_at((7,)) == 2 * 7 * 128
    with pytest.raises(ValueError, match="unit_bytes is 0"):
        presets.uniform(1, 0, 64)
    with pytest.raises(ValueError, match="at least one part"):
        presets.uniform(0, 8, 64)
