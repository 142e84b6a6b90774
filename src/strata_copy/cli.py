"""The command line: what was found on this machine, what it gives, and a conversation moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import click

from strata_copy import runtime
from strata_copy.chosen import open_runtime
from strata_copy.demo import demo
from strata_copy.probing import probe


def installed_version() -> str:
    try:
        return version("strata_copy")
    except PackageNotFoundError:  # run from a source tree
        return "(not installed)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(installed_version(), prog_name="strata_copy")
def main() -> None:
    """Moves a conversation's state between sessions, batch slots and pinned memory."""


main.add_command(demo)
main.add_command(probe)


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


def devices() -> Iterator[dict[str, object]]:
    for device in range(runtime.device_count()):
        with runtime.on_device(device):
            free, total = runtime.memory_info()
        name, bus_id = runtime.device_name(device), runtime.pci_bus_id(device)
        yield {"device": device, "name": name, "pci_bus_id": bus_id, "memory": total, "free": free}
