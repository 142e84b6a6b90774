"""Seconds for each GiB of pinned memory, by an arena and by cudaHostAlloc, and how long a copy loop of another thread
is held up meanwhile."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from arena.loops import Loop
from common.report import Figure, Result, spread
from common.setting import Setting
from strata_copy import Arena, runtime

GIB = 1 << 30
SECONDS = 0.10  # for a GiB, with 8 threads
STALL = 60.0  # ms
FOREIGN = 4096  # bytes of the copy beside it
THREADS = (1, 8)


def run(setting: Setting) -> Result:
    piece, pieces, rounds = (8 << 20, 2, 1) if setting.quick else (GIB, 8, 3)
    total = piece * pieces
    result = Result("arena", {"bytes": total, "piece": piece, "rounds": rounds, "foreign bytes": FOREIGN})
    touch(total)
    ways: dict[str, Callable[[], Iterator[None]]] = {
        f"arena, {n} thread{'s' if n > 1 else ''}": lambda n=n: by_arena(result, total, piece, n) for n in THREADS
    }
    ways["cudaHostAlloc"] = lambda: by_host_alloc(piece, pieces)
    for name, way in ways.items():
        seconds = np.array([timed(way) for _ in range(rounds)]) * GIB / total
        stalls = [beside(way) for _ in range(rounds)]
        goals = (SECONDS, STALL) if name == "arena, 8 threads" else (None, None)
        found = spread(seconds, 1, 4)
        result.figures.append(Figure(name, found["median"], "s/GiB", goals[0], samples=found))
        longest = max(float(times.max()) for times in stalls) / 1e6
        between = spread(np.concatenate(stalls), 1e-6, 4)
        result.figures.append(Figure(f"longest copy beside {name}", round(longest, 3), "ms", goals[1], samples=between))
    alone = spread(beside(lambda: asleep(0.01 if setting.quick else 1.0)), 1e-6, 4)
    result.figures.append(Figure("longest copy alone", alone["worst"], "ms", samples=alone))
    return result


def touch(total: int) -> None:
    """Memory that the machine has not given out yet costs more: it is asked for once before anything is timed."""
    np.ones(total, np.uint8)


@contextmanager
def by_arena(result: Result, total: int, piece: int, threads: int) -> Iterator[None]:
    with Arena(total, piece=piece, threads=threads) as arena:
        if arena.pinned != total or arena.refusal:
            result.wrong.append(f"{arena.pinned} of {total} bytes pinned: {arena.refusal}")
        yield


@contextmanager
def by_host_alloc(piece: int, pieces: int) -> Iterator[None]:
    made = [runtime.host_alloc(piece) for _ in range(pieces)]
    try:
        yield
    finally:
        for address in made:
            runtime.host_free(address)


@contextmanager
def asleep(seconds: float) -> Iterator[None]:
    time.sleep(seconds)
    yield


def timed(way: Callable[[], Iterator[None]]) -> float:
    started = time.monotonic()
    with way():
        return time.monotonic() - started


def beside(way: Callable[[], Iterator[None]]) -> np.ndarray:
    """ns of each copy of another thread, from when the memory is asked for until it is there."""
    loop = Loop(FOREIGN)
    try:
        with ThreadPoolExecutor(1) as thread:
            loop.start()
            running = thread.submit(loop.run)
            with way():
                loop.stop()
                return running.result()
    finally:
        loop.stop()
        loop.close()
