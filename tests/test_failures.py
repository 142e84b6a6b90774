"""Every CUDA call of a submit fails in turn: before the first copy call nothing is written, from it on the target is
INVALID, and either way the next copy is whole."""

import pickle
from collections import Counter

import pytest

import reference
import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, settle, small_layout, untouched
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host

INVALID_VALUE, OUT_OF_MEMORY, BAD_DEVICE, ILLEGAL_ADDRESS = 1, 2, 101, 700
COPY_CALLS = ("cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpyBatchAsync")
# A batch that is refused is no failure: its copies are made one by one.
CALLS = ["cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaEventRecord", "cudaStreamWaitEvent", "event_captured",
         "cudaStreamIsCapturing", "cudaThreadExchangeStreamCaptureMode"]  # fmt: skip
LAYOUT = small_layout("int8", layers=6)
UPTO = 21


def mixed(side):
    """Parts on two devices and in pinned memory, some with gaps between their units, so that one plan takes every
    route and both kinds of copy."""

    def where(i, part):
        kinds = [("device", "device"), ("device", "pinned"), ("pinned", "device")][i % 3]
        stride = part.unit_bytes + (64 if part.name in ("k", "v_scale") else 0)
        return {"kind": kinds[side], "device": part.layer % 2 if part.layer >= 0 else 0, "stride": stride}

    return where


# Function, whether the route is the mixed one, whether there is a stream to wait for.
NEVER_CALLED = [("cudaMemcpy2DAsync", False, foreign) for foreign in (False, True)]
NEVER_CALLED += [("cudaStreamIsCapturing", mixed_route, False) for mixed_route in (False, True)]
ROUTES = {
    "local": ("device", "device"),
    "out": ("device", "pinned"),
    "in": ("pinned", "device"),
    "host": ("pinned", "pinned"),
    "mixed": (mixed(0), mixed(1)),
}


class Copy:
    """A copy that takes a route in small chunks, behind an event and, if asked, a stream."""

    def __init__(self, memory, route, behind_stream=True):
        where, self.dead = ROUTES[route], False
        self.source, self.target = memory(LAYOUT, 1, where[0]), memory(LAYOUT, 2, where[1])
        self.third = memory(LAYOUT, 3, where[1])
        self.copier = sc.Copier((0, 1), tickets=4, layer_events=24, chunk=5000, window=1000)
        self.stream, self.event = runtime.stream_create(), runtime.event_create()
        runtime.event_record(self.event, self.stream)
        runtime.stream_synchronize(self.stream)
        self.after = [sc.Event(self.event), *([sc.Stream(self.stream)] if behind_stream else [])]
        self.plan = self.copier.plan(self.source.state, self.target.state)
        self.back = self.copier.plan(self.target.state, self.third.state)

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        if kind is not None or not self.dead:
            self.copier.close()
        else:  # what stays behind is told
            with pytest.raises(sc.Poisoned):
                self.copier.close()

    def submit(self):
        return self.plan.submit(UPTO, after=self.after)

    def wanted(self):
        return after_copy(self.source, self.target, UPTO)


def copy_calls():
    return sum(host_runtime.calls()[name] for name in COPY_CALLS)


def check_failed_submit(copy, error, function, started):
    """What holds when the exception of a failed call arrives."""
    assert type(error) is (sc.Failed if started else sc.Refused)
    assert (error.reason, error.cuda_code) == ("cuda", INVALID_VALUE)
    check_call(error, function)
    assert not copy.source.state.busy
    assert not copy.target.state.busy
    assert copy.source.state.valid
    assert copy.target.state.valid == (not started)
    assert untouched(copy.source)
    if not started:
        assert untouched(copy.target)


def check_call(error, function):
    """event_captured is this library's name for a function of the driver."""
    assert error.call == function or (function == "event_captured" and error.call.startswith("cu"))


