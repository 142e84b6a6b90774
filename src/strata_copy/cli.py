"""The command line: what was found on this machine, and a conversation moved with and without this library."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import click
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from strata_copy import CALLER_SYNCED, Copier, CopyError, Layout, Part, presets, rig, runtime, save_path, turns
from strata_copy.cudart import RUNTIME_VARIABLE

TOKENS = (430, 8_700, 46_000, 117_000)
TOKENS_HELP = f"Length; may be given several times. [default: {', '.join(map(str, TOKENS))}]"
SPARE_TOKENS = 64  # capacity behind the mark, which a copy must leave alone
MODES = ("all on the device", "K/V in pinned memory", "the draft's K/V in pinned memory")
HOST_MEMORY = 4 << 30  # the most that is taken by itself where memory is the machine's own


class Timed(NamedTuple):
    """One direction at one length: bytes that move, best times in milliseconds, and what was found wrong."""

    tokens: int
    format: str
    direction: str
    bytes: int
    save_ms: float
    direct_ms: float
    wrong: list[str]
    mode: int = 0

    def gb_per_second(self) -> float:
        return self.bytes / self.direct_ms / 1e6

    def as_json(self, ceiling: float) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "format": self.format,
            "mode": self.mode,
            "direction": self.direction,
            "bytes": self.bytes,
            "save_ms": round(self.save_ms, 3),
            "direct_ms": round(self.direct_ms, 3),
            "percent_of_ceiling": round(100 * self.gb_per_second() / ceiling, 1),
            "verified": not self.wrong,
        }


def installed_version() -> str:
    try:
        return version("strata_copy")
    except PackageNotFoundError:  # run from a source tree
        return "(not installed)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(installed_version(), prog_name="strata_copy")
def main() -> None:
    """Moves a conversation's state between sessions, batch slots and pinned memory."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def info(as_json: bool) -> None:
    """Says which runtime is used, and why, and which devices it has.

    STRATA_COPY_RUNTIME=cuda or host asks for one; else CUDA is tried, and the host runtime used without it.
    """
    why = open_runtime()
    listed = list(devices())
    found = {**runtime.describe(), "why": why, "devices": listed}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"strata_copy {installed_version()}")
    click.echo(f"runtime     {found['kind']}: {why}")
    click.echo(f"library     {found['library']}")
    click.echo(f"versions    runtime {found['runtime']}, driver {found['driver'] or 'none'}")
    if found["missing"]:
        click.echo(f"            {found['missing']} functions are missing from the library")
    for device in listed:
        number, name, bus_id, memory, free = device.values()
        click.echo(f"device {number}    {name}, {bus_id}, {memory:,} bytes, {free:,} free")


@main.command()
@click.option(
    "--format", "formats", type=click.Choice([*presets.QWEN3_8_CELLS, "all"]), default="int8", help="Of the K/V."
)
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, help=TOKENS_HELP)
@click.option("--draft", is_flag=True, help="With the K/V of the draft.")
@click.option("--mode", type=click.IntRange(0, 2), default=0, show_default=True, help="Where the K/V is; see above.")
@click.option("--memory", type=click.IntRange(min=1), help="Bytes that both sessions may take.")
@click.option("--pool", is_flag=True, help="Conversations that take turns in slots; see below.")
@click.option("--json", "as_json", is_flag=True, help="One JSON list, a row for each length and direction, or turn.")
def demo(
    formats: str, tokens: tuple[int, ...], draft: bool, mode: int, memory: int | None, pool: bool, as_json: bool
) -> None:
    """Copies a conversation from a main session to a batch slot and back, on one device.

    "save" is what engines do today (through pageable memory), "direct" is this library. Times are the best of 3; every
    byte of the target is compared with what it must hold.

    Mode 0: all of a session is on the device, and the ceiling is one plain copy within it. Mode 1: the K/V is streamed,
    complete in pinned memory; the ceiling is one plain copy from there to the device. Mode 2: as 0, but the draft's K/V
    is complete in pinned memory, beside a ring on the device that the engine fills itself; it needs --draft.

    With --pool 5 conversations take turns in 4 slots. They have a prefix of --tokens in common (by default the longest
    of the lengths that fits) and grow by 64 tokens a turn. The conversation whose turn it is is in no slot: another one
    is parked, and it takes that slot, on the save path and by a pool in pinned memory. A row for each turn, and one for
    all.

    Ends with status 1 where a byte differs or a copy fails.
    """
    if mode == 2 and not draft:
        raise click.UsageError("mode 2 is the draft's: --draft is needed")
    why = open_runtime()
    err = Console(stderr=True, highlight=False, markup=False)
    err.print(f"{runtime.describe()['kind']} runtime, {runtime.device_name(0)}: {why}", soft_wrap=True)
    names = list(presets.QWEN3_8_CELLS) if formats == "all" else [formats]
    if pool:
        demo_pool([presets.qwen3_8_flash_next(name, draft=draft) for name in names], tokens, mode, memory, err, as_json)
        return
    budget = memory or memory_to_take(mode)
    cases = []
    for name in names:
        layout = presets.qwen3_8_flash_next(name, draft=draft)
        for n in tokens or TOKENS:
            need = 2 * layout.bytes_at(marks(layout, n + SPARE_TOKENS))
            if need <= budget:
                cases.append((layout, n))
            else:
                err.print(f"left out: {name} at {n:,} tokens needs {need:,} bytes of {budget:,}", soft_wrap=True)
    if not cases:
        raise click.ClickException("no length fits into memory")
    try:
        timed, ceiling = run_cases(cases, err, mode)
    except (CopyError, runtime.CudaError, MemoryError) as failure:
        raise click.ClickException(f"{type(failure).__name__}: {failure}") from failure
    if as_json:
        click.echo(json.dumps([row.as_json(ceiling) for row in timed], indent=2))
    else:
        show(timed, ceiling)
    for row in timed:
        for line in row.wrong:
            err.print(f"{row.format}, {row.tokens:,} tokens, {row.direction}, {line}", soft_wrap=True)
    if any(row.wrong for row in timed):
        raise SystemExit(1)


