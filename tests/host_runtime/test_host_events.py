"""Events of the host runtime: what they order, and what asking them says."""

import ctypes
import threading

import pytest

from host_table import (
    BAD_HANDLE,
    NOT_READY,
    Gate,
    copy,
    cuda,
    event,
    malloc,
    mark,
    ok,
    pinned,
    stream,
    view,
    violations,
)
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host


@pytest.mark.parametrize("schedule", [None, *range(20)])
def test_a_chain_of_events_orders_two_streams(schedule):
    host.configure(seed=schedule)
    lanes, area = [stream(), stream()], malloc(64 * 65)
    view(area, 64)[:] = 5
    previous = None
    for chunk in range(64):
        lane = lanes[chunk % 2]
        if previous is not None:
            ok(cuda.cudaStreamWaitEvent(lane, previous, 0))
        copy(area + 64 * (chunk + 1), area + 64 * chunk, 64, lane)
        previous = mark(lane)
    ok(cuda.cudaEventSynchronize(previous))
    assert (view(area, 64 * 65) == 5).all()
    assert [on for _, on, _ in host.log()] == lanes * 32


def test_a_later_record_does_not_hold_an_earlier_wait():
    gated, waiting = stream(), stream()
    e = mark(gated)
    ok(cuda.cudaStreamWaitEvent(waiting, e, 0))
    gate = Gate(gated)
    ok(cuda.cudaEventRecord(e, gated))
    ok(cuda.cudaStreamSynchronize(waiting))
    assert cuda.cudaEventQuery(e) == NOT_READY
    gate.open()
    ok(cuda.cudaEventSynchronize(e))
    ok(cuda.cudaEventQuery(e))


@pytest.mark.parametrize("schedule", range(10))
def test_polling_comes_to_an_end(schedule):
    host.configure(seed=schedule)
    s, p, q = stream(), malloc(64), pinned(64)
    for _ in range(50):
        copy(p, q, 64, s)
    e = mark(s)
    answers = 0
    while (code := cuda.cudaEventQuery(e)) == NOT_READY:
        answers += 1
        assert answers < 60
    ok(code)
    assert answers >= 51 // 4
    ok(cuda.cudaStreamQuery(s))


def test_not_ready_is_not_a_last_error():
    host.configure(seed=1)
    s, p = stream(), malloc(64)
    for _ in range(9):
        ok(cuda.cudaMemsetAsync(p, 0, 64, s))
    assert cuda.cudaStreamQuery(s) == NOT_READY
    assert cuda.cudaPeekAtLastError() == 0


def test_destroyed_events_still_order():
    host.configure(seed=5)
    first, second, p, q = stream(), stream(), malloc(64), pinned(64)
    copy(p, q, 1, first)
    e = mark(first)
    ok(cuda.cudaStreamWaitEvent(second, e, 0))
    ok(cuda.cudaEventDestroy(e))
    copy(p, q, 2, second)
    ok(cuda.cudaStreamSynchronize(second))
    assert [size for _, _, size in host.log()] == [1, 2]


def test_a_stream_is_no_event():
    s = stream()
    assert cuda.cudaEventRecord(s, s) == BAD_HANDLE


@pytest.mark.parametrize("use", ["cudaEventQuery", "cudaEventSynchronize"])
def test_asking_an_event_that_was_never_recorded_is_reported(use):
    ok(getattr(cuda, use)(event()))
    assert violations() == [f"{use}: unrecorded event"]


def test_waiting_for_an_event_that_was_never_recorded_is_reported():
    ok(cuda.cudaStreamWaitEvent(stream(), event(), 0))
    assert violations() == ["cudaStreamWaitEvent: unrecorded event"]


def test_elapsed_time_needs_timing_and_the_end():
    s, start, end = stream(), event(0), event(0)
    out = ctypes.c_float(-1)

    def elapsed(first, last):
        return cuda.cudaEventElapsedTime(ctypes.addressof(out), first, last)

    ok(cuda.cudaEventRecord(start, s))
    gate = Gate(s)
    ok(cuda.cudaEventRecord(end, s))
    assert elapsed(start, end) == NOT_READY
    assert elapsed(start, mark(s)) == BAD_HANDLE
    assert elapsed(start, event(0)) == BAD_HANDLE
    assert gate.entered.wait(10)
    threading.Event().wait(0.02)
    gate.open()
    ok(cuda.cudaEventSynchronize(end))
    ok(elapsed(start, end))
    assert 20 <= out.value < 10000
