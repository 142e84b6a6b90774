from collections.abc import Iterable
from typing import NamedTuple

SIZES: tuple[int, ...]
P2P_VARIABLE: str

class PeerLink(NamedTuple):
    source: int
    target: int
    p2p: bool
    reason: str

def mode() -> str: ...
def link(source: int, target: int) -> PeerLink: ...
def hangs(device: int | None = None) -> bool: ...
def links(devices: Iterable[int] | None = None) -> list[PeerLink]: ...