def demo_pool(
    layouts: list[Layout], tokens: tuple[int, ...], mode: int, memory: int | None, err: Console, as_json: bool
) -> None:
    timed: list[turns.Turn] = []
    stream = runtime.stream_create()
    try:
        with Copier((0,)) as copier:
            for layout in layouts:
                for n in lengths_that_fit(layout, tokens, mode, memory, err):
                    timed += turns.run(copier, layout, n, stream, kind=kind_of(mode), mode=mode)
    except (CopyError, runtime.CudaError, MemoryError) as failure:
        raise click.ClickException(f"{type(failure).__name__}: {failure}") from failure
    runtime.stream_destroy(stream)
    if not timed:
        raise click.ClickException("no length fits into memory")
    if as_json:
        click.echo(json.dumps([row.as_json() for row in timed], indent=2))
    else:
        show_turns(timed)
    for row in timed:
        for line in row.wrong if row.turn is not None else ():
            err.print(f"{row.format}, {row.tokens:,} tokens, turn {row.turn}, {line}", soft_wrap=True)
    if any(row.wrong for row in timed):
        raise SystemExit(1)


def lengths_that_fit(layout: Layout, tokens: tuple[int, ...], mode: int, memory: int | None, err: Console) -> list[int]:
    """Those that were asked for, or the longest of the usual ones; what is left out is said."""
    found = []
    for n in tokens or reversed(TOKENS):
        needs = turns.memory(layout, n)
        if memory or runtime.describe()["kind"] == "host":
            fits = sum(needs) <= (memory or memory_to_take(mode))
        else:
            fits = needs[0] <= memory_to_take(mode) and needs[1] <= memory_to_take(1)
        if fits:
            found.append(n)
        elif tokens:
            err.print(f"left out: {layout.format} at {n:,} tokens needs {sum(needs):,} bytes", soft_wrap=True)
        if found and not tokens:
            break
    return found


def open_runtime() -> str:
    """Opens what STRATA_COPY_RUNTIME says, or CUDA, or without it the host runtime. Returns why in words."""
    try:
        if os.environ.get(RUNTIME_VARIABLE):
            return f"{RUNTIME_VARIABLE}={runtime.open()}"
        try:
            runtime.open("cuda")
            return "there is a GPU"
        except runtime.RuntimeUnavailable as reason:
            runtime.open("host")
            return f"CUDA is not to be had ({reason}), so copies run in host memory"
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    except runtime.RuntimeUnavailable as reason:
        raise click.ClickException(str(reason)) from reason


def devices() -> Iterator[dict[str, object]]:
    before = runtime.get_device()
    for device in range(runtime.device_count()):
        runtime.set_device(device)
        free, total = runtime.memory_info()
        name, bus_id = runtime.device_name(device), runtime.pci_bus_id(device)
        yield {"device": device, "name": name, "pci_bus_id": bus_id, "memory": total, "free": free}
    runtime.set_device(before)


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


