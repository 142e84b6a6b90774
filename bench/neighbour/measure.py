"""A foreign 64 KiB copy again and again, beside 6 GB of ours and beside the same bytes as plain queued copies."""

import numpy as np

from common.report import Figure, Result, spread
from common.setting import Case, Setting, verify
from neighbour.loops import Foreign
from strata_copy.rig import Session

P95 = 0.1  # ms
CHUNK = 32 << 20  # bytes between two gaps of a lane
SHORTER = 4, 8, 16  # MiB, of lanes that leave more gaps
FOREIGN, PERIOD = 64 << 10, 500_000  # bytes, ns
IN_FLIGHT = 6e9  # bytes, at least


def run(setting: Setting) -> Result:
    rounds = 1 if setting.quick else 10
    tokens = setting.tokens["middle"]
    slot, other = setting.sessions("int8", "middle", ("device", "source"), ("device", "target"))
    pinned, image = setting.sessions("int8", "middle", ("pinned", "source"), ("pinned", "target"))
    cases = {"d2h": Case(setting, slot, image, tokens), "h2d": Case(setting, pinned, other, tokens)}
    copies = 2 if setting.quick else -int(-IN_FLIGHT // cases["d2h"].bytes)
    result = Result(
        "neighbour",
        {
            "format": "int8",
            "tokens": tokens,
            "bytes in flight": copies * cases["d2h"].bytes,
            "foreign bytes": FOREIGN,
            "foreign pause ms": PERIOD / 1e6,
            "rounds": rounds,
        },
    )
    setting.ceilings.measure()
    found = {way: direction(setting, result, case, way, copies, rounds) for way, case in cases.items()}
    shorter = shorter_chunks(setting, result, {"d2h": (slot, image), "h2d": (pinned, other)}, copies)
    setting.check_ceilings(result)
    for way, times in found.items():
        result.figures += figures(way, times, setting.ceilings.found[way], copies * cases[way].bytes)
    result.figures += shorter
    return result


def direction(setting: Setting, result: Result, case: Case, way: str, copies: int, rounds: int) -> dict:
    """Foreign times and those of the long copies: alone, beside ours, beside plain copies. In ns."""
    foreign = Foreign(FOREIGN, PERIOD, way == "h2d")
    try:
        case.spoil()
        found = {"alone": (foreign.alone(20 if setting.quick else 500), [])}
        found |= beside_ours(foreign, case, copies, rounds)
        result.wrong += verify(f"beside a foreign copy, {way}", case)
        plain = [foreign.beside_plain(case.extents, setting.streams[0], copies) for _ in range(rounds)]
    finally:
        foreign.close()
    return found | {"plain": joined(plain)}


def shorter_chunks(
    setting: Setting, result: Result, pairs: dict[str, tuple[Session, Session]], copies: int
) -> list[Figure]:
    """What foreign copies wait and what ours move with more gaps, a copier for each."""
    found = []
    for mib in SHORTER:
        with setting.copier_with(chunk=mib << 20):
            for way, (source, target) in pairs.items():
                case = Case(setting, source, target, setting.tokens["middle"])
                case.spoil()
                found += beside_foreign(setting, case, way, f"chunks of {mib} MiB", copies, 3, chunk=mib << 20)
                result.wrong += verify(f"beside a foreign copy, {way}, chunks of {mib} MiB", case)
    return found


def beside_ours(foreign: Foreign, case: Case, copies: int, rounds: int) -> dict:
    """Foreign times and those of the long copies, in ns: with sleeps in between, and at random."""
    found = {}
    for name in ("at random", "ours"):
        foreign.at_random = name == "at random"
        found[name] = joined([foreign.beside_library(case.plan, case.upto, copies) for _ in range(rounds)])
    return found


def beside_foreign(
    setting: Setting, case: Case, way: str, whom: str, copies: int, rounds: int, chunk: int = CHUNK
) -> list[Figure]:
    """Foreign copies in the direction `way` beside some of one case: with sleeps in between, and at random.

    chunk: bytes between two gaps of the case.
    """
    copies, rounds = (1, 1) if setting.quick else (copies, rounds)
    foreign = Foreign(FOREIGN, PERIOD, way == "h2d")
    try:
        found = beside_ours(foreign, case, copies, rounds)
    finally:
        foreign.close()
    rate = round(copies * case.bytes / float(np.median(found["at random"][1])), 2)
    ceiling = setting.ceilings.found[way]
    share = {"share of the ceiling": round(rate / ceiling, 4)}
    return [*waits(way, whom, found, ceiling, chunk), Figure(f"{way}: {whom} meanwhile", rate, "GB/s", samples=share)]


def joined(rounds: list) -> tuple[np.ndarray, list[int]]:
    return np.concatenate([times for times, _ in rounds]), [took for _, took in rounds]


def figures(way: str, found: dict, ceiling: float, in_flight: int) -> list[Figure]:
    times = {name: spread(found[name][0], 1e-6, 4) for name in ("plain", "alone")}
    # At random, for there the end is looked for all the time.
    rate = {name: round(in_flight / float(np.median(found[name][1])), 2) for name in ("at random", "plain")}
    share = {"share of the ceiling": round(rate["at random"] / ceiling, 4)}
    return [
        *waits(way, "ours", found, ceiling, CHUNK),
        Figure(f"{way}: ours meanwhile", rate["at random"], "GB/s", samples=share),
        Figure(f"{way} beside plain copies, p50", times["plain"]["median"], "ms", samples=times["plain"]),
        Figure(f"{way}: the plain ones meanwhile", rate["plain"], "GB/s"),
        Figure(f"{way} alone, p50", times["alone"]["median"], "ms", samples=times["alone"]),
    ]


def waits(way: str, whom: str, found: dict, ceiling: float, chunk: int) -> list[Figure]:
    """What the foreign copies took beside `whom`. ceiling: of their way, GB/s. chunk: bytes between two gaps."""
    limit, figures = round(chunk / ceiling / 1e6 + P95, 3), []
    for name, when in (("ours", way), ("at random", f"{way} at random")):
        times = spread(found[name][0], 1e-6, 4)
        figures += [
            Figure(f"{when} beside {whom}, p50", times["median"], "ms", samples=times),
            Figure(f"{when} beside {whom}, p95", times["p95"], "ms", P95),
            Figure(f"{when} beside {whom}, max", times["worst"], "ms", limit),
        ]
    return figures
