"""Graph captures: one that is named to us is refused and stays good, and none of another thread is ever disturbed."""

import threading

import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, small_layout
from strata_copy import runtime

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


@pytest.mark.parametrize("mode", MODES)
def test_a_capturing_stream_is_refused_in_after(scene, mode):
    with Capture(mode) as stream:
        error = refused_in_capture(scene, lambda: scene.submit(after=sc.Stream(stream)))
    assert type(error) is sc.Refused
    assert error.reason == "capture"
    assert "the stream is capturing a graph" in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_event_is_refused_in_after(scene, mode):
    event = runtime.event_create()
    with Capture(mode) as stream:
        runtime.event_record(event, stream)
        error = refused_in_capture(scene, lambda: scene.submit(after=sc.Event(event)))
    assert type(error) is sc.Refused
    assert error.reason == "capture"
    assert "the event is part of a graph capture" in str(error)
    runtime.event_destroy(event)


def refused_in_capture(scene, act):
    """As Scene.refuses, without the reading of memory that a capture forbids."""
    mode = runtime.capture_mode(THREAD_LOCAL)
    with pytest.raises(sc.CopyError) as raised:
        act()
    assert runtime.capture_mode(mode) == THREAD_LOCAL
    assert runtime.peek_last_error() == 0
    assert scene.target.state.generation == 1
    return raised.value


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
    ticket = scene.submit(after=held.wait)
    with pytest.raises(sc.Refused) as refused:
        getattr(ticket, wait)(*([1] if wait == "wait_layer" else []), stream)
    assert refused.value.reason == "stream"
    assert f"stream {stream} is a default stream" in str(refused.value)
    held.open()
    assert ticket.sync(timeout=60)


def test_no_call_of_ours_ends_the_capture_of_another_thread(memory):
    """From the opening of a copier to its closing, while another thread captures in the strictest mode."""
    layout = small_layout()
    source, target = memory(layout, 1), memory(layout, 2, "pinned")
    writer = runtime.stream_create()
    event = runtime.event_create()
    runtime.event_record(event, writer)
    begun, done, found = threading.Event(), threading.Event(), []

    def capture():
        stream = runtime.stream_create()
        runtime.stream_begin_capture(stream, GLOBAL)
        begun.set()
        done.wait(60)
        found.append(runtime.stream_is_capturing(stream))
        runtime.stream_end_capture(stream)
        runtime.stream_destroy(stream)

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(60)
    try:
        sc.State(layout, source.places)
        with sc.Copier(tickets=2, layer_events=24) as copier:
            ticket = copier.submit(source.state, target.state, upto=9, after=[sc.Event(event), sc.Stream(writer)])
            assert ticket.wait_layer(0, writer)
            assert ticket.wait_done(writer)
            ticket.poll()
            assert ticket.sync(timeout=60)
            assert copier.finished() == [ticket]
            target.state.reset()
            with pytest.raises(sc.Refused):
                copier.submit(source.state, target.state, upto=200, after=SYNCED)
            copier.submit(source.state, target.state, upto=9, after=SYNCED)
    finally:
        done.set()
        thread.join(60)
    assert found == [1]
    runtime.stream_synchronize(writer)
    runtime.stream_destroy(writer)
    runtime.event_destroy(event)
    assert differences(target, after_copy(source, target, 9)) == []
