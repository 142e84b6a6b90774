"""Tickets that the worker queues in windows: the same bytes, honest waits, order, priorities, cancelling."""

import itertools
import random
import threading
import time

import pytest

import strata_copy as sc
from fixtures import (
    HOST,
    SYNCED,
    after_copy,
    differences,
    needed_by,
    read,
    small_layout,
    two_devices,
    untouched,
)
from host_table import Gate
from strata_copy import host_runtime, runtime

LAYOUT = small_layout("k8v4")
UPTO = 90
ROUTES = {
    "local": ("device", "device"),
    "out": ("device", "pinned"),
    "in": ("pinned", "device"),
    "ring": ("pinned", "pinned"),
    "helped": ("pinned", "pinned"),
    "mixed": (
        lambda i, part: {"kind": ("device", "device", "pinned", "pinned")[i % 4]},
        lambda i, part: {"kind": ("device", "pinned", "device", "pinned")[i % 4]},
    ),
}
# Every window with every ring; in the short tier each of them once.
SHAPES = [
    pytest.param(window, ring, marks=() if (window, ring) in {(1, 1), (2, 2), (7, 4)} else pytest.mark.long)
    for window in (1, 2, 7)
    for ring in (1, 2, 4)
]


def small(window=2, ring=2, chunk=3000, **how):
    """A copier in whose eyes the small conversation is long."""
    how = {"layer_events": 24, "device_memory": ring * 2048, "ring_slots": ring, **how}
    return sc.Copier(two_devices(), tickets=8, chunk=chunk, window=window, **how)


def helpers_of(route):
    """Helpers copy beside a ring where the copy is a few times as long as a chunk of theirs."""
    return {"pinned_memory": 4 * 512} if route == "helped" else {}


def sync_all(tickets):
    for ticket in tickets:
        assert ticket.sync()


@pytest.mark.parametrize(("window", "ring"), SHAPES)
@pytest.mark.parametrize("route", ROUTES)
def test_a_fed_copy_has_the_same_bytes(memory, seed, route, ring, window):
    a, b = memory(LAYOUT, 1, ROUTES[route][0]), memory(LAYOUT, 2, ROUTES[route][1])
    with small(window, ring, **helpers_of(route)) as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)
        assert ticket.sync()
        assert ticket.poll().bytes == ticket.bytes
        assert differences(b, after_copy(a, b, UPTO)) == []
        assert untouched(a)


@pytest.mark.parametrize("route", ROUTES)
def test_a_long_copy_is_fed_and_a_short_one_is_not(memory, route):
    """In scheduled mode the worker runs only inside calls, so what submit leaves unqueued is seen."""
    if HOST:
        host_runtime.configure(devices=2, seed=1)
    a, b = memory(LAYOUT, 1, ROUTES[route][0]), memory(LAYOUT, 2, ROUTES[route][1])
    with small(window=1, chunk=2000, **helpers_of(route)) as copier:
        plan = copier.plan(a.state, b.state)
        queued = {}
        for feed in (True, False, None):
            ticket = plan.submit(UPTO, after=SYNCED, feed=feed)
            queued[feed] = ticket.poll().layers_queued
            assert ticket.sync()
        assert queued[False] == LAYOUT.layers
        if HOST and route != "local":  # copies within a device have no chunks
            assert queued[True] < LAYOUT.layers
            assert queued[None] < LAYOUT.layers


