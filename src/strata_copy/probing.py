"""The command `probe`: what the links of this machine give, and whether they are as they should be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import click
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from strata_copy import CopyError, links, peers, runtime
from strata_copy.chosen import PEERS_OPTION, Pairs, numbers, open_runtime
from strata_copy.probe import Ceilings, Rate

DEVICE_WAYS = ("h2d", "d2h", "two_way", "d2d")
PAIR_WAYS = ("peer", "peer_two_way")
ALL_WAYS = ("h2d", "d2h", "two_way")
MIB = 1 << 20
SIZES = {"cuda": 1024, "host": 16}  # MiB of a copy, by default
OF_THE_HOST_RUNTIME = "figures of the host runtime are this machine's memory and mean nothing for a GPU"


class DeviceFound(NamedTuple):
    device: int
    name: str
    pci_bus_id: str
    link: links.Link | str  # text: why it is not known
    rates: dict[str, Rate]


class PairFound(NamedTuple):
    source: int
    target: int
    p2p: bool
    reason: str
    rates: dict[str, Rate]  # none where a copy hangs


@dataclass
class Found:
    """All that was measured. Rates are GB/s, by the names of strata_copy.probe."""

    runtime: str
    mebibytes: int
    devices: list[DeviceFound] = field(default_factory=list)
    pairs: list[PairFound] = field(default_factory=list)
    together: dict[str, Rate] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        said = [OF_THE_HOST_RUNTIME] if self.runtime == "host" else []
        for one in self.devices:
            if isinstance(one.link, links.Link) and one.link.slower():
                said.append(f"device {one.device}: its PCIe link is slower than rated: {one.link.slower()}")
        return said


@click.command(short_help="Measures the ceilings of copies: devices, links, pairs.")
@click.option("--devices", callback=numbers, help="Which, as in 0,1. [default: all]")
@click.option(
    "--size",
    type=click.IntRange(min=1),
    help="MiB of each copy; twice that within and between devices. [default: 1024]",
)
@PEERS_OPTION
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def probe(devices: tuple[int, ...], size: int | None, peers: Pairs | None, as_json: bool) -> None:
    """Measures what the devices and the links between them give: the ceilings of copies.

    For each device from pinned memory to it, back, both at once, and within it; for each pair the copy from one to the
    other, and both ways at once; at last the PCIe links of all devices at once. Each is one long plain copy by one CUDA
    call, best (and with --json median) of 5 after 3 warm-ups, in GB/s, by the method of nvbandwidth.

    It says which pairs have P2P, proven by data, or why not, and which PCIe link runs below what its device is rated
    at. The host runtime has as many devices as are named, and copies of 16 MiB.

    Ends with status 1 where a copy fails or brings wrong bytes.
    """
    chosen = devices or (0,)
    if len(set(chosen)) < len(chosen):
        raise click.UsageError(f"--devices names one twice: {','.join(map(str, chosen))}")
    why = open_runtime(max(chosen) + 1, peers)
    chosen = devices or tuple(range(runtime.device_count()))
    kind = str(runtime.describe()["kind"])
    err = Console(stderr=True, highlight=False, markup=False)
    err.print(f"{kind} runtime: {why}", soft_wrap=True)
    try:
        found = measure(chosen, Found(kind, size or SIZES[kind]), err)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    except runtime.CudaError as failure:
        hint = "; a smaller --size needs less memory" if failure.name == "cudaErrorMemoryAllocation" else ""
        raise click.ClickException(f"{failure}{hint}") from failure
    except (CopyError, RuntimeError, MemoryError) as failure:
        raise click.ClickException(f"{type(failure).__name__}: {failure}") from failure
    if as_json:
        click.echo(json.dumps(as_values(found), indent=2))
    else:
        show(found)


def measure(chosen: tuple[int, ...], found: Found, err: Console) -> Found:
    runtime.set_device(chosen[0])  # so that no other one becomes this process's because it was current before
    pairs = [(a, b) for a in chosen for b in chosen if a != b]
    with (
        Ceilings(2 * found.mebibytes * MIB, found.mebibytes * MIB) as ceilings,
        Progress(console=err, transient=True, disable=not err.is_terminal) as progress,
    ):
        bar = progress.add_task("", total=len(chosen) + len(pairs) + (len(chosen) > 1))
        for device in chosen:
            progress.update(bar, description=f"device {device}")
            found.devices.append(measure_device(ceilings, device))
            progress.advance(bar)
        for pair in pairs:
            progress.update(bar, description=f"device {pair[0]} to device {pair[1]}")
            found.pairs.append(measure_pair(ceilings, *pair))
            progress.advance(bar)
        if len(chosen) > 1:
            progress.update(bar, description="all links at once")
            found.together.update({way: ceilings.measure(way, chosen) for way in ALL_WAYS})
            progress.advance(bar)
    return found


def measure_device(ceilings: Ceilings, device: int) -> DeviceFound:
    rates = {way: ceilings.measure(way, (device,)) for way in DEVICE_WAYS}
    bus_id = runtime.pci_bus_id(device)
    with ceilings.running("h2d", (device,)):  # an idle link may have been slowed down
        link = links.read(bus_id)
    return DeviceFound(device, runtime.device_name(device), bus_id, link, rates)


def measure_pair(ceilings: Ceilings, source: int, target: int) -> PairFound:
    there = peers.link(source, target)
    peers.link(target, source)  # both ways at once need it too
    if peers.hangs(source) or peers.hangs(target):  # as these copies would
        return PairFound(source, target, there.p2p, there.reason, {})
    rates = {way: ceilings.measure(way, (source, target)) for way in PAIR_WAYS}
    return PairFound(source, target, there.p2p, there.reason, rates)


def as_values(found: Found) -> dict[str, object]:
    """As JSON has it."""
    return {
        "runtime": found.runtime,
        "bytes": {"pinned": found.mebibytes * MIB, "device": 2 * found.mebibytes * MIB},
        "devices": [
            {
                "device": one.device,
                "name": one.name,
                "pci_bus_id": one.pci_bus_id,
                "link": one.link._asdict() if isinstance(one.link, links.Link) else None,
                "link_unknown": None if isinstance(one.link, links.Link) else one.link,
                **dict(rounded(one.rates)),
            }
            for one in found.devices
        ],
        "pairs": [
            {
                "source": one.source,
                "target": one.target,
                "p2p": one.p2p,
                "reason": one.reason,
                **dict(rounded(one.rates)),
            }
            for one in found.pairs
        ],
        "together": dict(rounded(found.together)),
        "warnings": found.warnings(),
    }


def rounded(rates: dict[str, Rate]) -> Iterator[tuple[str, dict[str, float]]]:
    for way, rate in rates.items():
        yield way, {"best": round(rate.best, 2), "median": round(rate.median, 2)}


def show(found: Found) -> None:
    console = Console()
    table = Table(title="devices, GB/s", box=box.SIMPLE, padding=0)
    for heading in ("device", "name", "in", "out", "both", "within", "PCIe link"):
        table.add_column(heading, justify="left" if heading in ("name", "PCIe link") else "right")
    for one in found.devices:
        table.add_row(
            str(one.device), one.name, *(f"{one.rates[way].best:,.1f}" for way in DEVICE_WAYS), link_text(one.link)
        )
    if found.together:
        table.add_row("all", "", *(f"{found.together[way].best:,.1f}" for way in ALL_WAYS))
    console.print(table)
    if found.pairs:
        table = Table(title="from device to device, GB/s", box=box.SIMPLE, padding=0)
        for heading in ("from", "to", "one way", "both ways", "P2P", "why"):
            table.add_column(heading, justify="left" if heading in ("P2P", "why") else "right")
        for pair in found.pairs:
            rates = [f"{pair.rates[way].best:,.1f}" if pair.rates else "-" for way in PAIR_WAYS]
            table.add_row(str(pair.source), str(pair.target), *rates, "yes" if pair.p2p else "no", pair.reason)
        console.print(table)
    unknown = [f"PCIe link of device {one.device}: {one.link}" for one in found.devices if isinstance(one.link, str)]
    for line in (*unknown, *found.warnings()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def link_text(link: links.Link | str) -> str:
    if isinstance(link, str):
        return "not known"
    return f"generation {link.generation} x{link.width}" + (", slower than rated" if link.slower() else "")
