"""Conversations that take turns in too few slots: what the demo's --pool measures.

They have a long prefix in common and grow by a few tokens each turn. The one whose turn it is is in no slot: the one
that waited longest is parked, and it takes that slot. On the save path all of both moves, through pageable memory; with
a pool what changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from strata_copy import rig, save_path
from strata_copy._core import Copier
from strata_copy.arena import Arena
from strata_copy.face_pool import Pool
from strata_copy.face_state import State
from strata_copy.layout import Layout
from strata_copy.parts import Part
from strata_copy.places import CALLER_SYNCED
from strata_copy.stages import SaveStreams, Stages

SLOTS, CONVERSATIONS, TURNS = 4, 5, 10
NEW_TOKENS = 64  # of a conversation, each turn
CHUNK = 4096
PREFIX = "prefix"


class Turn(NamedTuple):
    """One turn, or all of them where `turn` is None: bytes of what was parked and taken, and of them those that the
    pool has moved; milliseconds; and what was found wrong."""

    turn: int | None
    conversation: int | None
    slot: int | None
    tokens: int
    format: str
    mode: int
    bytes: int
    moved: int
    save_ms: float
    pool_ms: float
    wrong: list[str]

    def as_json(self) -> dict[str, object]:
        times = {"save_ms": round(self.save_ms, 3), "pool_ms": round(self.pool_ms, 3)}
        found = {name: value for name, value in self._asdict().items() if name != "wrong"}
        return {**found, **times, "turn": "total" if self.turn is None else self.turn, "verified": not self.wrong}


class Keeper(Protocol):
    """One of both ways: keeps a slot's conversation under a key, and brings it into a slot. Both return bytes."""

    def written(self, slot: rig.Session, tokens: int, *, anew: bool = False) -> None: ...
    def park(self, slot: rig.Session, key: str, tokens: int) -> int: ...
    def take(self, slot: rig.Session, key: str, tokens: int) -> int: ...
    def close(self) -> None: ...


def memory(layout: Layout, tokens: int) -> tuple[int, int]:
    """Bytes of the slots, and of what is kept of the conversations."""
    capacity = _capacity(tokens)
    kept = layout.bytes_at(_marks(layout, capacity + min(CHUNK, capacity)))
    return SLOTS * layout.bytes_at(_marks(layout, capacity)), (CONVERSATIONS + 1) * kept * 11 // 10


def run(
    copier: Copier,
    layout: Layout,
    tokens: int,
    streams: SaveStreams,
    *,
    kind: Callable[[Part], str],
    mode: int,
    stages: Stages,
) -> list[Turn]:
    """All turns, both ways, and their sum behind them. tokens: of the prefix."""
    capacity = _marks(layout, _capacity(tokens))
    slots: list[rig.Session] = []
    try:
        slots += [rig.Session(layout, capacity, kind=kind, device=stages.device, number=k) for k in range(SLOTS)]
        saved = list(_play(SavePath(streams), slots, tokens))
        pooled = list(_play(ByPool(copier, layout, tokens), slots, tokens))
    finally:
        for slot in slots:
            slot.free()
    turns = [
        Turn(
            turn, a.conversation, a.slot, a.tokens, layout.format, mode, a.bytes, b.bytes, a.ms, b.ms, a.wrong + b.wrong
        )
        for turn, (a, b) in enumerate(zip(saved, pooled, strict=True))
    ]
    return [*turns, total(turns)]


def total(turns: list[Turn]) -> Turn:
    last = turns[-1]
    return last._replace(
        turn=None,
        conversation=None,
        slot=None,
        bytes=sum(turn.bytes for turn in turns),
        moved=sum(turn.moved for turn in turns),
        save_ms=sum(turn.save_ms for turn in turns),
        pool_ms=sum(turn.pool_ms for turn in turns),
        wrong=[line for turn in turns for line in turn.wrong],
    )


class SavePath:
    """As engines do it: images in pageable memory, all of a conversation each time."""

    def __init__(self, streams: SaveStreams) -> None:
        self.streams, self.kept = streams, dict[str, list[save_path.Saved]]()

    def written(self, slot: rig.Session, tokens: int, *, anew: bool = False) -> None:
        """Nobody asks."""

    def park(self, slot: rig.Session, key: str, tokens: int) -> int:
        runs = rig.runs_by_devices(slot, slot, _marks(slot.layout, tokens))
        self.kept[key] = self.streams.save(runs)
        return slot.layout.bytes_at(_marks(slot.layout, tokens))

    def take(self, slot: rig.Session, key: str, tokens: int) -> int:
        runs = rig.runs_by_devices(slot, slot, _marks(slot.layout, tokens))
        self.streams.restore(self.kept[key], runs)
        return slot.layout.bytes_at(_marks(slot.layout, tokens))

    def close(self) -> None:
        self.kept.clear()