@pytest.mark.parametrize("fed", [False, True], ids=["whole", "fed"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_layer_is_there_behind_its_wait(memory, seed, route, fed):
    """A consumer of each layer, queued behind wait_layer as soon as that says OK, while the lanes are held up."""
    a, b = memory(LAYOUT, 1, ROUTES[route][0]), memory(LAYOUT, 2, ROUTES[route][1])
    writer, consumers = runtime.stream_create(), [runtime.stream_create() for _ in range(LAYOUT.layers)]
    copies = [(layer, part, block) for layer in range(LAYOUT.layers)
              for part, block in zip(LAYOUT.parts, b.blocks, strict=True) if needed_by(part) == layer]  # fmt: skip
    seen = {id(block): runtime.host_alloc(block[2]) for _, _, block in copies}
    with small(**helpers_of(route)) as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=sc.Stream(writer), feed=fed)
        for layer in random.Random(seed).sample(range(LAYOUT.layers), LAYOUT.layers):
            assert ticket.wait_layer(layer, consumers[layer], timeout=60)
            for wanted, _, block in copies:
                if wanted == layer:
                    runtime.memcpy_async(seen[id(block)], block[1], block[2], consumers[layer])
        assert ticket.sync()
        for stream in consumers:
            runtime.stream_synchronize(stream)
        wanted = dict(zip(map(id, b.blocks), after_copy(a, b, UPTO), strict=True))
        for *_, block in copies:
            assert bytes(runtime.view(seen[id(block)], block[2])) == wanted[id(block)].tobytes()


@pytest.mark.host
@pytest.mark.parametrize("fed", [False, True], ids=["whole", "fed"])
def test_lanes_that_are_held_for_a_second_let_nobody_by(memory, fed):
    """The first and the last of 48 layers are asked for meanwhile."""
    layout = small_layout("k8v4", layers=48)
    a, b = memory(layout, 1), memory(layout, 2, "pinned")
    writer, asked = runtime.stream_create(), {layer: runtime.stream_create() for layer in (0, 47)}
    gate, began = Gate(writer), time.monotonic()
    opening = threading.Timer(1, gate.open)
    opening.start()
    with small(layer_events=60) as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=sc.Stream(writer), feed=fed)
        seen = []
        for layer, stream in asked.items():
            assert ticket.wait_layer(layer, stream, timeout=60)
            for i, (part, (_, base, size)) in enumerate(zip(layout.parts, b.blocks, strict=True)):
                if needed_by(part) == layer:
                    seen.append((i, runtime.malloc(size), size))
                    runtime.memcpy_async(seen[-1][1], base, size, stream)
        for stream in asked.values():
            runtime.stream_synchronize(stream)
        assert time.monotonic() - began > 0.9
        wanted = after_copy(a, b, UPTO)
        assert len(seen) > 5
        assert all((read(address, size) == wanted[i]).all() for i, address, size in seen)
        assert ticket.sync(timeout=60)
    opening.join()


@pytest.mark.parametrize("ahead", [1, 1023, 1024])
def test_however_few_bytes_may_be_ahead_pieces_are_worth_a_call(memory, ahead):
    if HOST:
        host_runtime.configure(devices=2, seed=1)
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    with small() as copier:
        before = host_runtime.calls()["cudaMemcpyAsync"] if HOST else 0
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, bytes_ahead=ahead)
        assert ticket.sync()
        assert not HOST or host_runtime.calls()["cudaMemcpyAsync"] - before < ticket.bytes / 512 + 100
        assert differences(b, after_copy(a, b, UPTO)) == []


def test_a_layer_that_the_worker_has_not_queued_is_not_there_yet(memory, held):
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    stream = runtime.stream_create()
    with small(window=1, chunk=2000) as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=held.wait, feed=True)
        if ticket.poll().layers_queued < LAYOUT.layers:
            began = time.monotonic()
            assert not ticket.wait_layer(LAYOUT.layers - 1, stream)
            assert time.monotonic() - began < 5
        held.open()
        assert ticket.wait_layer(LAYOUT.layers - 1, stream, timeout=60)
        assert ticket.wait_done(stream, timeout=60)
        assert ticket.sync()
        assert differences(b, after_copy(a, b, UPTO)) == []


def test_what_a_fed_copy_waits_for_is_noted_at_submit(memory, seed):
    """The event that it names is recorded anew, and destroyed, before the worker has come to it."""
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    writer, other = runtime.stream_create(), runtime.stream_create()
    with small(window=1) as copier:
        first = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)
        event = runtime.event_create()
        runtime.event_record(event, writer)
        second = copier.submit(a.state, b.state, upto=UPTO, after=[sc.Event(event), sc.Stream(writer)], feed=True)
        runtime.event_record(event, other)
        runtime.event_destroy(event)
        sync_all([first, second])
        assert differences(b, after_copy(a, b, UPTO)) == []


def test_marks_and_banks_of_the_request_are_read_at_submit(memory, seed):
    """Python's own values are gone when the worker comes to the second window."""
    banked = {"banks": 3}
    states = [memory(LAYOUT, n, lambda i, part: banked if part.growth.rule == "state" else {}) for n in (1, 2)]
    with small(window=1) as copier:
        ticket = copier.submit(
            states[0].state, states[1].state, upto=[UPTO], begin=[13], src_bank=2, dst_bank=1, after=SYNCED, feed=True
        )
        assert ticket.sync()
        wanted = after_copy(*states, UPTO, begin=(13,), src_bank={"main": 2}, dst_bank={"main": 1})
        assert differences(states[1], wanted) == []


