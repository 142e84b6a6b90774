"""Conversations from one GPU to another, by P2P and without, and one on both, in shares of what links give."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from common.report import Figure, Result, spread
from common.setting import Case, Setting
from copies.measure import Bench
from strata_copy import probe, runtime
from strata_copy.parts import Part
from strata_copy.peers import P2P_VARIABLE
from strata_copy.presets import qwen3_8_flash_next
from strata_copy.rig import Session

P2P, RING, RING_BOTH, SPLIT, SPLIT_BOTH = 0.98, 0.93, 0.85, 0.98, 0.95  # goals: shares of the ceiling
PAIR = (0, 1)
CHUNKS, SLOTS = (2, 4, 8, 16), (2, 4, 8)  # MiB; of the rings that are compared
# Each ceiling by the ways that it is the least of, as probe.Ceilings has them.
WITHOUT = {
    "pinned": (("d2h", (0,)), ("h2d", (1,))),
    "two_way": (("two_way", (0,)), ("two_way", (1,))),
    "out of both": (("d2h", PAIR),),
    "into both": (("h2d", PAIR),),
    "four_way": (("two_way", PAIR),),
}
BY_P2P = {"peer": (("peer", PAIR),), "peer_two_way": (("peer_two_way", PAIR),)}


def run(setting: Setting, long: bool = True, rings: bool = False) -> Result:
    repetitions, warm_up = (2, 1) if setting.quick else (9, 3)
    format, length = ("k8v4", "long") if long and setting.has_room(2) else ("int8", "middle")
    result = Result("peers", {"format": format, "tokens": setting.tokens[length], "repetitions": repetitions})
    if runtime.device_count() < 2:
        result.left_out["copies between two devices"] = "there is one device"
        return result
    setting.ceilings.measure()
    with Links(setting.quick) as links:
        bench = Bench(setting, result, repetitions, warm_up, links)
        # The driver's own staging and the rings come first: access that is enabled stays so.
        with asked_for("off"), setting.copier_with(PAIR):
            staged = driver_figures(links)
            links.measure(WITHOUT)
            split(bench, format, length)
            between(bench, format, length, "without P2P", ("pinned", RING), ("two_way", RING_BOTH))
            links.measure(WITHOUT)
        shapes = compared(bench) if rings else []
        with asked_for("auto"), setting.copier_with(PAIR):
            why = between(bench, format, length, "by P2P", ("peer", P2P), ("peer_two_way", P2P), by_p2p=True)
        if why:
            result.left_out["by P2P"] = why
        setting.check_ceilings(result)
        result.ceilings |= {way: round(rate, 2) for way, rate in links.found.items()}
    result.figures += [*bench.shares(), *staged, *shapes]
    return result


class Links:
    """Ceilings of two devices at once and between them; `found` keeps the largest of each ever."""

    def __init__(self, quick: bool) -> None:
        self._probe = probe.Ceilings(32 << 20, 32 << 20) if quick else probe.Ceilings(2 << 30, 1 << 30)
        self.found: dict[str, float] = {}

    def measure(self, ways: dict[str, tuple[tuple[str, tuple[int, ...]], ...]]) -> None:
        for name, parts in ways.items():
            rate = min(self.rate(way, devices) for way, devices in parts)
            self.found[name] = max(rate, self.found.get(name, 0.0))

    def rate(self, way: str, devices: tuple[int, ...]) -> float:
        return self._probe.measure(way, devices).best

    def __enter__(self) -> "Links":
        return self

    def __exit__(self, *exception: object) -> None:
        self._probe.close()


@contextmanager
def asked_for(p2p: str) -> Iterator[None]:
    """Copiers that are opened meanwhile use P2P as STRATA_COPY_P2P=... says."""
    before = os.environ.get(P2P_VARIABLE)
    os.environ[P2P_VARIABLE] = p2p
    try:
        yield
    finally:
        if before is None:
            del os.environ[P2P_VARIABLE]
        else:
            os.environ[P2P_VARIABLE] = before


def driver_figures(links: Links) -> list[Figure]:
    """One long copy without access: the driver takes it through host memory of its own."""
    return [
        Figure(f"by the driver without P2P, {name}", round(links.rate(way, PAIR), 2), "GB/s")
        for name, way in (("one way", "peer"), ("both ways", "peer_two_way"))
    ]


def between(
    bench: Bench,
    format: str,
    length: str,
    how: str,
    one_way: tuple[str, float],
    both_ways: tuple[str, float],
    by_p2p: bool = False,
) -> str:
    """Copies from device 0 to device 1, and both ways at once. Returns why not, where it shall be by P2P and is not."""
    setting = bench.setting
    upto = setting.tokens[length]
    there, back = there_and_back(setting, format, length)
    name = f"{how}, {format}, {upto} tokens"
    if by_p2p:
        for link in setting.copier.links:
            if not link.p2p:
                return link.reason
        bench.ceilings.measure(BY_P2P)
    bench.measure(f"{name}, one way", [there], *one_way)
    if by_p2p:
        for streams in (1, 2):
            bench.measure(f"the same by {streams} bare streams, one way", [there], one_way[0], None, bare=streams)
    bench.measure(f"{name}, both ways", [there, back], *both_ways)
    if by_p2p:
        bench.ceilings.measure(BY_P2P)
    return ""


def there_and_back(setting: Setting, format: str, length: str) -> tuple[Case, Case]:
    kinds = [("device", role, device) for role, device in (("source", 0), ("target", 1), ("source", 1), ("target", 0))]
    a, b, c, d = setting.sessions(format, length, *kinds)
    return Case(setting, a, b, setting.tokens[length]), Case(setting, c, d, setting.tokens[length])


def split(bench: Bench, format: str, length: str) -> None:
    """A conversation whose first layers are on device 0 and whose last ones on device 1, to pinned memory and back: one
    plan, one submit, one ticket."""
    setting = bench.setting
    upto, layout = setting.tokens[length], qwen3_8_flash_next(format, draft=False)

    def stage(part: Part) -> int:
        return int(2 * part.layer >= layout.layers)

    with ExitStack() as stack:
        slot, other, pinned, image = (
            stack.enter_context(Session(layout, upto, kind=kind, device=stage, number=number))
            for number, kind in enumerate(("device", "device", "pinned", "pinned"), 201)
        )
        with ThreadPoolExecutor() as threads:
            list(threads.map(Session.fill, (slot, other, pinned, image)))
        ways = {"both GPUs -> pinned": [(slot, image)], "pinned -> both GPUs": [(pinned, other)]}
        ways["both at once"] = [*ways["both GPUs -> pinned"], *ways["pinned -> both GPUs"]]
        for (way, pairs), ceiling in zip(ways.items(), ("out of both", "into both", "four_way"), strict=True):
            bench.long_copies(f"the same memory by one long copy each, {way}", blocks_of(setting, pairs), ceiling)
        for session in (image, other):
            session.fill()
        out, back = Case(setting, slot, image, upto), Case(setting, pinned, other, upto)
        name = f"{format}, {upto} tokens"
        bench.measure(f"both GPUs -> pinned, {name}", [out], "out of both", SPLIT)
        bench.measure(f"pinned -> both GPUs, {name}", [back], "into both", SPLIT)
        bench.measure(f"both at once, {name}", [out, back], "four_way", SPLIT_BOTH)
        for session in (slot, other, pinned, image):
            setting.reached.pop(session, None)


def blocks_of(setting: Setting, pairs: list[tuple[Session, Session]]) -> list[tuple[int, int, int, int]]:
    """(target, source, bytes, stream) of each allocation of pairs of sessions laid out alike; streams of its device."""
    return [
        (target.address(b.begin), source.address(b.begin), b.end - b.begin, stream)
        for (source, target), streams in zip(pairs, setting.streams_on(PAIR, len(pairs)), strict=True)
        for b, stream in zip(source.blocks, streams, strict=True)
    ]


def compared(bench: Bench) -> list[Figure]:
    """Rings of other shapes, a copier for each: one way, and both."""
    setting, found = bench.setting, []
    upto = setting.tokens["middle"]
    repetitions = 1 if setting.quick else 5
    for chunk in CHUNKS:
        for slots in SLOTS:
            with asked_for("off"), setting.copier_with(PAIR, relay_memory=slots * chunk << 20, relay_slots=slots):
                cases = there_and_back(setting, "int8", "middle")
                for name, these in (("one way", cases[:1]), ("both ways", cases)):
                    times = bench.timed_and_verified(f"{slots} chunks of {chunk} MiB", these, repetitions)
                    samples = spread(times, 1e-6, 4)
                    n = sum(case.bytes for case in these)
                    rate = round(n / samples["median"] / 1e6, 2)
                    text = f"a ring of {slots} chunks of {chunk} MiB, int8, {upto} tokens, {name}"
                    found.append(Figure(text, rate, "GB/s", samples=samples))
    return found
