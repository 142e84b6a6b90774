"""The model: which layers there are, what a session keeps of each, and that as a layout of strata_copy."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import strata_copy as sc

PAGE = 4  # cells of a K/V page, which is also a block of the indexer
SCALED = 64  # int8 values that share a scale of 2 bytes
FORMATS = ("fp16", "int8", "int8-rotated", "q4_0", "k8v4")
GROUPS = ("kv", "running", "draft")
TOKENS, DRAFT = 0, 1  # the marks


@dataclass(frozen=True)
class Geometry:
    """The numbers of a model; by default those of Qwen3.8-Flash-Next. Sizes in bytes."""

    layers: int = 48
    interval: int = 4  # the last of so many layers is attention, the others are recurrent
    heads: int = 2
    head_dim: int = 256
    gdn: int = 4 * (128 * 48 * 128 + 10240 * 3)
    ple: int = 4 * 9 * 10240
    key: int = 4 * 128

    def is_attention(self, layer: int) -> bool:
        return layer % self.interval == self.interval - 1


def cell_bytes(format: str, head_dim: int) -> dict[str, int]:
    """Bytes of one cell of one head in each array of a layer's K/V."""
    int8, q4, scale = head_dim, head_dim // 32 * 18, head_dim // SCALED * 2
    if format == "fp16":
        return {"k": 2 * head_dim, "v": 2 * head_dim}
    if format in ("int8", "int8-rotated"):
        return {"k": int8, "v": int8, "k_scale": scale, "v_scale": scale}
    if format == "q4_0":
        return {"k": q4, "v": q4}
    if format == "k8v4":
        return {"k": int8, "v": q4, "k_scale": scale}
    raise ValueError(f"format is {format!r}; may be {', '.join(FORMATS)}")


def draft_format(format: str) -> str:
    return "int8" if format == "k8v4" else format


def layout(geometry: Geometry, format: str, split: Sequence[int]) -> sc.Layout:
    """What the sessions of an engine have in common. split: the first layer of each stage.

    Three groups: a conversation's rows, its running state, which has checkpoints, and its draft, which a session may
    lack. The draft is the layer behind the last. The split belongs to the identity: a session that was carved for other
    stages is another thing.
    """
    parts = [sc.Part(name="ple", layer=-1, unit_bytes=geometry.ple, growth=sc.Growth.state(), group="running")]
    patches = []
    for layer in range(geometry.layers):
        if geometry.is_attention(layer):
            parts += kv_parts(geometry, format, layer, "kv", TOKENS) + indexer_parts(geometry, layer)
            patches.append(sc.Patch(layer=layer, part="pooled", source="idx_dead"))
        else:
            parts.append(
                sc.Part(name="gdn", layer=layer, unit_bytes=geometry.gdn, growth=sc.Growth.state(), group="running")
            )
    parts += kv_parts(geometry, draft_format(format), geometry.layers, "draft", DRAFT)
    numbers = (*astuple(geometry), *split)
    return sc.Layout(
        parts,
        marks=("tokens", "draft"),
        format=format,
        identity=struct.pack(f"<{len(numbers)}q", *numbers),
        patches=patches,
        groups=GROUPS,
    )


def kv_parts(geometry: Geometry, format: str, layer: int, group: str, mark: int) -> list[sc.Part]:
    """Codes and scales, each an array of pages [kv_head][cell][head_dim]. A partly filled page moves whole."""
    growth = sc.Growth.linear(PAGE, ceil=True, mark=mark)
    return [
        sc.Part(name=name, layer=layer, unit_bytes=PAGE * geometry.heads * cell, growth=growth, group=group)
        for name, cell in cell_bytes(format, geometry.head_dim).items()
    ]


def indexer_parts(geometry: Geometry, layer: int) -> list[sc.Part]:
    """A pooled key for each finished block and a spare row behind them that must be idx_dead; the block being filled.

    The patch in `layout` writes the spare row, so that idx_dead goes with the rows, not with the running state.
    """
    state = sc.Growth.state()
    return [
        sc.Part(
            name="pooled", layer=layer, unit_bytes=geometry.key, growth=sc.Growth.linear(PAGE, extra=1), group="kv"
        ),
        sc.Part(name="idx_dead", layer=layer, unit_bytes=geometry.key, growth=sc.Growth.const(), group="kv"),
        sc.Part(name="idx_tail", layer=layer, unit_bytes=3 * geometry.key, growth=state, group="running"),
        sc.Part(name="idx_block_pos", layer=layer, unit_bytes=4, growth=state, group="running"),
    ]