def run_cases(cases: list[tuple[Layout, int]], err: Console, mode: int) -> tuple[list[Timed], float]:
    """All cases, both ways, and the ceiling in GB/s: measured before and after them, the larger counts."""
    timed = []
    stream = runtime.stream_create()
    with Copier((0,)) as copier, Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("", total=2 * len(cases))
        before = ceiling_gb_per_second(stream, mode)
        for layout, tokens in cases:
            capacity = marks(layout, tokens + SPARE_TOKENS)
            with (
                rig.Session(layout, capacity, kind=kind_of(mode), number=1) as session,
                rig.Session(layout, capacity, kind=kind_of(mode), number=2) as slot,
            ):
                for direction, source, target in (("main->slot", session, slot), ("slot->main", slot, session)):
                    progress.update(bar, description=f"{layout.format}, {tokens:,} tokens, {direction}")
                    row = copy_both_ways(copier, source, target, tokens, direction, stream)
                    timed.append(row._replace(mode=mode))
                    progress.advance(bar)
        after = ceiling_gb_per_second(stream, mode)
    runtime.stream_destroy(stream)
    return timed, max(before, after)


def copy_both_ways(
    copier: Copier, source: rig.Session, target: rig.Session, tokens: int, direction: str, stream: int
) -> Timed:
    """The save path, then the direct copy, each into a target that was filled anew and is compared behind it."""
    upto = marks(source.layout, tokens)
    runs = rig.runs(source, target, upto)
    plan = copier.plan(source.state, target.state)
    ms, wrong = {}, []

    def save() -> None:
        save_path.save_and_restore(runs, stream)

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


def ceiling_gb_per_second(stream: int, mode: int) -> float:
    """One plain copy: within the device, or from pinned memory where the K/V is streamed."""
    n = (1 << 30) if runtime.describe()["kind"] == "cuda" else (256 << 20)
    source, target = runtime.host_alloc(n) if mode == 1 else runtime.malloc(n), runtime.malloc(n)

    def copy() -> None:
        runtime.memcpy_async(target, source, n, stream)
        runtime.stream_synchronize(stream)

    try:
        runtime.memset_async(source, 1, n, stream)
        return n / best_ms(copy, warm_ups=3, repeats=5) / 1e6
    finally:
        (runtime.host_free if mode == 1 else runtime.free)(source)
        runtime.free(target)


def best_ms(action: Callable[[], object], *, warm_ups: int, repeats: int) -> float:
    times = []
    for _ in range(warm_ups + repeats):
        start = time.perf_counter_ns()
        action()
        times.append(time.perf_counter_ns() - start)
    return min(times[warm_ups:]) / 1e6


def show(timed: list[Timed], ceiling: float) -> None:
    kind = runtime.describe()["kind"]
    for name in dict.fromkeys(row.format for row in timed):
        mode = timed[0].mode
        title = f"{name}, mode {mode} ({MODES[mode]}), {kind} runtime; ceiling {ceiling:,.1f} GB/s"
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
                    f"{100 * row.gb_per_second() / ceiling:.0f}",
                    "no" if row.wrong else "yes",
                )
        Console().print(table)


def show_turns(timed: list[turns.Turn]) -> None:
    kind = runtime.describe()["kind"]
    headings = ["turn", "conver-\nsation", "slot", "tokens", "MB", "moved\nMB", "save ms", "pool ms", "times\nfaster"]
    what = f"{turns.CONVERSATIONS} conversations in {turns.SLOTS} slots"
    for name in dict.fromkeys(row.format for row in timed):
        title = f"{what}, {name}, mode {timed[0].mode}, {kind} runtime"
        table = Table(title=title, box=box.SIMPLE, padding=0)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verified", no_wrap=True)
        for row in timed:
            if row.format == name:
                whose = ("total", "", "") if row.turn is None else (f"{row.turn}", f"{row.conversation}", f"{row.slot}")
                table.add_row(
                    *whose,
                    f"{row.tokens:,}",
                    f"{row.bytes / 1e6:,.0f}",
                    f"{row.moved / 1e6:,.0f}",
                    f"{row.save_ms:,.2f}",
                    f"{row.pool_ms:,.2f}",
                    f"{row.save_ms / row.pool_ms:,.1f}",
                    "no" if row.wrong else "yes",
                )
        Console().print(table)