def test_a_chain_of_fed_copies_ends_in_order(memory, seed):
    """Each reads what the one before it writes; and a short copy behind them is fed too."""
    held = [memory(LAYOUT, n, kind) for n, kind in enumerate(["device", "pinned", "pinned", "device", "device"], 1)]
    with small(window=1) as copier:
        tickets = [
            copier.submit(x.state, y.state, upto=UPTO, after=SYNCED, feed=True) for x, y in itertools.pairwise(held)
        ]
        assert copier.submit(held[-1].state, held[0].state, upto=3, after=SYNCED, feed=False) is None or not HOST
        tickets.append(copier.submit(held[-1].state, held[0].state, upto=3, after=SYNCED))
        sync_all(reversed(tickets))
        values = held[0].pattern()
        for x, y in itertools.pairwise(held):
            values = after_copy(x, y, UPTO, source_bytes=values)
            assert differences(y, values) == []


@pytest.mark.parametrize(("window", "ring"), SHAPES)
def test_a_random_programme_of_fed_copies(memory, seed, window, ring):
    """As its namesake in test_order: short and long, of both priorities, behind each other, looked at and cancelled
    at random. A model copies in the order of submits; what a cancelled copy leaves is not looked at."""
    print(f"seed {seed}")
    chance = random.Random(seed * 100 + window * 10 + ring)
    kinds = ["device", "pinned", "device", "pinned", "pinned"]
    held = [memory(LAYOUT, n, kind) for n, kind in enumerate(kinds, 1)]
    model, stream = [one.pattern() for one in held], runtime.stream_create()
    with small(
        window, ring, chance.choice([700, 3000, 20000]), **helpers_of(chance.choice(["ring", "helped"]))
    ) as copier:
        flying, lost = [], set()
        for _ in range(15):
            x, y = chance.sample(range(5), 2)
            upto = chance.randint(20, 90)
            how = {"feed": chance.choice([None, True]), "priority": chance.choice([0, -1]),
                   "bytes_ahead": chance.choice([0, 1, 5000]), "begin": chance.choice([None, 11])}  # fmt: skip
            ticket = submit_if_valid(copier, held[x], held[y], upto, how)
            if ticket is INVALID:
                continue
            if ticket is None:
                _, oldest = flying.pop(0)
                finish(oldest)
                copier.finished()
                continue
            flying.append((y, ticket))
            begin = None if how["begin"] is None else (how["begin"],)
            model[y] = after_copy(held[x], held[y], upto, before=model[y], source_bytes=model[x], begin=begin)
            assert x not in lost
            what = chance.randrange(6)
            if what == 0 and ticket.cancel():
                lost.add(y)
            elif what == 1:
                ticket.wait_layer(chance.randrange(LAYOUT.layers), stream)
            if HOST:
                host_runtime.step(chance.randint(0, 30))
        ended = [finish(ticket) for _, ticket in flying]
        lost |= {y for (y, _), well in zip(flying, ended, strict=True) if not well}
        for i, (one, wanted) in enumerate(zip(held, model, strict=True)):
            assert i in lost or differences(one, wanted) == []
        for one in held:
            one.state.reset()


INVALID = object()


def submit_if_valid(copier, source, target, upto, how):
    """A source is refused from the moment at which a copy into it is cancelled."""
    try:
        return copier.submit(source.state, target.state, upto=upto, after=SYNCED, **how)
    except sc.Refused as refused:
        if refused.reason != "invalid":
            raise
        return INVALID


def finish(ticket):
    try:
        return ticket.sync()
    except (sc.Cancelled, sc.Failed):
        return False


