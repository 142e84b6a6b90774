"""Pageable memory: through pinned chunks, with helpers for the pageable half; to and from other host memory by helpers
alone."""

import itertools
import random

import pytest

import strata_copy as sc
from fixtures import HOST, SYNCED, after_copy, differences, small_layout, two_devices, untouched
from strata_copy import host_runtime, runtime

LAYOUT = small_layout("k8v4")
UPTO = 90
PLACES = {
    "unstage": ("device", "pageable"),
    "stage": ("pageable", "device"),
    "host": ("pageable", "pageable"),
    "host in": ("pageable", "pinned"),
    "host out": ("pinned", "pageable"),
    "both": (
        lambda i, part: {"kind": ("device", "pageable")[part.layer % 2]},
        lambda i, part: {"kind": ("pageable", "device")[part.layer % 2]},
    ),
    "all": (
        lambda i, part: {"kind": ("pageable", "device", "pinned", "pageable", "pinned")[i % 5]},
        lambda i, part: {"kind": ("pinned", "pageable", "pageable", "device", "pinned")[i % 5]},
    ),
}


def small(chunk=3000, pinned=4 * 2048, **how):
    how = {"window": 2, **how}
    return sc.Copier(two_devices(), tickets=8, layer_events=24, chunk=chunk, pinned_memory=pinned, **how)


@pytest.mark.parametrize("pinned", [4 * 512, 4 * 4096, 1 << 20])
@pytest.mark.parametrize("places", PLACES)
def test_pageable_memory_gets_the_same_bytes(memory, seed, places, pinned):
    a, b = (memory(LAYOUT, n, where) for n, where in enumerate(PLACES[places], 1))
    with small(pinned=pinned) as copier:
        plan = copier.plan(a.state, b.state)
        assert {route for route, _ in plan.routes()} & {"stage", "unstage", "host"}
        for feed in (None, False, True):
            ticket = plan.submit(UPTO, after=SYNCED, feed=feed)
            assert ticket.sync()
            assert ticket.poll().bytes == ticket.bytes
            assert differences(b, after_copy(a, b, UPTO)) == []
            b.fill()
        assert untouched(a)


@pytest.mark.parametrize("places", PLACES)
def test_strides_and_runs_of_pageable_memory(memory, seed, places):
    def apart(where):
        def place(i, part):
            kind = where if isinstance(where, str) else where(i, part)["kind"]
            return {"kind": kind, "stride": part.unit_bytes + 16 * (i % 3)}

        return place

    a, b = (memory(LAYOUT, n, apart(where)) for n, where in enumerate(PLACES[places], 1))
    with small(pinned=4 * 1024) as copier:
        assert copier.submit(a.state, b.state, upto=UPTO, begin=7, after=SYNCED).sync()
        assert differences(b, after_copy(a, b, UPTO, begin=(7,))) == []


@pytest.mark.parametrize("places", PLACES)
def test_a_layer_counts_once_its_bytes_are_there(memory, seed, places):
    """A host that reads pageable memory as soon as wait_layer says OK, and a stream that reads the device behind it."""
    a, b = (memory(LAYOUT, n, where) for n, where in enumerate(PLACES[places], 1))
    stream = runtime.stream_create()
    with small() as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED)
        for layer in range(LAYOUT.layers):
            assert ticket.wait_layer(layer, stream, timeout=60)
            runtime.stream_synchronize(stream)
            assert differences(b, after_copy(a, b, UPTO), layers=[layer]) == []
        assert ticket.sync()


def test_helpers_wait_for_the_writer_of_the_source(memory, seed):
    """The source is pageable memory that the device still writes when the copy is submitted."""
    a, b, c = memory(LAYOUT, 1), memory(LAYOUT, 2, "pageable"), memory(LAYOUT, 3)
    with small() as copier:
        first = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED)
        second = copier.submit(b.state, c.state, upto=UPTO, after=SYNCED)
        back = copier.submit(c.state, b.state, upto=50, after=SYNCED)
        assert all(ticket.sync() for ticket in (back, second, first))
        there = after_copy(a, b, UPTO)
        onward = after_copy(b, c, UPTO, source_bytes=there)
        assert differences(c, onward) == []
        assert differences(b, after_copy(c, b, 50, before=there, source_bytes=onward)) == []


