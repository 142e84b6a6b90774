"""What is done under a fault in test_fault_sweep: each operation that calls CUDA, what it needs before, and what it
promises where one of its calls fails."""

import contextlib
import functools
from types import MappingProxyType

import numpy as np
import pytest

import strata_copy as sc
from fault_codes import CODES
from fixtures import Memory, after_copy, differences, pageable, read, settle
from hooks import SIGNATURE, address
from lost_calls import small_proof
from strata_copy import host_runtime, runtime

COPY_CALLS = (
    "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpyPeerAsync", "cudaMemcpy3DPeerAsync", "cudaMemcpyBatchAsync",
)  # fmt: skip
MODE_CALL = "cudaThreadExchangeStreamCaptureMode"
DRAIN_CALL = "cudaStreamSynchronize"
DEVICE_CALL = "cudaSetDevice"
TURN_CALL = "cudaStreamQuery"  # which the library does not make: in it the worker may have a turn
UPTO, CAPACITY = 21, 24


def conversation(times=1):
    """Small, with everything that makes a submit call CUDA: bundles, layers, rows with gaps, a patch; units of `times`
    the bytes."""
    growth, parts = sc.Growth, [sc.Part(name="window", layer=-1, unit_bytes=40 * times, growth=sc.Growth.state())]
    for layer in range(4):
        if layer % 2:
            parts += [
                sc.Part(name="k", layer=layer, unit_bytes=64 * times, growth=growth.linear(4, ceil=True)),
                sc.Part(name="pooled", layer=layer, unit_bytes=32 * times, growth=growth.linear(4, extra=1)),
                sc.Part(name="idx_dead", layer=layer, unit_bytes=32 * times, growth=growth.const()),
            ]
        else:
            parts.append(sc.Part(name="recurrent", layer=layer, unit_bytes=48 * times, growth=growth.state()))
    return sc.Layout(parts, patches=[sc.Patch(layer=layer, part="pooled", source="idx_dead") for layer in (1, 3)])


LAYOUT, LONG_LAYOUT = conversation(), conversation(4)


def everywhere(side):
    """Parts on two devices and in pinned memory, some with gaps between their units: all routes and kinds of copy."""

    def where(i, part):
        kinds = [("device", "device"), ("device", "pinned"), ("pinned", "device")][i % 3]
        stride = part.unit_bytes + (32 if part.name == "k" else 0)
        return {"kind": kinds[side], "device": max(part.layer, 0) % 2, "stride": stride}

    return where


def between(side):
    """All on one device, of which the other side is not."""
    return lambda i, part: {"device": side, "stride": part.unit_bytes + (32 if part.name == "k" else 0)}


