"""Streams of the host runtime: nothing is executed before it must be, each runs in its order, handles are checked."""

import ctypes

import pytest

from host_table import (
    ANY_DIRECTION,
    BAD_HANDLE,
    GLOBAL,
    INVALID_VALUE,
    NOT_PERMITTED,
    PAGE,
    QUEUE_DEPTH,
    Gate,
    both_modes,
    copy,
    cuda,
    event,
    in_thread,
    malloc,
    mark,
    ok,
    pages,
    pinned,
    stream,
    view,
    violations,
)
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host


def test_scheduled_copy_reads_its_source_when_it_is_executed():
    host.configure(seed=1)
    s, source, target = stream(), pinned(64), malloc(64)
    view(source, 64)[:] = 1
    copy(target, source, 64, s)
    assert (view(target, 64) == 0xA5).all()
    view(source, 64)[:] = 2
    ok(cuda.cudaStreamSynchronize(s))
    assert (view(target, 64) == 2).all()


def test_threads_mode_copy_reads_its_source_when_it_is_executed():
    s, source, target = stream(), pinned(64), malloc(64)
    view(source, 64)[:] = 1
    gate = Gate(s)
    copy(target, source, 64, s)
    view(source, 64)[:] = 2
    gate.open()
    ok(cuda.cudaStreamSynchronize(s))
    assert (view(target, 64) == 2).all()


def test_nothing_is_executed_before_somebody_waits():
    host.configure(seed=1)
    s, p = stream(), malloc(64)
    ok(cuda.cudaMemsetAsync(p, 7, 64, s))
    e = mark(s)
    ok(cuda.cudaStreamWaitEvent(stream(), e, 0))
    assert host.pending() == 3
    assert host.log() == []


def test_step_executes_what_is_ready_and_no_more():
    host.configure(seed=1)
    s, p, q = stream(), malloc(64), pinned(64)
    for _ in range(3):
        copy(p, q, 64, s)
    assert host.step() == 1
    assert host.pending() == 2
    assert host.step(9) == 2
    assert host.step() == 0


def test_step_is_refused_in_threads_mode():
    with pytest.raises(RuntimeError, match="scheduled"):
        host.step()


@both_modes
def test_a_stream_executes_in_order(schedule):
    host.configure(seed=schedule)
    s, a, b = stream(), pinned(64), malloc(64)
    for value in range(100):
        ok(cuda.cudaMemsetAsync(a, value, 64, s))
        copy(b, a, 64, s)
        copy(a, b, 64, s)
    ok(cuda.cudaStreamSynchronize(s))
    assert (view(b, 64) == 99).all()


def test_streams_without_events_run_in_any_order():
    orders = set()
    for schedule in range(30):
        host.configure(seed=schedule, races=False)
        p, q, streams = malloc(64), pinned(64), [stream() for _ in range(3)]
        for s in streams:
            copy(p, q, 64, s)
        ok(cuda.cudaDeviceSynchronize())
        orders.add(tuple(streams.index(on) for _, on, _ in host.log()))
    assert len(orders) == 6


def test_a_wait_may_run_everything_else_first():
    before = set()
    for schedule in range(60):
        host.configure(seed=schedule, races=False)
        p, q = malloc(64), pinned(64)
        foreign, needed, awaited = stream(), stream(), stream()
        for _ in range(2):
            copy(p, q, 1, foreign)
        copy(p, q, 2, needed)
        ok(cuda.cudaStreamWaitEvent(awaited, mark(needed), 0))
        copy(p, q, 3, awaited)
        ok(cuda.cudaStreamSynchronize(awaited))
        sizes = [size for _, _, size in host.log()]
        before.add(sizes[: sizes.index(3)].count(1))
    assert before == {0, 1, 2}


def test_a_wait_may_run_only_what_it_needs_over_all_streams():
    """With 20 other streams that are ready, chance alone would not leave all of them out."""
    for schedule in range(80):
        host.configure(seed=schedule, races=False)
        p, q = malloc(64), pinned(64)
        for _ in range(20):
            copy(p, q, 1, stream())
        needed, awaited = stream(), stream()
        copy(p, q, 2, needed)
        ok(cuda.cudaStreamWaitEvent(awaited, mark(needed), 0))
        copy(p, q, 3, awaited)
        ok(cuda.cudaStreamSynchronize(awaited))
        if [size for _, _, size in host.log()] == [2, 3]:
            return
    pytest.fail("every order had other work in it")


def test_a_seed_stands_for_one_order():
    def order(schedule):
        host.configure(seed=schedule, races=False)
        p, q, streams = malloc(64), pinned(64), [stream() for _ in range(4)]
        for n in range(40):
            copy(p, q, n + 1, streams[n % 4])
            if n % 8 == 7:
                cuda.cudaStreamQuery(streams[0])
        ok(cuda.cudaDeviceSynchronize())
        return [size for _, _, size in host.log()]

    assert order(11) == order(11)
    assert order(11) != order(12)


