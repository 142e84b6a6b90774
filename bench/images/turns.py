"""What a turn costs: a slot that has read a few tokens is parked, and the image is taken into another slot."""

import numpy as np

from common.report import Figure, Result, spread
from common.setting import Case, Setting
from images.cases import Park
from images.loops import moved
from strata_copy.rig import Session, conversation, differences, put

NEW = 383  # tokens


def rows(setting: Setting, result: Result, park: Park, take: Case) -> list[Figure]:
    """Turns at the end of the conversation. The slot gets other content there, and its lineage is told from here on."""
    slot, other, image, stream = park.source, take.target, park.image, setting.streams[0]
    new, turns = (3, 2) if setting.quick else (NEW, 9)
    upto, begin = park.upto, park.upto - turns * new
    back = setting.copier.plan(image, slot.state)
    park.spoil()
    take.spoil()
    content = {"prefix": begin, "numbers": (slot.number, slot.number + 1000, slot.number + 2000)}
    put(slot, conversation(slot, upto, begin=begin, **content))
    parked, taken = [], []
    for length in range(begin, upto + 1, new):
        slot.state.advanced(length)
        parked.append(moved(park.plan, length, stream))
        image.publish()
        taken.append(moved(take.plan, length, stream))
    moved(back, upto, stream)  # brings the spare rows: those of the slot are what its engine wrote
    idle = [moved(plan, upto, stream) for plan in (back, park.plan)]
    image.publish()
    idle.append(moved(take.plan, upto, stream))
    result.wrong += [f"turns: {line}" for line in differences(other, conversation(other, upto, **content))]
    name = f"a turn of {new} of {upto} tokens"
    least = [changed(slot, length, length - new, content) for length in range(begin + new, upto + 1, new)]
    return [
        *figures(f"{name}, park", parked[1:], least),
        *figures(f"{name}, take into another slot", taken[1:], least),
        Figure("takes and a park where nothing was decoded", max(n for n, *_ in idle), "bytes", 0, samples=times(idle)),
    ]


def changed(slot: Session, upto: int, begin: int, content: dict) -> int:
    """Bytes of new rows, units that were partly filled, and running state, by the rig's arithmetic."""
    return sum(span.end - span.begin for span in conversation(slot, upto, begin=begin, **content))


def figures(name: str, copies: list[tuple[int, int, int]], least: list[int]) -> list[Figure]:
    """The mean of all turns' bytes beside that of what they must move, for a unit is partly filled now and then."""
    samples = times(copies)
    return [
        Figure(f"{name}: bytes", float(np.mean([n for n, *_ in copies])), "bytes", float(np.mean(least))),
        Figure(name, samples["ms"]["median"], "ms", samples=samples),
    ]


def times(copies: list[tuple[int, int, int]]) -> dict:
    _, submits, whole = zip(*copies, strict=True)
    return {"ms": spread(whole, 1e-6, 4), "us inside submit": spread(submits, 1e-3, 2)}
