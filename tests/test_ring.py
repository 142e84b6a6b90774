"""Pinned memory to pinned memory, in two hops through a ring of slots on the device."""

import random
from collections import Counter

import pytest

import strata_copy as sc
from fixtures import CAPACITY, SYNCED, Memory, after_copy, differences, small_layout, untouched
from strata_copy import host_runtime, runtime

LAYOUT = small_layout("k8v4")
UPTO = 90
RINGS = [1, 2, 4]
CELLS = 2048  # bytes of the words that tell a ticket's end, on each device


# How a copy is queued: by submit, by the worker, and so that helpers copy a share of it, in chunks of 512 bytes.
MODES = ["whole", "fed", "helped"]


def ring_of(slots, slot=2048, mode="fed", **how):
    pinned_memory = 4 * (512 if mode == "helped" else 1 << 20)
    how = {"tickets": 8, "layer_events": 24, "chunk": 3000, "window": 2, "pinned_memory": pinned_memory, **how}
    return sc.Copier(device_memory=slots * slot, ring_slots=slots, **how)


def pinned(memory, n=2, layout=LAYOUT, where="pinned"):
    return [memory(layout, tag, where) for tag in range(1, n + 1)]


# ---- bytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", RINGS)
def test_parts_smaller_and_larger_than_a_slot(memory, seed, slots, mode):
    a, b = pinned(memory)
    with ring_of(slots, (512, 1024, 4096, 1 << 20)[seed % 4], mode) as copier:
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=mode != "whole").sync()
    assert differences(b, after_copy(a, b, UPTO)) == []
    assert untouched(a)


def spread(n):
    """Units of the K/V apart, on one side or both, so that rows have gaps, of other widths than slots."""

    def where(i, part):
        return {"kind": "pinned", "stride": part.unit_bytes + (1 + i % 3) * 4 * n}

    return where


@pytest.mark.parametrize("slots", RINGS)
def test_places_with_strides(memory, seed, slots):
    print(f"seed {seed}")
    chance = random.Random(seed * 10 + slots)
    gaps = chance.choice([(0, 1), (1, 0), (1, 2)])  # of the source, of the target
    a, b = (memory(LAYOUT, tag, spread(n)) for tag, n in enumerate(gaps, 1))
    slot, chunk = chance.choice([512, 1536, 3072, 20480]), chance.choice([100, 1000, 10000])
    with ring_of(slots, slot, chance.choice(MODES), chunk=chunk) as copier:
        for feed in (False, True):
            assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=feed, begin=(13,)).sync()
            assert differences(b, after_copy(a, b, UPTO, begin=(13,))) == []
            b.fill()
    assert untouched(a)


@pytest.mark.parametrize("slots", RINGS)
def test_tickets_share_a_ring(memory, seed, slots):
    """Three at once, none behind another: whole, fed, and both."""
    held, feed = pinned(memory, 6), (False, True, None)[seed % 3]
    pairs = list(zip(held[:3], held[3:], strict=True))
    slot = 2048 if feed else 16384  # three that are queued whole have to fit into streams
    with ring_of(slots, slot, MODES[1 + seed % 2]) as copier:
        tickets = [
            copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=n == 1 if feed is None else feed)
            for n, (a, b) in enumerate(pairs)
        ]
        for ticket in reversed(tickets):
            assert ticket.sync()
    for a, b in pairs:
        assert differences(b, after_copy(a, b, UPTO)) == []


@pytest.mark.parametrize("mode", MODES[1:])
def test_other_copies_use_the_lanes_of_the_ring_meanwhile(memory, seed, mode):
    a, b = pinned(memory)
    c, d = memory(LAYOUT, 3), memory(LAYOUT, 4)
    with ring_of(2, mode=mode) as copier:
        tickets = [copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True),
                   copier.submit(a.state, c.state, upto=UPTO, after=SYNCED),
                   copier.submit(c.state, b.state, upto=UPTO, after=SYNCED),
                   copier.submit(b.state, d.state, upto=UPTO, after=SYNCED, feed=True)]  # fmt: skip
        for ticket in tickets:
            assert ticket.sync()
    values = after_copy(a, c, UPTO)
    assert differences(c, values) == []
    values = after_copy(c, b, UPTO, before=after_copy(a, b, UPTO), source_bytes=values)
    assert differences(b, values) == []
    assert differences(d, after_copy(b, d, UPTO, source_bytes=values)) == []


