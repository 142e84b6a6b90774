from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

REPETITIONS: int
WARM_UPS: int
PIECES: int
PIECE: int

class Rate(NamedTuple):
    best: float
    median: float

class Memory(NamedTuple):
    address: int
    pinned: bool
    device: int

class Ceilings:
    device_bytes: int
    pinned_bytes: int
    found: dict[tuple[str, tuple[int, ...]], float]
    def __init__(self, device_bytes: int, pinned_bytes: int) -> None: ...
    def measure(self, way: str, devices: Sequence[int] = (0,), repetitions: int = 5, warm_ups: int = 3) -> Rate: ...
    def running(self, way: str, devices: Sequence[int] = (0,), times: int = 4) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Ceilings: ...
    def __exit__(self, *exception: object) -> None: ...

def timed(copies: Sequence[tuple[Memory, Memory, int, int]], repetitions: int, warm_ups: int) -> list[int]: ...