def half(first, second):
    """Layers in turn: their bytes take staging from one another."""
    return lambda i, part: {"kind": (first, second)[max(part.layer, 0) // 2 % 2]}


# Places of source and target, of where the target goes on to, and the devices of the copier.
ROUTES = {
    "local": ("device", "device", "device", (0,)),
    "out": ("device", "pinned", "pinned", (0,)),
    "in": ("pinned", "device", "device", (0,)),
    "ring": ("pinned", "pinned", "pinned", (0,)),
    "mixed": (everywhere(0), everywhere(1), everywhere(1), (0, 1)),
    "peer": (between(0), between(1), between(0), (0, 1)),
    "relay": (between(0), between(1), between(0), (0, 1)),
}
# Where helpers copy, which only the worker asks for: through staging, beside a ring, and alone.
STAGED_ROUTES = {
    "stage": ("pageable", "device", "device", (0,)),
    "unstage": ("device", "pageable", "device", (0,)),
    "both": (half("device", "pageable"), half("pageable", "device"), "device", (0,)),
    "helped": ("pinned", "pinned", "pinned", (0,)),
    "host": ("pageable", "pinned", "pageable", (0,)),
}


class Image(Memory):
    """A Memory whose pattern is made once: thousands are made of it."""

    def pattern(self):
        return [noise(self.tag, i, size) for i, (_, _, size) in enumerate(self.blocks)]


@functools.cache
def noise(tag, i, size):
    return np.random.default_rng((tag, i)).integers(0, 256, size, np.uint8)


# Bytes of a chunk: where helpers copy beside a ring; by P2P, where a lane's is many times as long.
CHUNKS = {"helped": 512, "peer": 48}


class Scene:
    """Three conversations and a copier on a host runtime as new, where nothing is executed by itself."""

    def __init__(self, route, operation):
        host_runtime.configure(devices=2, seed=1, peers=[] if route == "relay" else None)
        source, target, third, self.devices = {**ROUTES, **STAGED_ROUTES}[route]
        pageable.clear()  # of the scene before
        layout, marks = LONG_LAYOUT if route == "helped" else LAYOUT, (CAPACITY,)
        self.source, self.target = Image(layout, 1, source, marks), Image(layout, 2, target, marks)
        self.third = Image(layout, 3, third, marks)
        self.stream, self.event = runtime.stream_create(), runtime.event_create()
        runtime.event_record(self.event, self.stream)
        runtime.stream_synchronize(self.stream)
        self.after = [sc.Event(self.event), sc.Stream(self.stream)]
        self.wanted = after_copy(self.source, self.target, UPTO)
        self.live = host_runtime.live()
        self.tickets, self.copier = [], None
        self.how = {**operation.copier, **({"chunk": CHUNKS[route]} if route in CHUNKS else {})}
        self.route, self.by_worker = route, False
        if operation.opened:
            self.open()

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        try:
            if self.copier is not None:
                self.copier.close()
        except sc.CopyError:  # that an error ended
            assert kind is not None

    def open(self):
        how = {"tickets": 3, "layer_events": 10, "chunk": 256, "patience": 1e-9, **self.how}
        self.copier = sc.Copier(self.devices, **how)
        with small_proof():
            self.plan = self.copier.plan(self.source.state, self.target.state)
            self.back = self.copier.plan(self.target.state, self.third.state)

    def submit(self, plan=None, **how):
        self.tickets.append((plan or self.plan).submit(UPTO, after=self.after, **how))
        return self.tickets[-1]

    def turn(self):
        """The worker may have one, and something is executed."""
        with contextlib.suppress(runtime.CudaError):  # of a device that has ended
            runtime.stream_query(self.stream)
        host_runtime.step(1)

    def bytes_of_target(self):
        return b"".join(read(base, size).tobytes() for _, base, size in self.target.blocks)

    def check_quiet(self):
        """Nothing that still runs writes the target."""
        before = self.bytes_of_target()
        settle()
        assert self.bytes_of_target() == before

    def check_second(self, error, started):
        """The second ticket's copy has landed, or its target is as what was told says, and nothing of it runs."""
        if error is None:
            assert self.tickets[1].sync(60)
            self.check_copied()
        else:
            assert self.target.state.valid == (not started)
            self.check_quiet()
            assert started or differences(self.target, self.target.pattern()) == []

    def check_copied(self):
        assert differences(self.target, self.wanted) == []
        assert self.target.state.valid

    def check_ended_well(self, ticket):
        third = ticket.plan is self.back
        wanted = after_copy(self.target, self.third, UPTO) if third else self.wanted
        assert differences(self.third if third else self.target, wanted) == []

    def check_next_copy(self):
        """The target is no source until it was reset; then a whole copy is right."""
        if not self.target.state.valid:
            with pytest.raises(sc.Refused) as refused:
                self.back.submit(UPTO, after=self.after)
            assert refused.value.reason == "invalid"
            self.target.state.reset()
        self.target.fill()
        assert self.submit().sync(60)
        self.check_copied()
        self.target.fill()
        self.tickets.clear()


class Operation:
    """`act` is what is done under a fault, after `prepare`.

    routes: on which it is done. opened: with an open copier, which `copier` is for. moves: it queues copies itself.
    threaded: CUDA is called in a thread of its own, so that the caller's pending error is not seen. loops: functions
    most of whose calls are equal ones, in loops.
    """

    routes, opened, moves, threaded, loops = tuple(ROUTES), True, False, False, ()
    copier = MappingProxyType({})

    def prepare(self, scene):
        pass

    def arm(self):
        """Arms what the operation is about, besides the fault that is tried."""

    def act(self, scene):
        raise NotImplementedError

    def tries(self, function, calls):
        """How many of the calls of this function are made to fail, each in turn."""
        return calls

    def told(self, scene, fault, started):
        """The class of the exception, or None where `act` succeeds all the same; or a tuple of classes where time tells
        which. started: a copy call was made."""
        return None if fault.restores else sc.Refused

    def told_of_the_end(self, fault):
        """The same for a code that ends the device. Where the last call fails, what is told is what was done."""
        return None if fault.restores else sc.Poisoned

    def names_the_call(self, error, fault):
        """event_captured is this library's name for a function of the driver."""
        assert error.cuda_code == fault.code
        assert error.call == ("cuEventElapsedTime" if fault.function == "event_captured" else fault.function)

    def check(self, scene, error, started):
        """What holds behind it. `error`: what it ended with, or None."""


class Open(Operation):
    # It does not know what will be copied: on the devices of all routes.
    routes, opened, threaded, loops = ("mixed",), False, True, tuple(CODES)

    def act(self, scene):
        scene.open()

    def told(self, scene, fault, started):
        if fault.function == DRAIN_CALL and fault.forever:
            return sc.Poisoned  # what may still be written to cannot be given back
        # Lanes, then what the worker needs: each puts the mode of their thread back.
        return None if fault.restores and (fault.last or not fault.forever) else sc.Refused

    def told_of_the_end(self, fault):
        return None if fault.restores and fault.last else sc.Poisoned

    def names_the_call(self, error, fault):
        if not fault.restores:  # else it is found out later
            super().names_the_call(error, fault)

    def check(self, scene, error, started):
        assert scene.target.state.valid
        assert differences(scene.target, scene.target.pattern()) == []
        if error is not None:
            assert host_runtime.live() == scene.live
            scene.open()


class Submit(Operation):
    """With a ticket in flight that reads the target."""

    moves = True

    def prepare(self, scene):
        scene.submit(scene.back)

    def act(self, scene):
        scene.submit()

    def told(self, scene, fault, started):
        return None if fault.restores else sc.Failed if started else sc.Refused

    def check(self, scene, error, started):
        reader = scene.tickets[0]
        scene.check_second(error, started)
        assert reader.sync(60)
        assert differences(scene.third, after_copy(scene.target, scene.third, UPTO)) == []
        scene.third.fill()
        assert not scene.target.state.busy


class GiveUp(Operation):
    """A submit whose second copy call fails: what it does until it may say so."""

    moves = True
    failing = ("cudaMemcpyAsync", "cudaMemcpy3DPeerAsync")

    def arm(self):
        for function in self.failing:
            host_runtime.fail(function, 2, 1)

    def act(self, scene):
        scene.submit()

    def tries(self, function, calls):
        return calls if function in (DRAIN_CALL, MODE_CALL) else 0

    def told(self, scene, fault, started):
        if fault.function == DRAIN_CALL:
            return sc.Poisoned if fault.forever else sc.Failed  # asked twice
        return sc.Failed if fault.restores else sc.Refused

    def told_of_the_end(self, fault):
        return sc.Failed if fault.restores else sc.Poisoned

    def names_the_call(self, error, fault):
        assert (error.call, error.cuda_code) in (*((call, 1) for call in self.failing), (fault.function, fault.code))
        assert error.restored == (not fault.restores)

    def check(self, scene, error, started):
        assert scene.target.state.valid == (not started)
        scene.check_quiet()


class Waiting(Operation):
    """A wait behind a ticket in flight."""

    def prepare(self, scene):
        scene.submit()

    def check(self, scene, error, started):
        assert scene.tickets[0].sync(60)
        scene.check_copied()


class WaitLayer(Waiting):
    def act(self, scene):
        assert scene.tickets[0].wait_layer(1, scene.stream)


class WaitDone(Waiting):
    def act(self, scene):
        assert scene.tickets[0].wait_done(scene.stream)


class WaitSource(Waiting):
    def act(self, scene):
        assert scene.tickets[0].wait_source(scene.stream)


class Sync(Waiting):
    """With a part of the copy to be executed. How often CUDA is asked while it is depends on the time: the calls of the
    first time fail."""

    def prepare(self, scene):
        scene.submit()
        host_runtime.step(max(0, host_runtime.pending() - 12))

    def tries(self, function, calls):
        return min(calls, 2 if function == MODE_CALL else 1)

    def act(self, scene):
        assert scene.tickets[0].sync(60)

    def told(self, scene, fault, started):
        if fault.restores:  # for good: it may have ended before it is asked for again
            return (type(None), sc.Refused) if fault.forever else None
        return sc.Refused if fault.function == MODE_CALL else sc.Failed

    def told_of_the_end(self, fault):
        return sc.Poisoned

    def names_the_call(self, error, fault):
        assert error.cuda_code == fault.code
        assert error.call == fault.function or type(error) is sc.Poisoned  # the ticket only knows the code

    def check(self, scene, error, started):
        if type(error) is sc.Failed:
            assert not scene.target.state.valid
            assert not scene.target.state.busy
            scene.check_quiet()
        else:
            super().check(scene, error, started)


class Finished(Sync):
    """It raises nothing: a ticket says how it ended. CUDA is asked once."""

    def act(self, scene):
        for ticket in scene.copier.finished():
            if ticket.error is not None:
                raise ticket.error

    def told(self, scene, fault, started):
        return None if fault.function == MODE_CALL else sc.Failed

    def told_of_the_end(self, fault):
        return None if fault.restores else sc.Poisoned


class Close(Operation):
    """With a ticket in flight."""

    routes, threaded, loops = ("mixed",), True, tuple(CODES)

    def prepare(self, scene):
        scene.submit()

    def act(self, scene):
        scene.copier.close()

    def told(self, scene, fault, started):
        if fault.function == MODE_CALL:  # thrice: the end of all tickets, which does not tell, the worker's, the lanes'
            return sc.Failed if fault.nth in (3, 5) or (fault.forever and fault.nth < 5) else None
        if fault.function == DRAIN_CALL:
            return sc.Poisoned if fault.forever else None  # asked twice
        return sc.Failed

    def told_of_the_end(self, fault):
        return None if (fault.function, fault.nth) == (MODE_CALL, 6) else sc.Poisoned

    def names_the_call(self, error, fault):
        assert error.cuda_code == fault.code
        # Where the mode was put back it is found out by the next call: of the worker's closing, or of the lanes'.
        found_by = {2: "cudaStreamDestroy", 4: DRAIN_CALL}.get(fault.nth) if fault.restores else None
        assert error.call in (fault.function, "", found_by)

    def check(self, scene, error, started):
        assert scene.copier.closed
        assert scene.tickets[0].done
        scene.check_copied()
        left = {kind: n - scene.live[kind] for kind, n in host_runtime.live().items()}
        assert min(left.values()) == 0
        assert (sum(left.values()) > 0) == (error is not None and error.call not in (MODE_CALL, DEVICE_CALL))
        scene.open()


class Driven(Operation):
    """The worker queues it, where a call of ours gives it a turn: until the ticket has ended."""

    routes, loops = (*ROUTES, *STAGED_ROUTES), (MODE_CALL,)
    copier = MappingProxyType({"chunk": 128, "window": 1, "device_memory": 2 * 2048, "ring_slots": 2,
                               "pinned_memory": 4 * 512})  # fmt: skip

    def __init__(self):
        self.queued = {}  # by route: how often each function was called until everything was queued, with no fault

    def drive(self, scene, ticket, arrived):
        """arrived: the calls before `act`."""
        fault_free, queued, copies = scene.route not in self.queued, None, -1
        for _ in range(1000):
            calls = host_runtime.calls()
            if sum(calls[name] for name in COPY_CALLS) != copies:
                copies, queued = sum(calls[name] for name in COPY_CALLS), calls
            if ticket.done:
                break
            scene.turn()
        else:
            scene.copier.finished()  # everything is queued and its word does not come: CUDA is asked
        assert ticket.done
        if fault_free:
            self.queued[scene.route] = {name: queued[name] - arrived[name] for name in calls}

    def told(self, scene, fault, started):
        """The worker looks at what has landed until the ticket has ended, and what fails then does no harm."""
        nth = fault.nth
        if fault.restores:
            if not fault.forever:
                return None
            nth += 1  # its next turn cannot begin
        queued = self.queued[scene.route].get(fault.function, 0)
        late = fault.function in ("cudaEventQuery", MODE_CALL) and nth > queued
        return None if late else self.told_while_queueing(started)

    def told_of_the_end(self, fault):
        """The last word may just have arrived."""
        return (type(None), sc.Poisoned) if fault.restores and fault.last else sc.Poisoned

    def names_the_call(self, error, fault):
        if fault.restores or (type(error) is sc.Poisoned and not error.call):  # the next call, or a look, finds it out
            assert error.cuda_code == fault.code
        else:
            super().names_the_call(error, fault)

    def check_waits(self, scene, ticket, error):
        """They answer with what the ticket ended with."""
        calls = host_runtime.calls()
        for wait in (ticket.sync, ticket.poll, lambda: ticket.wait_layer(1, scene.stream),
                     lambda: ticket.wait_done(scene.stream), lambda: ticket.wait_source(scene.stream)):  # fmt: skip
            with pytest.raises(type(error)) as raised:
                wait()
            assert (raised.value.call, raised.value.cuda_code) == (error.call, error.cuda_code)
        assert host_runtime.calls() == calls


class Feed(Driven):
    """A ticket that is fed, with another in flight that reads the target."""

    moves = True

    def prepare(self, scene):
        reader = scene.submit(scene.back, feed=False)
        if scene.route in STAGED_ROUTES:  # it may be fed all the same
            assert reader.sync(60)

    def act(self, scene):
        arrived = host_runtime.calls()
        ticket = scene.submit(feed=True)
        scene.by_worker = True
        self.drive(scene, ticket, arrived)
        if ticket.error is not None:
            raise ticket.error

    def told_while_queueing(self, started):
        return sc.Failed if started else sc.Refused

    def check(self, scene, error, started):
        scene.check_second(error, started)
        if error is not None:
            for ticket in scene.tickets[1:]:  # none where submit itself failed
                self.check_waits(scene, ticket, error)
        assert scene.tickets[0].sync(60)
        assert differences(scene.third, after_copy(scene.target, scene.third, UPTO)) == []
        scene.third.fill()
        assert not scene.target.state.busy


class Cancel(Driven):
    """A fed ticket that is in the middle."""

    def prepare(self, scene):
        scene.submit(feed=True)
        while scene.tickets[0].poll().layers_queued < 2:
            scene.turn()

    def act(self, scene):
        arrived = host_runtime.calls()
        assert scene.tickets[0].cancel()
        scene.by_worker = True
        self.drive(scene, scene.tickets[0], arrived)
        if type(scene.tickets[0].error) is not sc.Cancelled:
            raise scene.tickets[0].error

    def told_while_queueing(self, started):
        return sc.Failed

    def check(self, scene, error, started):
        ticket = scene.tickets[0]
        assert not scene.target.state.valid
        assert not scene.target.state.busy
        scene.check_quiet()
        self.check_waits(scene, ticket, error or ticket.error)
        if error is None:
            assert 0 < ticket.error.found <= ticket.error.wanted == ticket.bytes
            # What is in chunks on its way to pageable memory is queued, though its layers are not.
            assert ticket.error.found < ticket.bytes or scene.route in STAGED_ROUTES


@SIGNATURE
def does_nothing(argument, layer, device, stream):
    return 0


class Hook(Submit):
    """A submit with a hook, which is told with each device current in turn."""

    routes, copier = ("out", "mixed"), MappingProxyType({"layer_events": 20})

    def prepare(self, scene):
        scene.submit(scene.back)

    def act(self, scene):
        scene.submit(hook=address(does_nothing))


OPERATIONS = {
    "open": Open(),
    "submit": Submit(),
    "give up": GiveUp(),
    "wait_layer": WaitLayer(),
    "wait_done": WaitDone(),
    "wait_source": WaitSource(),
    "sync": Sync(),
    "finished": Finished(),
    "close": Close(),
    "feed": Feed(),
    "cancel": Cancel(),
    "hook": Hook(),
}