@pytest.mark.parametrize("route", ROUTES)
def test_a_copy_is_cancelled_at_every_chunk(memory, route):
    """In scheduled mode, after every number of steps: what has landed is told, the rest is as before, and the target is
    INVALID until it is reset."""
    a, b = (memory(LAYOUT, n, where) for n, where in enumerate(ROUTES[route], 1))
    places = set()
    for steps in range(0, 400, 3):
        if HOST:
            host_runtime.configure(devices=2, seed=steps)
            a, b = (type(a)(LAYOUT, n, where) for n, where in enumerate(ROUTES[route], 1))
        else:
            b.fill()
        with small(window=1, chunk=2000, **helpers_of(route)) as copier:
            ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)
            for _ in range(steps):
                ticket.poll()
                if HOST:
                    host_runtime.step(1)
                    runtime.get_device()  # the worker has a turn
            stopped = ticket.cancel()
            if not stopped:
                assert ticket.sync()
                assert differences(b, after_copy(a, b, UPTO)) == []
                break
            with pytest.raises(sc.Cancelled) as cancelled:
                ticket.sync()
            assert f"of {ticket.bytes} bytes" in str(cancelled.value)
            places.add(cancelled.value.found)
            assert not b.state.valid
            assert repr(ticket).endswith(" bytes, cancelled>")
            assert untouched(a)
            whole = after_copy(a, b, UPTO)
            changed = sum(int((now != old).sum()) for now, old in zip(b.bytes(), b.pattern(), strict=True))
            assert changed <= cancelled.value.found
            for now, old, new in zip(b.bytes(), b.pattern(), whole, strict=True):
                assert ((now == old) | (now == new)).all()
            with pytest.raises(sc.Refused):
                copier.submit(b.state, a.state, upto=UPTO, after=SYNCED)
            with pytest.raises(sc.Cancelled):
                ticket.wait_done(0x1234)
            b.state.reset()
            b.fill()
            assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
            assert differences(b, whole) == []
        if HOST:
            assert host_runtime.violations() == []
    if HOST:
        assert len(places) > (3 if route == "local" else 8)


def test_readers_of_a_cancelled_copy_fail_and_others_go_on(memory, held):
    a, b, c, d = (memory(LAYOUT, n, kind) for n, kind in enumerate(["device", "pinned", "device", "pinned"], 1))
    with small(window=1, chunk=2000) as copier:
        first = copier.submit(a.state, b.state, upto=UPTO, after=held.wait, feed=True)
        reader = copier.submit(b.state, c.state, upto=UPTO, after=SYNCED)
        other = copier.submit(a.state, d.state, upto=UPTO, after=SYNCED)
        assert first.cancel()
        held.open()
        with pytest.raises(sc.Cancelled):
            first.sync()
        with pytest.raises(sc.Failed):
            reader.sync()
        assert other.sync()
        assert (b.state.valid, d.state.valid) == (False, True)
        assert untouched(c)
        assert differences(d, after_copy(a, d, UPTO)) == []
        for one in (b, c):
            one.state.reset()


@pytest.mark.host
def test_what_a_ring_took_of_a_cancelled_copy_lands_before_its_end(memory):
    """Each layer has parts of several routes: at no step does anything stay in the ring for a later ticket to send."""

    def where(ring):
        return lambda i, part: {"kind": "pinned" if part.name in ("k", "recurrent") else ring}

    for ahead in range(1100, 9000, 700):
        host_runtime.configure(devices=2, seed=ahead)
        a, b, c, d = (
            memory(LAYOUT, n, kind) for n, kind in enumerate([where("device"), where("device"), "pinned", "pinned"], 1)
        )
        with small(window=1, chunk=1 << 20) as copier:
            ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, bytes_ahead=ahead)
            assert ticket.cancel()
            with pytest.raises(sc.Cancelled):
                ticket.sync()
            b.state.reset()
            b.fill()
            assert copier.submit(c.state, d.state, upto=UPTO, after=SYNCED).sync()
            assert untouched(b)
        assert host_runtime.violations() == []


@pytest.mark.parametrize("written_again", [False, True])
def test_the_target_of_a_cancelled_copy_is_refused_as_a_source_before_that_has_ended(memory, held, written_again):
    """Also where a copy that was submitted since writes some of it."""
    a, b, c, d = (memory(LAYOUT, n, kind) for n, kind in enumerate(["device", "pinned", "device", "device"], 1))
    with small(window=1, chunk=2000) as copier:
        first = copier.submit(a.state, b.state, upto=UPTO, after=held.wait, feed=True)
        assert first.cancel()
        if written_again:
            copier.submit(d.state, b.state, upto=5, after=SYNCED)
        with pytest.raises(sc.Refused) as refused:
            copier.submit(b.state, c.state, upto=UPTO, after=SYNCED)
        assert refused.value.reason == "invalid"
        held.open()
        with pytest.raises(sc.Cancelled):
            first.sync()
        assert untouched(c)
    b.state.reset()


