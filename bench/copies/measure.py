"""Whole conversations from slot to slot and between slot and pinned memory, as shares of what the hardware gives."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import click

from common.report import Figure, Result, spread
from common.setting import Case, Setting, verify
from copies.latency import Watch
from copies.loops import by_library, by_streams
from strata_copy import runtime

LOCAL, PINNED, BOTH_WAYS = 0.82, 0.98, 0.95  # goals: shares of the ceiling
FIRST_LAYER = 0.5  # ms
DEVICE, DEVICE_TOO = ("device", "source"), ("device", "target")
HOST, HOST_TOO = ("pinned", "source"), ("pinned", "target")


def run(setting: Setting, long: bool = True) -> Result:
    repetitions, warm_up = (2, 1) if setting.quick else (9, 3)
    result = Result("copies", {"tokens": setting.tokens, "repetitions": repetitions, "warm_up": warm_up})
    bench = Bench(setting, result, repetitions, warm_up)
    setting.ceilings.measure()
    slot, other, pinned, image = setting.sessions("int8", "middle", DEVICE, DEVICE_TOO, HOST, HOST_TOO)
    for length, goal in (("short", None), ("middle", LOCAL)):
        tokens = setting.tokens[length]
        local = Case(setting, slot, other, tokens)
        bench.measure(f"slot -> slot, int8, {tokens} tokens", [local], "d2d", goal)
        for streams in (4, 8):
            bench.measure(f"the same by {streams} bare streams, {tokens} tokens", [local], "d2d", None, bare=streams)
    out, back = Case(setting, slot, image, tokens), Case(setting, pinned, other, tokens)
    bench.measure(f"slot -> pinned, int8, {tokens} tokens", [out], "d2h", PINNED)
    bench.measure("the same by one bare stream, slot -> pinned", [out], "d2h", None, bare=1)
    bench.measure(f"pinned -> slot, int8, {tokens} tokens", [back], "h2d", PINNED)
    bench.measure("the same by one bare stream, pinned -> slot", [back], "h2d", None, bare=1)
    bench.measure(f"both directions at once, int8, {tokens} tokens", [out, back], "two_way", BOTH_WAYS)
    largest = long_case(setting) if long else None
    if largest is not None:
        bench.measure(f"slot -> slot, k8v4, {largest.upto} tokens", [largest], "d2d", LOCAL)
    ready = [first_layer(bench, local if largest is None else largest, feed) for feed in (False, True)]
    setting.check_ceilings(result)
    result.figures += [*bench.shares(), *ready]
    return result


class Bench:
    """Times cases, verifies each, and turns times into shares once all ceilings are known.

    ceilings: has them in `found`; None for those of the setting.
    """

    def __init__(self, setting: Setting, result: Result, repetitions: int, warm_up: int, ceilings: Any = None) -> None:
        self.setting, self.result, self.ceilings = setting, result, ceilings or setting.ceilings
        self.repetitions, self.warm_up = repetitions, warm_up
        self.timed: list[tuple[str, int, str, float | None, list[int], list[int]]] = []

    def measure(
        self, name: str, cases: Sequence[Case], way: str, goal: float | None, bare: int = 0, feed: bool | None = None
    ) -> None:
        """All cases at once. bare: on so many streams of plain cudaMemcpyAsync instead of by the library. feed: as of
        Plan.submit."""
        streams, by_sync = self.setting.streams, []
        for case in cases:
            case.spoil()
        if bare:
            times = by_streams(cases[0].extents, streams[:bare], self.repetitions, self.warm_up)
        else:
            plans = [case.plan for case in cases]
            times = by_library(plans, cases[0].upto, streams[0], self.repetitions, self.warm_up, feed=feed)
            by_sync = by_library(plans, cases[0].upto, streams[0], self.repetitions, 1, True, feed=feed)
        self.result.wrong += verify(name, *cases)
        bytes = sum(case.bytes for case in cases)
        click.echo(f"{name}: {bytes / statistics.median(times):.2f} GB/s", err=True)
        self.timed.append((name, bytes, way, goal, times, by_sync))

    def long_copies(self, name: str, copies: Sequence[tuple[int, int, int, int]], way: str) -> None:
        """Each (target, source, bytes, stream) by one cudaMemcpyAsync, all at once, unverified: what memory gives."""
        times = []
        for _ in range(self.warm_up + self.repetitions):
            start = time.perf_counter_ns()
            for target, source, bytes, stream in copies:
                runtime.memcpy_async(target, source, bytes, stream)
            for *_, stream in copies:
                runtime.stream_synchronize(stream)
            times.append(time.perf_counter_ns() - start)
        self.timed.append((name, sum(bytes for _, _, bytes, _ in copies), way, None, times[self.warm_up :], []))

    def timed_and_verified(self, name: str, cases: Sequence[Case], repetitions: int) -> list[int]:
        """ns of each repetition of all cases at once."""
        for case in cases:
            case.spoil()
        times = by_library([case.plan for case in cases], cases[0].upto, self.setting.streams[0], repetitions, 1)
        self.result.wrong += verify(name, *cases)
        return times

    def shares(self) -> list[Figure]:
        """The median's share is the figure; the best one and the time until sync returns stand beside it."""
        found = []
        for name, n, way, goal, times, by_sync in self.timed:
            ceiling = self.ceilings.found[way]
            samples = {"bytes": n, "ceiling": way, "ms": spread(times, 1e-6, 4)}
            samples["GB/s"] = round(n / (samples["ms"]["median"] * 1e6), 2)
            samples["best share"] = round(n / min(times) / ceiling, 4)
            if by_sync:
                samples["ms until sync returns"] = spread(by_sync, 1e-6, 4)
            share = n / (samples["ms"]["median"] * 1e6) / ceiling
            found.append(Figure(name, round(share, 4), f"of {way}", goal, more=True, samples=samples))
        return found


def long_case(setting: Setting) -> Case | None:
    """The longest conversation in the smallest format that keeps 8-bit keys, where two of it fit into what is free."""
    if not setting.has_room(2):
        return None
    slot, other = setting.sessions("k8v4", "long", DEVICE, DEVICE_TOO)
    return Case(setting, slot, other, setting.tokens["long"])


def first_layer(bench: Bench, case: Case, feed: bool) -> Figure:
    """From the call of submit until a second thread sees the event behind wait_layer(0) complete. feed: whether the
    worker queues the copy, or the caller."""
    repetitions = 3 if bench.setting.quick else 30
    case.spoil()
    watch = Watch(0)
    try:
        times = watch.run(case.plan, case.upto, repetitions, bench.warm_up, feed)
    finally:
        watch.close()
    name = f"layer 0 ready, slot -> slot, {case.upto} tokens{', fed' if feed else ''}"
    bench.result.wrong += verify(name, case)
    found = spread(times, 1e-6, 4)
    return Figure(name, found["median"], "ms", FIRST_LAYER, samples=found)