def check_recovery(copy, started):
    """A target that may be half written is no source until it is reset; then a whole copy is right again."""
    if started:
        with pytest.raises(sc.Refused) as refused:
            copy.back.submit(UPTO, after=SYNCED)
        assert refused.value.reason == "invalid"
        assert untouched(copy.third)
        generation = copy.target.state.generation
        copy.target.state.reset()
        assert copy.target.state.valid
        assert copy.target.state.generation > generation
    copy.target.fill()
    assert copy.submit().sync()
    assert differences(copy.target, copy.wanted()) == []
    copy.target.fill()


@pytest.mark.parametrize("foreign", [False, True], ids=["alone", "beside-others"])
@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("route", ROUTES)
def test_every_call_fails_in_turn(memory, route, function, forever, foreign):
    """foreign: with a stream of other code to wait for, and an error that it has left. Without, nothing runs by
    itself, and so whatever of ours is still in flight when the exception arrives would be seen."""
    pending = BAD_DEVICE if foreign else 0
    if not foreign:
        host_runtime.configure(devices=2, seed=1)
    with Copy(memory, route, foreign) as copy:
        fired, nth = 1, 0
        while fired:
            nth += 1
            settle()  # the ticket before has ended, and makes none of the calls that are counted
            before, error, ticket = copy_calls(), None, None
            leave_an_error(pending)
            host_runtime.fail(function, nth, INVALID_VALUE, forever)
            try:
                ticket = copy.submit()
            except sc.CopyError as failed:
                error = failed
            fired = host_runtime.clear_faults()
            started = copy_calls() > before
            if error is not None:
                assert foreign or not started or host_runtime.pending() == 0
                check_failed_submit(copy, error, function, started)
                assert error.pending_before == pending
                assert (runtime.get_last_error() != 0) == (pending != 0)
                check_recovery(copy, started)
                continue
            # Nothing failed, or only the way back to the thread's own capture mode: what is said of the bytes is true.
            assert ticket.sync()
            assert differences(copy.target, copy.wanted()) == []
            copy.target.fill()
            assert not fired or function == "cudaThreadExchangeStreamCaptureMode"
            assert (runtime.get_last_error() != 0) == (pending != 0)
            runtime.capture_mode(0)
    assert nth > 1 or (function, route == "mixed", foreign) in NEVER_CALLED


def leave_an_error(code):
    if code:
        with pytest.raises(runtime.CudaError):
            runtime.set_device(99)
    assert runtime.peek_last_error() == code


