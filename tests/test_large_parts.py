"""A part of more than 2^31 bytes arrives, every byte of it: as one unit, as rows, and as rows that lie apart. So do
rows with more than 2^31 bytes from one to the next."""

from pathlib import Path

import numpy as np
import pytest

import strata_copy as sc
from fixtures import GUARD, HOST, SYNCED, allocate, read, write
from strata_copy import rig, runtime

long_on_the_host = pytest.mark.long if HOST else lambda test: test

BYTES = 2**31 + 4096
PIECE = 16 << 20  # bytes that are filled or looked at together
NEEDED = 6 << 30  # bytes that both sides take on the host runtime, with room for others

# Bytes of the part's units, and how its bytes lie: bytes of a row, from row to row in the source, and in the target.
SHAPES = {
    "one unit": (BYTES, 4096, 4096, 4096),
    "rows": (4096, 4096, 4096, 4096),
    "rows apart": (12288, 12288, 12544, 12800),
}


class Side:
    """Memory of one place: rows of `width` bytes, `pitch` bytes apart, with guards on both sides. All of it, gaps and
    guards too, is filled with rig's pattern of `number`."""

    def __init__(self, number, kind, width, pitch):
        self.number, self.kind, self.pitch = number, kind, pitch
        self.rows = BYTES // width
        self.bytes = self.rows * pitch + 2 * GUARD
        self.base = allocate(kind, 0, self.bytes)
        for at in range(0, self.bytes, PIECE):
            write(self.base + at, self.content(at, min(PIECE, self.bytes - at)))

    def content(self, at, n):
        return rig.pattern(self.number, 0, at, n)

    def found(self, at, n):
        return read(self.base + at, n)

    def state(self, part):
        stride = self.pitch if part.unit_bytes < self.pitch else part.unit_bytes
        units = BYTES // part.unit_bytes
        return sc.State(
            sc.Layout([part]), [sc.Place(base=self.base + GUARD, units=units, stride=stride, kind=self.kind)]
        )

    def free(self):
        (runtime.free if self.kind == "device" else runtime.host_free)(self.base)


@pytest.fixture
def sides():
    """Makes the source and the target, and frees them."""
    made = []

    def make(kinds, width, pitches):
        for number, kind, pitch in zip((1, 2), kinds, pitches, strict=True):
            made.append(Side(number, kind, width, pitch))
        runtime.device_synchronize()  # what came from pageable memory may still be on its way
        return made

    if HOST and (available := memory_available()) < NEEDED:
        pytest.skip(f"{NEEDED >> 20} MiB of memory are needed, {available >> 20} are available")
    yield make
    for side in made:
        side.free()


def memory_available():
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def wrong_bytes(source, target, width):
    """How many bytes of both sides are not as they must be after the copy."""
    wrong = 0
    for side in (source, target):
        for at in (0, side.bytes - GUARD):
            wrong += np.count_nonzero(side.found(at, GUARD) != side.content(at, GUARD))
    rows = PIECE // max(source.pitch, target.pitch)
    for first in range(0, source.rows, rows):
        n = min(rows, source.rows - first)
        spans = [(side, GUARD + first * side.pitch, n * side.pitch) for side in (source, target)]
        found = [side.found(at, size).reshape(n, side.pitch) for side, at, size in spans]
        wanted = [side.content(at, size).reshape(n, side.pitch) for side, at, size in spans]
        wanted[1][:, :width] = wanted[0][:, :width]
        wrong += sum(np.count_nonzero(a != b) for a, b in zip(found, wanted, strict=True) if not np.array_equal(a, b))
    return wrong


@long_on_the_host
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ("one unit", ("device", "device")),
        ("rows", ("pinned", "device")),
        ("rows apart", ("pinned", "device")),
        ("rows apart", ("device", "device")),
    ],
)
def test_a_part_of_more_than_2_to_31_bytes_arrives(copier, sides, figure, shape, kinds):
    unit, width, *pitches = SHAPES[shape]
    growth = sc.Growth.state() if shape == "one unit" else sc.Growth.linear()
    part = sc.Part(name="k", layer=0, unit_bytes=unit, growth=growth)
    source, target = sides(kinds, width, pitches)
    ticket = copier.submit(source.state(part), target.state(part), upto=BYTES // unit, after=SYNCED)
    assert ticket.sync(timeout=60)
    last = target.base + GUARD + (target.rows - 1) * target.pitch + width - 1
    for address in (target.base, last):  # a check that finds these, and nothing else, would find others
        write(address, read(address, 1) ^ np.uint8(1))
    assert wrong_bytes(source, target, width) == 2
    figure(f"{BYTES} bytes of one part, {shape}, {' -> '.join(kinds)}: verified")


@pytest.mark.parametrize("pitches", [(BYTES, 8192), (8192, BYTES), (BYTES, BYTES)], ids=["source", "target", "both"])
@pytest.mark.parametrize("chunk", [3000, 32 << 20])
def test_rows_further_apart_than_a_call_of_cuda_can_say_arrive(pitches, chunk):
    """cudaDevAttrMaxPitch is 2^31 - 1. What lies between the rows is not touched, and so costs nothing on the host."""
    width, rows = 8192, 3
    part = sc.Part(name="k", layer=0, unit_bytes=width, growth=sc.Growth.linear())
    bases = [allocate("device", 0, (rows - 1) * pitch + width + 2 * GUARD) for pitch in pitches]
    states = []
    for number, (base, pitch) in enumerate(zip(bases, pitches, strict=True)):
        for row in range(rows):
            write(base + row * pitch, rig.pattern(number, 0, row * width, width + 2 * GUARD))
        states.append(sc.State(sc.Layout([part]), [sc.Place(base=base + GUARD, units=rows, stride=pitch)]))
    runtime.device_synchronize()
    with sc.Copier(tickets=1, layer_events=2, chunk=chunk) as copier:
        assert copier.submit(*states, upto=rows, after=SYNCED).sync(timeout=60)
    for row in range(rows):
        wanted = [rig.pattern(number, 0, row * width, width + 2 * GUARD) for number in (0, 1)]
        found = read(bases[1] + row * pitches[1], width + 2 * GUARD)
        assert np.array_equal(found[GUARD:-GUARD], wanted[0][GUARD:-GUARD])
        if pitches[1] > width:
            assert np.array_equal(found[:GUARD], wanted[1][:GUARD])
            assert np.array_equal(found[-GUARD:], wanted[1][-GUARD:])
    for base in bases:
        runtime.free(base)
