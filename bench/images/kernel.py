"""A kernel that reads device memory as fast as it can, alone and beside a copy: a sum by PyTorch or CuPy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util

import numpy as np

from common.report import Figure, Result, spread
from common.setting import Case
from images.cases import Park
from strata_copy import CALLER_SYNCED, runtime

SLOWER = 1.10  # goal: of its time alone
BYTES = 4 << 30


def rows(result: Result, cases: dict[str, Park | Case], quick: bool) -> list[Figure]:
    """cases: by the name of what each does."""
    n, rounds, launches = (64 << 20, 1, 20) if quick else (BYTES, 3, 100)
    package = next((name for name in PACKAGES if util.find_spec(name)), None)
    if runtime.describe()["kind"] == "host" or package is None:
        result.left_out |= {row(name): "needs a GPU, and PyTorch or CuPy" for name in cases}
        return []
    with timed_sum(package, n) as once:
        alone = [[once() for _ in range(launches)]]
        beside = {name: [ms for _ in range(rounds) for ms in meanwhile(case, once)] for name, case in cases.items()}
        alone += [[once() for _ in range(launches)]]
    # Clocks may still be rising at first: the faster of before and behind.
    alone = min(alone, key=np.median)
    found = []
    for name, times in beside.items():
        if not times:
            result.left_out[row(name)] = "the copy ended before the first one did"
            continue
        samples = {"by": package, "bytes": n, "ms": spread(times, 1, 4), "ms alone": spread(alone, 1, 4)}
        ratio = round(float(np.median(times) / np.median(alone)), 4)
        found.append(Figure(row(name), ratio, "", SLOWER, samples=samples))
    return found


def row(name: str) -> str:
    return f"a read-bound kernel beside {name}, beside / alone"


def meanwhile(case: Park | Case, once: Callable[[], float]) -> list[float]:
    """ms of each kernel that began and ended while one copy was under way."""
    found = []
    ticket = case.plan.submit(case.upto, after=CALLER_SYNCED)
    while True:
        ms = once()
        if ticket.done:
            break
        found.append(ms)
    ticket.sync()
    return found


@contextmanager
def timed_sum(package: str, n: int) -> Iterator[Callable[[], float]]:
    """A function that sums `n` bytes on a stream of its own and returns the device's ms."""
    stream, start, end = runtime.stream_create(), runtime.event_create(timing=True), runtime.event_create(timing=True)
    launch, free = PACKAGES[package](stream, n)

    def once() -> float:
        runtime.event_record(start, stream)
        launch()
        runtime.event_record(end, stream)
        runtime.event_synchronize(end)
        return runtime.event_elapsed(start, end)

    try:
        yield once
    finally:
        free()
        runtime.event_destroy(start)
        runtime.event_destroy(end)
        runtime.stream_destroy(stream)


def by_torch(stream: int, n: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Launches the sum; gives its memory back."""
    import torch

    data, total = torch.ones(n // 4, device="cuda"), torch.empty((), device="cuda")
    torch.cuda.synchronize()

    def launch() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            torch.sum(data, 0, out=total)

    def free() -> None:
        nonlocal data, total
        del data, total
        torch.cuda.empty_cache()

    return launch, free


def by_cupy(stream: int, n: int) -> tuple[Callable[[], None], Callable[[], None]]:
    import cupy

    data, total = cupy.ones(n // 4, cupy.float32), cupy.empty((), cupy.float32)
    cupy.cuda.Device().synchronize()

    def launch() -> None:
        with cupy.cuda.ExternalStream(stream):
            data.sum(out=total)

    def free() -> None:
        nonlocal data, total
        del data, total
        cupy.get_default_memory_pool().free_all_blocks()

    return launch, free


PACKAGES = {"torch": by_torch, "cupy": by_cupy}
