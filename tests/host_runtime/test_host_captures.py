"""Captures of the host runtime: what is not executed, and what spoils them."""

import ctypes

import pytest

from host_table import (
    ANY_DIRECTION,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    GLOBAL,
    ILLEGAL_STATE,
    INVALID_VALUE,
    NOT_READY,
    PAGE,
    RELAXED,
    THREAD_LOCAL,
    WRONG_THREAD,
    copy,
    cuda,
    in_thread,
    malloc,
    mark,
    ok,
    pages,
    pinned,
    stream,
)
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host


UNSAFE = {
    "cudaEventQuery": lambda at: (at["event"],),
    "cudaEventSynchronize": lambda at: (at["event"],),
    "cudaStreamSynchronize": lambda at: (at["stream"],),
    "cudaStreamQuery": lambda at: (at["stream"],),
    "cudaDeviceSynchronize": lambda at: (),
    "cudaMalloc": lambda at: (at["out"], 64),
    "cudaFree": lambda at: (0,),
    "cudaHostAlloc": lambda at: (at["out"], 64, 0),
    "cudaFreeHost": lambda at: (0,),
    "cudaHostRegister": lambda at: (at["pages"], PAGE, 0),
    "cudaHostUnregister": lambda at: (at["pages"],),
    "cudaMemcpy": lambda at: (at["device"], at["pages"], 64, ANY_DIRECTION),
}


def status(on):
    out = ctypes.c_int(-1)
    ok(cuda.cudaStreamIsCapturing(on, ctypes.addressof(out)))
    return out.value


def end_capture(on):
    graph = ctypes.c_size_t(1)
    return cuda.cudaStreamEndCapture(on, ctypes.addressof(graph)), graph.value


def in_mode(wanted, function):
    """Calls `function` with the thread in another capture mode."""
    mode = ctypes.c_int(wanted)
    ok(cuda.cudaThreadExchangeStreamCaptureMode(ctypes.addressof(mode)))
    try:
        return function()
    finally:
        ok(cuda.cudaThreadExchangeStreamCaptureMode(ctypes.addressof(mode)))
        assert mode.value == wanted


@pytest.mark.parametrize("unsafe", UNSAFE)
@pytest.mark.parametrize("where", ["in the capturing thread", "in another thread"])
def test_an_unsafe_call_spoils_a_global_capture(unsafe, where):
    block, out = pages(1), ctypes.c_size_t()
    at = {
        "stream": stream(),
        "event": mark(stream()),
        "device": malloc(64),
        "out": ctypes.addressof(out),
        "pages": block.ctypes.data,
    }
    capturing = stream()

    def call():
        return getattr(cuda, unsafe)(*UNSAFE[unsafe](at))

    ok(cuda.cudaStreamBeginCapture(capturing, GLOBAL))
    assert status(capturing) == 1
    assert (call() if where == "in the capturing thread" else in_thread(call)()) == CAPTURE_UNSUPPORTED
    assert status(capturing) == 2
    assert end_capture(capturing) == (CAPTURE_INVALIDATED, 0)
    assert status(capturing) == 0

    ok(cuda.cudaStreamBeginCapture(capturing, GLOBAL))
    if unsafe == "cudaHostUnregister":
        ok(in_mode(RELAXED, lambda: cuda.cudaHostRegister(at["pages"], PAGE, 0)))
    run = (
        (lambda: in_mode(RELAXED, call))
        if where == "in the capturing thread"
        else lambda: in_thread(lambda: in_mode(RELAXED, call))()
    )
    assert run() in (0, NOT_READY)
    code, graph = end_capture(capturing)
    ok(code)
    ok(cuda.cudaGraphDestroy(graph))
    assert cuda.cudaGraphDestroy(graph) == INVALID_VALUE


def test_a_thread_local_capture_concerns_its_own_thread_only():
    capturing, out = stream(), ctypes.c_size_t()
    ok(cuda.cudaStreamBeginCapture(capturing, THREAD_LOCAL))
    ok(in_thread(lambda: cuda.cudaMalloc(ctypes.addressof(out), 64))())
    assert status(capturing) == 1
    assert cuda.cudaMalloc(ctypes.addressof(out), 64) == CAPTURE_UNSUPPORTED
    assert end_capture(capturing)[0] == CAPTURE_INVALIDATED


def test_a_thread_in_thread_local_mode_is_not_concerned_by_other_threads():
    capturing, out = stream(), ctypes.c_size_t()

    def allocate():
        return in_mode(THREAD_LOCAL, lambda: cuda.cudaMalloc(ctypes.addressof(out), 64))

    ok(cuda.cudaStreamBeginCapture(capturing, GLOBAL))
    ok(in_thread(allocate)())
    assert status(capturing) == 1
    assert allocate() == CAPTURE_UNSUPPORTED
    assert end_capture(capturing)[0] == CAPTURE_INVALIDATED