def test_a_copy_of_priority_0_overtakes_one_of_low_priority(memory, held):
    """Both need the lane `out`; the later one is done while the earlier is still being queued."""
    if not HOST:
        return
    a, b, c = (memory(LAYOUT, n, kind) for n, kind in enumerate(["device", "pinned", "pinned"], 1))
    with small(window=2, chunk=2000) as copier:
        park = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, priority=-1, bytes_ahead=1000)
        take = copier.submit(a.state, c.state, upto=UPTO, after=SYNCED, feed=True)
        while not take.done:
            runtime.get_device()  # the worker has a turn
            host_runtime.step(1)
        assert not park.done
        assert park.poll().bytes < take.bytes
        sync_all([park, take])


def test_bytes_ahead_bounds_what_is_queued(memory):
    if not HOST:
        return
    host_runtime.configure(devices=2, seed=5)
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    with small(window=7, chunk=4096) as copier:
        before, most = len(host_runtime.log()), 0
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, bytes_ahead=2500)
        while not ticket.done:
            executed = sum(size for _, _, size in host_runtime.log()[before:])
            most = max(most, ticket.poll().bytes)
            assert executed >= ticket.poll().bytes
            runtime.get_device()
            assert host_runtime.pending() < 30
            host_runtime.step(1)
        assert max(most, ticket.poll().bytes) == ticket.bytes


def test_progress_is_told_chunk_by_chunk(memory):
    if not HOST:
        return
    host_runtime.configure(devices=2, seed=3)
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    with small(window=2, chunk=2000) as copier:
        ticket, seen = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True), []
        while not ticket.done:
            seen.append(ticket.poll().bytes)
            runtime.get_device()
            host_runtime.step(1)
        assert seen == sorted(seen)
        assert len(set(seen)) > 5
        assert 0 <= seen[0] <= seen[-1] <= ticket.bytes


def test_sixteen_are_fed_at_once_and_the_next_one_later(memory, held):
    a = memory(LAYOUT, 1)
    targets = [memory(LAYOUT, n, "pinned") for n in range(2, 19)]
    with sc.Copier(tickets=32, layer_events=24) as copier:
        tickets = [copier.submit(a.state, t.state, upto=9, after=held.wait, feed=True) for t in targets]
        if HOST:
            assert tickets[16] is None
        held.open()
        sync_all(ticket for ticket in tickets if ticket)
        last = tickets[16] or copier.submit(a.state, targets[16].state, upto=9, after=SYNCED, feed=True)
        assert last.sync()
        assert all(differences(t, after_copy(a, t, 9)) == [] for t in targets)


def test_closing_lets_fed_copies_land(memory, seed):
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    with small(window=1) as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)
    assert ticket.done
    assert ticket.error is None
    assert differences(b, after_copy(a, b, UPTO)) == []


def test_threads_feed_wait_and_cancel_at_once(memory):
    """The worker's own thread; each thread has states of its own."""
    kinds = ("pinned", "device", "pinned")
    pairs = [(memory(LAYOUT, n), memory(LAYOUT, n + 10, kind)) for n, kind in enumerate(kinds, 1)]
    failed = []

    def work(number, a, b):
        stream, chance = runtime.stream_create(), random.Random(number)
        try:
            for _ in range(40):
                while (ticket := copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)) is None:
                    time.sleep(0.001)
                if chance.random() < 0.4:
                    ticket.cancel()
                try:
                    ticket.wait_layer(chance.randrange(LAYOUT.layers), stream, timeout=10)
                    ticket.sync()
                except sc.Cancelled:
                    while not ticket.done:  # a wait says it before the lanes are quiet
                        time.sleep(0.0001)
                    b.state.reset()
                runtime.stream_synchronize(stream)
            assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
        except BaseException as error:
            failed.append(error)

    with small(window=1, chunk=1000) as copier:
        threads = [threading.Thread(target=work, args=(n, *pair)) for n, pair in enumerate(pairs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failed == []
        assert not any(thread.is_alive() for thread in threads)
    for a, b in pairs:
        assert differences(b, after_copy(a, b, UPTO)) == []
