from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from typing_extensions import disjoint_base

from strata_copy.face_plan import Plan
from strata_copy.face_state import State
from strata_copy.face_ticket import Ticket
from strata_copy.peers import PeerLink
from strata_copy.places import CallerSynced, Event, Stream

_C_API: Any

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
        patience: float | None = 10.0,
        window: int = 8,
        device_memory: int = ...,
        ring_slots: int = 4,
        pinned_memory: int = ...,
        helpers: int = 7,
        relay_memory: int = ...,
        relay_slots: int = 4,
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
    @property
    def links(self) -> tuple[PeerLink, ...]: ...
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
        priority: int = 0,
        bytes_ahead: int = 0,
        feed: bool | None = None,
        hook: int = 0,
        hook_arg: int = 0,
    ) -> Ticket | None: ...
    def finished(self) -> list[Ticket]: ...
