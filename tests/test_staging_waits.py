"""Pageable memory with each of the waits around it taken away in turn: a race with what the helpers read and write in
pinned chunks, or, as nobody judges pageable memory itself, a wrong byte in it."""

from collections import Counter

import numpy as np
import pytest

import strata_copy as sc
from fixtures import after_copy, differences
from lost_calls import LAYOUT, STAGED_ROUTES, UPTO, Beside, run
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host
BALLAST = 1000


def fill(beside, tag):
    """Gives a neighbour something to write, a pattern of its own, and returns it."""
    values = [
        np.random.default_rng((tag, i)).integers(0, 256, size, np.uint8) for i, (*_, size) in enumerate(beside.blocks)
    ]
    for mine, value in zip(beside.mine, values, strict=True):
        runtime.view(mine, value.size)[:] = value
    return values


def wrong(beside, wanted, what):
    found = [runtime.view(mine, value.size) for mine, value in zip(beside.mine, wanted, strict=True)]
    parts = [part.name for part, now, value in zip(LAYOUT.parts, found, wanted, strict=True) if (now != value).any()]
    return [f"bytes: {what}: {', '.join(parts)}"] if parts else []


def busy_stream(copies=1):
    """With a copy on it, which holds up what comes behind where it is late."""
    stream, source, target = runtime.stream_create(), runtime.host_alloc(8), runtime.malloc(8)
    for _ in range(copies):
        runtime.memcpy_async(target, source, 8, stream)
    return stream


def staged_copies(copier, a, b, c):
    """A writer of the source and a reader of the target come before; consumers of each layer and of everything, and who
    overwrites the source, come behind. Then the target goes on to a third."""
    writer, reader = busy_stream(), busy_stream()
    for _ in range(2):
        busy_stream(BALLAST // 2)  # the host runtime has something else to execute while the worker looks at its lanes
    everything, overwriter = runtime.stream_create(), runtime.stream_create()
    consumers = [runtime.stream_create() for _ in range(LAYOUT.layers)]
    writes, reads, takes, overwrites, consumed = Beside(a), Beside(b), Beside(b), Beside(a), Beside(b)
    late, old = fill(writes, 11), b.pattern()
    fill(overwrites, 12)
    writes.write_it(writer)
    reads.read_it(reader)
    ticket = copier.submit(a.state, b.state, upto=UPTO, after=[sc.Stream(writer), sc.Stream(reader)])
    for layer, stream in enumerate(consumers):
        assert ticket.wait_layer(layer, stream, timeout=60)
        consumed.read_it(stream, layer)
    assert ticket.wait_done(everything, timeout=60)
    takes.read_it(everything)
    assert ticket.wait_source(overwriter, timeout=60)
    overwrites.write_it(overwriter)
    further = copier.submit(b.state, c.state, upto=UPTO, after=sc.CALLER_SYNCED)
    while not (ticket.done and further.done):
        runtime.get_device()  # the worker has a turn
        host_runtime.step(1)
    for stream in [writer, reader, everything, overwriter, *consumers]:
        runtime.stream_synchronize(stream)
    wanted = after_copy(a, b, UPTO, source_bytes=late)
    return [
        *(["bytes: the target"] if differences(b, wanted) else []),
        *(["bytes: the third"] if differences(c, after_copy(b, c, UPTO, source_bytes=wanted)) else []),
        *wrong(reads, old, "who read the target before"),
        *wrong(consumed, wanted, "who waited for a layer"),
        *wrong(takes, wanted, "who waited for the end"),
    ]


class Lates:
    """Numbers of copies to be late, for a loss that the seed's order hides: those first that have shown others."""

    def __init__(self, copies):
        own = range(1, copies - BALLAST + 1)  # of the writer, the reader, and of the tickets
        self.numbers = [0, *(number if number <= 2 else number + BALLAST for number in own)]

    def show(self, route, call):
        """Whether one of them does."""
        for at, late in enumerate(self.numbers):
            found, _ = run(staged_copies, route, call, late=late)
            assert all(text.startswith(("race: ", "bytes: ")) or "unrecorded event" in text for text in found)
            if found:
                self.numbers.insert(0, self.numbers.pop(at))
                return True
        return False


def never_reported(route, every):
    """What is lost without a report, whichever copy is late: (function, what for) of each `every`-th call, and how many
    were looked at."""
    found, orders = run(staged_copies, route)
    assert found == []
    lates = Lates(len(host_runtime.log()))
    looked_at = [call for call in orders if call[2] != "chain"][::every]  # chains make gaps: test_races has them
    lost = Counter((function, what) for function, nth, what in looked_at if not lates.show(route, (function, nth)))
    host_runtime.configure(devices=2)
    return lost, len(looked_at)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 12])
@pytest.mark.parametrize("route", STAGED_ROUTES)
def test_each_wait_and_record_around_staged_copies_is_needed(route, every):
    lost, of = never_reported(route, every)
    print(route, lost, of)