# ---- memory


def test_there_is_no_such_copy_without_a_ring(memory):
    a, b = pinned(memory)
    c = memory(LAYOUT, 3)
    with sc.Copier(tickets=2, layer_events=24, device_memory=0) as copier:
        with pytest.raises(sc.Refused) as refused:
            copier.plan(a.state, b.state)
        assert (refused.value.reason, refused.value.part, refused.value.device) == ("capacity", 0, 0)
        assert "device_memory=0" in str(refused.value)
        assert copier.submit(a.state, c.state, upto=UPTO, after=SYNCED).sync()


@pytest.mark.host
@pytest.mark.parametrize("slots", [1, 3, 4, 16])
def test_its_memory_is_what_was_asked_for_and_does_not_grow(memory, slots):
    """On each device, in one allocation at open; what a slot of 512s does not fill is not taken."""
    host_runtime.configure(devices=2, seed=1)
    a, b = pinned(memory)
    before, taken = host_runtime.live(), free_memory()
    with sc.Copier((0, 1), tickets=2, layer_events=24, device_memory=slots * 4096 + 511, ring_slots=slots) as copier:
        opened = host_runtime.live()
        assert opened["allocations"] - before["allocations"] == 4
        assert [x - y for x, y in zip(taken, free_memory(), strict=True)] == [slots * 4096 + CELLS] * 2
        for feed in (False, True):
            assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=feed).sync()
        assert host_runtime.live() == opened
    assert host_runtime.live() == before


@pytest.mark.host
def test_without_device_memory_none_is_taken():
    before = free_memory()
    with sc.Copier((0, 1), tickets=2, layer_events=24, device_memory=0):
        assert [x - y for x, y in zip(before, free_memory(), strict=True)] == [CELLS] * 2


def free_memory():
    free = []
    for device in range(runtime.device_count()):
        runtime.set_device(device)
        free.append(runtime.memory_info()[0])
    runtime.set_device(0)
    return free


@pytest.mark.parametrize(("memory_asked", "slots"), [(511, 1), (2047, 4), (1, 16)])
def test_slots_that_are_too_small_are_a_value_error(memory_asked, slots):
    with pytest.raises(ValueError, match="less than 512 bytes for each"):
        sc.Copier(device_memory=memory_asked, ring_slots=slots)


# ---- what is queued


class Lanes:
    """The streams of the lanes `in` and `out`, learnt from copies that use one of them alone, and what was queued or
    executed on them since."""

    def __init__(self, copier):
        layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=64, growth=sc.Growth.linear(1))])  # a few chunks
        device, host = Memory(layout, 8, "device"), Memory(layout, 9, "pinned")
        self.streams = {}
        for lane, (a, b) in (("in", (host, device)), ("out", (device, host))):
            before = len(host_runtime.log())
            assert copier.submit(a.state, b.state, upto=64, after=SYNCED, feed=False).sync()
            streams = Counter(stream for _, stream, _ in host_runtime.log()[before:])
            self.streams[lane] = {stream for stream in streams if stream != host_runtime.log()[0][1]}
        assert len(self.streams["in"]) == len(self.streams["out"]) == 2
        assert not self.streams["in"] & self.streams["out"]
        self.orders, self.log = len(host_runtime.orders()), len(host_runtime.log())

    def copies(self, lane):
        return [copy for copy in host_runtime.log()[self.log :] if copy[1] in self.streams[lane]]

    def hops(self):
        """The records and waits that tie the two lanes, in the order of the calls: (function, its number since, the
        lane that recorded the event). A record that nothing waits for before the event's next one is none."""
        numbers, recorded, found = Counter(), {}, {}
        for function, stream, event in host_runtime.orders()[self.orders :]:
            numbers[function] += 1
            nth = numbers[function]
            if function == "cudaEventRecord":
                recorded[event] = nth, stream
            elif event in recorded:
                at, by = recorded[event]
                for lane, other in (("in", "out"), ("out", "in")):
                    if by in self.streams[lane] and stream in self.streams[other]:
                        found["cudaEventRecord", at] = found[function, nth] = lane
        return [(*call, lane) for call, lane in found.items()]


