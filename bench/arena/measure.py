"""Seconds for each GiB of pinned memory, by an arena and by cudaHostAlloc, how long a copy loop of another thread is
held up meanwhile, and whether a Global capture beside it stays valid."""

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from mmap import MADV_HUGEPAGE, mmap

import numpy as np

from arena.loops import Loop
from common.report import Figure, Result, spread
from common.setting import Setting
from strata_copy import Arena, Refused, runtime

GIB = 1 << 30
LIBC = ctypes.CDLL(None)
MADV_POPULATE_WRITE = 23  # which the module mmap does not have
SECONDS = 0.10  # for a GiB, with 8 threads
STALL = 60.0  # ms
FOREIGN = 4096  # bytes of the copy beside it
GLOBAL = 0  # the strictest mode of a capture

Way = Callable[[], AbstractContextManager[None]]


def run(setting: Setting) -> Result:
    piece, pieces, rounds = (8 << 20, 2, 1) if setting.quick else (GIB, 8, 3)
    total = piece * pieces
    result = Result("arena", {"bytes": total, "piece": piece, "rounds": rounds, "foreign bytes": FOREIGN})
    touch(total)

    def ours() -> AbstractContextManager[None]:
        return by_arena(result, total, piece, threads=8)

    result.figures += costs("arena, 8 threads", ours, total, rounds, (SECONDS, STALL))
    # What it is compared with takes long: once, and of half the bytes.
    half = total // 2
    result.figures += costs("arena, 1 thread", lambda: by_arena(result, half, piece, threads=1), half, 1)
    result.figures += costs("cudaHostAlloc", lambda: by_host_alloc(piece, pieces // 2), half, 1)
    result.figures += [captures(ours, rounds), closes(total, piece), alone(0.01 if setting.quick else 1.0)]
    result.figures += parts(piece)
    return result


def costs(name: str, way: Way, total: int, rounds: int, goals: tuple = (None, None)) -> list[Figure]:
    """Seconds for a GiB, and again the longest copy beside it."""
    seconds = spread(np.array([timed(way) for _ in range(rounds)]) * GIB / total, 1, 4)
    copies = spread(np.concatenate([beside(way) for _ in range(rounds)]), 1e-6, 4)
    return [
        Figure(name, seconds["median"], "s/GiB", goals[0], samples=seconds),
        Figure(f"longest copy beside {name}", copies["worst"], "ms", goals[1], samples=copies),
    ]


def captures(way: Way, rounds: int) -> Figure:
    """The share of captures that were open while memory was had and given back, and had their node in the end."""
    valid = [stays_valid(way) for _ in range(rounds)]
    return Figure(
        "Global captures that stayed valid beside arena", sum(valid) / rounds, "", 1.0, more=True, samples={"n": rounds}
    )


def closes(total: int, piece: int) -> Figure:
    arena = Arena(total, piece=piece, threads=8)
    found = spread(beside(lambda: closing(arena)), 1e-6, 4)
    return Figure("longest copy beside an arena that closes", found["worst"], "ms", samples=found)


def alone(seconds: float) -> Figure:
    found = spread(beside(lambda: asleep(seconds)), 1e-6, 4)
    return Figure("longest copy alone", found["worst"], "ms", samples=found)


def parts(piece: int) -> list[Figure]:
    """What an arena does to a piece, one after the other: the pages made to be there, then registered."""
    found = []
    for threads in (1, 4, 8, 16):
        with mmap(-1, piece) as memory:
            memory.madvise(MADV_HUGEPAGE)
            held = ctypes.c_char.from_buffer(memory)
            base, share = ctypes.addressof(held), piece // threads
            with ThreadPoolExecutor(threads) as pool:
                started = time.monotonic()
                list(pool.map(lambda at: populate(at, share), range(base, base + piece, share)))  # noqa: B023
                took = time.monotonic() - started
            found.append(Figure(f"touching a piece, {threads} threads", round(took * GIB / piece, 4), "s/GiB"))
            started = time.monotonic()
            runtime.host_register(base, piece)
            took = time.monotonic() - started
            runtime.host_unregister(base)
            del held
    return [*found, Figure("registering a piece", round(took * GIB / piece, 4), "s/GiB")]


def populate(start: int, n: int) -> None:
    if LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(n), MADV_POPULATE_WRITE) != 0:
        ctypes.memset(start, 0, n)  # of a kernel before 5.14


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
def closing(arena: Arena) -> Iterator[None]:
    arena.close()
    yield


@contextmanager
def asleep(seconds: float) -> Iterator[None]:
    time.sleep(seconds)
    yield


def timed(way: Way) -> float:
    started = time.monotonic()
    with way():
        return time.monotonic() - started


def beside(way: Way) -> np.ndarray:
    """ns of each copy of another thread, from when the memory is asked for until it is there."""
    loop = Loop(FOREIGN, True)
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


def stays_valid(way: Way) -> bool:
    """Whether a capture of this thread that is begun before and ended behind gets its node."""
    stream, memory = runtime.stream_create(), runtime.malloc(FOREIGN)
    runtime.stream_begin_capture(stream, GLOBAL)
    try:
        with way():
            runtime.memset_async(memory, 0, FOREIGN, stream)
        return runtime.stream_end_capture(stream) == 1
    except (Refused, runtime.CudaError):
        return False
    finally:
        runtime.stream_destroy(stream)
        runtime.free(memory)
