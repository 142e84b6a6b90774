"""Runs code that moves state on the host runtime, as a referee: in an order that a seed decides, with every access that
nothing orders reported. docs/testing.md says how an engine's own loop is run on it, and what it cannot find."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from strata_copy import runtime
from strata_copy.host_runtime import (
    break_peer,
    clear_faults,
    corrupt,
    delay,
    fail,
    host_read,
    host_write,
    live,
    observe,
    pending,
    publish,
    skip,
    step,
    violations,
)

__all__ = [
    "break_peer",
    "clear_faults",
    "corrupt",
    "delay",
    "fail",
    "host",
    "host_read",
    "host_write",
    "live",
    "observe",
    "pending",
    "publish",
    "seeds",
    "skip",
    "step",
    "violations",
]


def seeds(n: int) -> range:
    """n seeds, the same ones each time: for pytest.mark.parametrize, or a loop around `host`."""
    return range(n)


@contextmanager
def host(
    devices: int = 1,
    seed: int | None = 0,
    *,
    memory: int | None = None,
    pinned: int | None = None,
    races: bool = True,
    peers: Iterable[tuple[int, int]] | None = None,
) -> Iterator[None]:
    """The host runtime as new, with so many devices; what was there before is dropped.

    The options are those of strata_copy.host_runtime.configure. seed=None gives every stream a thread of its own, as on
    a GPU; nobody decides the order then.

    Raises AssertionError at the end where something was found, with all of it. An exception of the block goes first.
    """
    runtime.open("host", devices=devices, seed=seed, memory=memory, pinned=pinned, races=races, peers=peers)
    yield
    found = violations()
    if found:
        raise AssertionError(f"{len(found)} violations with seed {seed}:\n  " + "\n  ".join(found))
