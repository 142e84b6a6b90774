"""Copies whose sources and targets lie on different devices: every matrix of who can reach whom, with ways that are
broken, under every seed; in one plan, one submit and one ticket."""

import random
import time
from collections import Counter

import pytest
from numpy import array_equal as same

import strata_copy as sc
from fixtures import HOST, SYNCED, Memory, after_copy, differences, needed_by, small_layout, untouched
from host_table import Gate, in_thread
from strata_copy import host_runtime, peers, runtime

WAYS = [(a, b) for a in range(3) for b in range(3) if a != b]
LAYOUT = small_layout("k8v4", draft=True)  # the draft is the last layer
UPTO = (41, 17)


@pytest.fixture(autouse=True)
def small_proof(monkeypatch):
    if HOST:
        monkeypatch.setattr(peers, "SIZES", (4096,))


def stages(chance, devices, pinned=0.0):
    """Where a state keeps its layers: consecutive ones on one device, uneven shares, some stages perhaps without K/V or
    without anything; some layers in pinned memory."""
    layers = LAYOUT.layers
    cuts = sorted(chance.choices(range(layers + 1), k=len(devices) - 1))
    order = chance.sample(devices, len(devices))
    of_layer = [order[sum(cut <= layer for cut in cuts)] for layer in range(layers)]
    kinds = ["pinned" if chance.random() < pinned else "device" for _ in range(layers)]
    return lambda i, part: {"kind": kinds[needed_by(part)], "device": of_layer[needed_by(part)]}


def cross_pairs(a, b):
    return {
        (x.device, y.device)
        for x, y in zip(a.places, b.places, strict=True)
        if x.kind == y.kind == "device" and x.device != y.device
    }


def run_world(devices, matrix, seed, broken=()):
    """Five copies between three states, each behind the ones before where they meet, whole and fed, all of it or from
    some marks on. broken: (pair, how)."""
    print(f"devices {devices}, matrix {sorted(matrix)}, seed {seed}, broken {broken}")
    host_runtime.configure(devices=devices, seed=seed, peers=matrix)
    for way, how in broken:
        host_runtime.break_peer(*way, how)
    chance = random.Random(f"{devices} {sorted(matrix)} {seed}")
    held = [Memory(LAYOUT, tag, stages(chance, range(devices), 0.2 * (tag == 3))) for tag in (1, 2, 3)]
    wanted = [one.pattern() for one in held]
    lost = {way for way, how in broken if how != "delay"}
    shape = {"chunk": chance.choice([200, 3000, 1 << 20]), "relay_slots": chance.choice([1, 2, 4]), "window": 2}
    with sc.Copier(range(devices), tickets=8, layer_events=64, relay_memory=1 << 13, **shape) as copier:
        tickets = []
        for source, target in [(0, 1), (1, 2), (2, 0), *(chance.sample(range(3), 2) for _ in range(2))]:
            upto = (chance.randint(0, 96), chance.randint(0, 96))
            begin = tuple(chance.randint(0, mark) for mark in upto) if chance.random() < 0.3 else (0, 0)
            plan = copier.plan(held[source].state, held[target].state)
            tickets.append(plan.submit(upto, after=SYNCED, feed=chance.choice([None, True]), begin=begin))
            wanted[target] = after_copy(
                held[source], held[target], upto, before=wanted[target], source_bytes=wanted[source], begin=begin
            )
            p2p = {(link.source, link.target): link.p2p for link in copier.links}
            for way in cross_pairs(held[source], held[target]):
                assert p2p[way] == (way in matrix and way not in lost)
        for ticket in tickets:
            assert ticket.sync()
        assert all(host_runtime.peer_copies(*way) == 0 for way in p2p if way not in matrix)
    for one, values in zip(held, wanted, strict=True):
        assert differences(one, values) == []
    assert host_runtime.violations() == []


def matrix_of(number, ways=tuple(WAYS)):
    return {way for n, way in enumerate(ways) if number >> n & 1}