def test_the_error_names_device_layer_and_part_of_the_copy_that_failed(memory):
    layout, counts = LAYOUT, Counter()
    source, target = memory(layout, 1), memory(layout, 2, "pinned")
    with sc.Copier(tickets=4, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        host_runtime.fail("cudaMemcpyBatchAsync", 1, 801)
        assert plan.submit(UPTO, after=SYNCED).sync()  # from now on one by one
        for address, _, _, rows, _, _ in plan.extents(UPTO):
            function = "cudaMemcpyAsync" if rows == 1 else "cudaMemcpy2DAsync"
            counts[function] += 1
            host_runtime.fail(function, counts[function], INVALID_VALUE)
            with pytest.raises(sc.Failed) as failed:
                plan.submit(UPTO, after=SYNCED)
            error, part = failed.value, layout.parts[failed.value.part]
            assert error.call == function
            assert error.device == 0
            assert error.layer == max(part.layer, 0) or rows > 1  # of several layers at once
            place = target.places[error.part]
            assert place.base <= address < place.base + reference.span(place, part)
            host_runtime.clear_faults()
            target.state.reset()


def test_the_error_names_the_latest_of_the_copies_whose_one_call_failed(memory):
    state = sc.Growth.state()
    layout = sc.Layout(
        [sc.Part(name=name, layer=layer, unit_bytes=8, growth=state) for layer in range(3) for name in "ab"]
    )
    source, target = memory(layout, 1, together=False), memory(layout, 2, "pinned", together=False)
    with sc.Copier(tickets=4, layer_events=24) as copier:
        for nth in range(1, 3):  # the first layer has an event of its own, the others share one
            host_runtime.fail("cudaMemcpyBatchAsync", nth, OUT_OF_MEMORY)
            with pytest.raises(sc.Failed) as failed:
                copier.submit(source.state, target.state, upto=1, after=SYNCED)
            found = failed.value
            assert (found.call, found.device) == ("cudaMemcpyBatchAsync", 0)
            assert (found.layer, layout.parts[found.part].name) == ((0, "b"), (2, "b"))[nth - 1]
            host_runtime.clear_faults()
            target.state.reset()


def test_the_error_names_copies_that_were_queued_as_their_chunk_was_full(memory):
    """Not the part with which the next chunk begins."""
    state = sc.Growth.state()
    layout = sc.Layout(
        [sc.Part(name=name, layer=layer, unit_bytes=8, growth=state) for layer in range(4) for name in "ab"]
    )
    source, target = memory(layout, 1, together=False), memory(layout, 2, "pinned", together=False)
    with sc.Copier(tickets=4, layer_events=24, chunk=48, window=1000) as copier:  # full behind layer 2
        host_runtime.fail("cudaMemcpyBatchAsync", 2, OUT_OF_MEMORY)
        with pytest.raises(sc.Failed) as failed:
            copier.submit(source.state, target.state, upto=1, after=SYNCED)
        assert (failed.value.layer, layout.parts[failed.value.part].name) == (2, "b")


def test_before_the_first_copy_call_nothing_is_lost_where_a_ring_follows_copies_that_are_gathered(memory):
    state = sc.Growth.state()
    layout = sc.Layout(
        [sc.Part(name=name, layer=0, unit_bytes=8, growth=state, order=n) for n, name in enumerate(["out", "ring"])]
    )
    source = memory(layout, 1, lambda i, part: {"kind": "device" if part.name == "out" else "pinned"}, together=False)
    target = memory(layout, 2, "pinned", together=False)
    with sc.Copier(tickets=4, layer_events=24) as copier:
        plan, event = copier.plan(source.state, target.state), runtime.event_create()
        runtime.event_record(event, runtime.stream_create())
        for nth in (1, 2):  # of the waits of the lanes for the event: out, ring
            before = copy_calls()
            host_runtime.fail("cudaStreamWaitEvent", nth, INVALID_VALUE)
            with pytest.raises((sc.Refused, sc.Failed)) as failed:
                plan.submit(1, after=[sc.Event(event)])
            started = copy_calls() > before
            assert type(failed.value) is (sc.Failed if started else sc.Refused)
            assert target.state.valid == (not started)
            host_runtime.clear_faults()
            target.state.reset()


def test_the_error_names_the_device_whose_lane_failed(memory):
    """The lanes of two devices in turn: what is queued next on a lane is not the device's whose event was recorded
    last."""
    state = sc.Growth.state()
    layout = sc.Layout(
        [
            sc.Part(name="far", layer=0, unit_bytes=8, growth=state, order=1),
            sc.Part(name="near", layer=0, unit_bytes=8, growth=state, order=2),
            sc.Part(name="near", layer=1, unit_bytes=8, growth=state),
        ]
    )
    source = memory(layout, 1, lambda i, part: {"device": int(part.name == "far")}, together=False)
    target = memory(layout, 2, "pinned", together=False)
    with sc.Copier((0, 1), tickets=4, layer_events=24) as copier:
        host_runtime.fail("cudaMemcpyAsync", 3, INVALID_VALUE)
        with pytest.raises(sc.Failed) as failed:
            copier.submit(source.state, target.state, upto=1, after=SYNCED)
        assert (failed.value.device, failed.value.layer, failed.value.part) == (0, 1, 2)


# ---- what is found out only later


@pytest.mark.parametrize("ask", ["sync", "finished"])
def test_a_copy_that_fails_in_flight_takes_its_readers_along(memory, ask):
    host_runtime.configure(devices=2, seed=1)
    first, second, third, fourth = (memory(LAYOUT, n) for n in range(1, 5))
    with sc.Copier(tickets=8, layer_events=24, patience=0.001) as copier:
        failing = copier.submit(first.state, second.state, upto=UPTO, after=SYNCED)
        reader = copier.submit(second.state, third.state, upto=UPTO, after=SYNCED)
        other = copier.submit(first.state, fourth.state, upto=UPTO, after=SYNCED)
        host_runtime.fail("cudaEventQuery", 1, INVALID_VALUE)
        if ask == "sync":
            with pytest.raises(sc.Failed):
                failing.sync()
        else:
            while failing not in copier.finished():
                pass
        assert host_runtime.clear_faults() == 1
        assert host_runtime.pending() == 0 or not other.done
        for ticket in (failing, reader):
            assert isinstance(ticket.error, sc.Failed)
            assert ticket.error.call == "cudaEventQuery"
            assert ticket.error is ticket.error
            assert pickle.loads(pickle.dumps(ticket.error)).fields == ticket.error.fields
            with pytest.raises(sc.Failed):
                ticket.poll()
            with pytest.raises(sc.Failed):
                ticket.wait_done(runtime.stream_create())
        assert other.sync()
        assert [one.state.valid for one in (first, second, third, fourth)] == [True, False, False, True]
        assert differences(fourth, after_copy(first, fourth, UPTO)) == []


def test_lanes_that_cannot_be_waited_for_are_poisoned(memory):
    """Nobody knows then what still writes."""
    with Copy(memory, "local") as copy:
        host_runtime.fail("cudaMemcpyAsync", 3, INVALID_VALUE)
        host_runtime.fail("cudaStreamSynchronize", 1, INVALID_VALUE, forever=True)
        with pytest.raises(sc.Poisoned):
            copy.submit()
        host_runtime.clear_faults()
        assert not copy.target.state.valid
        with pytest.raises(sc.Poisoned):
            copy.submit()
        copy.dead = True


@pytest.mark.parametrize("function", [*CALLS, "cudaMemcpyBatchAsync"])
@pytest.mark.parametrize("route", ["out", "mixed"])
def test_a_sticky_error_poisons(memory, route, function):
    """At any call of a submit: the device is called no more, and who waits is told."""
    nth, fired = 0, 1
    while fired:
        nth += 1 if nth < 4 else 9
        host_runtime.configure(devices=2, seed=nth)
        with Copy(memory, route) as copy:
            flying = copy.copier.submit(copy.source.state, copy.third.state, upto=UPTO, after=SYNCED)
            host_runtime.fail(function, nth, ILLEGAL_ADDRESS)
            before, error = copy_calls(), None
            try:
                copy.submit()
            except sc.CopyError as failed:
                error = failed
            started = copy_calls() > before
            if error is None:
                fired = host_runtime.clear_faults()
                assert not fired or function == "cudaThreadExchangeStreamCaptureMode"
                copy.dead = bool(fired)  # by the way back to the thread's own capture mode
                continue
            copy.dead = True
            assert type(error) is sc.Poisoned
            assert error.cuda_code == ILLEGAL_ADDRESS
            check_call(error, function)
            assert copy.target.state.valid == (not started)
            check_dead(copy, flying)


def check_dead(copy, flying):
    before = host_runtime.calls()
    with pytest.raises(sc.Poisoned) as again:
        copy.submit()
    after = host_runtime.calls()
    assert {name for name in after if after[name] != before[name]} <= {"cudaGetErrorName"}
    assert again.value.cuda_code == ILLEGAL_ADDRESS
    assert "restart the process" in str(again.value)
    for wait in (lambda: flying.wait_layer(0, 99), lambda: flying.wait_done(99), flying.sync, flying.poll):
        with pytest.raises(sc.Poisoned):
            wait()
    assert isinstance(flying.error, sc.Poisoned)
    assert not copy.third.state.valid
