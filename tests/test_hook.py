"""The caller's hook: told of each layer on each device once, its work between the layer's bytes and whoever waits."""

import ctypes

import pytest

import strata_copy as sc
from fixtures import (
    SYNCED,
    after_copy,
    allocate,
    differences,
    needed_by,
    read,
    release,
    settle,
    small_layout,
    two_devices,
    untouched,
)
from hooks import Hook, address
from lost_calls import ROUTES as LOST_ROUTES
from lost_calls import Beside, unreported
from strata_copy import host_runtime, runtime

LAYOUT = small_layout("k8v4")
UPTO = 90
ROUTES = {
    "local": ("device", "device"),
    "out": ("device", "pinned"),
    "in": ("pinned", "device"),
    "ring": ("pinned", "pinned"),
    "stage": ("pageable", "device"),
    "unstage": ("device", "pageable"),
    "host": ("pageable", "pinned"),
    "mixed": (
        lambda i, part: {"kind": ("device", "device", "pinned", "pinned")[i % 4]},
        lambda i, part: {"kind": ("device", "pinned", "device", "pinned")[i % 4]},
    ),
    "two devices": (
        lambda i, part: {"kind": ("device", "device", "pinned", "pinned")[i % 4], "device": i // 2 % 2},
        lambda i, part: {"kind": ("device", "pinned", "device", "pinned")[i % 4], "device": i // 2 % 2},
    ),
}
FED = [False, True]


def small(**how):
    """A copier in whose eyes the small conversation is long."""
    return sc.Copier(two_devices(), **{
        "tickets": 8, "layer_events": 32, "chunk": 3000, "window": 1, "device_memory": 4096, "ring_slots": 2,
        "pinned_memory": 4 * 2048, **how
    })  # fmt: skip


def two_memories(memory, route, layout=LAYOUT):
    if route == "two devices" and runtime.device_count() < 2:
        route = "mixed"
    return [memory(layout, n, where) for n, where in enumerate(ROUTES[route], 1)]


def devices_of(ticket):
    return {device for _, device in ticket.routes}


@pytest.fixture
def current_device():
    """Another than the first, where there are two."""
    runtime.set_device(runtime.device_count() - 1)
    yield runtime.get_device()
    runtime.set_device(0)


@pytest.mark.parametrize("upto", [UPTO, 0])
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("route", ROUTES)
def test_each_layer_is_told_once_on_each_device_and_in_order(memory, current_device, route, fed, upto):
    """With the device current, which is as before when submit has returned."""
    a, b = two_memories(memory, route)
    hook = Hook(argument=1234)
    with small() as copier:
        ticket = copier.submit(a.state, b.state, upto=upto, after=SYNCED, feed=fed, **hook.how)
        assert runtime.get_device() == current_device
        assert ticket.sync()
        assert hook.errors == []
        assert len(devices_of(ticket)) == (2 if route == "two devices" and runtime.device_count() > 1 else 1)
        assert {device for _, device in hook.calls} == devices_of(ticket)
        for device in devices_of(ticket):
            assert hook.layers_of(device) == list(range(LAYOUT.layers))
    assert differences(b, after_copy(a, b, upto)) == []


@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("rows", [0, 3])
def test_layers_without_bytes_are_told_too(memory, seed, rows, fed):
    """Layer 1 of 4 has none at any length; at no rows there is nothing to copy at all."""
    parts = [sc.Part(name="k", layer=n, unit_bytes=64, growth=sc.Growth.linear(1)) for n in (0, 2, 3)]
    layout = sc.Layout(parts)
    a, b = two_memories(memory, "out", layout)
    hook, stream = Hook(), runtime.stream_create()
    with small() as copier:
        ticket = copier.submit(a.state, b.state, upto=rows, after=SYNCED, feed=fed, **hook.how)
        assert all(ticket.wait_layer(layer, stream, timeout=60) for layer in range(layout.layers))
        assert ticket.sync()
    assert (hook.layers_of(0), hook.errors) == (list(range(layout.layers)), [])
    assert differences(b, after_copy(a, b, rows)) == []


def test_a_hook_is_called_without_the_gil(memory, seed):
    """PyGILState_Check has a hook's convention: its 1, where the thread holds the GIL, would fail the ticket, as what
    Py_IsInitialized returns does."""
    a, b = two_memories(memory, "out")
    with small() as copier:
        for fed in FED:
            hook = address(ctypes.pythonapi.PyGILState_Check)
            assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=fed, hook=hook).sync()
        hook = address(ctypes.pythonapi.Py_IsInitialized)
        with pytest.raises(sc.Failed) as failed:
            copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=False, hook=hook)
        assert (failed.value.reason, failed.value.found) == ("hook", 1)
        b.state.reset()


# ---- what it enqueues


