from collections.abc import Iterable, Mapping

from typing_extensions import disjoint_base

from strata_copy._core import Copier
from strata_copy.face_state import State
from strata_copy.face_ticket import Ticket
from strata_copy.layout import Layout
from strata_copy.places import CallerSynced, Event, Stream

ROUTE_NAMES: tuple[str, ...]

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
        priority: int = 0,
        bytes_ahead: int = 0,
        feed: bool | None = None,
        hook: int = 0,
        hook_arg: int = 0,
    ) -> Ticket | None: ...
    def extents(
        self, upto: int | Iterable[int], begin: int | Iterable[int] | None = None
    ) -> list[tuple[int, int, int, int, int, int]]: ...
