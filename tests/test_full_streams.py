"""A stream takes so many entries, then CUDA holds whoever adds to it, and with him the copier's lock: neither a submit
nor the worker ever fills one, whatever their copies wait for."""

import time

import pytest

import strata_copy as sc
from fixtures import SYNCED, Memory, after_copy, differences, two_devices
from hooks import Hook
from host_table import QUEUE_DEPTH, Gate, in_thread
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host

INVALID_VALUE = 1
UPTO = (4,)
WAYS = {  # a source's and a target's kind and device, and those of a copy that uses other lanes
    "local": (("device", 0), ("device", 0), ("pinned", "device")),
    "hook": (("device", 0), ("device", 0), ("pinned", "device")),
    "out": (("device", 0), ("pinned", 0), ("device", "device")),
    "in": (("pinned", 0), ("device", 0), ("device", "device")),
    "ring": (("pinned", 0), ("pinned", 0), ("device", "device")),
    "host": (("pageable", 0), ("pageable", 0), ("device", "device")),
    "staged out": (("device", 0), ("pageable", 0), ("device", "device")),
    "staged in": (("pageable", 0), ("device", 0), ("device", "device")),
    "peer": (("device", 0), ("device", 1), ("device", "device")),
    "relay": (("device", 0), ("device", 1), ("device", "device")),
}


def layout_of(parts, unit_bytes=64):
    grows = sc.Growth.linear()
    return sc.Layout([sc.Part(name="k", layer=i, unit_bytes=unit_bytes, growth=grows) for i in range(parts)])


def memory(layout, tag, kind, device=0):
    """Rows are apart, each layer's by more, so that no copies go as one."""
    unit = layout.parts[0].unit_bytes

    def apart(i, part):
        return {"kind": kind, "device": device, "stride": unit + 64 * (i % 7)}

    return Memory(layout, tag, apart, marks=UPTO)