def test_work_of_a_destroyed_stream_completes():
    for schedule in (None, 4):
        host.configure(seed=schedule)
        s, p, q = stream(), malloc(64), pinned(64)
        view(q, 64)[:] = 9
        copy(p, q, 64, s)
        e = mark(s)
        ok(cuda.cudaStreamDestroy(s))
        ok(cuda.cudaEventSynchronize(e))
        assert (view(p, 64) == 9).all()


def test_a_full_queue_blocks_the_submitting_thread():
    s, p, q = stream(), malloc(64), pinned(64)
    gate = Gate(s)
    for _ in range(QUEUE_DEPTH - 1):
        copy(p, q, 64, s)
    blocked = in_thread(lambda: cuda.cudaMemcpyAsync(p, q, 64, ANY_DIRECTION, s))
    blocked.join(0.2)
    assert blocked.running()
    assert host.pending() == QUEUE_DEPTH
    gate.open()
    ok(blocked())
    ok(cuda.cudaStreamSynchronize(s))


def test_a_full_queue_of_scheduled_mode_makes_room():
    host.configure(seed=1)
    s, p = stream(), malloc(64)
    for _ in range(QUEUE_DEPTH):
        ok(cuda.cudaMemsetAsync(p, 0, 64, s))
    assert host.pending() == QUEUE_DEPTH
    ok(cuda.cudaMemsetAsync(p, 0, 64, s))
    assert host.pending() == QUEUE_DEPTH


def test_destroyed_handles_are_refused_and_never_used_again():
    s, e = stream(), mark(stream())
    ok(cuda.cudaStreamDestroy(s))
    ok(cuda.cudaEventDestroy(e))
    assert stream() != s
    assert event() != e
    assert cuda.cudaStreamSynchronize(s) == BAD_HANDLE
    assert cuda.cudaStreamDestroy(s) == BAD_HANDLE
    assert cuda.cudaEventQuery(e) == BAD_HANDLE
    assert cuda.cudaEventDestroy(e) == BAD_HANDLE
    host.configure()
    assert cuda.cudaStreamQuery(s) == BAD_HANDLE


@pytest.mark.parametrize("legacy", [0, 1, 2])
def test_default_streams_are_refused_and_reported(legacy):
    p, q, e = malloc(64), pinned(64), mark(stream())
    codes = [
        cuda.cudaMemcpyAsync(p, q, 64, ANY_DIRECTION, legacy),
        cuda.cudaMemcpy2DAsync(p, 8, q, 8, 8, 8, ANY_DIRECTION, legacy),
        cuda.cudaMemsetAsync(p, 0, 64, legacy),
        cuda.cudaEventRecord(e, legacy),
        cuda.cudaStreamWaitEvent(legacy, e, 0),
        cuda.cudaStreamSynchronize(legacy),
        cuda.cudaLaunchHostFunc(legacy, 1, 0),
        cuda.cudaStreamQuery(legacy),
        cuda.cudaStreamBeginCapture(legacy, GLOBAL),
        cuda.cudaStreamIsCapturing(legacy, p),
        cuda.cudaStreamDestroy(legacy),
    ]
    assert codes == [BAD_HANDLE] * len(codes)
    found = violations()
    assert len(found) == len(codes)
    assert all("legacy stream" in text for text in found)


def test_unknown_flags_are_refused():
    out = ctypes.c_size_t()
    at = ctypes.addressof(out)
    assert cuda.cudaStreamCreateWithFlags(at, 2) == INVALID_VALUE
    assert cuda.cudaEventCreateWithFlags(at, 4) == INVALID_VALUE
    assert cuda.cudaHostAlloc(at, 64, 8) == INVALID_VALUE
    assert cuda.cudaHostRegister(pages(1).ctypes.data, PAGE, 16) == INVALID_VALUE
    assert cuda.cudaStreamWaitEvent(stream(), mark(stream()), 1) == INVALID_VALUE
    assert host.live()["host_allocations"] == host.live()["registrations"] == 0


@both_modes
def test_a_host_function_is_called_in_its_stream_order(schedule):
    host.configure(seed=schedule)
    s, p, seen = stream(), malloc(64), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append((data, int(view(p, 64)[0]))))
    address = ctypes.cast(function, ctypes.c_void_p).value
    ok(cuda.cudaMemsetAsync(p, 1, 64, s))
    ok(cuda.cudaLaunchHostFunc(s, address, 42))
    ok(cuda.cudaMemsetAsync(p, 2, 64, s))
    ok(cuda.cudaLaunchHostFunc(s, address, 43))
    ok(cuda.cudaStreamSynchronize(s))
    assert seen == [(42, 1), (43, 2)]


@pytest.mark.parametrize("schedule", [None, 1])
def test_a_call_inside_a_host_function_is_refused_and_reported(schedule):
    host.configure(seed=schedule)
    s, codes = stream(), []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: codes.append(cuda.cudaStreamSynchronize(s)))
    ok(cuda.cudaLaunchHostFunc(s, ctypes.cast(function, ctypes.c_void_p).value, 0))
    ok(cuda.cudaStreamSynchronize(s))
    assert codes == [NOT_PERMITTED]
    assert violations() == ["cudaStreamSynchronize: called inside a host function"]
