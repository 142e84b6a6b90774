"""Pinned memory to pinned memory: by ring and helpers, by the ring alone, by the driver; a foreign copy beside it."""

from copies.loops import by_library, by_streams

from common.report import Figure, Result, spread
from common.setting import Case, Setting, verify
from neighbour.measure import IN_FLIGHT, beside_foreign
from queueing.loops import WHAT, by_submit

RATIO, SUBMIT = 6, 1.0  # goals: of the driver's speed; ms
CHUNKS, SLOTS = (2, 3, 3.5, 4, 8), (4, 8)  # MiB; of the rings that are compared
BESIDE = 4  # slots of those that a foreign copy is beside


def rows(setting: Setting, result: Result, rings: bool) -> list[Figure]:
    case = pinned_to_pinned(setting)
    name = f"pinned -> pinned, fp16, {case.upto} tokens"
    few, many = (1, 2) if setting.quick else (3, 9)
    case.spoil()
    plain = spread(by_streams(case.extents, setting.streams[:1], few, 1), 1e-6)
    result.wrong += verify(f"{name}, by the driver", case)
    case.spoil()
    ours = spread(by_library([case.plan], case.upto, setting.streams[0], many, few), 1e-6)
    took = by_submit(case.plan, case.upto, many, 1)
    submit = spread(took[:, WHAT.index("submit")], 1e-6, 4)
    cpu = spread(took[:, WHAT.index("cpu of others")], 1e3 / case.bytes)
    result.wrong += verify(name, case)
    rate = {"bytes": case.bytes, "ms": ours, "ms by cudaMemcpyAsync": plain}
    gbs = {"ours": gb_per_s(case, ours), "the driver's": gb_per_s(case, plain)}
    found = [
        Figure(f"{name}, ours / cudaMemcpyAsync", round(plain["median"] / ours["median"], 3), "", RATIO, True, rate),
        Figure(name, gbs["ours"], "GB/s"),
        Figure(f"CPU of others than the caller, {name}", cpu["median"], "ms/GB", samples=cpu),
        Figure(f"{name}, by cudaMemcpyAsync", gbs["the driver's"], "GB/s"),
        Figure(f"submit, {name}", submit["median"], "ms", SUBMIT, samples=submit),
    ]
    for way in ("d2h", "h2d"):
        case.spoil()
        found += beside_foreign(setting, case, way, "the ring", -int(-IN_FLIGHT // case.bytes), 5)
    result.wrong += verify("the ring beside a foreign copy", case)
    found.append(ring_alone(setting, result, name, many))
    return found + (compared(setting, result) if rings else [])


def ring_alone(setting: Setting, result: Result, name: str, repetitions: int) -> Figure:
    with setting.copier_with(helpers=0):
        case = pinned_to_pinned(setting)
        case.spoil()
        times = spread(by_library([case.plan], case.upto, setting.streams[0], repetitions, 1), 1e-6)
        result.wrong += verify(f"{name}, the ring alone", case)
    rate = gb_per_s(case, times)
    return Figure(f"{name}, the ring alone", rate, "GB/s", samples=times | half_of_both_ways(setting, rate))


def pinned_to_pinned(setting: Setting) -> Case:
    source, target = setting.sessions("fp16", "middle", ("pinned", "source"), ("pinned", "target"))
    return Case(setting, source, target, setting.tokens["middle"])


def gb_per_s(case: Case, ms: dict) -> float:
    return round(case.bytes / ms["median"] / 1e6, 2)


def half_of_both_ways(setting: Setting, rate: float) -> dict[str, float]:
    """Each byte crosses PCIe once in each direction, so that no ring is faster than half of the two-way ceiling."""
    return {"share of half the two-way ceiling": round(2 * rate / setting.ceilings.found["two_way"], 4)}


def compared(setting: Setting, result: Result) -> list[Figure]:
    """Rings of other shapes, alone, a copier for each."""
    found = []
    for chunk in CHUNKS:
        for slots in SLOTS:
            with setting.copier_with(device_memory=int(slots * chunk * 2**20), ring_slots=slots, helpers=0):
                case = pinned_to_pinned(setting)
                name = f"pinned -> pinned, {slots} chunks of {chunk} MiB"
                case.spoil()
                repetitions = 1 if setting.quick else 5
                times = spread(by_library([case.plan], case.upto, setting.streams[0], repetitions, 1), 1e-6)
                result.wrong += verify(name, case)
                found.append(Figure(name, gb_per_s(case, times), "GB/s", samples=times))
                if slots == BESIDE:
                    for way in ("d2h", "h2d"):
                        found += beside_foreign(setting, case, way, f"{slots} chunks of {chunk} MiB", 2, rounds=2)
    return found
