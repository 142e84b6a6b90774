"""Runs the benchmarks: python bench/run.py [submit] [copies] [neighbour] [queueing] [strata] [arena] [images] [peers]

They are built before, by python bench/setup.py build_ext --inplace. STRATA_COPY_RUNTIME says which runtime is measured,
as for the library. A missed goal is no failure; wrong bytes are, and ceilings below what this kind of device has.
"""

import sys
import time
from pathlib import Path

import click

import arena.measure
import copies.measure
import images.measure
import neighbour.measure
import peers.measure
import queueing.measure
import strata.measure
import submit.measure
from common import machine, report
from common.setting import Setting
from strata_copy import host_runtime, runtime

BENCHES = {
    "submit": submit.measure.run,
    "copies": copies.measure.run,
    "neighbour": neighbour.measure.run,
    "queueing": queueing.measure.run,
    "strata": strata.measure.run,
    "arena": arena.measure.run,
    "images": images.measure.run,
    "peers": peers.measure.run,
}
RESULTS = Path(__file__).resolve().parent / "results"


@click.command()
@click.argument("benches", nargs=-1, type=click.Choice(list(BENCHES)))
@click.option("--quick", is_flag=True, help="Tiny sizes: shows that everything runs and copies right, not how fast.")
@click.option(
    "--long/--no-long",
    default=True,
    help="Of copies, queueing, strata, images, peers: also 497,051 tokens, if the device has room.",
)
@click.option("--rings", is_flag=True, help="Of queueing and peers: also rings of other shapes, a minute each.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    multiple=True,
    help="Of strata: a length in int8; may be given several times.",
)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="The folder for one JSON file each.")
def main(benches: tuple[str, ...], quick: bool, long: bool, rings: bool, tokens: tuple[int, ...], out: Path) -> None:
    """Measures BENCHES, all by default, writes what was found and shows it beside the goals."""
    opened = runtime.open()
    if opened == "host":
        runtime.open(devices=2)
    setting, results = Setting(quick), []
    options = {
        "images": {"long": long},
        "copies": {"long": long},
        "queueing": {"long_copies": long, "rings": rings},
        "strata": {"long": long, "tokens": tokens},
        "peers": {"long": long, "rings": rings},
    }
    described = {**machine.describe(), "quick": quick}
    try:
        for name in dict.fromkeys(benches or BENCHES):
            started = time.monotonic()
            results.append(BENCHES[name](setting, **options.get(name, {})))
            path = report.write(results[-1], described, out)
            click.echo(f"{name}: {time.monotonic() - started:.1f} s, {path}", err=True)
    finally:
        setting.close()
    report.show(results)
    broken = host_runtime.violations() if opened == "host" else []
    for text in broken:
        click.echo(f"against CUDA's contracts: {text}")
    sys.exit(1 if broken or any(result.wrong or result.void for result in results) else 0)


if __name__ == "__main__":
    main()