def one_copy(slots, mode, lost=None):
    """Violations, and the calls that tie the lanes, of a copy with one of them lost."""
    host_runtime.configure(devices=1, seed=3)
    a, b = (Memory(LAYOUT, tag, "pinned") for tag in (1, 2))
    with ring_of(slots, mode=mode, chunk=100, window=10000) as copier:
        lanes = Lanes(copier)
        plan = copier.plan(a.state, b.state)
        if lost:
            host_runtime.skip(*lost)
        assert plan.submit(41, after=SYNCED, feed=mode != "whole").sync()
        hops = lanes.hops()
        return host_runtime.violations(), hops


@pytest.mark.host
@pytest.mark.parametrize(
    "mode", MODES[:2]
)  # with helpers the worker looks at what has landed: tests of staging have it
@pytest.mark.parametrize("slots", RINGS)
def test_a_slot_is_emptied_before_it_is_filled_and_filled_before_it_is_emptied(slots, mode):
    """Each record and each wait between the two lanes, lost alone, is a race."""
    found, hops = one_copy(slots, mode)
    assert found == []
    ties = Counter((function, lane) for function, _, lane in hops)
    fills, again = ties["cudaStreamWaitEvent", "in"], ties["cudaStreamWaitEvent", "out"]
    assert fills > 4 * slots
    assert again == ties["cudaEventRecord", "out"] == fills - slots
    for function, nth, lane in hops:
        found, _ = one_copy(slots, mode, (function, nth))
        assert found, f"{function} number {nth}, of lane {lane}"
        assert all("race: " in text or "unrecorded event" in text for text in found)
    host_runtime.configure(devices=2)


@pytest.mark.host
def test_small_parts_are_packed(memory):
    """All of a layer goes in one slot where it fits: then the lanes are tied once for each layer that has bytes, and
    each extent is copied once on each lane."""
    host_runtime.configure(devices=1, seed=1)
    a, b = pinned(memory)
    with ring_of(2, 1 << 20, chunk=100) as copier:
        lanes, plan = Lanes(copier), copier.plan(a.state, b.state)
        assert plan.submit(UPTO, after=SYNCED, feed=False).sync()
        extents = len(plan.extents(UPTO))
        assert extents > 2 * LAYOUT.layers
        assert len(lanes.copies("in")) == len(lanes.copies("out")) == extents
        waits = [lane for function, _, lane in lanes.hops() if function == "cudaStreamWaitEvent"]
        assert waits.count("in") <= LAYOUT.layers + 1


@pytest.mark.host
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lane", ["in", "out"])
def test_both_lanes_leave_gaps(memory, lane, mode):
    """A lane's copies go on from stream to stream after each chunk; a copy is no longer than a slot."""
    host_runtime.configure(devices=1, seed=1)
    a, b = pinned(memory)
    chunk, slot = 3000, 1024
    with ring_of(4, slot, mode, chunk=chunk) as copier:
        lanes = Lanes(copier)
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=mode != "whole").sync()
        copies = lanes.copies(lane)
    assert max(size for *_, size in copies) <= slot
    runs, last = [0], copies[0][1]
    for _, stream, size in copies:
        if stream != last:
            runs.append(0)
        runs[-1] += size
        last = stream
    assert len(runs) > 5
    assert max(runs) < chunk + slot


