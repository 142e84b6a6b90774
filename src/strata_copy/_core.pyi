from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from typing_extensions import disjoint_base

from strata_copy.errors import CopyError
from strata_copy.layout import Layout
from strata_copy.parts import Part
from strata_copy.places import CallerSynced, Event, Place, Stream

ROUTE_NAMES: tuple[str, ...]
_C_API: Any

class Progress(NamedTuple):
    layers_queued: int
    bytes: int
    bytes_total: int
    submit_seconds: float
    seconds: float

@disjoint_base
class State:
    layout: Layout
    places: tuple[Place, ...]
    owner: object
    def __init__(self, layout: Layout, places: Iterable[Place], *, owner: object = None) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def valid(self) -> bool: ...
    @property
    def busy(self) -> bool: ...
    def advanced(self, marks: int | Iterable[int]) -> None: ...
    def rewound(self, marks: int | Iterable[int]) -> None: ...
    def dirty(self, part: int, first_unit: int = 0, n: int = 1) -> None: ...
    def rewindable(self, marks: int | Iterable[int]) -> bool: ...
    def rewind_blocker(self, marks: int | Iterable[int]) -> Part | None: ...
    @property
    def lineage(self) -> dict[tuple[str, str], list[tuple[int, int, int]]]: ...
    def reset(self) -> None: ...

@disjoint_base
class Plan:
    sources: dict[str, State]
    target: State
    copier: Copier
    @property
    def address(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    def routes(self) -> set[tuple[str, int]]: ...
    def submit(
        self,
        upto: int | Iterable[int],
        *,
        after: CallerSynced | Event | Stream | Iterable[Event | Stream] | None = None,
        begin: int | Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        src_bank: int | Mapping[str, int] | None = None,
        dst_bank: int | Mapping[str, int] | None = None,
        src_generation: int = 0,
        dst_generation: int = 0,
    ) -> Ticket | None: ...
    def extents(
        self, upto: int | Iterable[int], begin: int | Iterable[int] | None = None
    ) -> list[tuple[int, int, int, int, int, int]]: ...

@disjoint_base
class Copier:
    devices: tuple[int, ...]
    def __init__(
        self,
        devices: Iterable[int] = (0,),
        *,
        tickets: int = 64,
        layer_events: int = 128,
        chunk: int = ...,
        patience: float = 10.0,
    ) -> None: ...
    def __enter__(self) -> Copier: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def plan(self, source: State | Mapping[str, State], target: State) -> Plan: ...
    def submit(
        self,
        source: State | Mapping[str, State],
        target: State,
        *,
        upto: int | Iterable[int],
        after: CallerSynced | Event | Stream | Iterable[Event | Stream] | None = None,
        begin: int | Iterable[int] | None = None,
        groups: Iterable[str] | None = None,
        src_bank: int | Mapping[str, int] | None = None,
        dst_bank: int | Mapping[str, int] | None = None,
        src_generation: int = 0,
        dst_generation: int = 0,
    ) -> Ticket | None: ...
    def finished(self) -> list[Ticket]: ...

@disjoint_base
class Ticket:
    plan: Plan
    value: int
    def wait_layer(self, layer: int, stream: Any, timeout: float = 0.0) -> bool: ...
    def wait_done(self, stream: Any, timeout: float = 0.0) -> bool: ...
    def wait_source(self, stream: Any, timeout: float = 0.0) -> bool: ...
    def sync(self, timeout: float | None = None) -> bool: ...
    def poll(self) -> Progress: ...
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> CopyError | None: ...
    @property
    def target(self) -> State: ...
    @property
    def routes(self) -> set[tuple[str, int]]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
