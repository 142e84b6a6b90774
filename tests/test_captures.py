"""Graph captures: one that is named to us is refused and stays good, and none of another thread is ever disturbed."""

import threading
from contextlib import contextmanager

import pytest

import strata_copy as sc
from fixtures import HOST, SYNCED, after_copy, differences, small_layout
from strata_copy import host_runtime, runtime

MODE_CALL = "cudaThreadExchangeStreamCaptureMode"

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
MODES = [GLOBAL, THREAD_LOCAL, RELAXED]


class Capture:
    """A stream that captures, in `with`; leaving it, the capture must still be good."""

    def __init__(self, mode):
        self.stream, self.mode = runtime.stream_create(), mode

    def __enter__(self):
        runtime.stream_begin_capture(self.stream, self.mode)
        return self.stream

    def __exit__(self, kind, *rest):
        if kind is None:
            assert runtime.stream_is_capturing(self.stream) == 1
            runtime.stream_end_capture(self.stream)
        runtime.stream_destroy(self.stream)


# Where the capturing stream or the captured event stands among what is named.
PLACES = {"alone": lambda bad, good: bad, "first": lambda bad, good: [bad, good], "last": lambda bad, good: [good, bad]}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_a_capturing_stream_is_refused_in_after(scene, mode, place):
    with Capture(mode) as stream, other_stream() as good:
        error = refused_in_capture(scene, PLACES[place](sc.Stream(stream), sc.Stream(good)))
    assert "the stream is capturing a graph" in str(error)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", MODES)
def test_a_captured_event_is_refused_in_after(scene, mode, place):
    event = runtime.event_create()
    with Capture(mode) as stream, other_stream() as good:
        runtime.event_record(event, stream)
        error = refused_in_capture(scene, PLACES[place](sc.Event(event), sc.Stream(good)))
    assert "the event is part of a graph capture" in str(error)
    runtime.event_destroy(event)


@contextmanager
def other_stream():
    stream = runtime.stream_create()
    yield stream
    runtime.stream_destroy(stream)


def refused_in_capture(scene, after):
    """As Scene.refuses, without the reading of memory that a capture forbids: nothing is queued anywhere."""
    mode = runtime.capture_mode(THREAD_LOCAL)
    before = host_runtime.calls() if HOST else {}
    with pytest.raises(sc.Refused) as refused:
        scene.submit(after=after)
    if HOST:
        made = {name for name, count in host_runtime.calls().items() if count > before[name]}
        assert made <= {"cudaPeekAtLastError", MODE_CALL, "cudaStreamIsCapturing", "event_captured"}
        assert host_runtime.pending() == 0
    assert refused.value.reason == "capture"
    assert runtime.capture_mode(mode) == THREAD_LOCAL
    assert runtime.peek_last_error() == 0
    assert scene.target.state.generation == 1
    assert scene.target.state.valid
    assert not scene.target.state.busy
    return refused.value


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wait", ["wait_layer", "wait_done", "wait_source"])
def test_a_wait_on_a_capturing_stream_is_refused(held, scene, mode, wait):
    """Waits answer at once where the copy has ended; this one has not."""
    ticket = scene.submit(after=held.wait)
    with Capture(mode) as stream, pytest.raises(sc.Refused) as refused:
        getattr(ticket, wait)(*([1] if wait == "wait_layer" else []), stream)
    assert refused.value.reason == "capture"
    held.open()
    assert ticket.sync(timeout=60)
    assert differences(scene.target, after_copy(scene.source, scene.target, 9)) == []


@pytest.mark.parametrize("stream", [0, 1, 2])
@pytest.mark.parametrize("wait", ["wait_layer", "wait_done", "wait_source"])
def test_a_wait_on_a_default_stream_is_refused(held, scene, wait, stream):
    """Whether the copy has ended or not: the time does not tell."""
    ticket = scene.submit(after=held.wait)
    check_refused(ticket, wait, stream)
    held.open()
    assert ticket.sync(timeout=60)
    check_refused(ticket, wait, stream)


@pytest.mark.parametrize("stream", [0, 1, 2])
@pytest.mark.parametrize("wait", ["wait_layer", "wait_done", "wait_source"])
def test_a_wait_of_a_fed_ticket_on_a_default_stream_is_refused(held, memory, wait, stream):
    """Before it is queued, and once it was cancelled."""
    source, target = memory(small_layout(), 1), memory(small_layout(), 2, "pinned")
    with sc.Copier(tickets=4, layer_events=24, chunk=2000, window=1) as copier:
        ticket = copier.submit(source.state, target.state, upto=41, after=held.wait, feed=True)
        check_refused(ticket, wait, stream)
        assert ticket.cancel()
        check_refused(ticket, wait, stream)
        held.open()
        with pytest.raises(sc.Cancelled):
            ticket.sync(timeout=60)
        check_refused(ticket, wait, stream)