def some_of(all_params, short):
    """Those that are not `short` are for the long tier."""
    return [pytest.param(*values, marks=[] if short(*values) else pytest.mark.long) for values in all_params]


@pytest.mark.host
@pytest.mark.parametrize(
    ("number", "seed_"), some_of([(m, s) for m in range(64) for s in range(20)], lambda m, s: s == m % 20)
)
def test_every_matrix_of_three_devices(number, seed_):
    run_world(3, matrix_of(number), seed_)


@pytest.mark.host
@pytest.mark.parametrize(
    ("number", "seed_"),
    some_of([(m, s) for m in range(1, 64) for s in range(20)], lambda m, s: s == m % 20 and m % 3 == 0),
)
def test_every_matrix_of_three_devices_with_broken_ways(number, seed_):
    """Each way that there is may be broken: the bytes are right always."""
    chance = random.Random(number * 100 + seed_)
    matrix = matrix_of(number)
    ways = sorted(matrix)
    broken = [
        (way, chance.choice(["drop", "corrupt", "delay"])) for way in chance.sample(ways, chance.randint(1, len(ways)))
    ]
    run_world(3, matrix, seed_, broken)


@pytest.mark.host
@pytest.mark.parametrize(
    ("density", "seed_"), some_of([(d, s) for d in (0, 50, 100) for s in range(10)], lambda d, s: (d, s) == (50, 0))
)
def test_eight_devices(density, seed_):
    chance = random.Random(density)
    run_world(8, {(a, b) for a in range(8) for b in range(8) if a != b and chance.randrange(100) < density}, seed_)


@pytest.mark.host
@pytest.mark.parametrize("on", [False, True])
def test_broken_ways_are_refused_before_the_first_write_where_p2p_is_asked_for(monkeypatch, on):
    monkeypatch.setenv("STRATA_COPY_P2P", "on" if on else "auto")
    for way in WAYS:
        for how in ("drop", "corrupt", "hang"):
            host_runtime.configure(devices=3, seed=1)
            host_runtime.break_peer(*way, how)
            a, b = (Memory(LAYOUT, tag, device=device) for tag, device in enumerate(way, 1))
            with sc.Copier(range(3), tickets=2, layer_events=24) as copier:
                if on:
                    with pytest.raises(sc.Refused) as refused:
                        copier.plan(a.state, b.state)
                    assert refused.value.reason == "unsupported"
                    assert untouched(b)
                else:
                    assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
                    assert differences(b, after_copy(a, b, UPTO)) == []
            if how == "hang":
                break  # it takes two seconds


# ---- both routes, on a GPU too


@pytest.fixture(params=["auto", "off"])
def p2p(request, monkeypatch):
    monkeypatch.setenv("STRATA_COPY_P2P", request.param)
    return request.param


def spread(i, part):
    return {"stride": part.unit_bytes + (64 if part.name in ("k", "v") else 0)}


def strided(device):
    return lambda i, part: {**spread(i, part), "kind": "device", "device": device}


@pytest.mark.parametrize("feed", [False, True])
@pytest.mark.parametrize("where", ["dense", "strided"])
def test_one_way(memory, second_device, p2p, where, feed):
    a, b = (
        memory(LAYOUT, tag, *([strided(device)] if where == "strided" else []), device=device)
        for tag, device in ((1, 0), (2, second_device))
    )
    with sc.Copier((0, second_device), tickets=4, layer_events=24, chunk=1250, relay_memory=1 << 14) as copier:
        for source, target in ((a, b), (b, a)):
            source.fill()
            target.fill()
            assert copier.submit(source.state, target.state, upto=UPTO, after=SYNCED, feed=feed, begin=(0, 0)).sync()
            assert differences(target, after_copy(source, target, UPTO)) == []
            assert untouched(source)
        routes = {route for route, _ in copier.plan(a.state, b.state).routes()}
    assert routes == ({"relay"} if p2p == "off" else {"peer"} if HOST else routes)


