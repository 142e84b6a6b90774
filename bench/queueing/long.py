"""The longest conversation from its slot to pinned memory: what it takes of the caller, Python and the CPU."""

import time

import numpy as np
from copies.latency import Watch

from common.report import Figure, Result, spread
from common.setting import Case, Setting, verify
from queueing.counter import Counter
from queueing.loops import WHAT, by_submit, idle
from strata_copy import CALLER_SYNCED

SUBMIT, FIRST_LAYER = 1.0, 0.5  # goals: ms
COUNTER = 0.9  # of its rate alone
IDLE = 100  # us of CPU a second that a copier adds: the worker wakes once
SETTLE = 0.05  # s: threads that were told to end take processor time until they have


def rows(setting: Setting, result: Result, long: bool) -> list[Figure]:
    format, length = ("k8v4", "long") if long and setting.has_room(1) else ("int8", "middle")
    slot, image = setting.sessions(format, length, ("device", "source"), ("pinned", "target"))
    case = Case(setting, slot, image, setting.tokens[length])
    name = f"slot -> pinned, {format}, {case.upto} tokens"
    case.spoil()
    times = by_submit(case.plan, case.upto, 3 if setting.quick else 20, 1 if setting.quick else 3)
    share = counting(case, 1 if setting.quick else 5)
    ready = first_layer(case, 3 if setting.quick else 10)
    result.wrong += verify(name, case)
    return [*held(name, case, times), share, ready, *at_rest(setting, 0.05 if setting.quick else 2.0)]


def held(name: str, case: Case, times: np.ndarray) -> list[Figure]:
    """Of the caller and of the processors."""
    column = {what: times[:, i] for i, what in enumerate(WHAT)}
    submit, per_gb = spread(column["submit"], 1e-6, 4), spread(column["cpu"], 1e3 / case.bytes)
    submit |= {"bytes": case.bytes, "ms until sync returns": spread(column["whole"], 1e-6)}
    per_gb["without the caller's thread"] = spread(column["cpu of others"], 1e3 / case.bytes)
    return [
        Figure(f"submit, {name}", submit["median"], "ms", SUBMIT, samples=submit),
        Figure(f"CPU of the process, {name}", per_gb["median"], "ms/GB", samples=per_gb),
    ]


def counting(case: Case, rounds: int) -> Figure:
    """Rounds of three whole copies through the Python API, each behind as long a time in which nothing is copied."""

    def copy() -> None:
        for _ in range(3):
            case.plan.submit(case.upto, after=CALLER_SYNCED).sync()

    shares, rates = [], []
    with Counter() as counter:
        _, seconds = counter.beside(copy)
        for _ in range(rounds):
            alone, _ = counter.beside(lambda seconds=seconds: time.sleep(seconds))
            beside, seconds = counter.beside(copy)
            shares.append(beside / alone)
            rates.append(alone)
    samples = spread(shares) | {"counts a second alone": spread(rates, digits=0)}
    return Figure("a Python counter beside it", samples["median"], "of its rate", COUNTER, more=True, samples=samples)


def first_layer(case: Case, repetitions: int) -> Figure:
    watch = Watch(0)
    try:
        times = spread(watch.run(case.plan, case.upto, repetitions, 1, True), 1e-6, 4)
    finally:
        watch.close()
    return Figure("layer 0 ready, the same, fed", times["median"], "ms", FIRST_LAYER, samples=times)


def at_rest(setting: Setting, seconds: float) -> list[Figure]:
    """Of the whole process with nothing to do: the copier open, and closed, for the driver has threads of its own.

    Where the difference is less than the noise, it is 0.
    """
    with_it = us_a_second(seconds)
    with setting.no_copier():
        without = us_a_second(seconds)
    samples = {"seconds": seconds, "us/s with it": with_it, "us/s without": without}
    return [
        Figure("CPU of the copier at rest", round(max(0.0, with_it - without), 2), "us/s", IDLE, samples=samples),
        Figure("CPU of the process at rest without it", without, "us/s"),
    ]


def us_a_second(seconds: float) -> float:
    idle(int(SETTLE * 1e9))
    return round(idle(int(seconds * 1e9)) / 1e3 / seconds, 2)