def check_refused(ticket, wait, stream):
    with pytest.raises(sc.Refused) as refused:
        getattr(ticket, wait)(*([1] if wait == "wait_layer" else []), stream)
    assert refused.value.reason == "stream"
    assert f"stream {stream} is a default stream" in str(refused.value)


class CaptureElsewhere:
    """Another thread captures in the strictest mode, in `with`."""

    def __init__(self):
        self.begun, self.done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._capture)

    def _capture(self):
        self.stream = runtime.stream_create()
        runtime.stream_begin_capture(self.stream, GLOBAL)
        self.begun.set()
        self.done.wait(60)
        try:
            runtime.stream_end_capture(self.stream)
        except runtime.CudaError:
            runtime.get_last_error()  # it was ended: `valid` says so before
        runtime.stream_destroy(self.stream)

    def __enter__(self):
        self.thread.start()
        assert self.begun.wait(60)
        return self

    def __exit__(self, *exception):
        self.done.set()
        self.thread.join(60)

    def valid(self):
        return runtime.stream_is_capturing(self.stream) == 1


def test_a_query_without_our_guard_ends_the_capture_of_another_thread():
    """What the next test would see."""
    writer, event = runtime.stream_create(), runtime.event_create()
    runtime.event_record(event, writer)
    with CaptureElsewhere() as capture:
        assert capture.valid()
        with pytest.raises(runtime.CudaError):
            runtime.event_query(event)
        assert not capture.valid()
    runtime.get_last_error()
    runtime.stream_destroy(writer)
    runtime.event_destroy(event)


@pytest.mark.parametrize("schedule", [None, *(pytest.param(n, marks=pytest.mark.host) for n in range(3))])
@pytest.mark.parametrize("target_kind", ["device", "pinned"])
@pytest.mark.parametrize("source_kind", ["device", "pinned"])
def test_no_call_of_ours_ends_the_capture_of_another_thread(memory, source_kind, target_kind, schedule):
    """From the making of states to the closing of a copier, one call after the other. In a schedule nothing of a copy
    is executed by itself, so that each of them finds it in flight."""
    if schedule is not None:
        host_runtime.configure(devices=2, seed=schedule)
    layout = small_layout()
    source, target = memory(layout, 1, source_kind), memory(layout, 2, target_kind)
    other = memory(layout, 3, target_kind)
    writer, event = runtime.stream_create(), runtime.event_create()
    runtime.event_record(event, writer)
    with CaptureElsewhere() as capture:

        def unharmed(act):
            found = act()
            assert capture.valid()
            return found

        unharmed(lambda: sc.State(layout, source.places))
        copier = unharmed(lambda: sc.Copier(tickets=4, layer_events=24, chunk=5000, patience=1e-9))
        plan = unharmed(lambda: copier.plan(source.state, target.state))
        ticket = unharmed(lambda: plan.submit(9, after=[sc.Event(event), sc.Stream(writer)]))
        unharmed(lambda: ticket.wait_layer(0, writer))
        unharmed(lambda: ticket.wait_done(writer))
        unharmed(lambda: ticket.wait_source(writer))
        unharmed(ticket.poll)
        unharmed(copier.finished)
        assert unharmed(lambda: ticket.sync(timeout=60))
        unharmed(target.state.reset)
        with pytest.raises(sc.Refused):
            plan.submit(200, after=SYNCED)
        assert capture.valid()
        if HOST:
            check_a_failure(copier, source, other)
            assert capture.valid()
        unharmed(lambda: plan.submit(9, after=SYNCED))
        unharmed(copier.close)
    runtime.stream_synchronize(writer)
    runtime.stream_destroy(writer)
    runtime.event_destroy(event)
    assert differences(target, after_copy(source, target, 9)) == []


def check_a_failure(copier, source, target):
    """It has to wait for what was queued."""
    host_runtime.fail("cudaMemcpyAsync", 2, 1)
    with pytest.raises(sc.Failed):
        copier.submit(source.state, target.state, upto=9, after=SYNCED)
    assert host_runtime.clear_faults() == 1
