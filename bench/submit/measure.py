"""The cost of submitting one conversation from slot to slot, beside the least C that does the same."""

import threading
from contextlib import contextmanager

import numpy as np

from common.report import Figure, Result, spread
from common.setting import Case, Setting, verify
from strata_copy import CALLER_SYNCED
from submit.loops import WHAT, Twin, in_turn

GOAL = 1.05  # of the twin's time


def run(setting: Setting) -> Result:
    repetitions, warm_up = (3, 1) if setting.quick else (100, 10)
    tokens = setting.tokens["middle"]
    source, target = setting.sessions("int8", "middle", ("device", "source"), ("device", "target"))
    case = Case(setting, source, target, tokens)
    twin = Twin(case.extents)
    result = Result(
        "submit",
        {
            "copy": "slot -> slot",
            "format": "int8",
            "tokens": tokens,
            "extents": case.extents.n,
            "layers": case.extents.layers,
            "bytes": case.bytes,
            "repetitions": repetitions,
            "warm_up": warm_up,
        },
    )
    result.wrong = proofs(case, twin)
    times = in_turn(case.plan, twin, tokens, repetitions, warm_up)
    result.figures += compared(*times, "")
    result.figures += polls(times[0])
    with python_thread():
        times = in_turn(case.plan, twin, tokens, repetitions, warm_up)
    result.figures += compared(*times, ", beside a busy Python thread")
    result.figures += spoken_of(case, twin, result, repetitions, warm_up)
    return result


def spoken_of(case: Case, twin: Twin, result: Result, repetitions: int, warm_up: int) -> list[Figure]:
    """The same where the engine says what it writes: lineages are compared, and find that all has to move."""
    ours, theirs = in_turn(case.plan, twin, case.upto, repetitions, warm_up, told=True)
    for session in (case.source, case.target):
        session.state.reset()  # for those who come later nobody has spoken of it
    moved = {int(n) for n in ours[:, WHAT.index("bytes")]}
    if moved != {case.bytes}:
        result.wrong.append(f"a source that was written anew: {sorted(moved)} bytes moved, {case.bytes} are wanted")
    return compared(ours, theirs, ", lineages compared")


def proofs(case: Case, twin: Twin) -> list[str]:
    """That both bring the same bytes, each for itself."""
    case.spoil()
    case.plan.submit(case.upto, after=CALLER_SYNCED).sync()
    wrong = verify("submit", case)
    case.spoil()
    twin.copy()
    return wrong + verify("the twin", case)


def compared(ours: np.ndarray, theirs: np.ndarray, beside: str) -> list[Figure]:
    found = []
    for what, goal in (("submit", GOAL), ("waits", None)):
        column = WHAT.index(what)
        name = "submit" if what == "submit" else "wait for every layer"
        mine, its = spread(ours[:, column], 1e-3), spread(theirs[:, column], 1e-3)
        found += [
            Figure(f"{name}{beside}", mine["median"], "us", samples=mine),
            Figure(f"{name} by the twin{beside}", its["median"], "us", samples=its),
            Figure(f"{name}, ours / twin{beside}", round(mine["median"] / its["median"], 4), "", goal),
        ]
    return found


def polls(ours: np.ndarray) -> list[Figure]:
    in_flight = ours[:, WHAT.index("poll_in_flight")]
    found = [("poll of an ended copy", ours[:, WHAT.index("poll_after")])]
    if (in_flight >= 0).any():  # a copy may end sooner than it can be asked
        found.append(("poll of a copy in flight", in_flight[in_flight >= 0]))
    return [Figure(name, spread(times)["median"], "ns", samples=spread(times)) for name, times in found]


@contextmanager
def python_thread():
    """A thread that asks for the GIL all the time."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin, name="busy")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
