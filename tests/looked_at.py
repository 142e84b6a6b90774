"""What a run has looked at, from the outcomes of its tests, printed at its end: each cell of the exactness table, the
seeds, and figures that tests report.

A cell that is missing fails the run, unless only some of the cells were asked for.
"""

from collections import Counter
from itertools import groupby, product
from typing import NamedTuple

import pytest

FORMATS = ("fp16", "int8", "int8-rotated", "q4_0", "k8v4")
KINDS = ("device", "pinned")
LENGTHS = (0, 1, 3, 4, 5, 63, 64, 65, 96)
WAYS = ("direct", "save + restore")


class Cell(NamedTuple):
    """One case of the exactness table."""

    format: str
    source: str
    target: str
    way: str
    length: int


CELLS = tuple(Cell(*values) for values in product(FORMATS, KINDS, KINDS, WAYS, LENGTHS))


class LookedAt:
    """A pytest plugin. What a test stands for is in its user_properties: ("cell", its number in CELLS), ("seed", n),
    ("figure", a line to print), ("fault pairs", a list), ("engine cell", what it is of, 0 for off and 1 for on, a
    length)."""

    def __init__(self, config):
        self.cells = {}  # number -> outcomes of its test
        self.seeds = Counter()  # (seed, outcome) -> tests
        self.figures = []
        self.fault_pairs = set()
        self.engine_cells = {}  # (what, off or on) -> lengths
        self.asked_for_some = any("::" in argument for argument in config.args) or config.getoption("lf", False)
        self.table_was_collected = False

    def pytest_deselected(self, items):
        self.asked_for_some |= any(is_of_table(item) for item in items)

    def pytest_collection_finish(self, session):
        self.table_was_collected = any(item.path.name == "test_exactness.py" for item in session.items)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and not report.failed:
            return
        for name, value in report.user_properties:
            if name == "cell":
                self.cells.setdefault(value, []).append(report.outcome)
            elif name == "seed":
                self.seeds[value, report.outcome] += 1
            elif name == "figure" and report.when == "call":
                self.figures.append(value)
            elif name == "fault pairs":
                self.fault_pairs.update(map(tuple, value))
            elif name == "engine cell":
                what, direct, length = value
                self.engine_cells.setdefault((what, direct), []).append(length)

    def pytest_sessionfinish(self, session):
        if self.missing() and session.exitstatus == pytest.ExitCode.OK and not session.config.getoption("collectonly"):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.cells or self.missing():
            terminalreporter.section("exactness")
            for line in self.table():
                terminalreporter.line(line)
        if self.seeds or self.figures or self.fault_pairs:
            terminalreporter.section("counts")
            for line in [*self.seed_lines(), *self.figures, *self.fault_lines()]:
                terminalreporter.line(line)
        if self.engine_cells:
            terminalreporter.section("engine loop: equal to the reference, into a slot, back, and back at a checkpoint")
            for line in self.engine_table():
                terminalreporter.line(line)

    def missing(self):
        """The cells without an outcome that should have one."""
        if self.asked_for_some or not self.table_was_collected:
            return []
        return [cell for n, cell in enumerate(CELLS) if not self.ran(n)]

    def ran(self, n):
        return any(outcome != "skipped" for outcome in self.cells.get(n, []))

    def verified(self, n):
        return bool(self.cells.get(n)) and set(self.cells[n]) == {"passed"}

    def table(self):
        """A line for each format, source, target and way, and the total."""
        verified = {cell for n, cell in enumerate(CELLS) if self.verified(n)}
        ran = {cell for n, cell in enumerate(CELLS) if self.ran(n)}
        for (format, source, target, way), cells in groupby(CELLS, key=lambda cell: cell[:4]):
            row = list(cells)
            line = f"{format:<13} {source:>6} -> {target:<6} {way:<15}"
            line += "".join(f"{cell.length if cell in verified else '':>4}" for cell in row)
            wrong = [str(cell.length) for cell in row if cell in ran - verified]
            missing = [str(cell.length) for cell in row if cell not in ran]
            line += f"   wrong: {' '.join(wrong)}" if wrong else ""
            line += f"   not run: {' '.join(missing)}" if missing else ""
            if not self.asked_for_some or any(cell in ran for cell in row):
                yield line
        wrong, missing = len(ran - verified), len(CELLS) - len(ran)
        yield f"{len(verified)} of {len(CELLS)} cells verified, {wrong} wrong, {missing} not run"

    def seed_lines(self):
        seeds = {seed for seed, _ in self.seeds}
        if seeds:
            failed = sum(n for (_, outcome), n in self.seeds.items() if outcome == "failed")
            yield (
                f"{sum(self.seeds.values())} runs under {len(seeds)} seeds ({min(seeds)} to {max(seeds)}), "
                f"{failed} with a race or a wrong byte"
            )

    def fault_lines(self):
        if self.fault_pairs:
            functions = {function for _, _, function, _, _ in self.fault_pairs}
            yield f"fault pairs: {len(self.fault_pairs)} (functions: {len(functions)})"

    def engine_table(self):
        for what in sorted({what for what, _ in self.engine_cells}):
            lengths = (sorted(self.engine_cells.get((what, direct), ())) for direct in (0, 1))
            off, on = (" ".join(map(str, row)) for row in lengths)
            yield f"{what}: off {off}; on {on}"


def is_of_table(item):
    return hasattr(item, "callspec") and "cell" in item.callspec.params
