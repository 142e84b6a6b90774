"""Conversations between a slot and an image, in shares of what the hardware gives, what is beside them, and turns."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from common.report import Figure, Result
from common.setting import Case, Setting, verify
from copies.measure import BOTH_WAYS, PINNED, Bench
from images import kernel, turns
from images.cases import Park
from neighbour.measure import IN_FLIGHT, beside_foreign
from strata_copy import CALLER_SYNCED, Arena, Image
from strata_copy.presets import qwen3_8_flash_next
from strata_copy.rig import Session

STEPS, QUICK_STEPS = 100, 5  # turns in which an image grows
CHUNK, QUICK_CHUNK = 4096, 128  # tokens
PIECE, QUICK_PIECE = 1 << 30, 256 << 20


def run(setting: Setting, long: bool = True) -> Result:
    repetitions, warm_up = (2, 1) if setting.quick else (9, 3)
    format, length = ("k8v4", "long") if long and setting.has_room(2) else ("int8", "middle")
    upto = setting.tokens[length]
    result = Result("images", {"format": format, "tokens": upto, "repetitions": repetitions, "warm_up": warm_up})
    bench = Bench(setting, result, repetitions, warm_up)
    setting.ceilings.measure()
    with memory(setting, format, upto) as (slot, other, arena):
        found = Images(bench, slot, other, arena, upto)
        try:
            found.grown(f"{format}, {upto} tokens", QUICK_STEPS if setting.quick else STEPS)
            figures = found.landed(f"{format}, {upto} tokens")
        finally:
            found.discard()
    setting.check_ceilings(result)
    result.figures += [*bench.shares(), *figures]
    return result


@contextmanager
def memory(setting: Setting, format: str, upto: int) -> Iterator[tuple[Session, Session, Arena]]:
    """Two filled slots, and an arena with room for two images of them."""
    layout = qwen3_8_flash_next(format, draft=False)
    piece = QUICK_PIECE if setting.quick else PIECE
    with Session(layout, upto, number=101) as slot, Session(layout, upto, number=102) as other:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Session.fill, (slot, other)))
        # Of each part that grows a chunk may be used in part, and of each piece the end.
        with Arena(-int(-2.1 * slot.bytes // piece) * piece, piece=piece) as arena:
            if arena.refusal:
                raise RuntimeError(f"no room for two images: {arena.refusal}")
            yield slot, other, arena


class Images:
    """The cases of one conversation. `discard` its images in the end: the latest tickets refer to them."""

    def __init__(self, bench: Bench, slot: Session, other: Session, arena: Arena, upto: int) -> None:
        self.bench, self.setting = bench, bench.setting
        self.slot, self.other, self.arena, self.upto = slot, other, arena, upto
        self.made: list[Image] = []

    def grown(self, name: str, steps: int) -> None:
        """An image that has grown turn by turn, each of them parked; beside it the same extents on one stream."""
        image = self.image()
        plan, begin = self.setting.copier.plan(self.slot.state, image), 0
        for length in (self.upto * step // steps for step in range(1, steps + 1)):
            plan.submit(length, begin=begin, after=CALLER_SYNCED).sync()
            begin = length
        park = Park(self.setting, self.slot, image, self.upto)
        image.publish()
        take = self.take(image)
        for direction, case, way in (("slot -> image", park, "d2h"), ("image -> slot", take, "h2d")):
            self.bench.measure(f"{direction}, {name}, grown over {steps} turns", [case], way, None)
            self.bench.measure(f"the same by one bare stream, {direction}, grown", [case], way, None, bare=1)
        self.discard()

    def landed(self, name: str) -> list[Figure]:
        """Images that have landed in one copy. Returns the figures that are no shares."""
        park, at_once = (Park(self.setting, self.slot, self.image(), self.upto) for _ in range(2))
        self.bench.measure(f"slot -> image, {name}", [park], "d2h", PINNED)
        take = self.take(park.image)
        self.bench.measure(f"image -> slot, {name}", [take], "h2d", PINNED)
        self.bench.measure(f"both directions at once, {name}", [at_once, take], "two_way", BOTH_WAYS)
        return [*self.beside(at_once, take), *turns.rows(self.setting, self.bench.result, park, take)]

    def beside(self, park: Park, take: Case) -> list[Figure]:
        """A foreign copy in the same direction and a kernel that reads, beside a park and beside a take."""
        found = []
        for whom, case, way in (("a park", park, "d2h"), ("a take", take, "h2d")):
            case.spoil()
            copies = max(1, round(IN_FLIGHT / case.bytes))
            found += beside_foreign(self.setting, case, way, whom, copies, rounds=10)
        found += kernel.rows(self.bench.result, {"a park": park, "a take": take}, self.setting.quick)
        self.bench.result.wrong += verify("beside a foreign copy and a kernel", park, take)
        return found

    def image(self) -> Image:
        chunk = QUICK_CHUNK if self.setting.quick else CHUNK
        self.made.append(Image(self.arena, self.slot.layout, chunk=chunk))
        return self.made[-1]

    def take(self, image: Image) -> Case:
        """The whole conversation from an image that is published into the other slot."""
        return Case(self.setting, self.slot, self.other, self.upto, image=image)

    def discard(self) -> None:
        while self.made:
            self.made.pop().discard()
