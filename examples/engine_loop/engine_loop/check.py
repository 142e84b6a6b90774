"""Whether a copy has left what it must: both sides are read back by plain cudaMemcpy and compared."""

from __future__ import annotations

import numpy as np

from strata_copy import runtime

PIECE = 64 << 20  # bytes that are read back at once


def wrong_parts(source, target, at=None) -> list[str]:
    """The parts in which a session is not what another one is, up to its own lengths; with `at`, a checkpoint of the
    source, running state must be the checkpoint's. The last pooled row must be idx_dead: the layout's patch."""
    layout, marks = source.layout, (target.tokens, target.draft_tokens)
    dead_of = {layout.index(p.layer, p.part): layout.index(p.layer, p.source) for p in layout.patches}
    found = []
    for i, part in enumerate(layout.parts):
        place, size, n = target.state.places[i], part.unit_bytes, layout.units(i, marks)
        if place.units == 0:  # a draft that is not there
            continue
        kept = source.checkpoints.places[i] if at is not None and part.group == "running" else source.state.places[i]
        begin = kept.base + (at.bank * kept.bank_stride if at is not None and part.group == "running" else 0)
        copied = n - 1 if i in dead_of and n else n
        same = equal(begin, place.base, copied * size)
        if copied < n:
            same = same and equal(source.state.places[dead_of[i]].base, place.base + copied * size, size)
        if not same:
            found.append(f"part {part.name!r} of layer {part.layer}")
    return found


def equal(one: int, other: int, n: int) -> bool:
    return all(
        np.array_equal(read(one + start, size), read(other + start, size))
        for start in range(0, n, PIECE)
        for size in [min(PIECE, n - start)]
    )


def read(address: int, n: int) -> np.ndarray:
    found = np.empty(n, np.uint8)
    runtime.memcpy(found.ctypes.data, address, n)
    return found
