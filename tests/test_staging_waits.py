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
    ticket = copier.submit(a.state, b.state, upto=UPTO, after=[sc.Stream(writer), sc.Stream(reader)], feed=True)
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


class LateCopies:
    """Numbers of copies to be late, for a loss that the seed's order hides: those first that have shown others."""

    def __init__(self, route, base, copies):
        self.route, self.base = route, base
        own = range(1, copies - BALLAST + 1)  # of the writer, the reader, and of the tickets
        self.numbers = [0, *(number if number <= 2 else number + BALLAST for number in own)]
        self.orders = {late: run(staged_copies, route, late=late)[1] for late in self.numbers}

    def show(self, call):
        """Whether one of them does under which the same calls are made up to this one: else another would be lost."""
        before = self.base[: self.base.index(call) + 1]
        for at, late in enumerate(self.numbers):
            if self.orders[late][: len(before)] != before:
                continue
            found, _ = run(staged_copies, self.route, call[:2], late=late)
            assert all(text.startswith(("race: ", "bytes: ")) or "unrecorded event" in text for text in found)
            if found:
                self.numbers.insert(0, self.numbers.pop(at))
                return True
        return False


WAITS = {("cudaStreamWaitEvent", what) for what in ("mark", "finish mark", "end")}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 12])
@pytest.mark.parametrize("route", STAGED_ROUTES)
def test_each_wait_and_record_around_staged_copies_is_needed(route, every):
    """But for those that say again what the worker knows: it has seen on the host that a chunk is over before it lets
    a layer or a ticket end that goes to pageable memory, or comes from there. Streams wait for the events of such a
    layer all the same, as parts beside it may need it (`beside`: there each is needed). A chunk's own record is hidden
    where the event of the next chunk on the lane was seen before the chunk was used again; and for the end of the last
    ticket nobody waits but by its word."""
    found, orders = run(staged_copies, route)
    assert found == []
    late_copies, lost, of = LateCopies(route, orders, len(host_runtime.log())), Counter(), Counter()
    for call in [call for call in orders if call[2] not in ("query", "chain")][::every]:  # chains: test_races has them
        of[call[0], call[2]] += 1
        lost[call[0], call[2]] += not late_copies.show(call)
    host_runtime.configure(devices=2)
    lost, record = +lost, "cudaEventRecord"
    print(route, lost, of)
    assert set(lost) <= {(record, "chunk"), (record, "end"), *WAITS}
    assert lost[record, "chunk"] < of[record, "chunk"] or not of[record, "chunk"]
    assert lost[record, "end"] <= 1
    if route == "beside":
        assert lost["cudaStreamWaitEvent", "mark"] == lost["cudaStreamWaitEvent", "end"] == 0


@pytest.mark.parametrize("route", [route for route in STAGED_ROUTES if route not in ("beside", "helped")])
def test_a_chunk_that_is_taken_for_ready_is_reported(route):
    """Unless the lane happened to be done with it. Not where other things are asked for too: how far a lane is."""
    _, orders = run(staged_copies, route)
    queries = [nth for _, nth, what in orders if what == "query"][::4]
    lost = [nth for nth in queries if not run(staged_copies, route, ("cudaEventQuery", nth))[0]]
    host_runtime.configure(devices=2)
    assert len(lost) < len(queries) / 2


def test_helpers_that_begin_before_the_source_is_written_are_reported():
    """Beside a ring they read what the ticket waits for, which its first looks are for."""
    found, orders = run(staged_copies, "helped")
    assert found == []
    first = next(nth for _, nth, what in orders if what == "query")
    found, _ = run(staged_copies, "helped", ("cudaEventQuery", first))
    host_runtime.configure(devices=2)
    assert any("race: " in text and "host_read" in text for text in found), found