@pytest.mark.parametrize("feed", [False, True])
def test_both_ways_at_once(memory, second_device, p2p, feed):
    a, c = (memory(LAYOUT, tag, device=0) for tag in (1, 3))
    b, d = (memory(LAYOUT, tag, device=second_device) for tag in (2, 4))
    with sc.Copier((0, second_device), tickets=4, layer_events=24, relay_memory=1 << 15) as copier:
        plans = copier.plan(a.state, b.state), copier.plan(d.state, c.state)
        for _ in range(4):
            tickets = [plan.submit(UPTO, after=SYNCED, feed=feed, begin=(0, 0)) for plan in plans]
            assert all(ticket.sync() for ticket in tickets)
    assert differences(b, after_copy(a, b, UPTO)) == []
    assert differences(c, after_copy(d, c, UPTO)) == []
    assert untouched(a)
    assert untouched(d)


def test_large_parts_both_ways(memory, second_device, p2p):
    """More than a slot, more than a chunk; both sizes of slots, as the second ticket joins the first."""
    layout = sc.Layout([sc.Part(name="k", layer=n, unit_bytes=1 << 16, growth=sc.Growth.linear()) for n in range(3)])
    upto = (96,)
    a, c = (memory(layout, tag, device=0, marks=upto) for tag in (1, 3))
    b, d = (memory(layout, tag, device=second_device, marks=upto) for tag in (2, 4))
    with sc.Copier((0, second_device), tickets=4, layer_events=24, chunk=1 << 18, relay_memory=4 << 20) as copier:
        tickets = [
            copier.submit(source.state, target.state, upto=upto, after=SYNCED, feed=feed)
            for source, target, feed in ((a, b, True), (d, c, False))
        ]
        assert all(ticket.sync() for ticket in tickets)
    assert differences(b, after_copy(a, b, upto)) == []
    assert differences(c, after_copy(d, c, upto)) == []


def test_a_layer_is_waited_for_on_the_targets_device(memory, second_device, p2p):
    """A stream of either device comes behind the bytes that the layer needs."""
    a, b = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=second_device)
    wanted = after_copy(a, b, UPTO)
    with sc.Copier((0, second_device), tickets=4, layer_events=24) as copier:
        runtime.set_device(second_device)
        stream = runtime.stream_create()
        runtime.set_device(0)
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED)
        for layer in range(LAYOUT.layers):
            assert ticket.wait_layer(layer, stream, timeout=10)
            runtime.stream_synchronize(stream)
            assert differences(b, wanted, layers={layer}) == []
        assert ticket.sync()
    runtime.stream_destroy(stream)
    assert differences(b, wanted) == []


# ---- refusals, memory, lanes


@pytest.mark.host
def test_a_patch_from_elsewhere_than_its_part_is_refused():
    def where(kind, device):
        return lambda i, part: {
            "kind": kind if part.name == "idx_dead" else "device",
            "device": device if part.name == "idx_dead" else 0,
        }

    host_runtime.configure(devices=3)
    target = Memory(LAYOUT, 2, device=1)
    wrong = [("pinned", 0, "its patch comes from host memory"), ("device", 2, "its patch comes from device 2")]
    for kind, device, text in wrong:
        source = Memory(LAYOUT, 1, where(kind, device))
        with sc.Copier(range(3), tickets=2, layer_events=24) as copier, pytest.raises(sc.Refused) as refused:
            copier.plan(source.state, target.state)
        assert refused.value.reason == "unsupported"
        assert text in str(refused.value)


@pytest.mark.host
def test_the_other_device_has_to_be_open_too(memory):
    a, b = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=1)
    for open_, missing in ((0, 1), (1, 0)):
        with sc.Copier((open_,), tickets=2, layer_events=24) as copier, pytest.raises(sc.Refused) as refused:
            copier.plan(a.state, b.state)
        assert (refused.value.reason, refused.value.device) == ("place", missing)


@pytest.mark.parametrize(("relay_memory", "slots"), [(511, 1), (2047, 4), (0, 1)])
def test_slots_that_are_too_small_are_a_value_error(relay_memory, slots):
    with pytest.raises(ValueError, match="relay_memory"):
        sc.Copier(relay_memory=relay_memory, relay_slots=slots)


