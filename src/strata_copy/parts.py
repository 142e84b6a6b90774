"""What a layout is written in: parts, growth rules and patches, as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass

RULES = ("const", "state", "linear", "window")
LOWS = ("zero", "last", "chunk", "mark")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Which units a part has at a mark. docs/layouts.md has the formulas.

    rule: "const" (one unit, moved once), "state" (one unit, moved whenever it may have changed), "linear" (units from
        0 up to the mark) or "window" (the last units).
    mark: index of the mark that it follows, by the order of Layout.marks.
    q: tokens in a unit. ceil: a partly filled last unit exists. extra: units after the last, where the mark is above 0.
    shift: tokens added to the mark. settle: units that change together (0: an append may change any).
    window, sinks, lo, lo_mark: of rule "window": it begins `window` tokens before the mark ("last"), at a multiple of
        `window` ("chunk") or at another mark ("mark"); the first `sinks` units stay.
    cp_size, cp_rank, cp_interleave: the share of one rank of a context that is split over cp_size ranks in runs of
        cp_interleave tokens.
    """

    rule: str
    mark: int = 0
    q: int = 1
    ceil: bool = False
    extra: int = 0
    shift: int = 0
    settle: int = 1
    window: int = 0
    sinks: int = 0
    lo: str = "zero"
    lo_mark: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    @classmethod
    def const(cls) -> Growth:
        """One unit that never changes within a conversation."""
        return cls(rule="const")

    @classmethod
    def state(cls, mark: int = 0) -> Growth:
        """One unit that every append rewrites: running state."""
        return cls(rule="state", mark=mark)

    @classmethod
    def linear(
        cls, q: int = 1, *, ceil: bool = False, extra: int = 0, mark: int = 0, shift: int = 0, settle: int = 1
    ) -> Growth:
        """Units of q tokens that are appended and then stay."""
        return cls(rule="linear", q=q, ceil=ceil, extra=extra, mark=mark, shift=shift, settle=settle)

    @classmethod
    def last(cls, window: int, q: int = 1, *, ceil: bool = False, mark: int = 0, sinks: int = 0) -> Growth:
        """Units of q tokens of which those of the last `window` tokens are kept, and the first `sinks` units."""
        return cls(rule="window", lo="last", window=window, q=q, ceil=ceil, mark=mark, sinks=sinks)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One array of a layer, or of the session (layer -1).

    name: unique in its layer. unit_bytes: bytes of one run of a unit, without padding. rep: runs that a unit has
    (heads).
    needed_by: first layer that reads it; by default its own layer, and 0 for a session part. group: parts of a group
    move whole or not at all. order: smaller moves first within a layer. shard, replica: (axis, index, count) and
    (index, count) of a part that is split or repeated over ranks; they belong to the identity.
    """

    name: str
    layer: int
    unit_bytes: int
    growth: Growth
    group: str = "main"
    needed_by: int | None = None
    order: int = 0
    rep: int = 1
    shard: tuple[int, int, int] = (0, 0, 1)
    replica: tuple[int, int] = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """After a copy the last unit of `part` in the target is unit 0 of `source` in the source, both parts of `layer`."""

    layer: int
    part: str
    source: str