class ByPool:
    """By this library: images in pinned memory, and copies of what changed."""

    def __init__(self, copier: Copier, layout: Layout, tokens: int) -> None:
        self.copier = copier
        self.arena = Arena(memory(layout, tokens)[1])
        self.pool = Pool(self.arena, layout, chunk=min(CHUNK, tokens + NEW_TOKENS))

    def written(self, slot: rig.Session, tokens: int, *, anew: bool = False) -> None:
        if anew:
            slot.state.rewound(_marks(slot.layout, 0))
        slot.state.advanced(_marks(slot.layout, tokens))

    def park(self, slot: rig.Session, key: str, tokens: int) -> int:
        upto = _marks(slot.layout, tokens)
        image = self.pool.image(key, upto)
        moved = self._copy(slot.state, image, upto)
        assert image.publish(), "nobody else uses it"
        return moved

    def take(self, slot: rig.Session, key: str, tokens: int) -> int:
        return self._copy(self.pool[key], slot.state, _marks(slot.layout, tokens))

    def close(self) -> None:
        for key in list(self.pool.keys()):
            del self.pool[key]
        self.arena.close()

    def _copy(self, source: State, target: State, upto: tuple[int, ...]) -> int:
        ticket = self.copier.submit(source, target, upto=upto, after=CALLER_SYNCED)
        assert ticket is not None, "all tickets before have ended"
        ticket.sync()
        return ticket.bytes


class Played(NamedTuple):
    """A turn of one way."""

    conversation: int
    slot: int
    tokens: int
    bytes: int
    ms: float
    wrong: list[str]


def _play(way: Keeper, slots: list[rig.Session], prefix: int) -> Iterator[Played]:
    """Every conversation goes on from the prefix and was parked once before the first turn, as any turn leaves it."""
    try:
        talks = [Talk(number, prefix) for number in range(CONVERSATIONS)]
        rig.put(slots[0], talks[0].spans(slots[0]))
        way.written(slots[0], prefix, anew=True)
        way.park(slots[0], PREFIX, prefix)
        for talk, slot in zip((talks[-1], *talks[:-1]), (slots[0], *slots), strict=True):
            way.take(slot, PREFIX, prefix)
            talk.goes_on(slot, way)
            way.park(slot, talk.key, talk.tokens)
            if talk is not talks[-1]:
                talk.goes_on(slot, way)
        for turn in range(TURNS):
            talk, slot = talks[(CONVERSATIONS - 1 + turn) % CONVERSATIONS], slots[turn % SLOTS]
            leaves = talks[turn % CONVERSATIONS]
            start = time.perf_counter_ns()
            moved = way.park(slot, leaves.key, leaves.tokens) + way.take(slot, talk.key, talk.tokens)
            ms = (time.perf_counter_ns() - start) / 1e6
            yield Played(talk.number, turn % SLOTS, talk.tokens, moved, ms, talk.wrong(slot))
            talk.goes_on(slot, way)
    finally:
        way.close()


class Talk:
    """A conversation: how long it is, and what its bytes are."""

    def __init__(self, number: int, prefix: int) -> None:
        self.number, self.prefix, self.tokens, self.steps = number, prefix, prefix, 0
        self.key = f"conversation {number}"

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Patterns: the prefix's and all constants', its own rows', and its running state's, new every step."""
        return 100, 101 + self.number, 200 + self.steps * CONVERSATIONS + self.number

    def marks(self, slot: rig.Session) -> tuple[int, ...]:
        return _marks(slot.layout, self.tokens)

    def goes_on(self, slot: rig.Session, way: Keeper) -> None:
        """A few tokens are read and written in its slot."""
        begin = self.marks(slot)
        self.tokens, self.steps = self.tokens + NEW_TOKENS, self.steps + 1
        way.written(slot, self.tokens)
        rig.put(slot, self.spans(slot, begin))

    def wrong(self, slot: rig.Session) -> list[str]:
        """What a slot should hold of it and does not."""
        return rig.differences(slot, self.spans(slot))

    def spans(self, slot: rig.Session, begin: tuple[int, ...] | None = None) -> list[rig.Span]:
        """Its bytes in a slot; those that an append from `begin` on writes."""
        prefix = _marks(slot.layout, self.prefix)
        return rig.conversation(slot, self.marks(slot), prefix=prefix, numbers=self.numbers, begin=begin)


def _capacity(prefix: int) -> int:
    return prefix + (TURNS + 2) * NEW_TOKENS


def _marks(layout: Layout, tokens: int) -> tuple[int, ...]:
    return (tokens,) * len(layout.marks)
