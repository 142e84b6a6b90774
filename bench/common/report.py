"""Figures, their goals, and where they are written and shown."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass
class Figure:
    """One number. goal: what it should be at most, or at least where `more` is better; None where there is no promise.

    samples: how the number came about: n, median, p95, best and whatever else is worth keeping.
    """

    name: str
    value: float
    unit: str
    goal: float | None = None
    more: bool = False
    samples: dict = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return bool(self.value >= self.goal if self.more else self.value <= self.goal)


@dataclass
class Result:
    """What one benchmark found.

    wrong: bytes that were not what they should be. void: why no figure counts. left_out: names of figures that could
    not be had, and why.
    """

    bench: str
    parameters: dict
    figures: list[Figure] = field(default_factory=list)
    ceilings: dict = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def spread(values: Sequence[float] | np.ndarray, scale: float = 1.0, digits: int = 3) -> dict:
    """n, median, p95, best and worst of some times, each times `scale`."""
    found = np.asarray(values, float) * scale
    return {
        "n": int(found.size),
        "median": round(float(np.median(found)), digits),
        "p95": round(float(np.percentile(found, 95)), digits),
        "best": round(float(found.min()), digits),
        "worst": round(float(found.max()), digits),
    }


def write(result: Result, machine: dict, folder: Path) -> Path:
    """One file for each benchmark, device and day."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    path = folder / f"{result.bench}-{device}-{machine['date']}.json"
    content = {
        "bench": result.bench,
        **machine,
        "parameters": result.parameters,
        "verified": not result.wrong,
        "wrong": result.wrong,
        "void": result.void,
        "left_out": result.left_out,
        "ceilings": result.ceilings,
        "figures": [{**asdict(figure), "met": figure.met} for figure in result.figures],
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def show(results: Iterable[Result]) -> None:
    table = Table("bench", "figure", "value", "goal", "met")
    for result in results:
        for figure in result.figures:
            goal = "" if figure.goal is None else f"{'>=' if figure.more else '<='} {figure.goal:.4g}"
            met = {None: "", True: "yes", False: "NO"}[figure.met]
            table.add_row(result.bench, figure.name, f"{figure.value:.4g} {figure.unit}", goal, met)
        for name in result.left_out:
            table.add_row(result.bench, name, "not measured")
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    for result in results:
        for name, why in result.left_out.items():
            console.print(f"not measured: {result.bench}: {name}: {why}", markup=False)
        for text in result.void:
            console.print(f"void: {result.bench}: {text}", markup=False)
        for text in result.wrong:
            console.print(f"WRONG BYTES: {result.bench}: {text}", markup=False)
