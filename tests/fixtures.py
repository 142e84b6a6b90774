"""A small conversation in five K/V formats, and memory for it that knows what it should hold."""

import ctypes
import functools
import mmap
import os
import subprocess
import sys
import textwrap
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

import reference
import strata_copy as sc
from strata_copy import host_runtime, runtime

KIND = os.environ.get("STRATA_COPY_RUNTIME") or "host"
HOST = KIND == "host"
CAPACITY = 96
GUARD = 512
ALIGNMENT = 256

# Bytes of one page: four cells of two heads of 256 values, codes and scales apart.
PAGES = {
    "fp16": {"k": 4096, "v": 4096},
    "int8": {"k": 2048, "v": 2048, "k_scale": 64, "v_scale": 64},
    "int8-rotated": {"k": 2048, "v": 2048, "k_scale": 64, "v_scale": 64},
    "q4_0": {"k": 1152, "v": 1152},
    "k8v4": {"k": 2048, "v": 1152, "k_scale": 64},
}
KINDS = ("device", "pinned")
SYNCED = sc.CALLER_SYNCED
COPIES = ("cudaMemcpy", "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemsetAsync")


def pages(layer, format, group="main", mark=0):
    """The K/V of one attention layer, in whole pages."""
    growth = sc.Growth.linear(4, ceil=True, mark=mark)
    return [
        sc.Part(name=name, layer=layer, unit_bytes=size, growth=growth, group=group)
        for name, size in PAGES[format].items()
    ]


def attention(layer, format):
    """K/V and what the indexer keeps: a row for each full page, and a spare one that is patched."""
    return [
        *pages(layer, format),
        sc.Part(name="pooled", layer=layer, unit_bytes=512, growth=sc.Growth.linear(4, extra=1)),
        sc.Part(name="idx_tail", layer=layer, unit_bytes=1536, growth=sc.Growth.state()),
        sc.Part(name="idx_dead", layer=layer, unit_bytes=512, growth=sc.Growth.const()),
        sc.Part(name="idx_block_pos", layer=layer, unit_bytes=4, growth=sc.Growth.state()),
    ]


def small_layout(format="k8v4", *, layers=4, draft=False, identity=b""):
    """Layers 0, 2, ... are recurrent, 1, 3, ... attention; the session has a window of its own. The layer behind them
    is the draft's, with a group and a mark of its own."""
    parts = [sc.Part(name="window", layer=-1, unit_bytes=360, growth=sc.Growth.state())]
    for layer in range(layers):
        if layer % 2:
            parts += attention(layer, format)
        else:
            parts.append(sc.Part(name="recurrent", layer=layer, unit_bytes=1192, growth=sc.Growth.state()))
    if draft:
        parts += pages(layers, "int8" if format == "k8v4" else format, "draft", 1)
    return sc.Layout(
        parts,
        marks=("tokens", "draft") if draft else ("tokens",),
        format=format,
        identity=identity,
        patches=[sc.Patch(layer=layer, part="pooled", source="idx_dead") for layer in range(1, layers, 2)],
    )


def two_devices():
    """For a copier of two devices, or of one where the machine has no second one."""
    return (0, 1)[: runtime.device_count()]


def settle(devices=None):
    """Waits for these devices, or for two_devices(); runtime.device_synchronize waits for the current one."""
    for device in two_devices() if devices is None else devices:
        with runtime.on_device(device):
            runtime.device_synchronize()


def write(address, values):
    """Puts bytes into memory of any kind. On the host runtime they are there at once, and nothing that is queued is
    executed."""
    if HOST:
        host_runtime.host_write(address, values.size)
        runtime.view(address, values.size)[:] = values
    else:
        runtime.memcpy(address, values.ctypes.data, values.size)
        runtime.stream_synchronize(0)  # from pageable memory the bytes may still be under way


