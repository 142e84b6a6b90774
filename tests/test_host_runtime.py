"""The host runtime is the referee of the other tests: each test here makes it catch, delay or refuse one thing.

It is called through its own table, so that nothing it judges stands in between.
"""

import ctypes
import subprocess
import sys
import textwrap
import threading
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_copy import host_runtime as host

pytestmark = pytest.mark.host

INVALID_VALUE, OUT_OF_MEMORY, UNLOADING, INVALID_PITCH, BAD_DIRECTION = 1, 2, 4, 12, 21
BAD_DEVICE, BAD_HANDLE, ILLEGAL_STATE, NOT_READY, ILLEGAL_ADDRESS = 101, 400, 401, 600, 700
ALREADY_REGISTERED, NOT_REGISTERED, NOT_PERMITTED, NOT_SUPPORTED = 712, 713, 800, 801
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURED_EVENT, WRONG_THREAD = 900, 901, 905, 907, 908
HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, ANY_DIRECTION = range(5)
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NO_TIMING = 2
PAGE = 4096
QUEUE_DEPTH = 1020


class Table:
    """The functions of the table: `cuda.cudaMalloc(...)` takes numbers and returns the code."""

    def __init__(self):
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        name = ctypes.pythonapi.PyCapsule_GetName
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
        capsule = host.__pyx_capi__["table"]
        self.names = list(host.calls())
        table = ctypes.CFUNCTYPE(ctypes.c_void_p)(get(capsule, name(capsule)))()
        self.functions = dict(zip(self.names, (ctypes.c_void_p * len(self.names)).from_address(table), strict=True))

    def __getattr__(self, name):
        address = self.functions[name]

        def call(*args):
            return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * len(args))(address)(*args)

        return call


cuda = Table()


def ok(code):
    assert code == 0


def made(function, *args):
    """The handle or address that a function writes to its first argument."""
    out = ctypes.c_size_t()
    ok(getattr(cuda, function)(ctypes.addressof(out), *args))
    return out.value


def stream():
    return made("cudaStreamCreateWithFlags", 1)


def event(flags=NO_TIMING):
    return made("cudaEventCreateWithFlags", flags)


def malloc(size):
    return made("cudaMalloc", size)


def pinned(size):
    return made("cudaHostAlloc", size, 0)


def copy(target, source, size, on):
    ok(cuda.cudaMemcpyAsync(target, source, size, ANY_DIRECTION, on))


def mark(on):
    recorded = event()
    ok(cuda.cudaEventRecord(recorded, on))
    return recorded


def view(address, size):
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def pages(count):
    """Host memory that nobody has registered, on page borders."""
    raw = np.zeros((count + 1) * PAGE, np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + count * PAGE]


def violations():
    """What was found so far, on purpose; the runtime is as new afterwards."""
    found = host.violations()
    host.configure()
    return found


class Gate:
    """A host function that holds a stream of threads mode until it is opened, at the latest by the end of the test."""

    closed: ClassVar[list["Gate"]] = []

    def __init__(self, on):
        self.opened, self.entered = threading.Event(), threading.Event()
        self.closed.append(self)
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._hold)
        ok(cuda.cudaLaunchHostFunc(on, ctypes.cast(self.function, ctypes.c_void_p).value, 0))

    def _hold(self, _):
        self.entered.set()
        self.opened.wait()

    def open(self):
        self.opened.set()


