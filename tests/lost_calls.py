"""A copy with each of its waits and records taken away in turn, in the host runtime's scheduled mode: what is lost has
to be reported."""

from collections import Counter
from contextlib import contextmanager

import strata_copy as sc
from fixtures import Memory, needed_by, small_layout
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


class Beside:
    """Memory for a memory's blocks, each of the other kind: what is copied between the two holds no caller."""

    def __init__(self, memory):
        self.pairs = [
            (base, runtime.host_alloc(size) if kind == "device" else runtime.malloc(size), size)
            for kind, base, size in memory.blocks
        ]
        self.parts = memory.layout.parts

    def read_it(self, stream, layer=None):
        for part, (base, mine, size) in zip(self.parts, self.pairs, strict=True):
            if layer in (None, needed_by(part)):
                runtime.memcpy_async(mine, base, size, stream)

    def write_it(self, stream):
        for base, mine, size in self.pairs:
            runtime.memcpy_async(base, mine, size, stream)


def run(scene, route, lost=None, together=False):
    """Runs a scene with one call lost, (function, nth). Returns what was found, and the calls that order, by what they
    are for.

    together: blocks lie evenly spaced, so that small parts move in bundles before the first layer.
    """
    host_runtime.configure(devices=2, seed=SEED, peers=[] if route == "relay" else None)
    a, b, c = (Memory(LAYOUT, n, kinds, together=together) for n, kinds in enumerate(ROUTES[route], 1))
    devices = (0, 1) if route in ("peer", "relay") else (0,)
    shape = {"tickets": 4, "layer_events": 24, "chunk": CHUNK, "window": 1000, "relay_memory": 4 * 2048}
    with small_proof(), sc.Copier(devices, **shape) as copier:
        before = len(host_runtime.orders())
        if lost:
            host_runtime.skip(*lost)
        scene(copier, a, b, c)
        finish = {log[1] for log in host_runtime.log() if (log[0], log[2]) == ("cudaMemcpyAsync", 8)}  # words of ends
        return host_runtime.violations(), name_orders(host_runtime.orders()[before:], finish)


def name_orders(orders, finish):
    """(function, its number, what for), by where the event is recorded, and how often: the chain of a pair of streams
    is recorded over and over. A layer's record that nothing in the scene waits for is left out."""
    awaited = {event for function, _, event in orders if function == "cudaStreamWaitEvent"}
    times = Counter(event for function, _, event in orders if function == "cudaEventRecord")
    numbers, recorded, named = Counter(), {}, []
    for function, stream, event in orders:
        numbers[function] += 1
        if function == "cudaEventRecord":
            recorded[event] = stream
        what = "chain" if times[event] > 1 else "end" if recorded[event] in finish else "mark"
        if event not in awaited and recorded[event] not in finish:
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
        assert all("race: " in text or "unrecorded event" in text for text in found)
        of[what] += 1
        lost[what] += not found
    return +lost, of