@pytest.mark.host
def test_a_step_of_the_worker_ends_with_a_full_slot():
    """What is over of two slots and 100 bytes would have a slot by itself, which takes as long as a full one."""
    host_runtime.configure(devices=1, seed=1)
    layout, slot = layers_of(2048), 1024
    a, b = (Memory(layout, tag, "pinned") for tag in (1, 2))
    with ring_of(4, slot, chunk=2 * slot + 100, window=4) as copier:
        lanes = Lanes(copier)
        assert copier.submit(a.state, b.state, upto=(96, 0), after=SYNCED, feed=True).sync()
        assert [size for *_, size in lanes.copies("out")] == [slot] * (24 * 2048 // slot)
    assert differences(b, after_copy(a, b, (96, 0))) == []


# ---- helpers beside it


def by_ring(submit):
    """Bytes of a copy that go through the ring, in and then out; the word of its end only goes out."""
    before = len(host_runtime.log())
    assert submit().sync()
    return (sum(size for _, _, size in host_runtime.log()[before:]) - 8) // 2


@pytest.mark.host
def test_helpers_copy_a_share_of_a_long_copy(memory):
    """Not where none are asked for, processors have another address, the ticket keeps its distance, submit queues it
    whole, or it is short."""
    host_runtime.configure(devices=1, seed=1)
    a, b = pinned(memory)
    with ring_of(4, mode="helped") as copier:
        plan = copier.plan(a.state, b.state)
        whole = by_ring(lambda: plan.submit(UPTO, after=SYNCED, feed=False))
        assert whole == sum(width * rows for _, _, width, rows, *_ in plan.extents(UPTO))
        assert whole / 4 < by_ring(lambda: plan.submit(UPTO, after=SYNCED, feed=True)) < whole - 2 * 512
        assert by_ring(lambda: plan.submit(UPTO, after=SYNCED, bytes_ahead=5000)) == whole
        other_address = memory(LAYOUT, 3, lambda i, part: {"kind": "pinned", "host_base": 4096})
        assert by_ring(lambda: copier.submit(other_address.state, b.state, upto=UPTO, after=SYNCED, feed=True)) == whole
    for how in ({"mode": "helped", "helpers": 0}, {"pinned_memory": 0}, {"pinned_memory": whole + 4096}):
        with ring_of(4, **how) as copier:
            assert by_ring(lambda: copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)) == whole


@pytest.mark.host
def test_a_patch_from_a_device_is_no_helpers_work(memory):
    """Though its own part moves over another device, and all else of this one through the ring: as much is
    copied on lanes as without helpers."""
    host_runtime.configure(devices=2, seed=1, peers=[])

    def where(device):
        return lambda i, part: {"kind": "device", "device": device} if part.name == "idx_dead" else {"kind": "pinned"}

    a, b = memory(LAYOUT, 1, where(0)), memory(LAYOUT, 2, where(1))
    on_lanes = []
    for helpers in (7, 0):
        with ring_of(4, mode="helped", devices=(0, 1), helpers=helpers) as copier:
            plan = copier.plan(a.state, b.state)
            assert set(plan.routes()) == {("ring", 0), ("relay", 1)}
            on_lanes.append(by_ring(lambda: plan.submit(UPTO, after=SYNCED, feed=True)))  # noqa: B023
        assert differences(b, after_copy(a, b, UPTO)) == []
    assert on_lanes[0] == on_lanes[1]


def layers_of(*sizes):
    """A layer of 24 rows of each size; rows of 0 bytes are rows of a mark that stays at 0."""
    growths = [sc.Growth.linear(4, mark=0 if size else 1) for size in sizes]
    parts = [
        sc.Part(name="k", layer=layer, unit_bytes=size or 64, growth=growth)
        for layer, (size, growth) in enumerate(zip(sizes, growths, strict=True))
    ]
    return sc.Layout(parts, marks=("tokens", "none"))


@pytest.mark.host
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_layer_without_bytes_comes_behind_what_the_ticket_waits_for(seed, mode):
    """Though the next layers are small enough for helpers to take them whole."""
    layout = layers_of(0, 4, 4, 64, 64, 64, 64, 64)
    host_runtime.configure(devices=1, seed=seed)
    a, b = (Memory(layout, tag, "pinned") for tag in (1, 2))
    _, base, size = b.blocks[0]
    with ring_of(4, 1024, mode, window=4) as copier:
        writer, reader, device = runtime.stream_create(), runtime.stream_create(), runtime.malloc(size)
        runtime.memcpy_async(base, device, size, writer)
        ticket = copier.submit(a.state, b.state, upto=(CAPACITY, 0), after=[sc.Stream(writer)], feed=True)
        assert ticket.wait_layer(0, reader, timeout=60)
        runtime.memcpy_async(device, base, size, reader)
        assert ticket.sync()
        runtime.stream_synchronize(reader)
    assert host_runtime.violations() == []
    assert differences(b, after_copy(a, b, (CAPACITY, 0)), layers=range(1, 8)) == []