def in_thread(function):
    """Runs `function` in a thread of its own; `result()` waits for its value."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()

    def result():
        thread.join(30)
        assert not thread.is_alive()
        return results[0]

    result.running = thread.is_alive
    result.join = thread.join
    return result


@pytest.fixture(autouse=True)
def runtime():
    host.configure()
    yield
    while Gate.closed:
        Gate.closed.pop().open()
    found = host.violations()
    host.configure()
    assert found == []


both_modes = pytest.mark.parametrize("schedule", [None, 0, 1, 2])


# Late


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


# Order


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


def test_device_synchronize_waits_for_the_current_device_only():
    host.configure(devices=2)
    gated = stream()
    gate = Gate(gated)
    ok(cuda.cudaSetDevice(1))
    s, p = stream(), malloc(64)
    ok(cuda.cudaMemsetAsync(p, 3, 64, s))
    ok(cuda.cudaDeviceSynchronize())
    assert (view(p, 64) == 3).all()
    assert host.pending() == 1
    gate.open()


# Queue depth


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


# Handles


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


def test_a_stream_is_no_event():
    s = stream()
    assert cuda.cudaEventRecord(s, s) == BAD_HANDLE


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


def test_an_event_belongs_to_the_device_of_its_creation():
    host.configure(devices=2)
    e = event()
    ok(cuda.cudaSetDevice(1))
    s = stream()
    assert cuda.cudaEventRecord(e, s) == BAD_HANDLE
    ok(cuda.cudaEventRecord(event(), s))


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


# Memory


def test_memory_limits_hold_per_device_and_are_given_back():
    host.configure(devices=2, memory=3 * PAGE)
    out = ctypes.c_size_t()
    p = malloc(2 * PAGE)
    assert cuda.cudaMalloc(ctypes.addressof(out), PAGE + 1) == OUT_OF_MEMORY
    available, total = ctypes.c_size_t(), ctypes.c_size_t()
    ok(cuda.cudaMemGetInfo(ctypes.addressof(available), ctypes.addressof(total)))
    assert (available.value, total.value) == (PAGE, 3 * PAGE)
    ok(cuda.cudaSetDevice(1))
    malloc(3 * PAGE)
    ok(cuda.cudaFree(p))
    ok(cuda.cudaSetDevice(0))
    malloc(3 * PAGE)


def test_allocated_and_registered_memory_share_the_pinned_limit():
    host.configure(pinned=2 * PAGE)
    block = pages(2)
    p = pinned(PAGE)
    assert cuda.cudaHostRegister(block.ctypes.data, 2 * PAGE, 0) == OUT_OF_MEMORY
    ok(cuda.cudaHostRegister(block.ctypes.data, PAGE, 0))
    out = ctypes.c_size_t()
    assert cuda.cudaHostAlloc(ctypes.addressof(out), 1, 0) == OUT_OF_MEMORY
    ok(cuda.cudaFreeHost(p))
    pinned(PAGE)


def test_large_memory_costs_nothing_until_it_is_touched():
    p, size = malloc(40 << 30), 40 << 30
    view(p + size - 64, 64)[:] = 1
    ok(cuda.cudaFree(p))


def test_new_memory_is_garbage_and_freed_memory_another():
    for allocate, free in ((malloc, cuda.cudaFree), (pinned, cuda.cudaFreeHost)):
        p = allocate(100_000)
        assert p % 256 == 0
        assert (view(p, 65536) == 0xA5).all()
        ok(free(p))
        assert (view(p, 65536) == 0xDD).all()


def test_memory_is_freed_by_its_own_kind_from_its_start():
    p, q, block = malloc(PAGE), pinned(PAGE), pages(1)
    ok(cuda.cudaHostRegister(block.ctypes.data, PAGE, 0))
    for wrong in (q, p + 1, block.ctypes.data, 12345):
        assert cuda.cudaFree(wrong) == INVALID_VALUE
    for wrong in (p, q + 1, block.ctypes.data, 12345):
        assert cuda.cudaFreeHost(wrong) == INVALID_VALUE
    ok(cuda.cudaFree(0))
    ok(cuda.cudaFree(p))
    assert cuda.cudaFree(p) == INVALID_VALUE


def test_empty_allocations_have_no_address():
    assert malloc(0) == 0
    assert pinned(0) == 0


def test_registration_follows_the_rules_of_pinning():
    block = pages(4)
    start = block.ctypes.data
    assert cuda.cudaHostRegister(start, 0, 0) == INVALID_VALUE
    assert cuda.cudaHostRegister(0, PAGE, 0) == INVALID_VALUE
    assert cuda.cudaHostRegister(start, PAGE, 8) == NOT_SUPPORTED
    ok(cuda.cudaHostRegister(start + PAGE, PAGE, 0))
    for first, size in ((start, 2 * PAGE), (start + PAGE, 1), (start + PAGE + 100, PAGE), (start, 4 * PAGE)):
        assert cuda.cudaHostRegister(first, size, 0) == ALREADY_REGISTERED
    assert cuda.cudaHostRegister(pinned(PAGE), PAGE, 0) == ALREADY_REGISTERED
    assert cuda.cudaHostRegister(malloc(PAGE), PAGE, 0) == INVALID_VALUE
    ok(cuda.cudaHostRegister(start, PAGE, 0))
    assert cuda.cudaHostUnregister(start + PAGE + 1) == INVALID_VALUE
    assert cuda.cudaHostUnregister(start + 2 * PAGE) == NOT_REGISTERED
    assert cuda.cudaHostUnregister(pinned(PAGE)) == INVALID_VALUE
    ok(cuda.cudaHostUnregister(start + PAGE))
    assert cuda.cudaHostUnregister(start + PAGE) == NOT_REGISTERED


class Attributes(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("device_pointer", ctypes.c_size_t),
        ("host_pointer", ctypes.c_size_t),
        ("reserved", ctypes.c_long * 8),
    ]


def test_pointer_attributes_tell_the_four_kinds_of_memory():
    host.configure(devices=2)
    ok(cuda.cudaSetDevice(1))
    p, q, block = malloc(PAGE), pinned(PAGE), pages(2)
    r = block.ctypes.data
    ok(cuda.cudaHostRegister(r, PAGE, 0))
    ok(cuda.cudaSetDevice(0))

    def attributes(address):
        out = Attributes()
        ok(cuda.cudaPointerGetAttributes(ctypes.addressof(out), address))
        return out.type, out.device, out.device_pointer, out.host_pointer

    assert attributes(p + 5) == (2, 1, p + 5, 0)
    assert attributes(q + 5) == (1, 1, q + 5, q + 5)
    assert attributes(r + 5) == (1, 1, r + 5, r + 5)
    assert attributes(r + PAGE) == (0, -2, 0, r + PAGE)
    ok(cuda.cudaFree(p))
    assert attributes(p)[0] == 0
    assert made("cudaHostGetDevicePointer", q + 5, 0) == q + 5
    out = ctypes.c_size_t()
    assert cuda.cudaHostGetDevicePointer(ctypes.addressof(out), p, 0) == INVALID_VALUE
    assert cuda.cudaHostGetDevicePointer(ctypes.addressof(out), r + PAGE, 0) == INVALID_VALUE


def test_pointer_range_is_the_one_allocation_or_registration():
    start, size, block = ctypes.c_size_t(), ctypes.c_size_t(), pages(3)
    r = block.ctypes.data
    ok(cuda.cudaHostRegister(r, PAGE, 0))
    ok(cuda.cudaHostRegister(r + PAGE, PAGE, 0))

    def held_by(address):
        code = cuda.pointer_range(address, ctypes.addressof(start), ctypes.addressof(size))
        return (start.value, size.value) if code == 0 else code

    p = malloc(1000)
    assert held_by(p + 999) == (p, 1000)
    assert held_by(r + PAGE) == (r + PAGE, PAGE)
    assert held_by(r + PAGE - 1) == (r, PAGE)
    assert held_by(r + 2 * PAGE) == INVALID_VALUE
    ok(cuda.cudaFree(p))
    assert held_by(p) == INVALID_VALUE


# Copies


def test_a_copy_across_two_ranges_is_refused():
    s, target, block = stream(), malloc(4 * PAGE), pages(3)
    r = block.ctypes.data
    ok(cuda.cudaHostRegister(r, PAGE, 0))
    ok(cuda.cudaHostRegister(r + PAGE, PAGE, 0))
    across = [(r, 2 * PAGE), (r + PAGE, 2 * PAGE), (r + PAGE - 1, 2), (r - 8, 16), (r - 8, 4 * PAGE)]
    for first, size in across:
        assert cuda.cudaMemcpyAsync(target, first, size, ANY_DIRECTION, s) == INVALID_VALUE
        assert cuda.cudaMemcpyAsync(first, target, size, ANY_DIRECTION, s) == INVALID_VALUE
        assert cuda.cudaMemcpy(target, first, size, ANY_DIRECTION) == INVALID_VALUE
    copy(target, r + PAGE, PAGE, s)
    copy(target, r + 2 * PAGE, PAGE, s)
    assert cuda.cudaMemcpyAsync(target, r, PAGE, ANY_DIRECTION, s) == 0


def test_a_copy_past_the_end_of_device_memory_is_refused():
    s, source, target = stream(), pinned(2 * PAGE), malloc(PAGE)
    assert cuda.cudaMemcpyAsync(target, source, PAGE + 1, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemcpyAsync(target + 1, source, PAGE, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemsetAsync(target + 1, 0, PAGE, s) == INVALID_VALUE
    assert cuda.cudaMemcpy2DAsync(target, 64, source, 64, 64, 65, ANY_DIRECTION, s) == INVALID_VALUE
    ok(cuda.cudaMemcpy2DAsync(target, 64, source, 64, 64, 64, ANY_DIRECTION, s))


def test_directions_are_checked():
    s, p, q = stream(), malloc(64), pinned(64)
    fitting = {
        (p, q): HOST_TO_DEVICE,
        (q, p): DEVICE_TO_HOST,
        (malloc(64), p): DEVICE_TO_DEVICE,
        (pinned(64), q): HOST_TO_HOST,
    }
    for (target, source), fits in fitting.items():
        for kind in range(4):
            code = cuda.cudaMemcpyAsync(target, source, 64, kind, s)
            assert code == (0 if kind == fits else INVALID_VALUE)
    assert cuda.cudaMemcpyAsync(p, q, 64, 5, s) == BAD_DIRECTION


def test_empty_copies_do_nothing_and_null_needs_one():
    s, p, q = stream(), malloc(64), pinned(64)
    ok(cuda.cudaMemcpyAsync(0, 0, 0, ANY_DIRECTION, s))
    ok(cuda.cudaMemcpyAsync(p, q, 0, ANY_DIRECTION, s))
    ok(cuda.cudaMemcpy2DAsync(p, 8, q, 8, 8, 0, ANY_DIRECTION, s))
    ok(cuda.cudaMemsetAsync(p, 0, 0, s))
    assert cuda.cudaMemcpyAsync(0, q, 1, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemcpyAsync(p, 0, 1, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemcpy(0, q, 1, ANY_DIRECTION) == INVALID_VALUE
    ok(cuda.cudaStreamSynchronize(s))
    assert host.log() == []


@both_modes
def test_a_rectangle_moves_its_rows_and_nothing_between_them(schedule):
    host.configure(seed=schedule)
    s, source, target = stream(), pinned(10 * 32), malloc(10 * 48)
    view(source, 320)[:] = np.arange(320) % 251
    ok(cuda.cudaMemcpy2DAsync(target, 48, source, 32, 20, 10, ANY_DIRECTION, s))
    ok(cuda.cudaStreamSynchronize(s))
    got, sent = view(target, 480).reshape(10, 48), view(source, 320).reshape(10, 32)
    assert (got[:, :20] == sent[:, :20]).all()
    assert (got[:, 20:] == 0xA5).all()
    assert host.log() == [("cudaMemcpy2DAsync", s, 200)]


def test_a_rectangle_needs_pitches_that_hold_it():
    s, p, q = stream(), malloc(PAGE), pinned(PAGE)
    rectangle = cuda.cudaMemcpy2DAsync
    assert rectangle(p, 8, q, 16, 9, 2, ANY_DIRECTION, s) == INVALID_PITCH
    assert rectangle(p, 16, q, 8, 9, 2, ANY_DIRECTION, s) == INVALID_PITCH
    assert rectangle(p, 1 << 31, q, 16, 9, 2, ANY_DIRECTION, s) == INVALID_PITCH
    assert rectangle(p, 16, q, 16, 16, 1 << 61, ANY_DIRECTION, s) == INVALID_VALUE


def test_a_pitch_of_almost_two_gib_is_taken():
    p, q, s = malloc((1 << 31) + 64), malloc(PAGE), stream()
    ok(cuda.cudaMemcpy2DAsync(p, (1 << 31) - 1, q, 16, 16, 2, ANY_DIRECTION, s))
    ok(cuda.cudaStreamSynchronize(s))
    assert (view(p + (1 << 31) - 1, 16) == view(q, 16)).all()


def test_a_copy_onto_itself_is_reported():
    s, p = stream(), malloc(128)
    copy(p + 64, p, 64, s)
    assert host.violations() == []
    copy(p + 63, p, 64, s)
    assert "overlaps" in violations()[0]


rectangles = st.tuples(st.integers(0, 40), st.integers(0, 8))


@settings(max_examples=400, deadline=None)
@given(rectangles, rectangles, st.integers(1, 5), st.integers(1, 6))
def test_rectangles_overlap_where_a_byte_is_read_and_written(target, source, width, rows):
    host.configure(seed=0)
    s, p = stream(), malloc(512)

    def bytes_of(start, gap):
        return {start + row * (width + gap) + i for row in range(rows) for i in range(width)}

    (t, t_gap), (f, f_gap) = target, source
    ok(cuda.cudaMemcpy2DAsync(p + t, width + t_gap, p + f, width + f_gap, width, rows, ANY_DIRECTION, s))
    assert len(host.violations()) == bool(bytes_of(*target) & bytes_of(*source))
    host.configure()


@both_modes
def test_copies_of_pageable_memory_hold_their_caller(schedule):
    host.configure(seed=schedule)
    s, p, block = stream(), malloc(PAGE), pages(2)
    for value in range(1, 20):
        ok(cuda.cudaMemsetAsync(p, value, PAGE, s))
        copy(block.ctypes.data, p, PAGE, s)
        assert (block[:PAGE] == value).all()
        copy(block.ctypes.data + PAGE, block.ctypes.data, PAGE, s)
        assert (block[PAGE:] == value).all()
        block[:PAGE] = 100 + value
        copy(p, block.ctypes.data, PAGE, s)
        block[:PAGE] = 0
        assert (view(p, PAGE) == 100 + value).all()


def test_copies_between_pinned_ranges_hold_their_caller():
    host.configure(seed=1)
    s, p, q = stream(), pinned(64), pinned(64)
    view(p, 64)[:] = 3
    copy(q, p, 64, s)
    assert (view(q, 64) == 3).all()


def test_pageable_memory_is_no_target_of_memset():
    assert cuda.cudaMemsetAsync(pages(1).ctypes.data, 0, PAGE, stream()) == INVALID_VALUE


@both_modes
def test_the_blocking_copy_is_done_when_it_returns(schedule):
    host.configure(devices=2, seed=schedule)
    a, b, block = malloc(PAGE), malloc(PAGE), pages(1)
    block[:] = 8
    ok(cuda.cudaMemcpy(a, block.ctypes.data, PAGE, HOST_TO_DEVICE))
    ok(cuda.cudaMemcpy(b, a, PAGE, DEVICE_TO_DEVICE))
    assert (view(b, PAGE) == 8).all()
    assert host.log() == [("cudaMemcpy", 0, PAGE)] * 2
    assert host.live()["streams"] == 0


# Lifetimes


def test_freeing_device_memory_completes_the_work_of_its_device():
    for schedule in (None, 1, 2):
        host.configure(seed=schedule)
        s, p, q = stream(), malloc(64), pinned(64)
        ok(cuda.cudaMemsetAsync(p, 4, 64, s))
        copy(q, p, 64, s)
        ok(cuda.cudaFree(p))
        assert (view(q, 64) == 4).all()


@pytest.mark.parametrize("how", ["host memory", "registration", "memory of another device"])
def test_memory_that_ends_before_its_copy_is_reported_and_left_alone(how):
    host.configure(devices=2, seed=1)
    ok(cuda.cudaSetDevice(1))
    other = malloc(64)
    ok(cuda.cudaSetDevice(0))
    s, p, block = stream(), malloc(64), pages(1)
    if how == "host memory":
        target = pinned(64)
        end = cuda.cudaFreeHost
    elif how == "registration":
        target = block.ctypes.data
        ok(cuda.cudaHostRegister(target, PAGE, 0))
        end = cuda.cudaHostUnregister
    else:
        target, end = other, cuda.cudaFree
    copy(target, p, 64, s)
    ok(end(target))
    before = view(target, 64).copy()
    ok(cuda.cudaStreamSynchronize(s))
    assert (view(target, 64) == before).all()
    found = host.violations()
    assert len(found) == 1
    assert "was freed or unregistered before it was executed" in found[0]
    assert f"{target:#x}, +64" in found[0]
    violations()


def test_use_after_free_is_refused_and_reported():
    s, p, q = stream(), malloc(64), pinned(64)
    ok(cuda.cudaFree(p))
    assert cuda.cudaMemcpyAsync(p, q, 64, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemcpyAsync(q, p + 60, 2, ANY_DIRECTION, s) == INVALID_VALUE
    found = violations()
    assert len(found) == 2
    assert all("freed before the call" in text for text in found)


def test_ending_a_range_in_use_waits_for_the_running_copy_and_is_reported():
    size = 256 << 20
    s, p, q = stream(), malloc(size), pinned(size)
    view(p, 1)[0] = 1
    target = view(q, 1)
    copy(q, p, size, s)
    while target[0] != 1:
        pass
    ok(cuda.cudaFreeHost(q))
    assert host.log() == [("cudaMemcpyAsync", s, size)]
    found = violations()
    assert len(found) == 1
    assert "is used by an operation that is running" in found[0]


def test_live_counts_what_was_not_destroyed():
    block = pages(1)
    s, e, p, q = stream(), event(), malloc(64), pinned(64)
    ok(cuda.cudaHostRegister(block.ctypes.data, PAGE, 0))
    assert host.live() == dict.fromkeys(("streams", "events", "registrations", "allocations", "host_allocations"), 1)
    ok(cuda.cudaStreamDestroy(s))
    ok(cuda.cudaEventDestroy(e))
    ok(cuda.cudaFree(p))
    ok(cuda.cudaFreeHost(q))
    ok(cuda.cudaHostUnregister(block.ctypes.data))
    assert set(host.live().values()) == {0}


def test_configure_drops_everything():
    s, e, p = stream(), mark(stream()), malloc(64)
    host.fail("cudaMalloc", 1, 2, forever=True)
    host.configure(devices=3)
    assert set(host.live().values()) == {0}
    assert set(host.calls().values()) == {0}
    assert cuda.cudaStreamDestroy(s) == cuda.cudaEventDestroy(e) == BAD_HANDLE
    assert cuda.cudaFree(p) == INVALID_VALUE
    assert made("cudaGetDeviceCount") == 3
    malloc(64)


def test_configure_ends_the_calls_that_wait():
    s = stream()
    gate = Gate(s)
    assert gate.entered.wait(10)
    ok(cuda.cudaMemsetAsync(malloc(64), 0, 64, s))
    waiting = in_thread(lambda: cuda.cudaStreamSynchronize(s))
    waiting.join(0.1)
    assert waiting.running()
    configuring = in_thread(host.configure)
    while cuda.cudaStreamQuery(s) != UNLOADING:
        pass
    gate.open()
    configuring()
    assert waiting() == UNLOADING


# Errors and devices


def test_the_last_error_belongs_to_its_thread_and_is_read_once():
    assert cuda.cudaFree(12345) == INVALID_VALUE
    assert in_thread(cuda.cudaPeekAtLastError)() == 0
    ok(cuda.cudaFree(0))
    assert cuda.cudaPeekAtLastError() == INVALID_VALUE
    assert cuda.cudaGetLastError() == INVALID_VALUE
    assert cuda.cudaGetLastError() == 0


def test_the_current_device_belongs_to_its_thread():
    host.configure(devices=2)
    ok(cuda.cudaSetDevice(1))
    assert made("cudaGetDevice") == 1
    assert in_thread(lambda: made("cudaGetDevice"))() == 0
    assert cuda.cudaSetDevice(2) == BAD_DEVICE
    assert made("cudaGetDevice") == 1


def test_errors_have_their_names():
    def text(function, code):
        return ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(cuda.functions[function])(code)

    assert text("cudaGetErrorName", INVALID_VALUE) == b"cudaErrorInvalidValue"
    assert text("cudaGetErrorName", ILLEGAL_ADDRESS) == b"cudaErrorIllegalAddress"
    assert text("cudaGetErrorString", OUT_OF_MEMORY) == b"out of memory"
    assert text("cudaGetErrorName", 123456) == b"unrecognized error code"


def test_devices_describe_themselves():
    host.configure(devices=2)
    name = ctypes.create_string_buffer(PAGE)
    ok(cuda.device_properties(ctypes.addressof(name), 1))
    assert name.value == b"Host runtime device 1"
    ok(cuda.cudaDeviceGetPCIBusId(ctypes.addressof(name), 16, 1))
    assert name.value == b"host:1"
    assert cuda.cudaDeviceGetPCIBusId(ctypes.addressof(name), 6, 1) == INVALID_VALUE
    assert cuda.device_properties(ctypes.addressof(name), 2) == BAD_DEVICE
    assert [made("cudaDeviceGetAttribute", a, 0) for a in (11, 40, 91, 99)] == [(1 << 31) - 1, 3, 1, 1]
    assert made("cudaRuntimeGetVersion") == made("cudaDriverGetVersion") == 13000


def test_calls_are_counted():
    for _ in range(3):
        event()
    cuda.cudaFree(12345)
    assert {name: n for name, n in host.calls().items() if n} == {"cudaEventCreateWithFlags": 3, "cudaFree": 1}


# Faults

CODELESS = {"cudaGetErrorName", "cudaGetErrorString"}


@pytest.mark.parametrize("function", [name for name in cuda.names if name not in CODELESS])
def test_every_function_can_be_made_to_fail(function):
    host.fail(function, 1, NOT_SUPPORTED)
    assert getattr(cuda, function)(*[0] * 8) == NOT_SUPPORTED
    assert host.clear_faults() == 1


def test_the_nth_call_fails_once_and_does_nothing():
    host.fail("cudaMalloc", 2, OUT_OF_MEMORY)
    malloc(64)
    out = ctypes.c_size_t(77)
    assert cuda.cudaMalloc(ctypes.addressof(out), 64) == OUT_OF_MEMORY
    assert out.value == 77
    assert cuda.cudaGetLastError() == OUT_OF_MEMORY
    malloc(64)
    assert host.live()["allocations"] == 2
    assert host.clear_faults() == 1
    assert host.clear_faults() == 0


def test_a_fault_for_ever_lasts_until_it_is_cleared():
    host.fail("cudaEventCreateWithFlags", 2, OUT_OF_MEMORY, forever=True)
    event()
    out = ctypes.c_size_t()
    for _ in range(3):
        assert cuda.cudaEventCreateWithFlags(ctypes.addressof(out), 0) == OUT_OF_MEMORY
    assert host.clear_faults() == 3
    event()


@pytest.mark.parametrize("sticky", [214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911])
def test_a_sticky_error_ends_the_context(sticky):
    s, p, q = stream(), malloc(64), pinned(64)
    view(q, 64)[:] = 1
    gate = Gate(s)
    copy(p, q, 64, s)
    waiting = in_thread(lambda: cuda.cudaStreamSynchronize(s))
    host.fail("cudaMemcpyAsync", 1, sticky)
    assert cuda.cudaMemcpyAsync(p, q, 64, ANY_DIRECTION, s) == sticky
    host.clear_faults()
    gate.open()
    out = ctypes.c_size_t()
    assert cuda.cudaStreamSynchronize(s) == cuda.cudaStreamQuery(s) == cuda.cudaDeviceSynchronize() == sticky
    assert cuda.cudaMalloc(ctypes.addressof(out), 64) == cuda.cudaFree(p) == cuda.cudaStreamDestroy(s) == sticky
    assert cuda.cudaGetLastError() == cuda.cudaGetLastError() == sticky
    assert made("cudaGetDevice") == 0
    assert waiting() == sticky
    assert (view(p, 64) == 0xA5).all()
    host.configure()
    malloc(64)


def test_an_ordinary_error_leaves_the_context_alone():
    host.fail("cudaMalloc", 1, OUT_OF_MEMORY)
    out = ctypes.c_size_t()
    assert cuda.cudaMalloc(ctypes.addressof(out), 64) == OUT_OF_MEMORY
    malloc(64)


def test_the_nth_copy_gets_one_wrong_byte():
    s, source = stream(), pinned(100)
    view(source, 100)[:] = np.arange(100)
    targets = [malloc(100) for _ in range(3)]
    host.corrupt(2)
    for target in targets:
        copy(target, source, 100, s)
    ok(cuda.cudaStreamSynchronize(s))
    assert [int((view(target, 100) != view(source, 100)).sum()) for target in targets] == [0, 1, 0]
    assert host.clear_faults() == 1


def test_a_wrong_byte_of_a_rectangle_lies_in_a_row():
    s, source, target = stream(), pinned(64), malloc(64)
    view(source, 64)[:] = 0
    ok(cuda.cudaMemsetAsync(target, 0, 64, s))
    host.corrupt(1)
    ok(cuda.cudaMemcpy2DAsync(target, 16, source, 16, 3, 4, ANY_DIRECTION, s))
    ok(cuda.cudaStreamSynchronize(s))
    wrong = view(target, 64).reshape(4, 16)
    assert np.count_nonzero(wrong[:, :3]) == 1
    assert np.count_nonzero(wrong) == 1


def test_faults_that_can_never_fire_are_refused():
    with pytest.raises(ValueError, match="cudaMaloc"):
        host.fail("cudaMaloc", 1, 2)
    with pytest.raises(ValueError, match="nth"):
        host.fail("cudaMalloc", 0, 2)
    with pytest.raises(ValueError, match="success"):
        host.fail("cudaMalloc", 1, 0)
    with pytest.raises(ValueError, match="nth"):
        host.corrupt(0)


# Host functions


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


# Capture

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


# Threads


@pytest.mark.parametrize("schedule", [None, 1, 2])
def test_several_threads_may_call_at_once(schedule):
    host.configure(devices=2, seed=schedule)

    def work(n):
        ok(cuda.cudaSetDevice(n % 2))
        s, p, q = stream(), malloc(PAGE), pinned(PAGE)
        for value in range(200):
            view(q, PAGE)[:] = (value + n) % 256
            copy(p, q, PAGE, s)
            e = mark(s)
            while (code := cuda.cudaEventQuery(e)) == NOT_READY:
                pass
            ok(code)
            if not (view(p, PAGE) == (value + n) % 256).all():
                return False
            ok(cuda.cudaEventDestroy(e))
        ok(cuda.cudaStreamSynchronize(s))
        ok(cuda.cudaFree(p))
        ok(cuda.cudaFreeHost(q))
        ok(cuda.cudaStreamDestroy(s))
        return True

    results = [in_thread(lambda n=n: work(n)) for n in range(6)]
    assert all(result() for result in results)
    assert set(host.live().values()) == {0}


EXIT_WITH_WORK = """
    import ctypes, threading
    import numpy as np
    from strata_copy import host_runtime as host
    import test_host_runtime as t

    host.configure()
    s, gated = t.stream(), t.stream()
    block = np.zeros(64 << 20, np.uint8)
    t.ok(t.cuda.cudaHostRegister(block.ctypes.data, block.nbytes, 0))
    p = t.malloc(block.nbytes)
    for _ in range(4):
        t.copy(block.ctypes.data, p, block.nbytes, s)
    {gate}
    print("left with", host.pending())
"""


@pytest.mark.parametrize("gate", ["", "gate = t.Gate(gated)"], ids=["copies", "a host function that never ends"])
def test_the_process_ends_with_work_in_the_queues(gate):
    program = textwrap.dedent(EXIT_WITH_WORK).format(gate=gate)
    path = [str(p) for p in sys.path if p] + [__file__.rpartition("/")[0]]
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout.split()[-1]) > 0
