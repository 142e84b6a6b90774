"""The demo's rows: a session and a slot, both ways, by the save path and by this library."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import click
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from strata_copy import CALLER_SYNCED, Copier, Layout, Part, rig, runtime
from strata_copy.probe import Ceilings
from strata_copy.stages import SaveStreams, Stages

TOKENS = (430, 8_700, 46_000, 117_000)
SPARE_TOKENS = 64  # capacity behind the mark, which a copy must leave alone
MODES = ("all on the device", "K/V in pinned memory", "the draft's K/V in pinned memory")
PEER_DIRECTIONS = {"0->1": (0, 1), "1->0": (1, 0)}
HOST_MEMORY = 4 << 30  # the most that is taken by itself where memory is the machine's own

Way = tuple[str, tuple[int, ...]]  # as strata_copy.probe names what it measures


class Timed(NamedTuple):
    """One direction at one length: bytes that move, best times in milliseconds, the way whose ceiling counts, and what
    was found wrong."""

    tokens: int
    format: str
    direction: str
    bytes: int
    save_ms: float
    direct_ms: float
    wrong: list[str]
    way: Way = ("d2d", (0,))
    mode: int = 0
    devices: int = 1

    def gb_per_second(self) -> float:
        return self.bytes / self.direct_ms / 1e6

    def as_json(self, ceiling: float) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "format": self.format,
            "mode": self.mode,
            "devices": self.devices,
            "direction": self.direction,
            "bytes": self.bytes,
            "save_ms": round(self.save_ms, 3),
            "direct_ms": round(self.direct_ms, 3),
            "percent_of_ceiling": round(100 * self.gb_per_second() / ceiling, 1),
            "verified": not self.wrong,
        }


class Case(NamedTuple):
    """Both sessions of a row: where each is, and what the directions between them are called."""

    layout: Layout
    tokens: int
    stages: tuple[Stages | int, Stages | int]  # an int is one device for all of it
    directions: dict[str, Way]

    def device(self, side: int) -> Callable[[Part], int] | int:
        stages = self.stages[side]
        return stages if isinstance(stages, int) else stages.device


def demo_copies(
    layouts: list[Layout],
    tokens: tuple[int, ...],
    mode: int,
    stages: Stages,
    memory: int | None,
    err: Console,
    as_json: bool,
) -> None:
    budget = memory or memory_to_take(mode)
    cases = []
    for layout in layouts:
        for n in tokens or TOKENS:
            need = 2 * layout.bytes_at(marks(layout, n + SPARE_TOKENS))
            if need <= budget:
                cases += cases_of(layout, n, mode, stages)
            else:
                err.print(
                    f"left out: {layout.format} at {n:,} tokens needs {need:,} bytes of {budget:,}", soft_wrap=True
                )
    if not cases:
        raise click.ClickException("no length fits into memory")
    timed, ceilings = run_cases(cases, err, mode, stages)
    if as_json:
        click.echo(json.dumps([row.as_json(ceilings[row.way]) for row in timed], indent=2))
    else:
        show(timed, ceilings)
    for row in timed:
        for line in row.wrong:
            err.print(f"{row.format}, {row.tokens:,} tokens, {row.direction}, {line}", soft_wrap=True)
    if any(row.wrong for row in timed):
        raise SystemExit(1)


def cases_of(layout: Layout, tokens: int, mode: int, stages: Stages) -> list[Case]:
    way = "h2d" if mode == 1 else "d2d", tuple(stages.devices)
    found = [Case(layout, tokens, (stages, stages), {"main->slot": way, "slot->main": way})]
    if mode == 0 and len(stages.devices) > 1:
        found.append(Case(layout, tokens, (0, 1), {name: ("peer", pair) for name, pair in PEER_DIRECTIONS.items()}))
    return found


def run_cases(cases: list[Case], err: Console, mode: int, stages: Stages) -> tuple[list[Timed], dict[Way, float]]:
    """All cases, both ways, and the ceilings in GB/s: measured before and after them, the larger counts. From device to
    device that is the second one: the first plan proves P2P, and enables it."""
    timed = []
    ways = list(dict.fromkeys(way for case in cases for way in case.directions.values()))
    streams = SaveStreams(stages.devices)
    with (
        Copier(stages.devices) as copier,
        Progress(console=err, transient=True, disable=not err.is_terminal) as progress,
    ):
        bar = progress.add_task("", total=2 * len(cases))
        before = ceilings_of(ways)
        for case in cases:
            capacity = marks(case.layout, case.tokens + SPARE_TOKENS)
            with (
                rig.Session(case.layout, capacity, kind=kind_of(mode), device=case.device(0), number=1) as session,
                rig.Session(case.layout, capacity, kind=kind_of(mode), device=case.device(1), number=2) as slot,
            ):
                sides = ((session, slot), (slot, session))
                for (direction, way), (source, target) in zip(case.directions.items(), sides, strict=True):
                    progress.update(bar, description=f"{case.layout.format}, {case.tokens:,} tokens, {direction}")
                    row = copy_both_ways(copier, source, target, case.tokens, direction, streams)
                    timed.append(row._replace(way=way, mode=mode, devices=len(stages.devices)))
                    progress.advance(bar)
        after = ceilings_of(ways)
    streams.close()
    return timed, {way: max(before[way], after[way]) for way in ways}


def copy_both_ways(
    copier: Copier, source: rig.Session, target: rig.Session, tokens: int, direction: str, streams: SaveStreams
) -> Timed:
    """The save path, then the direct copy, each into a target that was filled anew and is compared behind it."""
    upto = marks(source.layout, tokens)
    runs = rig.runs_by_devices(source, target, upto)
    plan = copier.plan(source.state, target.state)
    ms, wrong = {}, []

    def save() -> None:
        streams.save_and_restore(runs)

    def direct() -> None:
        ticket = plan.submit(upto, after=CALLER_SYNCED)
        assert ticket is not None, "all tickets before have ended"
        ticket.sync()

    source.fill()
    for kind, copy in (("save", save), ("direct", direct)):
        target.fill()
        ms[kind] = best_ms(copy, warm_ups=1, repeats=3)
        wrong += [f"{kind}: {line}" for line in rig.mismatches(target, source, upto)]
    wrong += [f"source: {line}" for line in rig.changes(source)]
    return Timed(tokens, source.layout.format, direction, source.layout.bytes_at(upto), ms["save"], ms["direct"], wrong)


def ceilings_of(ways: list[Way]) -> dict[Way, float]:
    """The probe's figures. Its memory is given back before copies need theirs."""
    n = (1 << 30) if runtime.describe()["kind"] == "cuda" else (64 << 20)
    with Ceilings(n, n) as ceilings:
        return {way: ceilings.measure(*way).best for way in ways}