def test_submitting_elsewhere_is_fine_during_a_capture():
    capturing, s, p, q = stream(), stream(), malloc(64), pinned(64)
    ok(cuda.cudaStreamBeginCapture(capturing, GLOBAL))
    copy(p, q, 64, s)
    e = mark(s)
    ok(cuda.cudaStreamWaitEvent(s, e, 0))
    assert end_capture(capturing)[0] == 0
    ok(cuda.cudaStreamSynchronize(s))


def test_captured_work_is_not_executed():
    host.configure(seed=1)
    s, p, q = stream(), malloc(64), pinned(64)
    ok(cuda.cudaStreamBeginCapture(s, GLOBAL))
    copy(p, q, 64, s)
    mark(s)
    assert host.pending() == 0
    assert end_capture(s)[0] == 0
    ok(cuda.cudaStreamSynchronize(s))
    assert host.log() == []


def test_a_captured_event_has_no_state_and_no_use_outside():
    s, outside = stream(), stream()
    ok(cuda.cudaStreamBeginCapture(s, RELAXED))
    e = mark(s)
    ok(cuda.cudaStreamWaitEvent(s, e, 0))
    assert status(s) == 1
    assert cuda.cudaStreamWaitEvent(outside, e, 0) == INVALID_VALUE
    assert status(s) == 2
    assert end_capture(s) == (CAPTURE_INVALIDATED, 0)
    assert cuda.cudaEventSynchronize(e) == CAPTURED_EVENT
    ok(cuda.cudaEventRecord(e, outside))
    ok(cuda.cudaEventSynchronize(e))


@pytest.mark.parametrize("ask", ["cudaEventQuery", "cudaEventSynchronize"])
def test_asking_for_a_captured_event_ends_the_capture_in_every_mode(ask):
    s = stream()
    ok(cuda.cudaStreamBeginCapture(s, RELAXED))
    e = mark(s)
    assert in_mode(RELAXED, lambda: getattr(cuda, ask)(e)) == CAPTURED_EVENT
    assert status(s) == 2
    assert end_capture(s) == (CAPTURE_INVALIDATED, 0)


def test_a_captured_event_is_told_without_ending_the_capture():
    s = stream()
    ok(cuda.cudaStreamBeginCapture(s, RELAXED))
    e = mark(s)
    assert cuda.event_captured(e) == CAPTURED_EVENT
    elapsed = ctypes.c_float()
    assert cuda.cudaEventElapsedTime(ctypes.addressof(elapsed), e, e) == CAPTURED_EVENT
    assert status(s) == 1
    ok(end_capture(s)[0])
    ok(cuda.event_captured(mark(stream())))


def test_a_capture_cannot_wait_for_work_outside():
    s, e = stream(), mark(stream())
    ok(cuda.cudaStreamBeginCapture(s, RELAXED))
    assert cuda.cudaStreamWaitEvent(s, e, 0) == CAPTURE_ISOLATION
    assert cuda.cudaMemsetAsync(malloc(64), 0, 64, s) == CAPTURE_INVALIDATED
    assert end_capture(s)[0] == CAPTURE_INVALIDATED


def test_a_capture_ends_once_and_in_its_own_thread():
    s = stream()
    assert end_capture(s)[0] == ILLEGAL_STATE
    ok(cuda.cudaStreamBeginCapture(s, GLOBAL))
    assert cuda.cudaStreamBeginCapture(s, GLOBAL) == ILLEGAL_STATE
    assert in_thread(lambda: end_capture(s)[0])() == WRONG_THREAD
    assert end_capture(s)[0] == 0
    assert end_capture(s)[0] == ILLEGAL_STATE


def test_waiting_for_a_capturing_stream_spoils_its_capture_in_any_mode():
    s = stream()
    ok(cuda.cudaStreamBeginCapture(s, RELAXED))
    assert in_mode(RELAXED, lambda: cuda.cudaStreamSynchronize(s)) == CAPTURE_UNSUPPORTED
    assert end_capture(s)[0] == CAPTURE_INVALIDATED


def test_a_destroyed_stream_takes_its_capture_along():
    s = stream()
    ok(cuda.cudaStreamBeginCapture(s, GLOBAL))
    ok(cuda.cudaStreamDestroy(s))
    malloc(64)


def test_a_pageable_copy_is_no_part_of_a_capture():
    s, p, block = stream(), malloc(64), pages(1)
    ok(cuda.cudaStreamBeginCapture(s, RELAXED))
    copy(p, pinned(64), 64, s)
    assert status(s) == 1
    assert cuda.cudaMemcpyAsync(p, block.ctypes.data, 64, ANY_DIRECTION, s) == CAPTURE_UNSUPPORTED
    assert status(s) == 2
    assert end_capture(s) == (CAPTURE_INVALIDATED, 0)


def test_a_capture_mode_that_is_none_is_refused():
    mode = ctypes.c_int(3)
    assert cuda.cudaThreadExchangeStreamCaptureMode(ctypes.addressof(mode)) == INVALID_VALUE
    assert cuda.cudaThreadExchangeStreamCaptureMode(0) == INVALID_VALUE
    assert cuda.cudaStreamBeginCapture(stream(), 3) == INVALID_VALUE
    assert in_mode(RELAXED, lambda: 7) == 7