@pytest.mark.host
@pytest.mark.parametrize("mode", MODES[1:])
def test_the_first_layer_is_told_before_what_the_ticket_waits_for_is_over(memory, seed, mode):
    layout = layers_of(*[64] * 8)
    host_runtime.configure(devices=1, seed=seed)
    a, b = pinned(memory, layout=layout)
    with ring_of(4, 1024, mode, window=4) as copier:
        writer, reader = runtime.stream_create(), runtime.stream_create()
        host_runtime.delay(1)
        runtime.memcpy_async(runtime.malloc(8), runtime.host_alloc(8), 8, writer)
        ticket = copier.submit(a.state, b.state, upto=(CAPACITY, 0), after=[sc.Stream(writer)], feed=True)
        assert ticket.wait_layer(0, reader)
        assert ticket.poll().bytes == 0
        assert ticket.sync()
    assert differences(b, after_copy(a, b, (CAPACITY, 0))) == []


@pytest.mark.host
def test_a_long_share_holds_up_no_chunks_of_other_devices(memory, seed):
    host_runtime.configure(devices=2, seed=seed)
    a, b = pinned(memory, layout=small_layout("k8v4", layers=24))
    c, d = (memory(LAYOUT, tag, where, device=1) for tag, where in ((3, "device"), (4, "pageable")))
    with ring_of(4, 1024, "helped", devices=(0, 1), window=4, layer_events=60) as copier:
        long = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)
        short = copier.submit(c.state, d.state, upto=UPTO, after=SYNCED)
        while not short.done:
            runtime.get_device()  # the worker has a turn
            host_runtime.step(1)
        assert long.poll().bytes < long.bytes * 2 / 3
        assert long.sync()
    assert differences(b, after_copy(a, b, UPTO)) == []
    assert differences(d, after_copy(c, d, UPTO)) == []


# ---- windows


@pytest.mark.host
def test_short_steps_beside_a_ring_leave_the_window_full(memory):
    """Bytes of another way end each step; what is left of a lane's chunk then, less than a slot, is worth a step."""
    host_runtime.configure(devices=1, seed=1)
    each = sc.Growth.linear(4)
    parts = [sc.Part(name=name, layer=i, unit_bytes=40, growth=each) for i in range(16) for name in "kv"]
    layout = sc.Layout(parts)
    a = memory(layout, 1, "pinned")
    b = memory(layout, 2, lambda i, part: {"kind": "device" if part.name == "k" else "pinned"})
    with ring_of(4, chunk=3000, window=16, layer_events=40) as copier:
        ticket = copier.submit(a.state, b.state, upto=CAPACITY, after=SYNCED, feed=True)
        assert ticket.cancel()
        with pytest.raises(sc.Cancelled) as cancelled:
            ticket.sync()
    assert cancelled.value.found > 16 * 3000 / 4 - 2048


# ---- failures


@pytest.mark.host
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", RINGS)
def test_after_a_failure_the_next_copy_is_exact(memory, slots, mode):
    """Each copy call and each tie of the lanes fails in turn, with slots full and half full."""
    tried = 0
    for function in ("cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaEventRecord", "cudaStreamWaitEvent"):
        for nth in range(1, 1000, 3):
            host_runtime.configure(devices=1, seed=nth)
            a, b = (Memory(LAYOUT, tag, spread(1)) for tag in (1, 2))
            with ring_of(slots, mode=mode) as copier:
                plan = copier.plan(a.state, b.state)
                host_runtime.fail(function, nth, 1)
                told = outcome(lambda: plan.submit(UPTO, after=SYNCED, feed=mode != "whole").sync())  # noqa: B023
                assert told in (None, function)
                if not host_runtime.clear_faults():
                    break
                tried += 1
                assert untouched(a)
                b.state.reset()
                b.fill()
                assert plan.submit(UPTO, after=SYNCED, feed=mode != "whole").sync()
                assert differences(b, after_copy(a, b, UPTO)) == []
                assert host_runtime.violations() == []
        else:
            pytest.fail(f"{function} is called more than 1000 times")
    assert tried > 30


def outcome(act):
    """The call that it failed with, or None."""
    try:
        act()
    except (sc.Refused, sc.Failed) as error:
        return error.call