def lands(copier, source, target):
    """Whether a copy ends while others are held up."""
    ticket = copier.submit(source.state, target.state, upto=UPTO, after=SYNCED)
    wanted, deadline = after_copy(source, target, UPTO), time.monotonic() + 20
    while differences(target, wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert differences(target, wanted) == []
    return ticket


def are_right(pairs, tickets):
    for (a, b), ticket in zip(pairs, tickets, strict=True):
        assert ticket is None or ticket.sync()
        assert ticket is None or differences(b, after_copy(a, b, UPTO)) == []
    assert host_runtime.fullest() < QUEUE_DEPTH


@pytest.mark.parametrize("parts", [1, 100], ids=["short", "long"])
@pytest.mark.parametrize("way", WAYS)
def test_tickets_that_wait_for_long_hold_no_others_up(way, parts):
    host_runtime.configure(devices=2, peers=[] if way == "relay" else None)
    layout, many, hook = layout_of(parts), 240 if parts == 1 else 40, Hook()
    from_, to, other = WAYS[way]
    how = hook.how if way == "hook" else {}
    stream = runtime.stream_create()
    pairs = [(memory(layout, n, *from_), memory(layout, n + 1, *to)) for n in range(1, many, 2)]
    others = [(memory(layout, n, other[0]), memory(layout, n + 1, other[1])) for n in (501, 503)]
    with sc.Copier(two_devices(), tickets=256, layer_events=256) as copier:
        plans = [copier.plan(a.state, b.state) for a, b in pairs]
        gate = Gate(stream)
        try:
            tickets = in_thread(lambda: [plan.submit(UPTO, after=sc.Stream(stream), **how) for plan in plans])()
            last = [lands(copier, *pair) for pair in others]
            assert sum(ticket is not None for ticket in tickets) >= 16
        finally:
            gate.open()
        are_right(pairs + others, tickets + last)
    assert hook.errors == []


@pytest.mark.parametrize("way", WAYS)
def test_a_ticket_of_more_than_a_stream_takes_goes_on_to_its_end(way):
    """What has landed comes off again while the ticket is being fed."""
    host_runtime.configure(devices=2, peers=[] if way == "relay" else None)
    layout, hook = layout_of(700), Hook()
    from_, to, _ = WAYS[way]
    pair = memory(layout, 1, *from_), memory(layout, 2, *to)
    with sc.Copier(two_devices(), tickets=1, layer_events=2048) as copier:
        how = hook.how if way == "hook" else {}
        ticket = copier.submit(pair[0].state, pair[1].state, upto=UPTO, after=SYNCED, feed=True, **how)
        assert ticket.sync(timeout=60)
    are_right([pair], [ticket])
    assert hook.errors == []


def test_what_hooks_add_does_not_fill_their_stream():
    """It is shared by the hooks of all tickets: each may add four entries for each layer."""
    host_runtime.configure(devices=1)
    layout, stream, event = layout_of(16), runtime.stream_create(), runtime.event_create()
    hook = Hook(lambda layer, device, on: [runtime.event_record(event, on) for _ in range(4)] and None)
    pairs = [(memory(layout, n, "device"), memory(layout, n + 1, "device")) for n in range(1, 61, 2)]
    other = (memory(layout, 101, "pinned"), memory(layout, 102, "device"))
    with sc.Copier(tickets=64) as copier:
        plans = [copier.plan(a.state, b.state) for a, b in pairs]
        gate = Gate(stream)
        try:
            tickets = in_thread(lambda: [plan.submit(UPTO, after=sc.Stream(stream), **hook.how) for plan in plans])()
            last = lands(copier, *other)
        finally:
            gate.open()
        are_right([*pairs, other], [*tickets, last])
    assert hook.errors == []


def test_hooks_of_several_fed_tickets_do_not_hold_each_other_up():
    """What they have on the hooks' stream comes off before they end, for there is no room for all of it."""
    host_runtime.configure(devices=1)
    layout, event = layout_of(150), runtime.event_create()
    hook = Hook(lambda layer, device, on: [runtime.event_record(event, on) for _ in range(4)] and None)
    pairs = [
        (memory(layout, 1, "device"), memory(layout, 2, "pinned")),
        (memory(layout, 3, "pinned"), memory(layout, 4, "device")),
        (memory(layout, 5, "device"), memory(layout, 6, "device")),
    ]
    with sc.Copier(tickets=8, layer_events=512) as copier:
        plans = [copier.plan(a.state, b.state) for a, b in pairs]
        tickets = [plan.submit(UPTO, after=SYNCED, feed=True, **hook.how) for plan in plans]
        assert all(ticket.sync(timeout=30) for ticket in tickets)
    are_right(pairs, tickets)
    assert hook.errors == []


def test_layers_without_bytes_of_which_a_hook_is_told_fill_no_stream():
    host_runtime.configure(devices=1)
    layout, stream = layout_of(250), runtime.stream_create()
    event = runtime.event_create()
    hook = Hook(lambda layer, device, on: [runtime.event_record(event, on) for _ in range(4)] and None)
    a, b = memory(layout, 1, "device"), memory(layout, 2, "device")
    other = memory(layout_of(1), 101, "pinned"), memory(layout_of(1), 102, "device")
    with sc.Copier(tickets=8, layer_events=512) as copier:
        gate = Gate(stream)
        try:
            ticket = in_thread(
                lambda: copier.submit(a.state, b.state, upto=(0,), after=sc.Stream(stream), feed=True, **hook.how)
            )()
            last = lands(copier, *other)
        finally:
            gate.open()
        assert ticket.sync(timeout=30)
        assert last.sync(timeout=30)
    assert hook.layers_of(0) == list(range(250))
    assert host_runtime.fullest() < QUEUE_DEPTH


@pytest.mark.parametrize("feed", [None, False])
def test_a_place_behind_many_tickets_fills_no_stream(feed):
    """Each of the later ones waits for every reader of its target."""
    host_runtime.configure(devices=1)
    layout, stream = layout_of(1), runtime.stream_create()
    middle = memory(layout, 1, "device")
    readers = [memory(layout, n, "device") for n in range(2, 42)]
    writers = [memory(layout, n, "device") for n in range(50, 90)]
    with sc.Copier(tickets=128) as copier:
        reads = [copier.plan(middle.state, one.state) for one in readers]
        writes = [copier.plan(one.state, middle.state) for one in writers]
        gate = Gate(stream)
        try:
            tickets = in_thread(
                lambda: [plan.submit(UPTO, after=sc.Stream(stream), feed=feed) for plan in reads + writes]
            )()
            lands(copier, memory(layout, 101, "pinned"), memory(layout, 102, "device"))
        finally:
            gate.open()
        for ticket in tickets:
            assert ticket is None or ticket.sync()
    written = [one for one, ticket in zip(writers, tickets[40:], strict=True) if ticket is not None]
    assert written
    assert differences(middle, after_copy(written[-1], middle, UPTO)) == []
    assert host_runtime.fullest() < QUEUE_DEPTH


def test_a_place_behind_many_tickets_on_many_devices_fills_no_stream():
    """It waits for more than a stream takes, and the worker queues that once there is less."""
    host_runtime.configure(devices=8)
    layout, stream = layout_of(8), runtime.stream_create()

    def spread(tag):
        return Memory(layout, tag, lambda i, part: {"kind": "device", "device": i}, marks=UPTO)

    middle, writer = spread(1), spread(2)
    readers = [spread(n) for n in range(3, 143)]
    other = memory(layout_of(1), 201, "pinned"), memory(layout_of(1), 202, "device")
    with sc.Copier(tuple(range(8)), tickets=256, layer_events=16) as copier:
        reads = [copier.plan(middle.state, one.state) for one in readers]
        write = copier.plan(writer.state, middle.state)
        gate = Gate(stream)
        try:
            tickets = in_thread(lambda: [plan.submit(UPTO, after=sc.Stream(stream)) for plan in [*reads, write]])()
            lands(copier, *other)
        finally:
            gate.open()
        assert all(ticket.sync(timeout=30) for ticket in tickets)
    assert differences(middle, after_copy(writer, middle, UPTO)) == []
    assert host_runtime.fullest() < QUEUE_DEPTH


def test_places_in_line_without_bytes_fill_no_stream():
    """Their waits are on the stream that tells the end."""
    host_runtime.configure(devices=1)
    layout = layout_of(1)
    streams = [runtime.stream_create() for _ in range(32)]
    pairs = [(memory(layout, n, "device"), memory(layout, n + 1, "device")) for n in range(1, 129, 2)]
    with sc.Copier(tickets=128) as copier:
        plans = [copier.plan(a.state, b.state) for a, b in pairs]
        gate = Gate(streams[-1])
        try:
            tickets = in_thread(
                lambda: [plan.submit((0,), after=[sc.Stream(stream) for stream in streams]) for plan in plans]
            )()
            lands(copier, memory(layout, 201, "pinned"), memory(layout, 202, "device"))
        finally:
            gate.open()
        for ticket in tickets:
            assert ticket is None or ticket.sync()
    assert host_runtime.fullest() < QUEUE_DEPTH


def test_what_refused_submits_have_on_lanes_holds_nobody_up():
    """It waits there, and no ticket ends behind it."""
    host_runtime.configure(devices=1)
    layout, stream = layout_of(1), runtime.stream_create()
    pairs = [(memory(layout, n, "device"), memory(layout, n + 1, "pinned")) for n in (1, 3, 5)]
    with sc.Copier(tickets=8) as copier:
        first, refused, last = (copier.plan(a.state, b.state) for a, b in pairs)
        gate = Gate(stream)
        try:
            ticket = first.submit(UPTO, after=sc.Stream(stream))
            for _ in range(25):
                host_runtime.fail("cudaStreamWaitEvent", 31, INVALID_VALUE)
                with pytest.raises(sc.Refused):
                    refused.submit(UPTO, after=[sc.Stream(stream)] * 31)
            fed = last.submit(UPTO, after=sc.Stream(stream), feed=True)
        finally:
            gate.open()
        assert ticket.sync(timeout=20)
        assert fed.sync(timeout=20)
    for number in (0, 2):
        a, b = pairs[number]
        assert differences(b, after_copy(a, b, UPTO)) == []
    assert host_runtime.fullest() < QUEUE_DEPTH


def test_a_look_at_a_hooks_work_that_fails_ends_the_ticket():
    """Its layers have no bytes: what the worker asks CUDA for is the hook's work alone."""
    host_runtime.configure(devices=1)
    layout, hook = layout_of(250), Hook()
    a, b = memory(layout, 1, "device"), memory(layout, 2, "device")
    with sc.Copier(tickets=8, layer_events=512) as copier:
        plan = copier.plan(a.state, b.state)
        host_runtime.fail("cudaEventQuery", 1, INVALID_VALUE)
        ticket = plan.submit((0,), after=SYNCED, feed=True, **hook.how)
        while not ticket.done:
            time.sleep(0.001)  # asks nothing of CUDA
        assert (type(ticket.error), ticket.error.call) == (sc.Refused, "cudaEventQuery")
        assert plan.submit(UPTO, after=SYNCED, feed=True, **hook.how).sync(timeout=30)
    assert differences(b, after_copy(a, b, UPTO)) == []
    assert hook.errors == []


def test_hooks_that_refuse_leave_no_room_taken_of_their_stream():
    """It stands behind what the request waits for as the first layer has no bytes."""
    host_runtime.configure(devices=1)
    layout, stream = layout_of(2), runtime.stream_create()
    a, b = memory(layout, 1, "device"), memory(layout, 2, "device")
    refusing, hook = Hook(lambda *_: 1), Hook()
    with sc.Copier(tickets=8) as copier:
        plan = copier.plan(a.state, b.state)
        for _ in range(60):
            with pytest.raises(sc.Refused):
                plan.submit((0,), after=[sc.Stream(stream)] * 32, feed=False, **refusing.how)
            runtime.device_synchronize()
        assert plan.submit(UPTO, after=SYNCED, feed=True, **hook.how).sync(timeout=30)
    assert differences(b, after_copy(a, b, UPTO)) == []


def test_what_a_dead_devices_tickets_have_on_other_devices_holds_nobody_up():
    """They end with their device; what they had on the lanes of the other one comes off with them."""
    host_runtime.configure(devices=2)
    layout, stream = layout_of(100), runtime.stream_create()

    def halves(tag, kind):
        def apart(i, part):
            return {"kind": kind, "device": i % 2, "stride": 64 + 64 * (i % 7)}

        return Memory(layout, tag, apart, marks=UPTO)

    pairs = [(halves(n, "device"), halves(n + 1, "pinned")) for n in range(1, 41, 2)]
    x, y = memory(layout, 101, "pinned", 1), memory(layout, 102, "device", 1)
    c, d = memory(layout, 103, "device"), memory(layout, 104, "pinned")
    copier = sc.Copier(two_devices(), tickets=64)
    plans = [copier.plan(a.state, b.state) for a, b in pairs]
    last = copier.plan(x.state, y.state)
    gate = Gate(stream)
    try:
        tickets = in_thread(lambda: [plan.submit(UPTO, after=sc.Stream(stream), feed=False) for plan in plans])()
        for function, nth in (("cudaMemcpyAsync", 3), ("cudaMemcpy2DAsync", 3), ("cudaStreamSynchronize", 1)):
            host_runtime.fail(function, nth, INVALID_VALUE, forever=nth == 1)  # nobody can wait for its streams
        with pytest.raises(sc.Poisoned):
            last.submit(UPTO, after=SYNCED)
        host_runtime.clear_faults()
        assert {ticket is None for ticket in tickets} == {True, False}  # as many as there is room for
        for ticket in filter(None, tickets):
            with pytest.raises(sc.Poisoned):
                ticket.sync(timeout=20)
    finally:
        gate.open()
    ticket = copier.submit(c.state, d.state, upto=UPTO, after=SYNCED, feed=True)
    assert ticket.sync(timeout=20)
    assert differences(d, after_copy(c, d, UPTO)) == []
    with pytest.raises(sc.Poisoned):
        copier.close()
