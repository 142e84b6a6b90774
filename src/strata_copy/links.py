"""The PCIe link of a device: what it is rated at and what it runs at, and the processors that are near it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

DEVICES = Path("/sys/bus/pci/devices")
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # by gigatransfers a second in a lane


class Link(NamedTuple):
    """Generation and lanes of a PCIe link, and what the device is rated at."""

    generation: int
    width: int
    rated_generation: int
    rated_width: int

    def slower(self) -> str:
        """In what it is below its rating, as text; empty where it is not."""
        found = []
        if self.width < self.rated_width:
            found.append(f"x{self.width} of x{self.rated_width}")
        if self.generation < self.rated_generation:
            found.append(f"generation {self.generation} of {self.rated_generation}")
        return ", ".join(found)


def read(bus_id: str) -> Link | str:
    """The link as it is now, or why it is not known. Idle links may be slowed down to save power: read it under load.

    bus_id: as of runtime.pci_bus_id. Linux is asked, then the driver's management library, where the package
    nvidia-ml-py is installed.
    """
    by_linux = _by_linux(bus_id)
    if isinstance(by_linux, Link):
        return by_linux
    by_nvml = _by_nvml(bus_id)
    return by_nvml if isinstance(by_nvml, Link) else f"{by_linux}; {by_nvml}"


@contextmanager
def near(bus_id: str) -> Iterator[None]:
    """Meanwhile the thread runs on processors of the device's NUMA node, as far as it may and Linux tells which these
    are: memory that it makes lies there."""
    before = os.sched_getaffinity(0)
    chosen = before & _processors(bus_id)
    if chosen:
        os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _by_linux(bus_id: str) -> Link | str:
    folder = _folder(bus_id)
    numbers = []
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        try:
            numbers.append(float((folder / name).read_text().split()[0]))
        except (OSError, ValueError, IndexError):
            return f"{folder} does not tell"
    speed, width, rated_speed, rated_width = numbers
    if speed not in GENERATIONS or rated_speed not in GENERATIONS or not width:
        return f"{folder} tells of no PCIe link"
    return Link(GENERATIONS[speed], int(width), GENERATIONS[rated_speed], int(rated_width))


def _by_nvml(bus_id: str) -> Link | str:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        try:
            device = nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
            return Link(
                nvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
                nvml.nvmlDeviceGetCurrPcieLinkWidth(device),
                nvml.nvmlDeviceGetMaxPcieLinkGeneration(device),
                nvml.nvmlDeviceGetMaxPcieLinkWidth(device),
            )
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as failure:
        return f"NVML: {failure}"


def _processors(bus_id: str) -> set[int]:
    found: set[int] = set()
    try:
        listed = (_folder(bus_id) / "local_cpulist").read_text().strip()
        for part in filter(None, listed.split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found


def _folder(bus_id: str) -> Path:
    """Linux writes bus addresses in small letters, with a domain of four digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return DEVICES / f"{domain[-4:]}:{rest}"
