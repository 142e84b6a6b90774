"""Layouts of known models. The sizes are the engines' own; tests/test_presets.py has them as numbers."""

from __future__ import annotations

from strata_copy.layout import Layout
from strata_copy.parts import Growth, Part, Patch

PAGE = 4  # cells of a K/V page, which is also the indexer's block

# Bytes of a cell in a layer, all heads. "int8-rotated" has int8's sizes and other contents; q4_0 is always rotated.
INT8 = {"k": 512, "v": 512, "k_scale": 16, "v_scale": 16}
QWEN3_8_CELLS = {
    "fp16": {"k": 1024, "v": 1024},
    "int8": INT8,
    "int8-rotated": INT8,
    "q4_0": {"k": 288, "v": 288},
    "k8v4": {"k": 512, "v": 288, "k_scale": 16},
}
QWEN3_8_LAYERS = 48
QWEN3_8_ATTENTION = range(3, QWEN3_8_LAYERS, 4)  # the others are recurrent
GDN_ROW = 4 * (128 * 48 * 128 + 10240 * 3)  # fp32: 48 heads of 128 x 128, and three columns of the convolution
PLE_WINDOW = 4 * 9 * 10240
INDEX_KEY = 4 * 128


def qwen3_8_flash_next(format: str = "int8", *, draft: bool = True, identity: bytes = b"") -> Layout:
    """Qwen3.8-Flash-Next: 12 layers of indexed attention (3, 7, ... 47), 36 recurrent ones, and its draft layer.

    format: "fp16", "int8", "int8-rotated", "q4_0" or "k8v4".
    draft: with the draft's K/V, which is layer 48, group "draft" and mark "draft"; under k8v4 it is int8.
    identity: the engine's own bytes (weights, adapters, rope).

    A unit of K/V is a page of 4 cells, [kv_head][cell][head_dim]; so are its scales. Everything but the draft is group
    "main".
    Raises ValueError for another format.
    """
    if format not in QWEN3_8_CELLS:
        raise ValueError(f"format is {format!r}; may be {', '.join(QWEN3_8_CELLS)}")
    cells = QWEN3_8_CELLS[format]
    parts = [Part(name="ple", layer=-1, unit_bytes=PLE_WINDOW, growth=Growth.state(), needed_by=0)]
    for layer in range(QWEN3_8_LAYERS):
        if layer in QWEN3_8_ATTENTION:
            parts += _pages(layer, cells, "main", 0) + _indexer(layer)
        else:
            parts.append(Part(name="gdn", layer=layer, unit_bytes=GDN_ROW, growth=Growth.state()))
    if draft:
        parts += _pages(QWEN3_8_LAYERS, INT8 if format == "k8v4" else cells, "draft", 1)
    return Layout(
        parts,
        marks=("tokens", "draft") if draft else ("tokens",),
        format=format,
        identity=identity,
        patches=[Patch(layer=layer, part="pooled", source="idx_dead") for layer in QWEN3_8_ATTENTION],
    )


def uniform(
    layers: int,
    kv_heads: int,
    head_dim: int,
    *,
    bytes_per_element: int = 2,
    page: int = 1,
    identity: bytes = b"",
    format: str = "",
) -> Layout:
    """A transformer whose layers are alike: K and V of every token, in units of `page` tokens.

    A unit is page * kv_heads * head_dim elements, in the engine's own order. format: the engine's name for them.
    Raises ValueError where a number has no meaning.
    """
    unit_bytes = page * kv_heads * head_dim * bytes_per_element
    growth = Growth.linear(page, ceil=True)
    return Layout(
        [
            Part(name=name, layer=layer, unit_bytes=unit_bytes, growth=growth)
            for layer in range(layers)
            for name in ("k", "v")
        ],
        format=format,
        identity=identity,
    )


def _pages(layer: int, cells: dict[str, int], group: str, mark: int) -> list[Part]:
    growth = Growth.linear(PAGE, ceil=True, mark=mark)
    return [Part(name=name, layer=layer, unit_bytes=PAGE * n, growth=growth, group=group) for name, n in cells.items()]


def _indexer(layer: int) -> list[Part]:
    """Pooled keys of the finished blocks with a spare row behind them, and the block that is being filled."""
    return [
        Part(name="pooled", layer=layer, unit_bytes=INDEX_KEY, growth=Growth.linear(PAGE, extra=1)),
        Part(name="idx_tail", layer=layer, unit_bytes=3 * INDEX_KEY, growth=Growth.state()),
        Part(name="idx_dead", layer=layer, unit_bytes=INDEX_KEY, growth=Growth.const()),
        Part(name="idx_block_pos", layer=layer, unit_bytes=4, growth=Growth.state()),
    ]
