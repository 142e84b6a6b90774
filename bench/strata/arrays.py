"""What a copy between two sessions of the engine loop has to move, from their layout and places alone."""

import numpy as np

from strata_copy import Layout, Place, State, runtime

PIECE = 64 << 20  # bytes that are read back at once


def units(layout: Layout, i: int, marks: tuple[int, int]) -> int:
    """Pages or rows of a part at a length."""
    growth = layout.parts[i].growth
    if growth.rule != "linear":
        return 1
    tokens = marks[growth.mark]
    whole = -(-tokens // growth.q) if growth.ceil else tokens // growth.q
    return whole + (growth.extra if tokens > 0 else 0)


def save_runs(source: State, target: State, marks: tuple[int, int]) -> np.ndarray:
    """The arrays in the order of the save path, as save.h takes them: running state, layers, the spare rows."""
    layout, found, last = source.layout, [], []
    for i, part in enumerate(layout.parts):
        n = units(layout, i, marks) * part.unit_bytes
        step = 1 + part.layer if part.growth.rule == "linear" else 0
        found.append([step, source.places[i].base, target.places[i].base, n, 0])
    for patch in layout.patches:
        i, dead = layout.index(patch.layer, patch.part), layout.index(patch.layer, patch.source)
        row = layout.parts[i].unit_bytes
        spare = (units(layout, i, marks) - 1) * row
        last.append([layout.layers, target.places[dead].base, target.places[i].base + spare, row, 1])
    found = merged(sorted((run for run in found if run[3]), key=lambda run: run[:2]))
    return np.array(sorted(found, key=lambda run: run[0]) + last, np.int64)


def merged(runs: list[list[int]]) -> list[list[int]]:
    """The recurrent rows of a session lie in one piece and are one array."""
    found: list[list[int]] = []
    for run in runs:
        if found and found[-1][0] == run[0] == 0 and all(found[-1][k] + found[-1][3] == run[k] for k in (1, 2)):
            found[-1][3] += run[3]
        else:
            found.append(run)
    return found


def spoil(target: State, stream: int) -> None:
    """Overwrites every unit of every part."""
    for part, place in zip(target.layout.parts, target.places, strict=True):
        if place.units:
            runtime.memset_async(place.base, 0xA5, place.units * part.unit_bytes, stream)
    runtime.stream_synchronize(stream)


def wrong(name: str, source: State, target: State, marks: tuple[int, int]) -> list[str]:
    """The parts in which a target that was spoiled is not what a copy must leave: the source's units, the patch, and
    nothing behind."""
    layout, found = source.layout, []
    dead_of = {layout.index(p.layer, p.part): layout.index(p.layer, p.source) for p in layout.patches}
    for i, part in enumerate(layout.parts):
        n, place = units(layout, i, marks), target.places[i]
        copied = n - 1 if i in dead_of else n
        same = equal(source.places[i], place, copied * part.unit_bytes)
        if i in dead_of and n:
            spare = read(place.base + copied * part.unit_bytes, part.unit_bytes)
            same &= bool((spare == read(source.places[dead_of[i]].base, part.unit_bytes)).all())
        if n < place.units and part.growth.rule == "linear":
            same &= bool((read(place.base + n * part.unit_bytes, part.unit_bytes) == 0xA5).all())
        if not same:
            found.append(f"{name}: part {part.name!r} of layer {part.layer}")
    return found


def equal(source: Place, target: Place, n: int) -> bool:
    return all(
        bool((read(source.base + at, size) == read(target.base + at, size)).all())
        for at in range(0, n, PIECE)
        for size in [min(PIECE, n - at)]
    )


def read(address: int, n: int) -> np.ndarray:
    found = np.empty(n, np.uint8)
    runtime.memcpy(found.ctypes.data, address, n)
    return found
