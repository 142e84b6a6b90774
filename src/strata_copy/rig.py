"""Sessions to try copies on, and the check of every byte of them. Demo, tests and benchmarks stand on this.

Nothing here goes through the copy path or asks it anything: memory is made, filled and read back by plain runtime
calls, and what a copy has to move is worked out again from the growth rules, in arithmetic of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import numpy as np

from strata_copy import runtime
from strata_copy.face_state import State
from strata_copy.layout import Layout
from strata_copy.parts import Growth, Part
from strata_copy.places import Place

GUARD = -1  # the part number of guards in `pattern`
ALIGNMENT = 256
PIECE = 16 << 20  # bytes that are staged in host memory at once
BLOCK = 1 << 20  # bytes that are computed at once: of smaller ones threads wait for the GIL, larger leave the cache

Result = TypeVar("Result")


class Region(NamedTuple):
    """Where a session keeps a part: `offset` and `bytes` within its memory, and how many units fit."""

    offset: int
    units: int
    bytes: int


class Block(NamedTuple):
    """An allocation: offsets `begin` to `end` of a session's memory."""

    kind: str
    device: int
    begin: int
    end: int


class Session:
    """Memory for one state of `layout`: every part in it with guard bytes before and behind.

    capacity: the marks that fit, one int for each of layout.marks (or one int where there is one).
    kind: "device", "pinned" or "pageable", or a function that says it for each Part. device: of device memory; of host
        memory the device whose lanes carry it; or a function of the Part. There is one allocation for each kind and
        device.
    number: what `fill` makes its content from. guard: bytes, at least.

    Parts begin at multiples of 256 bytes: `regions` says where, in the order of layout.parts, by offsets that count
    through all allocations, `bytes` in all; `blocks` are the allocations. It has no content before `fill`. `free` it
    once no copy uses it, or use `with`.
    Raises CudaError without memory, ValueError for another kind.
    """

    def __init__(
        self,
        layout: Layout,
        capacity: int | Sequence[int],
        *,
        kind: str | Callable[[Part], str] = "device",
        device: int | Callable[[Part], int] = 0,
        number: int = 0,
        guard: int = 256,
    ) -> None:
        self.layout, self.number = layout, number
        wheres = [
            (kind if isinstance(kind, str) else kind(part), device if isinstance(device, int) else device(part))
            for part in layout.parts
        ]
        self.regions, self.blocks = _regions(layout, _marks(capacity), guard, wheres)
        self.bytes = self.blocks[-1].end
        self._memory: list[np.ndarray] = []
        self._addresses: list[int] = []
        try:
            for block in self.blocks:
                self._addresses.append(self._allocate(block))
            self.places = tuple(
                Place(base=self.address(region.offset), units=region.units, kind=part_kind, device=part_device)
                for region, (part_kind, part_device) in zip(self.regions, wheres, strict=True)
            )
            self.state = State(layout, self.places)
        except BaseException:
            self.free()
            raise

    def fill(self, number: int | None = None) -> None:
        """Writes pattern(number, ...) over all of the memory, guards included; a new number is kept."""
        if number is not None:
            self.number = number
        spans = _spans(self)

        def fill_piece(start: int, staging: np.ndarray) -> None:
            for span in _cut(spans, start, staging.size):
                staging[span.begin - start : span.end - start] = _content(span)
            self.write(start, staging)

        _each_piece(fill_piece, self.bytes)

    def address(self, offset: int) -> int:
        """Where the byte at `offset` is."""
        return next(a + offset - b.begin for a, b in zip(self._addresses, self.blocks, strict=True) if offset < b.end)

    def read(self, offset: int, n: int) -> np.ndarray:
        """`n` bytes from `offset` on, as a uint8 array of its own. Blocks."""
        found = np.empty(n, np.uint8)
        self.read_into(offset, found)
        return found

    def read_into(self, offset: int, found: np.ndarray) -> None:
        """Fills a contiguous uint8 array with the bytes from `offset` on. Blocks."""
        for block, address, piece in self._pieces_of(offset, found):
            if block.kind == "device":
                runtime.memcpy(piece.ctypes.data, address, piece.size)
            else:
                piece[:] = runtime.view(address, piece.size)

    def write(self, offset: int, data: np.ndarray) -> None:
        """Puts a contiguous uint8 array at `offset`. Blocks."""
        for block, address, piece in self._pieces_of(offset, data):
            if block.kind == "device":
                with runtime.on_device(block.device):
                    runtime.memcpy(address, piece.ctypes.data, piece.size)
                    runtime.device_synchronize()  # from pageable memory the bytes may still be under way
            else:
                runtime.view(address, piece.size)[:] = piece

    def free(self) -> None:
        """Gives the memory back; twice is allowed."""
        for address, block in zip(self._addresses, self.blocks, strict=False):
            if block.kind == "device":
                runtime.free(address)
            elif block.kind == "pinned":
                runtime.host_free(address)
        self._addresses, self._memory = [], []

    def _pieces_of(self, offset: int, data: np.ndarray) -> Iterator[tuple[Block, int, np.ndarray]]:
        """Block, address and view of the parts of `data` that lie in one allocation each."""
        for block in self.blocks:
            begin, end = max(offset, block.begin), min(offset + data.size, block.end)
            if begin < end:
                yield block, self.address(begin), data[begin - offset : end - offset]

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.free()

    def _allocate(self, block: Block) -> int:
        n = block.end - block.begin
        if block.kind == "pinned":
            with runtime.on_device(block.device):
                return runtime.host_alloc(n)
        if block.kind == "pageable":
            self._memory.append(np.empty(n + ALIGNMENT, np.uint8))
            return _aligned(self._memory[-1].ctypes.data)
        if block.kind != "device":
            raise ValueError(f"kind is {block.kind!r}; may be device, pinned, pageable")
        with runtime.on_device(block.device):
            return runtime.malloc(n)