def best_ms(action: Callable[[], object], *, warm_ups: int, repeats: int) -> float:
    times = []
    for _ in range(warm_ups + repeats):
        start = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - start)
    return min(times[warm_ups:]) / 1e6


def memory_to_take(mode: int) -> int:
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if runtime.describe()["kind"] == "cuda":
        device = runtime.memory_info()[0] * 9 // 10
        return min(device, host) if mode else device
    return min(HOST_MEMORY, host)


def kind_of(mode: int) -> Callable[[Part], str]:
    """Where each part of a session is: what grows by pages is K/V, what has a row more than blocks is the indexer's."""

    def kind(part: Part) -> str:
        streamed = part.growth.rule == "linear" and part.growth.extra == 0
        return "pinned" if mode and streamed and (mode == 1 or part.group == "draft") else "device"

    return kind


def marks(layout: Layout, tokens: int) -> tuple[int, ...]:
    return (tokens,) * len(layout.marks)


def show(timed: list[Timed], ceilings: dict[Way, float]) -> None:
    kind = runtime.describe()["kind"]
    said = "; ".join(f"{way_text(*way)} {rate:,.1f} GB/s" for way, rate in ceilings.items())
    for name in dict.fromkeys(row.format for row in timed):
        mode, devices = timed[0].mode, timed[0].devices
        where = f"{devices} devices, " if devices > 1 else ""
        title = f"{name}, mode {mode} ({MODES[mode]}), {where}{kind} runtime; ceiling {said}"
        table = Table(title=title, box=box.SIMPLE, padding=0)
        if kind == "host":  # one copy is one thread's here, and may miss the processor's cache where smaller ones hit
            table.caption = "host memory: the ceiling is one thread's copy, which several may pass"
        for heading in ("tokens", "direction", "MB", "save ms", "direct ms", "times\nfaster", "GB/s", "% of\nceiling"):
            table.add_column(heading, justify="left" if heading == "direction" else "right", no_wrap=True)
        table.add_column("verified", no_wrap=True)
        for row in timed:
            if row.format == name:
                table.add_row(
                    f"{row.tokens:,}",
                    row.direction,
                    f"{row.bytes / 1e6:,.0f}",
                    f"{row.save_ms:,.2f}",
                    f"{row.direct_ms:,.2f}",
                    f"{row.save_ms / row.direct_ms:,.1f}",
                    f"{row.gb_per_second():,.1f}",
                    f"{100 * row.gb_per_second() / ceilings[row.way]:.0f}",
                    "no" if row.wrong else "yes",
                )
        Console().print(table)


def way_text(way: str, devices: tuple[int, ...]) -> str:
    return f"{way} {devices[0]}->{devices[1]}" if way == "peer" else way