def test_helpers_wait_for_the_stream_that_is_named(memory, seed):
    a, b = memory(LAYOUT, 1, "pageable"), memory(LAYOUT, 2)
    writer, late = runtime.stream_create(), memory(LAYOUT, 5, "pinned")
    with small() as copier:
        for (_, target, size), (_, source, _) in zip(a.blocks, late.blocks, strict=True):
            runtime.memcpy_async(target, source, size, writer)
        assert copier.submit(a.state, b.state, upto=UPTO, after=sc.Stream(writer)).sync()
        assert differences(b, after_copy(a, b, UPTO, source_bytes=late.pattern())) == []


def test_several_tickets_take_turns(memory, seed):
    print(f"seed {seed}")
    chance = random.Random(seed)
    kinds = ["device", "pageable", "device", "pageable", "pinned"]
    held = [memory(LAYOUT, n, kind) for n, kind in enumerate(kinds, 1)]
    model = [one.pattern() for one in held]
    with small(chance.choice([700, 3000, 20000]), 4 * chance.choice([512, 2048, 8192])) as copier:
        flying = []
        for _ in range(12):
            x, y = chance.sample(range(5), 2)
            upto = chance.randint(20, 90)
            ticket = copier.submit(held[x].state, held[y].state, upto=upto, after=SYNCED)
            if ticket is None:
                flying.pop(0).sync()
                copier.finished()
                continue
            flying.append(ticket)
            model[y] = after_copy(held[x], held[y], upto, before=model[y], source_bytes=model[x])
            if HOST:
                host_runtime.step(chance.randint(0, 30))
        assert all(ticket.sync() for ticket in flying)
        for one, wanted in zip(held, model, strict=True):
            assert differences(one, wanted) == []


@pytest.mark.parametrize("places", PLACES)
def test_a_cancelled_copy_leaves_staging_to_the_next(memory, seed, places):
    a, b = (memory(LAYOUT, n, where) for n, where in enumerate(PLACES[places], 1))
    with small(window=1, pinned=4 * 512) as copier:
        for turns in range(0, 60, 6):
            ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED)
            for _ in range(turns):
                runtime.get_device()  # the worker has a turn
            if not ticket.cancel():
                assert ticket.sync()
                continue
            with pytest.raises(sc.Cancelled):
                ticket.sync()
            b.state.reset()
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
        assert differences(b, after_copy(a, b, UPTO)) == []


@pytest.mark.parametrize("places", ["unstage", "stage", "host", "host in"])
def test_without_pinned_chunks_pageable_memory_is_refused(memory, places):
    a, b = (memory(LAYOUT, n, where) for n, where in enumerate(PLACES[places], 1))
    with small(pinned=0) as copier, pytest.raises(sc.Refused) as refused:
        copier.plan(a.state, b.state)
    assert refused.value.reason == "capacity"
    assert "pinned_memory=0" in str(refused.value)


def test_pinned_memory_of_two_addresses_is_not_for_helpers(memory):
    a, b = memory(LAYOUT, 1, "pageable"), memory(LAYOUT, 2, lambda i, part: {"kind": "pinned", "host_base": 4096})
    with small() as copier, pytest.raises(sc.Refused, match="by another address") as refused:
        copier.plan(a.state, b.state)
    assert refused.value.reason == "unsupported"


def test_helpers_copy_with_threads_of_their_own(memory):
    """In threads mode: the real worker and real helpers, over and over."""
    kinds = ("device", "pageable", "pinned", "pageable", "device")
    held = [memory(LAYOUT, n, kind) for n, kind in enumerate(kinds, 1)]
    pairs = list(itertools.pairwise(held))
    for helpers in (0, 1, 7):
        with small(pinned=4 * 1024, helpers=helpers) as copier:
            for _ in range(20):
                tickets = [copier.submit(x.state, y.state, upto=UPTO, after=SYNCED) for x, y in pairs]
                assert all(ticket.sync() for ticket in tickets)
            values = held[0].pattern()
            for x, y in pairs:
                values = after_copy(x, y, UPTO, source_bytes=values)
                assert differences(y, values) == []


@pytest.mark.parametrize("to_kind", ["device", "pageable"])
def test_a_patch_in_pinned_memory_of_two_addresses_is_not_for_helpers(memory, to_kind):
    def from_pageable(i, part):
        return {"kind": "pinned", "host_base": 4096} if part.name == "idx_dead" else {"kind": "pageable"}

    def to(i, part):
        return {"kind": "device" if part.name == "idx_dead" else to_kind}

    a, b = memory(LAYOUT, 1, from_pageable), memory(LAYOUT, 2, to)
    with small() as copier, pytest.raises(sc.Refused, match="its patch from pinned memory") as refused:
        copier.plan(a.state, b.state)
    assert refused.value.reason == "unsupported"


