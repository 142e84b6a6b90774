"""What the benchmarks of one process share, for it takes long to make: the copier, filled sessions, the ceilings."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from common.ceilings import Ceilings, void_ways
from common.extents import Extents
from common.report import Result
from strata_copy import Copier, Image, runtime
from strata_copy.presets import qwen3_8_flash_next
from strata_copy.rig import Session, mismatches

# Lengths of a conversation in tokens.
FULL = {"short": 46_000, "middle": 117_000, "long": 497_051}
QUICK = {"short": 1_000, "middle": 2_000, "long": 3_000}


class Setting:
    """Opens the copier; `close` it. quick: tiny sizes, to see that everything runs."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.tokens = QUICK if quick else FULL
        self.device_name = runtime.device_name(0)
        self.copier = Copier((0,))
        self.streams = [runtime.stream_create() for _ in range(8)]
        self.ceilings = Ceilings(64 << 20, 32 << 20) if quick else Ceilings(2 << 30, 1 << 30)
        self.reached: dict[Session, int] = {}  # the most tokens that were copied into each target since it was filled
        self._sessions: dict[tuple[str, str, str, int], Session] = {}
        self._stream_on = {0: self.streams[0]}
        self._more: list[int] = []

    def sessions(self, format: str, length: str, *wanted: tuple[str, str] | tuple[str, str, int]) -> list[Session]:
        """Filled sessions of a format that hold a length. wanted: (kind, role), and the device if it is not 0; the same
        words give the same session.

        Each is filled with bytes of its own, in a thread of its own: numpy does it without the GIL.
        """
        made = []
        keys = [(format, kind, role, *(device or (0,))) for kind, role, *device in wanted]
        for key in keys:
            if key not in self._sessions:
                layout, number = qwen3_8_flash_next(format, draft=False), len(self._sessions)
                session = Session(layout, self.tokens[length], kind=key[1], device=key[3], number=number)
                self._sessions[key] = session
                made.append(session)
        with ThreadPoolExecutor() as threads:
            list(threads.map(Session.fill, made))
        return [self._sessions[key] for key in keys]

    def has_room(self, sessions: int) -> bool:
        """Whether so many of the longest conversations in k8v4 fit into what is free on the device.

        A token has 816 bytes of K/V and 128 of keys in each of 12 layers.
        """
        return runtime.memory_info()[0] >= 1.1 * sessions * self.tokens["long"] * 12 * 944

    @contextmanager
    def copier_with(self, devices: tuple[int, ...] = (0,), **how: int) -> Iterator[None]:
        """Meanwhile the copier is another one. Cases belong to the copier that they were made with."""
        with self.no_copier():
            self.copier = Copier(devices, **how)
            try:
                yield
            finally:
                self.copier.close()

    @contextmanager
    def no_copier(self) -> Iterator[None]:
        """Meanwhile none is open; then a new one is, to which no earlier case belongs."""
        self.copier.close()
        try:
            yield
        finally:
            self.copier = Copier((0,))

    def check_ceilings(self, result: Result) -> None:
        """Measures again behind the cases, and notes the larger figures of both in the result."""
        self.ceilings.measure()
        result.ceilings = {way: round(rate, 2) for way, rate in self.ceilings.found.items()}
        if not self.quick:
            result.void += void_ways(self.device_name, self.ceilings.found)

    def stream_on(self, device: int) -> int:
        """A stream of a device, which is touched by the first call for it."""
        if device not in self._stream_on:
            with runtime.on_device(device):
                self._stream_on[device] = runtime.stream_create()
        return self._stream_on[device]

    def streams_on(self, devices: Sequence[int], n: int) -> list[list[int]]:
        """n times a stream of each device."""
        for device in devices * n:
            with runtime.on_device(device):
                self._more.append(runtime.stream_create())
        made = self._more[-len(devices) * n :]
        return [made[i : i + len(devices)] for i in range(0, len(made), len(devices))]

    def close(self) -> None:
        self.copier.close()
        self.ceilings.close()
        for stream in {*self.streams, *self._stream_on.values(), *self._more}:
            runtime.stream_destroy(stream)
        for session in self._sessions.values():
            session.free()


class Case:
    """A copy between two sessions at one length, which is spoiled before it is timed and verified after.

    image: what is copied from instead of the source, whose bytes it has.
    """

    def __init__(
        self, setting: Setting, source: Session, target: Session, upto: int, *, image: Image | None = None
    ) -> None:
        self.source, self.target, self.upto = source, target, upto
        self.plan = setting.copier.plan(source.state if image is None else image, target.state)
        self.extents = Extents(self.plan, upto)
        self.bytes = self.extents.bytes
        self._setting = setting

    def spoil(self) -> None:
        """Makes the target wrong wherever the copy must write, and as it was filled everywhere else."""
        if self._setting.reached.get(self.target, 0) > self.upto:
            self.target.fill()
        self._setting.reached[self.target] = self.upto
        self.extents.spoil(self._setting.stream_on)

    def wrong(self) -> list[str]:
        """The bytes that are not what save and restore would have left."""
        return mismatches(self.target, self.source, self.upto)


def verify(name: str, *cases: Case) -> list[str]:
    """What is wrong with targets that were copied to at once, each line with the name of what was timed."""
    with ThreadPoolExecutor() as threads:
        return [f"{name}: {line}" for lines in threads.map(lambda case: case.wrong(), cases) for line in lines]