class Seen:
    """Memory of the other kind for each block of a memory, into which a hook copies what it is told of."""

    def __init__(self, memory):
        self.memory = memory
        self.kinds = ["pinned" if kind == "device" else "device" for kind, *_ in memory.blocks]
        self.mine = [allocate(kind, place.device, block[2])
                     for kind, place, block in zip(self.kinds, memory.places, memory.blocks, strict=True)]  # fmt: skip

    def copy(self, layer, device, stream):
        self.copy_layer(layer, stream, device)

    def copy_layer(self, layer, stream, device=None):
        for mine, part, place, (_, base, size) in self.each():
            if needed_by(part) == layer and device in (None, place.device):
                runtime.memcpy_async(mine, base, size, stream)

    def copy_on(self, layer, stream, to):
        """What was copied of a layer, once more."""
        for mine, target, (_, part, _, block) in zip(self.mine, to.mine, self.each(), strict=True):
            if needed_by(part) == layer:
                runtime.memcpy_async(target, mine, block[2], stream)

    def each(self):
        return zip(self.mine, self.memory.layout.parts, self.memory.places, self.memory.blocks, strict=True)

    def bytes(self):
        return [read(mine, block[2]) for mine, _, _, block in self.each()]

    def free(self):
        for kind, mine in zip(self.kinds, self.mine, strict=True):
            release(kind, mine)


@pytest.fixture
def seen():
    made = []

    def make(memory):
        made.append(Seen(memory))
        return made[-1]

    yield make
    for one in made:
        one.free()


def same(found, wanted):
    return [i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if (x != y).any()] == []


@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("route", ROUTES)
def test_its_stream_stands_behind_the_layer_and_waits_behind_its_work(memory, seen, seed, route, fed):
    """The hook copies the layer's bytes away; consumers of each layer copy on what it has copied."""
    a, b = two_memories(memory, route)
    first, second = seen(b), seen(b)
    streams = [runtime.stream_create() for _ in range(LAYOUT.layers)]
    writer = runtime.stream_create()
    hook = Hook(first.copy)
    with small() as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=sc.Stream(writer), feed=fed, **hook.how)
        for layer, stream in enumerate(streams):
            assert ticket.wait_layer(layer, stream, timeout=60)
            first.copy_on(layer, stream, second)
        assert ticket.sync()
        assert hook.errors == []
        wanted = after_copy(a, b, UPTO)
        assert same(first.bytes(), wanted)
        for stream in streams:
            runtime.stream_synchronize(stream)
        assert same(second.bytes(), wanted)
        assert differences(b, wanted) == []


@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("route", ["out", "in", "stage", "unstage", "mixed"])
def test_the_end_stands_behind_its_work(memory, seen, seed, route, fed):
    """A later ticket that writes the target comes behind what the hook still reads of it; and wait_done likewise."""
    a, b = two_memories(memory, route)
    first, second, stream = seen(b), seen(b), runtime.stream_create()
    hook = Hook(first.copy)
    with small() as copier:
        ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=fed, **hook.how)
        assert ticket.wait_done(stream, timeout=60)
        for layer in range(LAYOUT.layers):
            first.copy_on(layer, stream, second)
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
        runtime.stream_synchronize(stream)
        assert same(second.bytes(), after_copy(a, b, UPTO))


def with_a_hook(fed):
    def scene(copier, a, b, _):
        """A writer of the source comes before, and is late, so that waits are not for what is over; the hook copies
        each layer away. Who waits for a layer reads what the hook has written, who waits for the end overwrites what it
        reads."""
        writer, everything = runtime.stream_create(), runtime.stream_create()
        first, second, third = Seen(b), Seen(b), Beside(b)
        host_runtime.delay(1)
        Beside(a).write_it(writer)
        hook = Hook(lambda layer, _, stream: first.copy_layer(layer, stream))  # one device carries, also for another
        ticket = copier.submit(a.state, b.state, upto=41, after=sc.Stream(writer), feed=fed, **hook.how)
        assert ticket.wait_done(everything, timeout=60)
        third.write_it(everything)
        for layer in range(b.layout.layers):
            consumer = runtime.stream_create()
            assert ticket.wait_layer(layer, consumer, timeout=60)
            first.copy_on(layer, consumer, second)
        assert ticket.sync()
        assert hook.errors == []

    return scene


@pytest.mark.host
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("together", [False, True], ids=["apart", "bundles"])
@pytest.mark.parametrize("route", LOST_ROUTES)
def test_each_wait_and_record_around_a_hook_is_needed(route, together, fed):
    lost, of = unreported(with_a_hook(fed), route, together=together)
    host_runtime.configure(devices=2)
    assert of["mark"] >= 4 * 4  # behind a layer and behind its hook, each recorded and waited for
    assert set(lost) <= {"chain"}


# ---- what it may not do, and how it fails a ticket


