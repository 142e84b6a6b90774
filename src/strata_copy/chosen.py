"""The runtime that a command takes: the one that was asked for, or what is there."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from strata_copy import runtime
from strata_copy.cudart import RUNTIME_VARIABLE, WITHOUT_A_GPU

Pairs = Sequence[tuple[int, int]]


def open_runtime(devices: int = 1, peers: Pairs | None = None) -> str:
    """Opens what STRATA_COPY_RUNTIME says, or CUDA, or without it the host runtime. Returns why in words.

    devices: how many there must be; the host runtime has as many as are asked for. peers: of the host runtime, pairs
    (device, peer) whose first one reaches the other's memory; None for all.
    """
    try:
        why = _open()
        there = runtime.device_count()
        host = runtime.describe()["kind"] == "host"
        if host and (devices > there or peers is not None):
            runtime.open("host", devices=max(devices, there), peers=peers)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    except runtime.RuntimeUnavailable as reason:
        raise click.ClickException(str(reason)) from reason
    if host:
        return why
    if peers is not None:
        raise click.UsageError("--peers is for the host runtime; a machine's devices reach whom they reach")
    if devices > there:
        raise click.UsageError(f"{devices} devices are needed; there are {there}")
    return why


def _open() -> str:
    if os.environ.get(RUNTIME_VARIABLE):
        return f"{RUNTIME_VARIABLE}={runtime.open()}"
    try:
        runtime.open("cuda")
        return "there is a GPU"
    except runtime.RuntimeUnavailable as reason:
        runtime.open("host")
        return f"CUDA is not to be had ({str(reason).removesuffix(WITHOUT_A_GPU)}), so copies run in host memory"


def numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """An option's value: whole numbers with commas between them, as in 0,1. None are no numbers."""
    parts = value.split(",") if value else []
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers, as in 0,1")
    return tuple(int(part) for part in parts)


def pairs(ctx: click.Context, param: click.Parameter, value: str | None) -> Pairs | None:
    """An option's value: pairs of devices, as in 0-1,1-0; "none" is no pair."""
    if value is None:
        return None
    found = []
    for pair in [] if value == "none" else value.split(","):
        first, _, second = pair.partition("-")
        if not (first.isdecimal() and second.isdecimal()) or first == second:
            raise click.BadParameter(f"{pair!r} is no pair of two devices, as in 0-1")
        found.append((int(first), int(second)))
    return found


PEERS_OPTION = click.option(
    "--peers",
    callback=pairs,
    help="Of the host runtime: which device reaches the memory of which, as in 0-1,1-0; or none. [default: all do]",
)
