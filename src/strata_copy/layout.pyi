from collections.abc import Iterable
from os import PathLike

from typing_extensions import disjoint_base

from strata_copy.parts import Part, Patch

ENCODING: int

@disjoint_base
class Layout:
    parts: tuple[Part, ...]
    patches: tuple[Patch, ...]
    marks: tuple[str, ...]
    groups: tuple[str, ...]
    format: str
    identity: bytes
    def __init__(
        self,
        parts: Iterable[Part],
        *,
        marks: Iterable[str] = ("tokens",),
        format: str = "",
        identity: bytes = b"",
        patches: Iterable[Patch] = (),
        groups: Iterable[str] | None = None,
    ) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def fingerprint(self) -> bytes: ...
    def to_bytes(self) -> bytes: ...
    @classmethod
    def from_bytes(cls, encoded: bytes) -> Layout: ...
    @classmethod
    def load(cls, path: str | PathLike[str], *, identity: bytes = b"") -> Layout: ...
    def index(self, layer: int, name: str) -> int: ...
    def units(self, part: int, marks: int | Iterable[int]) -> int: ...
    def bytes_at(self, marks: int | Iterable[int]) -> int: ...
    def difference(self, other: Layout) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