@pytest.mark.host
@pytest.mark.parametrize("kinds", [("pageable", "pageable"), ("device", "pageable")])
def test_a_small_pageable_part_holds_up_no_layer(memory, kinds):
    """It fills no chunk: layers behind it that go over lanes would count only at the end."""
    host_runtime.configure(devices=2, seed=1)
    rows = [
        sc.Part(name="rows", layer=layer, unit_bytes=2048, growth=sc.Growth.linear(4, ceil=True)) for layer in range(8)
    ]
    layout = sc.Layout([sc.Part(name="head", layer=0, unit_bytes=100, growth=sc.Growth.state()), *rows], format="x")
    a, b = (
        memory(layout, n, lambda i, part, n=n: {"kind": ("device", "pinned")[n - 1] if i else kinds[n - 1]})
        for n in (1, 2)
    )
    with small(pinned=4 * 2048) as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)
        told = {}
        while not ticket.done:
            runtime.get_device()  # the worker has a turn
            host_runtime.step(1)
            told.setdefault(ticket.poll().layers_queued, ticket.poll().bytes)
        assert told[1] < ticket.bytes / 4
        assert set(range(1, layout.layers + 1)) <= set(told)
        assert differences(b, after_copy(a, b, UPTO)) == []


@pytest.mark.host
@pytest.mark.parametrize("later", [("pageable", "pageable"), ("pageable", "device"), ("device", "pageable")])
@pytest.mark.parametrize("low", [("pageable", "pageable"), ("pageable", "device"), ("device", "pageable")])
def test_a_copy_of_priority_0_is_given_the_chunks(memory, low, later):
    """Whichever lanes the two have: one of low priority hands what it has to the helpers, and takes no more."""
    host_runtime.configure(devices=2, seed=1)
    a, b, c, d = (memory(LAYOUT, n, kind) for n, kind in enumerate([*low, *later], 1))
    with small(pinned=4 * 512) as copier:
        park = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, priority=-1)
        for _ in range(10):
            runtime.get_device()  # the worker has a turn
            host_runtime.step(1)
        take = copier.submit(c.state, d.state, upto=20, after=SYNCED)
        while not take.done:
            runtime.get_device()
            host_runtime.step(1)
        assert park.poll().bytes < park.bytes / 4
        assert park.sync()
        assert differences(b, after_copy(a, b, UPTO)) == []
        assert differences(d, after_copy(c, d, 20)) == []


@pytest.mark.host
def test_helpers_beside_a_ring_leave_the_chunks_to_an_earlier_copy(memory):
    """The two have no lane in common."""
    host_runtime.configure(devices=2, seed=1)
    a, b, c, d = (memory(LAYOUT, n, kind) for n, kind in enumerate(["pinned", "pinned", "pageable", "pageable"], 1))
    with small(pinned=4 * 512, device_memory=4096, ring_slots=2) as copier:
        park = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, priority=-1, feed=True)
        for _ in range(40):
            runtime.get_device()  # the worker has a turn
            host_runtime.step(1)
        take = copier.submit(c.state, d.state, upto=20, after=SYNCED)
        while take.poll().bytes == 0:
            runtime.get_device()
            host_runtime.step(1)
        assert 0 < park.poll().bytes < park.bytes / 4
        assert park.sync()
        assert take.sync()
        assert differences(b, after_copy(a, b, UPTO)) == []
        assert differences(d, after_copy(c, d, 20)) == []


@pytest.mark.host
def test_a_copy_that_was_overtaken_takes_staging_again(memory, seed):
    """Between two of its layers nothing of it is in the chunks, and one of higher priority takes them."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    mixed = memory(LAYOUT, 1, lambda i, part: {"kind": "pinned" if part.name == "v" else "pageable"})
    b, c, d = memory(LAYOUT, 2), memory(LAYOUT, 3, "pageable"), memory(LAYOUT, 4)
    with small(chunk=1000, window=1, pinned=4 * 512) as copier:
        slow = copier.submit(mixed.state, b.state, upto=UPTO, after=SYNCED, priority=-1, bytes_ahead=1024)
        overtaking = []
        for _ in range(3):
            host_runtime.step(chance.randint(0, 40))
            overtaking.append(copier.submit(c.state, d.state, upto=UPTO, after=SYNCED))
        assert all(ticket.sync(timeout=20) for ticket in (slow, *overtaking))
        assert differences(b, after_copy(mixed, b, UPTO)) == []
        assert differences(d, after_copy(c, d, UPTO)) == []