def called_from_a_hook(scene, earlier):
    """Each call of this library that would do something, by name."""
    plan = scene.copier.plan(scene.target.state, scene.source.state)
    return {
        "submit": lambda: plan.submit(9, after=SYNCED),
        "wait_layer": lambda: earlier.wait_layer(0, 0x1234),
        "wait_done": lambda: earlier.wait_done(0x1234),
        "wait_source": lambda: earlier.wait_source(0x1234),
        "sync": earlier.sync,
        "cancel": earlier.cancel,
        "reset": scene.target.state.reset,
        "plan": lambda: scene.copier.plan(scene.source.state, scene.target.state),
        "close": scene.copier.close,
    }


@pytest.mark.parametrize("fed", FED)
def test_calls_of_the_library_from_a_hook_are_refused(scene, held, fed):
    """And what only looks does not: it says what is known."""
    told, other = [], scene.make(LAYOUT, 3, "pinned")
    earlier = scene.copier.submit(scene.source.state, other.state, upto=9, after=held.wait)
    calls = called_from_a_hook(scene, earlier)

    def act(layer, device, stream):
        for name, call in calls.items():
            with pytest.raises(sc.Refused) as refused:
                call()
            told.append((name, refused.value.reason))
            assert str(refused.value).startswith("wait_done" if name == "wait_source" else name)
        assert not earlier.done
        assert scene.copier.finished() == []
        assert scene.target.state.busy
        assert earlier.poll().layers_queued == LAYOUT.layers

    hook = Hook(act)
    ticket = scene.submit(feed=fed, **hook.how)
    held.open()
    assert ticket.sync()
    assert earlier.sync()
    assert hook.errors == []
    assert told == [(name, "hook") for name in calls] * LAYOUT.layers
    assert scene.copier.plan(scene.target.state, scene.source.state).submit(9, after=SYNCED).sync()


@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("bad", range(LAYOUT.layers))
@pytest.mark.parametrize("route", ROUTES)
def test_a_hook_that_says_no_fails_the_ticket(memory, current_device, route, bad, fed):
    a, b = two_memories(memory, route)
    hook = Hook(lambda layer, device, stream: 7 if layer == bad else 0)
    with small() as copier:
        with pytest.raises(sc.Failed) as failed:
            copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=fed, **hook.how).sync()
        error = failed.value
        assert (error.reason, error.layer, error.found) == ("hook", bad, 7)
        assert (error.layer, error.device) == hook.calls[-1]
        assert [layer for layer, device in hook.calls if device == error.device] == list(range(bad + 1))
        assert runtime.get_device() == current_device
        assert untouched(a)
        assert (b.state.valid, b.state.busy) == (False, False)
        left = b.bytes()  # quiet: nothing writes it any more
        settle()
        assert same(b.bytes(), left)
        b.state.reset()
        b.fill()
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED).sync()
        assert differences(b, after_copy(a, b, UPTO)) == []


@pytest.mark.parametrize("fed", FED)
def test_layer_events_for_a_hook_are_asked_for_at_submit(memory, fed):
    """One more for each layer than the plan needs."""
    a, b = two_memories(memory, "mixed")
    with small(layer_events=1) as copier, pytest.raises(sc.Refused) as refused:
        copier.plan(a.state, b.state)
    needed, hook = refused.value.wanted + LAYOUT.layers, Hook()
    with small(layer_events=needed) as copier:
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=fed, **hook.how).sync()
    with small(layer_events=needed - 1) as copier:
        with pytest.raises(sc.Refused) as refused:
            copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=fed, **hook.how)
        assert (refused.value.reason, refused.value.wanted, refused.value.found) == ("capacity", needed, needed - 1)
        assert copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=fed).sync()
    assert hook.layers_of(0) == list(range(LAYOUT.layers))


@pytest.mark.host
@pytest.mark.parametrize("route", ROUTES)
def test_a_fed_copy_with_a_hook_is_cancelled_at_every_chunk(memory, seed, route):
    """Once it says so, nothing writes the target, and the hook's work is done."""
    steps = 0
    while True:
        host_runtime.configure(devices=2, seed=seed)
        a, b = two_memories(memory, route)
        mine = Seen(b)
        hook = Hook(mine.copy)
        with small(chunk=2000) as copier:
            ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True, **hook.how)
            for _ in range(steps):
                host_runtime.step(1)
                runtime.get_device()  # the worker has a turn
            if not ticket.cancel():
                assert ticket.sync()
                break
            with pytest.raises(sc.Cancelled):
                ticket.sync()
            left = b.bytes() + mine.bytes()
            assert hook.layers_of(0) == list(range(len(hook.layers_of(0))))
        assert hook.errors == []
        assert same(b.bytes() + mine.bytes(), left)
        assert host_runtime.violations() == []
        steps += 7
    assert steps > 7