def pattern(number: int, part: int, offset: int, n: int) -> np.ndarray:
    """Bytes offset to offset + n of what part number `part` of state `number` is filled with, as a uint8 array.

    Another number, part or offset gives another byte in about 255 of 256 cases, wherever one looks. part: GUARD for
    guards, whose offsets count from the beginning of all memory.
    """
    first, last = offset // 8, (offset + n + 7) // 8
    key = int.from_bytes(blake2b(f"{number} {part}".encode(), digest_size=8).digest(), "little")
    words = np.empty(last - first, np.uint64)
    for start in range(0, words.size, RAMP.size):
        block = words[start : start + RAMP.size]
        np.add(RAMP[: block.size], np.uint64((first + start + key) * STEP % 2**64), out=block)
        # The high half goes into the low one, up, and down again, or the low bytes would repeat with every page.
        np.bitwise_xor(block, block >> HALF, out=block)
        np.multiply(block, MIX, out=block)
        np.bitwise_xor(block, block >> HALF, out=block)
    return words.view(np.uint8)[offset - 8 * first :][:n]


STEP = 0x9E3779B97F4A7C15
HALF = np.uint64(32)
MIX = np.uint64(0xD6E8FEB86659FD93)
RAMP = np.arange(BLOCK // 8, dtype=np.uint64) * np.uint64(STEP)


def mismatches(
    target: Session,
    source: Session,
    upto: int | Sequence[int],
    begin: int | Sequence[int] | None = None,
    *,
    limit: int = 8,
) -> list[str]:
    """The first `limit` bytes of `target` that are not what a copy of all groups from `source` up to `upto` must leave.

    Both were filled before, and the source has not been a target since. Every byte of the target's memory is read:
    moved units must hold the source's pattern (a patched unit that of its patch source), all other bytes and the guards
    the target's own. begin: the marks that the copy was told; None for 0.
    A line names part, layer, offset in the part, wanted and found byte.
    """
    return _wrong_bytes(target, _spans(target, source, _marks(upto), None if begin is None else _marks(begin)), limit)


def changes(session: Session, *, limit: int = 8) -> list[str]:
    """The first bytes that are not as the session was filled, as `mismatches` says it: sources, and refused targets."""
    return _wrong_bytes(session, _spans(session), limit)


def runs(source: Session, target: Session, upto: int | Sequence[int]) -> np.ndarray:
    """What strata_copy.save_path takes to copy everything up to `upto`: rows of step, source and target address, bytes.

    Steps are as engines take them: all running state, then layer after layer its rows, at last the patches over them.
    """
    return _table([line for _, line in _lines(source, target, _marks(upto))])


def runs_by_devices(source: Session, target: Session, upto: int | Sequence[int]) -> dict[tuple[int, int], np.ndarray]:
    """`runs` of each pair of devices, the source's and the target's, that have some."""
    found: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for i, line in _lines(source, target, _marks(upto)):
        found.setdefault((source.places[i].device, target.places[i].device), []).append(line)
    return {devices: _table(found[devices]) for devices in sorted(found)}


def _lines(source: Session, target: Session, marks: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Part number, and step, source, target and bytes, of each run."""
    layout = source.layout
    for i, part in enumerate(layout.parts):
        step = part.layer + 1 if part.growth.rule == "linear" else 0
        n = _units(part.growth, marks) * part.unit_bytes
        for run in range(part.rep):
            yield i, (step, _address(source, i, 0, run), _address(target, i, 0, run), n)
    for patch in layout.patches:
        i, from_ = layout.index(patch.layer, patch.part), layout.index(patch.layer, patch.source)
        part, last = layout.parts[i], _units(layout.parts[i].growth, marks) - 1
        for run in range(part.rep if last >= 0 else 0):
            addresses = _address(source, from_, 0, run), _address(target, i, last, run)
            yield i, (layout.layers + 1, *addresses, part.unit_bytes)


def _table(lines: list[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(sorted(lines, key=lambda line: line[0]), np.int64).reshape(-1, 4)


class Span(NamedTuple):
    """Bytes `begin` to `end` of a session's memory, which hold pattern(number, part, at, end - begin)."""

    begin: int
    end: int
    number: int
    part: int
    at: int


def conversation(
    session: Session,
    upto: int | Sequence[int],
    *,
    prefix: int | Sequence[int],
    numbers: tuple[int, int, int],
    begin: int | Sequence[int] | None = None,
) -> list[Span]:
    """What the memory of a session holds of a conversation that is `upto` long, wherever it came from.

    prefix: the marks up to which its rows are those of others. numbers: of the patterns of those rows and of constants,
    of its own rows, and of its running state. begin: only what an append from there on writes.
    """
    layout, marks, spans = session.layout, _marks(upto), []
    patches = {layout.index(p.layer, p.part): layout.index(p.layer, p.source) for p in layout.patches}
    for i, part in enumerate(layout.parts):
        first, last = _moved(part.growth, marks, None if begin is None else _marks(begin))
        own = min(max(_moved(part.growth, marks, _marks(prefix))[0], first), last)
        if part.growth.rule != "linear":
            own = last
        for run in range(part.rep):
            at = [_offset(session, i, unit, run) for unit in (first, own, last)]
            end = at[2] - part.unit_bytes if i in patches and first < last else at[2]
            number = numbers[2] if part.growth.rule == "state" else numbers[0]
            for start, stop, whose in ((at[0], min(at[1], end), number), (min(at[1], end), end, numbers[1])):
                spans.append(Span(start, stop, whose, i, start - session.regions[i].offset))
            if end < at[2]:
                source = _offset(session, patches[i], 0, run) - session.regions[patches[i]].offset
                spans.append(Span(end, at[2], numbers[0], patches[i], source))
    return [span for span in spans if span.begin < span.end]


def put(session: Session, spans: Sequence[Span]) -> None:
    """Writes them. Blocks."""
    for span in spans:
        for block in _cut([span], span.begin, span.end - span.begin):
            session.write(block.begin, _content(block))


def differences(session: Session, spans: Sequence[Span], *, limit: int = 8) -> list[str]:
    """The first bytes of a session that are not as the spans say, as `mismatches` says it. Others are not looked at."""
    return _wrong_bytes(session, list(spans), limit)


def _spans(
    session: Session, source: Session | None = None, upto: tuple[int, ...] = (), begin: tuple[int, ...] | None = None
) -> list[Span]:
    """What a session's memory must hold, byte after byte: as filled, or with what a copy from `source` puts over it."""
    spans, end, number = [], 0, session.number
    layout = session.layout
    patches = {layout.index(p.layer, p.part): layout.index(p.layer, p.source) for p in layout.patches}
    for i in sorted(range(len(layout.parts)), key=lambda i: session.regions[i].offset):
        part, region = layout.parts[i], session.regions[i]
        spans.append(Span(end, region.offset, number, GUARD, end))
        end = region.offset + region.bytes
        for run in range(part.rep):
            first, last = (0, 0) if source is None else _moved(part.growth, upto, begin)
            mine = [_offset(session, i, unit, run) for unit in (0, first, last, region.units)]
            spans.append(Span(mine[0], mine[1], number, i, mine[0] - region.offset))
            if source is not None and first < last:
                patched = mine[2] - part.unit_bytes if i in patches else mine[2]
                theirs = _offset(source, i, first, run) - source.regions[i].offset
                spans.append(Span(mine[1], patched, source.number, i, theirs))
                if i in patches:
                    theirs = _offset(source, patches[i], 0, run) - source.regions[patches[i]].offset
                    spans.append(Span(patched, mine[2], source.number, patches[i], theirs))
            spans.append(Span(mine[2], mine[3], number, i, mine[2] - region.offset))
    spans.append(Span(end, session.bytes, number, GUARD, end))
    return [span for span in spans if span.begin < span.end]


def _cut(spans: list[Span], start: int, n: int) -> Iterator[Span]:
    """The spans within `n` bytes from `start` on, in blocks."""
    for span in spans:
        for begin in range(max(span.begin, start), min(span.end, start + n), BLOCK):
            end = min(begin + BLOCK, span.end, start + n)
            yield Span(begin, end, span.number, span.part, span.at + begin - span.begin)


def _content(span: Span) -> np.ndarray:
    return pattern(span.number, span.part, span.at, span.end - span.begin)


def _wrong_bytes(session: Session, spans: list[Span], limit: int) -> list[str]:
    def wrong_in_piece(start: int, data: np.ndarray) -> list[str]:
        lines: list[str] = []
        session.read_into(start, data)
        for span in _cut(spans, start, data.size):
            found, wanted = data[span.begin - start : span.end - start], _content(span)
            if not np.array_equal(found, wanted):
                wrong = np.flatnonzero(found != wanted)[: limit - len(lines)]
                lines += [_line(session, span.begin + int(i), int(wanted[i]), int(found[i])) for i in wrong]
            if len(lines) == limit:
                break
        return lines

    return [line for lines in _each_piece(wrong_in_piece, session.bytes) for line in lines][:limit]


def _line(session: Session, offset: int, wanted: int, found: int) -> str:
    for part, region in zip(session.layout.parts, session.regions, strict=True):
        if region.offset <= offset < region.offset + region.bytes:
            where = f"part {part.name!r} of layer {part.layer}, offset {offset - region.offset}"
            break
    else:
        where = f"guard, offset {offset} of all memory"
    return f"{where}: wanted {wanted:#04x}, found {found:#04x}"


def _each_piece(work: Callable[[int, np.ndarray], Result], n: int) -> list[Result]:
    """What `work(start, staging)` returns of each piece of `n` bytes, in order; several are given to several threads.

    staging: an array with as many bytes as the piece, the thread's own. It keeps its pages: copies from a device into
    new ones are slow.
    """
    mine = threading.local()

    def work_on(start: int) -> Result:
        if not hasattr(mine, "staging"):
            mine.staging = np.empty(min(PIECE, n), np.uint8)
        return work(start, mine.staging[: min(PIECE, n - start)])

    starts = range(0, n, PIECE)
    if len(starts) < 2:
        return [work_on(start) for start in starts]
    with ThreadPoolExecutor() as threads:
        return list(threads.map(work_on, starts))


def _regions(
    layout: Layout, capacity: tuple[int, ...], guard: int, wheres: Sequence[tuple[str, int]]
) -> tuple[list[Region], list[Block]]:
    """The regions in the order of layout.parts, and the allocations that they lie in."""
    regions, blocks, end = [Region(0, 0, 0)] * len(wheres), [], 0
    for where in dict.fromkeys(wheres):
        begin = end = _aligned(end)
        for i, part in enumerate(layout.parts):
            if part.growth.rule == "window":
                raise ValueError(f"part {part.name!r} of layer {part.layer} is a window: the rig has none")
            if wheres[i] == where:
                units = _units(part.growth, capacity)
                regions[i] = Region(_aligned(end + guard), units, units * part.unit_bytes * part.rep)
                end = regions[i].offset + regions[i].bytes
        end += guard
        blocks.append(Block(*where, begin, end))
    # What lies between two allocations belongs to the guard of the first.
    ends = [following.begin for following in blocks[1:]] + [end]
    return regions, [block._replace(end=e) for block, e in zip(blocks, ends, strict=True)]


def _offset(session: Session, part: int, unit: int, run: int) -> int:
    """Where a run of a unit begins within a session's memory: all units of a run lie together."""
    region = session.regions[part]
    return region.offset + (run * region.units + unit) * session.layout.parts[part].unit_bytes


def _address(session: Session, part: int, unit: int, run: int) -> int:
    return session.address(_offset(session, part, unit, run))


def _units(growth: Growth, marks: tuple[int, ...]) -> int:
    if growth.rule != "linear":
        return 1
    tokens = _tokens(growth, marks)
    whole, rest = divmod(tokens, growth.q)
    return whole + (1 if growth.ceil and rest else 0) + (growth.extra if marks[growth.mark] + growth.shift > 0 else 0)


def _moved(growth: Growth, upto: tuple[int, ...], begin: tuple[int, ...] | None) -> tuple[int, int]:
    """The first unit that has to move, and the one behind the last."""
    end = _units(growth, upto)
    if begin is None or growth.rule == "state":
        return 0, end
    if growth.rule == "const":
        return (1 if begin[growth.mark] > 0 else 0), end
    settled = 0
    if growth.settle:
        settled = _tokens(growth, begin) // (growth.q * growth.settle) * growth.settle
    return min(settled, end), end


def _tokens(growth: Growth, marks: tuple[int, ...]) -> int:
    """The tokens that a part has seen, of those of its rank."""
    seen = max(0, marks[growth.mark] + growth.shift)
    if growth.cp_size == 1:
        return seen
    return sum(token // growth.cp_interleave % growth.cp_size == growth.cp_rank for token in range(seen))


def _marks(marks: int | Sequence[int]) -> tuple[int, ...]:
    return (marks,) if isinstance(marks, int) else tuple(marks)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
