"""A conversation into a slot and back, as an engine does it today and by strata_copy, at its users' lengths."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.report import Figure, Result, spread
from common.setting import Setting
from strata import arrays
from strata.loops import save_by_c
from strata_copy import runtime

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "engine_loop"))
from engine_loop import Engine, Geometry, Session, Stage

TOKENS = (430, 8_700, 37_000, 46_000, 117_000)
LONG = 497_051
QUICK, QUICK_LONG = (43, 87), 120
SAME = 1.10  # the loop's save path, of the time of plain C


def run(setting: Setting, long: bool = True, tokens: Sequence[int] = ()) -> Result:
    """tokens: lengths in int8, by default TOKENS. long: also LONG in k8v4."""
    lengths = sorted(tokens) or list(QUICK if setting.quick else TOKENS)
    longest = [QUICK_LONG if setting.quick else LONG] if long else []
    # The save path's times spread by a fifth, so its ratio to C is taken of more of them.
    repetitions = {"off": 2, "on": 2, "beside C": 2} if setting.quick else {"off": 3, "on": 9, "beside C": 7}
    result = Result(
        "strata", {"tokens": lengths, "long": longest, "draft": "ring", "repetitions": repetitions, "warm_up": 1}
    )
    setting.ceilings.measure()
    timed = []
    for mode in (0, 1):
        for format, some in (("int8", lengths), ("k8v4", longest)):
            if some and fits(setting, format, mode, some[-1]):
                timed += Table(setting, result, format, mode, some, repetitions).measure()
    setting.check_ceilings(result)
    for name, bytes, way, times in timed:
        result.figures.append(figure(setting, name, bytes, way, times))
    return result


def geometry(setting: Setting) -> Geometry:
    return Geometry(layers=8, head_dim=64, gdn=3060, ple=360, key=64) if setting.quick else Geometry()


def fits(setting: Setting, format: str, mode: int, tokens: int) -> bool:
    """Whether two sessions have room, of which draft and indexer are a fifth, beside what is held already."""
    if setting.quick:
        return True
    free = runtime.memory_info()[0] if mode == 0 else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2.4 * tokens * (12_672 if format == "int8" else 9_792) < free


class Table:
    """All lengths in one format and mode: a main session, which reads on from length to length, and a slot."""

    def __init__(
        self, setting: Setting, result: Result, format: str, mode: int, lengths: Sequence[int], repetitions: dict
    ) -> None:
        self.setting, self.result, self.lengths, self.repetitions = setting, result, lengths, repetitions
        self.name = f"{format}, mode {mode}"
        self.way = "h2d" if mode else "d2d"
        model = geometry(setting)
        self.stages = Stage.split(model.layers, [model.layers], [0])
        self.main, self.slot = (
            Session(
                model, format, self.stages, capacity=lengths[-1] + 64, mode=mode, draft_mode=2, checkpoints=1, name=name
            )
            for name in ("main", "slot 0")
        )
        self.engine = Engine(self.main, [self.slot], setting.copier, log=lambda line: None)
        self.timed: list[tuple[str, int, str, list[float]]] = []

    def measure(self) -> list[tuple[str, int, str, list[float]]]:
        """(name, bytes, the ceiling's way, seconds) of each case."""
        try:
            for tokens in self.lengths:
                self.main.append(1, tokens - self.main.tokens)
                self.into_and_back(tokens)
                if tokens < LONG:
                    self.beside_c(tokens)
        finally:
            self.engine.close()
            self.main.free()
            self.slot.free()
            runtime.stream_destroy(self.stages[0].stream)
        return self.timed

    def into_and_back(self, tokens: int) -> None:
        """Off and on. Before a case the target is spoiled, which touches its memory; behind it bytes are compared."""
        for direction, source, target in (("into slot", self.main, self.slot), ("back", self.slot, self.main)):
            for way, direct in (("off", False), ("on", True)):
                name = f"{self.name}, {tokens} tokens, {direction}, {way}"
                arrays.spoil(target.state, self.setting.streams[0])
                self.engine.direct = direct
                # The longest takes the save path seconds each time: once behind the warm-up is what fits.
                times = 1 if way == "off" and tokens >= LONG else self.repetitions[way]
                copies = [self.copy(direction) for _ in range(1 + times)]
                self.timed.append((name, copies[0].bytes, self.way, [copied.seconds for copied in copies[1:]]))
                marks = source.tokens, source.draft_tokens
                self.result.wrong += arrays.wrong(name, source.state, target.state, marks)

    def copy(self, direction: str):
        """All of the conversation: what the target held is given up before."""
        (self.slot if direction == "into slot" else self.main).state.rewound((0, 0))
        if direction == "into slot":
            return self.engine.copy_to_slot(0, self.main.ids)
        return self.engine.copy_from_slot(0, self.slot.ids)

    def beside_c(self, tokens: int) -> None:
        """The loop's save path and plain C in turn, on the same memory."""
        runs = arrays.save_runs(self.main.state, self.slot.state, (self.main.tokens, self.main.draft_tokens))
        stream, ours, theirs = self.setting.streams[0], [], []
        self.engine.direct = False
        for i in range(-1, self.repetitions["beside C"]):
            for side in range(2):  # who goes first changes every time
                if side ^ (i & 1):
                    ours.append(self.copy("into slot").seconds)
                else:
                    theirs.append(save_by_c(runs, stream) / 1e9)
        arrays.spoil(self.slot.state, stream)
        save_by_c(runs, stream)
        name = f"{self.name}, {tokens} tokens, save path"
        self.result.wrong += arrays.wrong(f"{name} in C", self.main.state, self.slot.state, (tokens, tokens))
        ratio = float(np.median(ours[1:]) / np.median(theirs[1:]))
        both = {"loop, ms": spread(ours[1:], 1e3), "C, ms": spread(theirs[1:], 1e3)}
        self.result.figures.append(Figure(f"{name}, loop / C", round(ratio, 4), "", SAME, samples=both))


def figure(setting: Setting, name: str, bytes: int, way: str, times: Sequence[float]) -> Figure:
    samples = {"bytes": bytes, "ceiling": way, **spread(times, 1e3)}
    samples["GB/s"] = round(bytes / samples["median"] / 1e6, 2)
    samples["share"] = round(samples["GB/s"] / setting.ceilings.found[way], 4)
    return Figure(name, samples["median"], "ms", samples=samples)
