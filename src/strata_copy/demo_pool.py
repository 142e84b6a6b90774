"""The demo's --pool: turns of conversations as rows."""

from __future__ import annotations

import json

import click
from rich import box
from rich.console import Console
from rich.table import Table

from strata_copy import Copier, Layout, runtime, turns
from strata_copy.demo_copies import TOKENS, kind_of, memory_to_take
from strata_copy.stages import SaveStreams, Stages


def demo_pool(
    layouts: list[Layout],
    tokens: tuple[int, ...],
    mode: int,
    stages: Stages,
    memory: int | None,
    err: Console,
    as_json: bool,
) -> None:
    timed: list[turns.Turn] = []
    streams = SaveStreams(stages.devices)
    with Copier(stages.devices) as copier:
        for layout in layouts:
            for n in lengths_that_fit(layout, tokens, mode, memory, err):
                timed += turns.run(copier, layout, n, streams, kind=kind_of(mode), mode=mode, stages=stages)
    streams.close()
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