def read(address, size):
    values = np.empty(size, np.uint8)
    if HOST:
        host_runtime.host_read(address, size)
        values[:] = runtime.view(address, size)
    else:
        runtime.memcpy(values.ctypes.data, address, size)
    return values


pageable = {}  # address -> the array that holds it


def allocate(kind, device, size):
    if kind == "pageable":
        array = np.zeros(size + ALIGNMENT, np.uint8)
        base = -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT
        pageable[base] = array
        return base
    with runtime.on_device(device):
        return runtime.malloc(size) if kind == "device" else runtime.host_alloc(size)


def release(kind, base):
    """Gives back what `allocate` has made."""
    if kind == "pageable":
        del pageable[base]
    else:
        (runtime.free if kind == "device" else runtime.host_free)(base)


class Mapped:
    """Memory of the engine's, which starts on a page."""

    def __init__(self, size):
        self.map, self.size = mmap.mmap(-1, size), size
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class Memory:
    """Memory of one state: for each part a block with guards on both sides, every byte of it a pattern of its own.

    tag: two memories with different tags hold different patterns. where: kind of all places, or a function of (number,
    part) that returns the fields of that part's Place. together: one allocation for each kind and device, block behind
    block, so that layers are evenly spaced; else each block is an allocation. gaps: bytes before each block, if not 0.
    """

    def __init__(self, layout, tag, where="device", marks=None, device=0, together=True, gaps=()):
        self.layout, self.tag = layout, tag
        marks = marks or (CAPACITY,) * len(layout.marks)
        fields, sizes = [], []
        for i, part in enumerate(layout.parts):
            fields.append({"kind": where, "device": device} if isinstance(where, str) else dict(where(i, part)))
            fields[i].setdefault(
                "units", reference.units_at(part.growth, marks) + (part.growth.rule in ("linear", "window"))
            )
            fields[i].setdefault("kind", "device")
            fields[i].setdefault("device", device)
            size = 2 * GUARD + reference.span(sc.Place(base=0, **fields[i]), part)
            sizes.append(-(-size // ALIGNMENT) * ALIGNMENT)
        self.allocations, bases = [], [0] * len(sizes)
        pieces = [(field["kind"], field["device"], None if together else i) for i, field in enumerate(fields)]
        for piece in dict.fromkeys(pieces):
            mine = [i for i in range(len(sizes)) if pieces[i] == piece]
            needed = [(gaps[i] if gaps else 0) + sizes[i] for i in mine]
            self.allocations.append((piece[0], allocate(*piece[:2], sum(needed))))
            for i, end in zip(mine, accumulate(needed), strict=True):
                bases[i] = self.allocations[-1][1] + end - sizes[i]
        self.blocks = [(field["kind"], base, size) for field, base, size in zip(fields, bases, sizes, strict=True)]
        self.places = [sc.Place(base=base + GUARD, **field) for base, field in zip(bases, fields, strict=True)]
        self.fill()
        self.state = sc.State(layout, self.places, owner=self)

    def fill(self):
        for (_, base, _), values in zip(self.blocks, self.pattern(), strict=True):
            write(base, values)

    def pattern(self):
        """What `fill` writes: an array for each part."""
        return [
            np.random.default_rng((self.tag, i)).integers(0, 256, size, np.uint8)
            for i, (_, _, size) in enumerate(self.blocks)
        ]

    def bytes(self):
        return [read(base, size) for _, base, size in self.blocks]

    def address(self, layer, name):
        return self.places[self.layout.index(layer, name)].base

    def free(self):
        for kind, base in self.allocations:
            release(kind, base)
        self.allocations = []


def after_copy(source, target, upto, before=None, source_bytes=None, **how):
    """What the target's allocations hold after a copy: the source's bytes where it moves some, `before` (the target's
    pattern) in every other byte, guards too."""
    upto = (upto,) * len(source.layout.marks) if isinstance(upto, int) else upto
    wanted = [values.copy() for values in before or target.pattern()]
    given = source_bytes or source.pattern()
    for i, to, j, from_, size in reference.moved_runs(source.layout, source.places, target.places, upto, **how):
        wanted[i][GUARD + to : GUARD + to + size] = given[j][GUARD + from_ : GUARD + from_ + size]
    return wanted


def differences(memory, wanted, layers=None):
    """The parts in which memory is not as wanted, with the first byte that differs, counted from the place's base."""
    found = []
    for part, (_, base, size), values in zip(memory.layout.parts, memory.blocks, wanted, strict=True):
        if layers is not None and part.layer not in layers:
            continue
        wrong = np.flatnonzero(read(base, size) != values)
        if wrong.size:
            found.append(f"layer {part.layer} {part.name}: {wrong.size} bytes from {wrong[0] - GUARD}")
    return found


def untouched(memory):
    """Nothing of a memory differs from its own pattern."""
    return differences(memory, memory.pattern()) == []


def needed_by(part):
    return max(part.layer, 0) if part.needed_by is None else part.needed_by


def run_python(code):
    """What a process of its own prints that runs `code`, with the kind of runtime and this folder as its arguments:
    for what could end the process."""
    process = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), KIND, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


SCENE_LAYOUT = small_layout("k8v4")


class Scene:
    """A copier, a source on the device, a target in pinned memory, and all other memory that must stay as it is.

    memory: makes a Memory, as the fixture of that name does.
    """

    def __init__(self, copier, memory):
        self.copier, self.memory, self.memories = copier, memory, []
        self.source, self.target = self.make(SCENE_LAYOUT, 1), self.make(SCENE_LAYOUT, 2, "pinned")

    def make(self, *args, **kwargs):
        self.memories.append(self.memory(*args, **kwargs))
        return self.memories[-1]

    def submit(self, **how):
        return self.copier.submit(self.source.state, self.target.state, **{"upto": 9, "after": SYNCED, **how})

    def refuses(self, act, pending=0):
        """Runs `act`, which must raise, and returns what it raised once all else was found to be as before.

        pending: a CUDA error that other code has left on this thread, 0 or 101.
        """
        device, mode = runtime.get_device(), runtime.capture_mode(1)
        copies = [host_runtime.calls()[name] for name in COPIES] if HOST else None
        if pending:
            with pytest.raises(runtime.CudaError):
                runtime.set_device(99)
        assert runtime.peek_last_error() == pending
        with pytest.raises((sc.CopyError, ValueError, TypeError, OverflowError, RuntimeError)) as raised:
            act()
        assert runtime.get_last_error() == pending
        assert runtime.capture_mode(mode) == 1
        assert runtime.get_device() == device
        assert all(one.state.generation == 1 and one.state.valid and not one.state.busy for one in self.memories)
        if HOST:
            assert [host_runtime.calls()[name] for name in COPIES] == copies
            assert host_runtime.pending() == 0
        assert all(untouched(one) for one in self.memories)
        return raised.value


class Held:
    """`wait` is for `after`: what waits for it is not done until `open`. With CUDA that is a stream with work for a
    tenth of a second and more, from when `wait` is first asked for: a copier may take as long to open. The host runtime
    in scheduled mode does nothing by itself."""

    SIZE, TIMES = 64 << 20, 96

    def __init__(self):
        self.memory = ()
        if not HOST:
            self.stream = runtime.stream_create()
            self.memory = runtime.host_alloc(self.SIZE), runtime.malloc(self.SIZE)

    @functools.cached_property
    def wait(self):
        if not self.memory:
            return SYNCED
        for _ in range(self.TIMES):
            runtime.memcpy_async(self.memory[1], self.memory[0], self.SIZE, self.stream)
        return sc.Stream(self.stream)

    def open(self):
        if self.memory:
            runtime.stream_synchronize(self.stream)

    def free(self):
        if self.memory:
            self.open()
            runtime.stream_destroy(self.stream)
            runtime.host_free(self.memory[0])
            runtime.free(self.memory[1])
