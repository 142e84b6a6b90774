"""Between the device and pageable memory, beside cudaMemcpy: into fresh and faulted pages, and back."""

import mmap
from contextlib import ExitStack

import numpy as np
from common.extents import Extents

from common.report import Figure, Result, spread
from common.setting import Case, Setting, verify
from queueing.loops import WHAT, by_cudamemcpy, by_submit
from strata_copy.layout import Layout
from strata_copy.presets import uniform
from strata_copy.rig import Block, Session, pattern

FRESH = 5  # goal: times the speed of cudaMemcpy
TOKENS = {False: 16384, True: 256}  # of 64 KiB; by whether it is quick


class Fresh(Session):
    """A session in pageable memory whose pages nobody has touched: no page is there before a copy writes to it."""

    def _allocate(self, block: Block) -> int:
        pages = mmap.mmap(-1, block.end - block.begin, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.append(np.frombuffer(pages, np.uint8))
        return self._memory[-1].ctypes.data


def rows(setting: Setting, result: Result) -> list[Figure]:
    layout, tokens = uniform(16, 8, 128), TOKENS[setting.quick]
    repetitions, warm_up = (2, 1) if setting.quick else (5, 1)
    kinds = ("device", "pageable", "device", "pageable")
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(Session(layout, tokens, kind=kind, number=100 + i)) for i, kind in enumerate(kinds)
        ]
        for session in sessions:
            session.fill()
        slot, image, other, target = sessions
        found = into_fresh(setting, result, slot, layout, tokens, repetitions, warm_up)
        for name, source, to in (("into faulted pageable memory", slot, target), ("pageable -> device", image, other)):
            case = Case(setting, source, to, tokens)
            plain = by_cudamemcpy(case.extents, repetitions, warm_up)
            case.spoil()
            ours = by_submit(case.plan, tokens, repetitions, warm_up)
            result.wrong += verify(name, case)
            found += compared(name, case.bytes, ours, plain, None)
            del setting.reached[to]
    return found


def into_fresh(
    setting: Setting, result: Result, slot: Session, layout: Layout, tokens: int, repetitions: int, warm_up: int
) -> list[Figure]:
    """In turn, each time into memory of its own."""
    name, plain, ours, n = "into fresh pageable memory", [], [], 0
    for i in range(-warm_up, repetitions):
        with Fresh(layout, tokens, kind="pageable") as target:
            extents = Extents(setting.copier.plan(slot.state, target.state), tokens)
            plain += by_cudamemcpy(extents, 1, 0)
            n = extents.bytes
        with Fresh(layout, tokens, kind="pageable") as target:
            ours.append(by_submit(setting.copier.plan(slot.state, target.state), tokens, 1, 0)[0])
            if i == repetitions - 1:
                result.wrong += [f"{name}: {line}" for line in wrong_in_fresh(target, slot)]
    return compared(name, n, np.array(ours[warm_up:]), plain[warm_up:], FRESH)


def compared(name: str, n: int, ours: np.ndarray, plain: list[int], goal: float | None) -> list[Figure]:
    ms = {what: spread(ours[:, WHAT.index(what)], 1e-6) for what in ("whole", "submit")}
    theirs = spread(plain, 1e-6)
    samples = {"bytes": n, "ms": ms["whole"], "ms inside submit": ms["submit"], "ms by cudaMemcpy": theirs}
    return [
        Figure(
            f"{name}, ours / cudaMemcpy", round(theirs["median"] / ms["whole"]["median"], 3), "", goal, True, samples
        ),
        Figure(name, round(n / ms["whole"]["median"] / 1e6, 2), "GB/s"),
        Figure(f"{name}, by cudaMemcpy", round(n / theirs["median"] / 1e6, 2), "GB/s"),
    ]


def wrong_in_fresh(target: Fresh, source: Session) -> list[str]:
    """The parts that are not the source's whole pattern, and what was touched between them, which was zero."""
    data, end, found = target.read(0, target.bytes), 0, []
    for i, region in enumerate(target.regions):
        part = target.layout.parts[i]
        if data[end : region.offset].any():
            found.append(f"guard before part {part.name!r} of layer {part.layer}")
        end = region.offset + region.bytes
        if not np.array_equal(data[region.offset : end], pattern(source.number, i, 0, region.bytes)):
            found.append(f"part {part.name!r} of layer {part.layer}")
    if data[end:].any():
        found.append("guard behind the last part")
    return found
