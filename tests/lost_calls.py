"""A copy with each of its waits and records taken away in turn, in the host runtime's scheduled mode: what is lost has
to be reported. Where the library's own threads copy, that they found an event complete is a wait too."""

import ctypes
from collections import Counter
from contextlib import contextmanager

import numpy as np

import strata_copy as sc
from fixtures import Memory, needed_by, pageable, small_layout
from host_table import cuda, ok
from strata_copy import host_runtime, peers, runtime

SEED = 3
LAYOUT = small_layout("int8", layers=4)
UPTO = 41
CHUNK = 6000


@contextmanager
def small_proof():
    """P2P is proven by copies that take no time: tests of the proof itself are others."""
    sizes, peers.SIZES = peers.SIZES, (4096,)
    try:
        yield
    finally:
        peers.SIZES = sizes


def dealt(*kinds):
    return lambda i, part: {"kind": kinds[i % len(kinds)]}


def on(device):
    return lambda i, part: {"kind": "device", "device": device}


# Kinds of three memories.
ROUTES = {
    "local": ("device", "device", "device"),
    "out": ("device", "pinned", "device"),
    "in": ("pinned", "device", "device"),
    "ring": ("pinned", "pinned", "device"),
    "mixed": (dealt("device", "device", "pinned"), dealt("device", "pinned", "device"), dealt("device")),
    "peer": (on(0), on(1), on(0)),
    "relay": (on(1), on(0), on(1)),
}
# The same with pageable memory, which the worker and its helpers reach through pinned chunks; the first one with parts
# in pinned memory beside it in each layer. And a ring beside which helpers copy a share; host memory that they copy
# alone.
PINNED = ("k", "v", "recurrent", "window", "idx_tail")
STAGED_ROUTES = {
    "beside": ("device", lambda i, part: {"kind": "pinned" if part.name in PINNED else "pageable"}, "device"),
    "stage": ("pageable", "device", "pageable"),
    "unstage": ("device", "pageable", "device"),
    "both": (dealt("device", "pageable"), dealt("pageable", "device"), dealt("device", "pageable")),
    "helped": ("pinned", "pinned", "device"),
    "host": ("pinned", "pageable", "pinned"),
}


class Beside:
    """Memory for a memory's blocks, each of the other kind: what is copied between the two holds no caller. Pageable
    memory is read and written by host functions, as no copy of CUDA's would be late."""

    def __init__(self, memory):
        self.blocks, self.parts = memory.blocks, memory.layout.parts
        self.pageable = {base: np.zeros(size, np.uint8) for kind, base, size in self.blocks if kind == "pageable"}
        self.mine = [self.address(*block) for block in self.blocks]
        self.functions = []

    def address(self, kind, base, size):
        if kind == "pageable":
            return self.pageable[base].ctypes.data
        return runtime.host_alloc(size) if kind == "device" else runtime.malloc(size)

    def read_it(self, stream, layer=None):
        for part, (kind, base, size), mine in zip(self.parts, self.blocks, self.mine, strict=True):
            if layer in (None, needed_by(part)):
                self.move(kind, mine, base, size, stream)

    def write_it(self, stream):
        for (kind, base, size), mine in zip(self.blocks, self.mine, strict=True):
            self.move(kind, base, mine, size, stream)

    def move(self, kind, target, source, size, stream):
        if kind == "pageable":
            self.functions.append(HOST_FUNCTION(lambda _: ctypes.memmove(target, source, size) and None))
            ok(cuda.cudaLaunchHostFunc(stream, ctypes.cast(self.functions[-1], ctypes.c_void_p).value, 0))
        else:
            runtime.memcpy_async(target, source, size, stream)


HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(scene, route, lost=None, together=False, late=0):
    """Runs a scene with one call lost, (function, nth). Returns what was found, and the calls that order, by what they
    are for. The scene returns what it finds itself, or None.

    together: blocks lie evenly spaced, so that small parts move in bundles before the first layer. late: the number of
    a copy that is executed as late as can be.
    """
    host_runtime.configure(devices=2, seed=SEED, peers=[] if route == "relay" else None)
    pageable.clear()  # of the scene before
    kinds = {**ROUTES, **STAGED_ROUTES}[route]
    a, b, c = (Memory(LAYOUT, n, kind, together=together) for n, kind in enumerate(kinds, 1))
    devices = (0, 1) if route in ("peer", "relay") else (0,)
    stage_chunk = CHUNK // 4 if route == "helped" else CHUNK
    chunk = CHUNK // 4 if route == "peer" else CHUNK  # a lane's is many times as long
    how = {"chunk": chunk, "window": 4000, "pinned_memory": 4 * stage_chunk, "relay_memory": 4 * 2048, "patience": 3600}
    with small_proof(), sc.Copier(devices, tickets=4, layer_events=24, **how) as copier:
        before, asked = len(host_runtime.orders()), host_runtime.calls()["cudaEventQuery"]
        if lost:
            host_runtime.skip(*lost)
        if late:
            host_runtime.delay(late)
        found = scene(copier, a, b, c) or []
        finish = {log[1] for log in host_runtime.log() if (log[0], log[2]) == ("cudaMemcpyAsync", 8)}  # words of ends
        orders = name_orders(host_runtime.orders()[before:], finish, route in STAGED_ROUTES)
        if route in STAGED_ROUTES:
            queries = host_runtime.calls()["cudaEventQuery"] - asked
            orders += [("cudaEventQuery", nth, "query") for nth in range(1, queries + 1)]
        return host_runtime.violations() + found, orders


def name_orders(orders, finish, staged):
    """(function, its number, what for) of records and waits, by where the event is recorded, and how often: the chain
    of a pair of streams is recorded over and over. A layer's record that nothing in the scene waits for is left out,
    and where nothing is staged what the worker asks about its windows."""
    awaited = {event for function, _, event in orders if function == "cudaStreamWaitEvent"}
    asked = {event for function, _, event in orders if function == "cudaEventQuery"}
    times = Counter(event for function, _, event in orders if function == "cudaEventRecord")
    numbers, recorded, named = Counter(), {}, []
    for function, stream, event in orders:
        numbers[function] += 1
        if function == "cudaEventQuery":
            continue
        if function == "cudaEventRecord":
            recorded[event] = stream
        what = "chain" if times[event] > 1 else "end" if recorded[event] in finish else "mark"
        if staged and event in asked:
            what = "chunk"
        elif event not in awaited and recorded[event] not in finish:
            continue
        by = "finish" if stream in finish and function == "cudaStreamWaitEvent" else ""
        named.append((function, numbers[function], f"{by} {what}".strip()))
    return named


def unreported(scene, route, **how):
    """How many calls of each purpose may be lost without a report, each alone, of how many."""
    found, orders = run(scene, route, **how)
    assert found == []
    lost, of = Counter(), Counter()
    for function, nth, what in orders:
        found, _ = run(scene, route, (function, nth), **how)
        assert all(text.startswith(("race: ", "bytes: ")) or "unrecorded event" in text for text in found)
        of[what] += 1
        lost[what] += not found
    return +lost, of