@pytest.mark.host
def test_a_copier_that_closes_while_a_plan_is_made_refuses_it():
    host_runtime.configure(devices=2)
    a, b = Memory(LAYOUT, 1, device=0), Memory(LAYOUT, 2, device=1)
    copier = sc.Copier((0, 1), tickets=2, layer_events=24)

    class Sources(dict):
        def __iter__(self):  # so that `keys` is asked
            return super().__iter__()

        def keys(self):
            copier.close()  # as another thread may
            return super().keys()

    with pytest.raises(sc.Refused) as refused:
        copier.plan(Sources(dict.fromkeys(LAYOUT.groups, a.state)), b.state)
    assert refused.value.reason == "closed"


@pytest.mark.host
def test_ends_that_are_told_on_different_streams_stay_in_order(seed):
    """One slot, one ticket after the other: through a ring, by P2P, within the device."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    host_runtime.configure(devices=3, seed=seed, peers=[(2, 0)])
    states = [Memory(LAYOUT, n + 1, device=n % 3) for n in range(6)]
    ways = [(0, 2), (2, 0), (2, 5), (1, 2), (5, 2)]  # four of them are carried by device 2
    with sc.Copier(range(3), tickets=1, layer_events=24, relay_memory=1 << 13) as copier:
        plans = [copier.plan(states[a].state, states[b].state) for a, b in ways]
        for plan in plans * 6:
            ticket = plan.submit(UPTO, after=SYNCED, begin=(0, 0))
            host_runtime.step(chance.randint(0, 80))  # CUDA may tell the end before the word is there
            assert ticket.sync()


# ---- a device that has ended


def end_device(copier, source, target):
    """Ends the device of both states, without a word to the runtime: nobody can wait for its streams."""
    plan = copier.plan(source.state, target.state)
    host_runtime.fail("cudaMemcpyAsync", 3, 1)
    host_runtime.fail("cudaMemcpy2DAsync", 3, 1)
    host_runtime.fail("cudaStreamSynchronize", 1, 1, forever=True)
    with pytest.raises(sc.Poisoned):
        plan.submit(UPTO, after=SYNCED, begin=(0, 0))
    host_runtime.clear_faults()


def close_dead(copier):
    with pytest.raises(sc.Poisoned):
        copier.close()


@pytest.mark.host
def test_a_dead_device_is_not_called_where_a_ring_from_it_is_drained():
    drained = []
    for dead in (False, True):
        host_runtime.configure(devices=2, peers=[])
        a, x, y = (Memory(LAYOUT, n, device=0) for n in (1, 2, 3))
        b, c, d = (Memory(LAYOUT, n, device=1) for n in (4, 5, 6))
        copier = sc.Copier((0, 1), tickets=4, layer_events=24)
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
        if dead:
            end_device(copier, x, y)
        before = host_runtime.calls()["cudaStreamSynchronize"]
        host_runtime.fail("cudaMemcpyAsync", 3, 1)
        host_runtime.fail("cudaMemcpy2DAsync", 3, 1)
        with pytest.raises(sc.Failed):
            copier.submit(c.state, d.state, upto=UPTO, after=SYNCED)
        host_runtime.clear_faults()
        drained.append(host_runtime.calls()["cudaStreamSynchronize"] - before)
        d.state.reset()
        assert copier.submit(c.state, d.state, upto=UPTO, after=SYNCED).sync()
        close_dead(copier) if dead else copier.close()
    assert drained[0] - drained[1] == 2  # the two streams of the first hop


@pytest.mark.host
def test_a_stream_of_a_dead_device_is_not_touched_and_ends_no_other_device():
    host_runtime.configure(devices=2, peers=[])
    x, y = (Memory(LAYOUT, n, device=0) for n in (1, 2))
    c, d = (Memory(LAYOUT, n, device=1) for n in (3, 4))
    stream = runtime.stream_create()
    copier = sc.Copier((0, 1), tickets=4, layer_events=24)
    end_device(copier, x, y)
    before = host_runtime.calls()["cudaStreamIsCapturing"]
    with pytest.raises(sc.Poisoned) as poisoned:
        copier.submit(c.state, d.state, upto=UPTO, after=sc.Stream(stream, device=0))
    assert poisoned.value.device == 0
    assert host_runtime.calls()["cudaStreamIsCapturing"] == before
    assert copier.submit(c.state, d.state, upto=UPTO, after=SYNCED).sync()
    close_dead(copier)


@pytest.mark.host
def test_a_target_that_a_dead_devices_copy_may_still_write_is_refused(seed):
    host_runtime.configure(devices=2, seed=seed, peers=[])
    x, y = (Memory(LAYOUT, n, device=0) for n in (1, 2))
    half = Memory(LAYOUT, 3, lambda i, part: {"device": needed_by(part) % 2})
    b, target = (Memory(LAYOUT, n, device=1) for n in (4, 5))
    copier = sc.Copier((0, 1), tickets=4, layer_events=24)
    ticket = copier.submit(half.state, target.state, upto=UPTO, after=SYNCED)
    end_device(copier, x, y)
    with pytest.raises(sc.Poisoned):
        ticket.poll()
    with pytest.raises(sc.Refused) as refused:
        copier.submit(b.state, target.state, upto=UPTO, after=SYNCED)
    assert refused.value.reason == "busy"
    close_dead(copier)


@pytest.mark.host
@pytest.mark.parametrize("matrix", [None, []], ids=["peer", "relay"])
def test_a_long_kernel_holds_up_no_copies_between_others(matrix):
    """Copies from 0 to 1 wait for a kernel: those from 0 to 2, from 2 to 1, back, within each device, and between each
    and the host come to their ends meanwhile."""
    host_runtime.configure(devices=3, peers=matrix)
    where = {**{n: {"device": n} for n in range(3)}, "pinned": {"where": "pinned"}}
    held = {name: [Memory(LAYOUT, 10 * n + k, **how) for k in (1, 2)] for n, (name, how) in enumerate(where.items())}
    stuck = [Memory(LAYOUT, 90, device=0), Memory(LAYOUT, 91, device=1)]
    stream = runtime.stream_create()
    pairs = [(0, 2), (2, 1), (1, 0), (2, 0), (1, 2), *((n, n) for n in range(3))]
    pairs += [(n, "pinned") for n in range(3)] + [("pinned", n) for n in range(3)]
    with sc.Copier(range(3), tickets=16, layer_events=24, relay_memory=1 << 14) as copier:
        stuck_plan = copier.plan(stuck[0].state, stuck[1].state)
        plans = [(held[a][0], held[b][1], copier.plan(held[a][0].state, held[b][1].state)) for a, b in pairs]
        gate = Gate(stream)
        held_up = stuck_plan.submit(UPTO, after=sc.Stream(stream))
        try:
            for source, target, plan in plans:
                assert plan.submit(UPTO, after=SYNCED, begin=(0, 0)).sync(20), plan.routes()
                assert differences(target, after_copy(source, target, UPTO)) == []
                target.fill()
            assert not held_up.done
            assert untouched(stuck[1])
        finally:
            gate.open()
        assert held_up.sync()
    assert differences(stuck[1], after_copy(*stuck, UPTO)) == []


@pytest.mark.host
@pytest.mark.parametrize(
    ("slots", "slot", "shared"),
    [(4, 1 << 14, 1 << 14), (2, 1 << 14, 1 << 13), (3, 1 << 14, 3 << 12), (4, 8 << 20, 4 << 20), (8, 2 << 20, 2 << 20)],
)
def test_a_ring_shares_what_it_holds_while_others_are_in_use(slots, slot, shared):
    """Alone it takes whole slots, all of them; beside another one half of their bytes: in all slots where each still
    has 4 MiB, in two where it has less."""
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=slot // 4, growth=sc.Growth.linear())])
    upto = (20,)

    def sizes(together):
        host_runtime.configure(devices=2, seed=1, peers=[])
        a, c = (Memory(layout, tag, device=0, marks=upto) for tag in (1, 3))
        b, d = (Memory(layout, tag, device=1, marks=upto) for tag in (2, 4))
        with sc.Copier((0, 1), tickets=4, layer_events=24, relay_memory=slots * slot, relay_slots=slots) as copier:
            plans = [copier.plan(x.state, y.state) for x, y in ((a, b), (d, c))]
            before = len(host_runtime.log())
            tickets = [plan.submit(upto, after=SYNCED) for plan in plans[: 1 + together]]
            assert all(ticket.sync() for ticket in tickets)
            found = Counter(size for _, _, size in host_runtime.log()[before:] if size > 8)
        assert differences(b, after_copy(a, b, upto)) == []
        return found

    assert sizes(together=False) == {slot: 2 * 5}
    # The first ticket was queued whole while it was alone.
    assert sizes(together=True) == Counter({slot: 2 * 5}) + Counter(both_hops(5 * slot, shared))


def both_hops(bytes, slot):
    """Sizes of the copies of so many bytes through slots, twice each."""
    whole, rest = divmod(bytes, slot)
    return {slot: 2 * whole} | ({rest: 2} if rest else {})


@pytest.mark.host
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_slot_is_filled_while_earlier_ones_are_emptied(slots):
    """The first hop is ahead of the second by as many chunks as there are slots, under some seed, and never by more."""
    slot = 1 << 12
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=slot, growth=sc.Growth.linear())])
    leads = []
    for seed in range(20):
        host_runtime.configure(devices=2, seed=seed, peers=[])
        a, b = (Memory(layout, tag, device=tag - 1, marks=(9,)) for tag in (1, 2))
        with sc.Copier((0, 1), tickets=4, layer_events=24, relay_memory=slots * slot, relay_slots=slots) as copier:
            plan = copier.plan(a.state, b.state)
            before = len(host_runtime.log())
            assert plan.submit((9,), after=SYNCED).sync()
            hops = [stream for _, stream, size in host_runtime.log()[before:] if size == slot]
        assert differences(b, after_copy(a, b, (9,))) == []
        assert sorted(Counter(hops).values()) == [9, 9]
        filled = [1 if stream == hops[0] else -1 for stream in hops]
        leads.append(max(sum(filled[:n]) for n in range(19)))
    assert max(leads) == slots


@pytest.mark.host
def test_many_rings_in_use_hold_as_much_as_one_alone():
    """Of four directions each gets a quarter of the bytes, in two slots; tickets of one direction get all of it."""
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=1 << 12, growth=sc.Growth.linear())])
    ways = [(0, 1), (1, 0), (1, 2), (2, 0)]
    for together, room in ((ways, 1 << 13), (2 * ways[:1], 1 << 14)):
        host_runtime.configure(devices=3, seed=1, peers=[])
        pairs = [
            tuple(Memory(layout, 2 * n + k, device=way[k], marks=(16,)) for k in (0, 1))
            for n, way in enumerate(together)
        ]
        with sc.Copier(range(3), tickets=8, layer_events=24, relay_memory=1 << 16, relay_slots=4) as copier:
            plans = [copier.plan(a.state, b.state) for a, b in pairs]
            tickets = [plan.submit((2,), after=SYNCED) for plan in plans]  # from now on all are in use
            before = len(host_runtime.log())
            tickets += [plan.submit((16,), after=SYNCED) for plan in plans]
            assert all(ticket.sync() for ticket in tickets)
            sizes = {size for _, _, size in host_runtime.log()[before:] if size > 8} - {2 << 12}
            before = len(host_runtime.log())
            assert plans[0].submit((16,), after=SYNCED).sync()  # alone again
            assert {size for _, _, size in host_runtime.log()[before:] if size > 8} == {1 << 14}
        assert all(differences(b, after_copy(a, b, (16,))) == [] for a, b in pairs)
        assert max(sizes | {2 << 12}) == room


@pytest.mark.host
def test_a_ring_takes_the_pinned_memory_that_it_says():
    """1 MiB for a direction: a machine that has that and 64 KiB opens one, and no second one."""
    host_runtime.configure(devices=2, peers=[], pinned=(1 << 20) + (64 << 10))
    a, b = (Memory(LAYOUT, tag, device=tag - 1) for tag in (1, 2))
    with sc.Copier((0, 1), tickets=4, layer_events=24, pinned_memory=0, relay_memory=1 << 20) as copier:
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
        with pytest.raises(sc.Refused) as refused:
            copier.plan(b.state, a.state)
        assert (refused.value.call, refused.value.wanted) == ("cudaHostAlloc", 1 << 20)
    assert differences(b, after_copy(a, b, UPTO)) == []


@pytest.mark.host
@pytest.mark.parametrize("slow", [0, 1])
def test_devices_of_a_ticket_do_not_wait_for_each_other(slow):
    """A kernel holds the lanes of one device: what the ticket moves on the other one lands meanwhile."""
    host_runtime.configure(devices=2)
    before = [Memory(LAYOUT, tag, device=slow) for tag in (1, 2)]
    a, b = (Memory(LAYOUT, tag, lambda i, part: {"device": needed_by(part) % 2}) for tag in (3, 4))
    stream = runtime.stream_create()
    with sc.Copier((0, 1), tickets=16, layer_events=24) as copier:
        stuck, plan = copier.plan(before[0].state, before[1].state), copier.plan(a.state, b.state)
        gate = Gate(stream)
        held_up = stuck.submit(UPTO, after=sc.Stream(stream))
        ticket = plan.submit(UPTO, after=SYNCED)
        try:
            wanted = after_copy(a, b, UPTO)
            there = [i for i, part in enumerate(LAYOUT.parts) if needed_by(part) % 2 != slow]
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and not all(same(b.bytes()[i], wanted[i]) for i in there):
                time.sleep(0.01)
            assert all(same(b.bytes()[i], wanted[i]) for i in there)
            assert not ticket.done
        finally:
            gate.open()
        assert held_up.sync()
        assert ticket.sync()
    assert differences(b, wanted) == []


@pytest.mark.host
def test_a_ticket_whose_slots_are_short_fills_no_stream():
    """Its ring is one of 12, and it waits for a kernel as they do: the worker has it, and no submit is held up."""
    host_runtime.configure(devices=4, peers=[])
    slot = 1 << 16
    short = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=64, growth=sc.Growth.linear())])
    long = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=slot, growth=sc.Growth.linear())])
    ways = [(a, b) for a in range(4) for b in range(4) if a != b]
    pairs = [tuple(Memory(short, 2 * n + k, device=way[k], marks=(4,)) for k in (0, 1)) for n, way in enumerate(ways)]
    a, b = (Memory(long, 90 + d, device=d, marks=(128,)) for d in (0, 1))
    c, d = (Memory(short, tag, device=2, marks=(4,)) for tag in (93, 94))
    stream = runtime.stream_create()
    with sc.Copier(
        range(4), tickets=32, layer_events=24, chunk=1 << 20, relay_memory=4 * slot, relay_slots=4
    ) as copier:
        plans = [copier.plan(x.state, y.state) for x, y in pairs]
        plan, other = copier.plan(a.state, b.state), copier.plan(c.state, d.state)
        gate = Gate(stream)
        try:
            tickets = [one.submit((4,), after=sc.Stream(stream)) for one in plans]
            tickets.append(in_thread(lambda: plan.submit((128,), after=sc.Stream(stream)))())
            assert in_thread(lambda: other.submit((4,), after=SYNCED).sync())()
            assert not any(ticket.done for ticket in tickets)
        finally:
            gate.open()
        assert all(ticket.sync() for ticket in tickets)
    for source, target, upto in [*((x, y, (4,)) for x, y in pairs), (a, b, (128,)), (c, d, (4,))]:
        assert differences(target, after_copy(source, target, upto)) == []
