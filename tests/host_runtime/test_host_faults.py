"""Errors and faults of the host runtime: whose they are, and what can be made to fail."""

import ctypes

import numpy as np
import pytest

from host_table import (
    ANY_DIRECTION,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    Gate,
    both_modes,
    copy,
    cuda,
    event,
    in_thread,
    made,
    malloc,
    mark,
    ok,
    pinned,
    stream,
    view,
)
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host


def test_the_last_error_belongs_to_its_thread_and_is_read_once():
    assert cuda.cudaFree(12345) == INVALID_VALUE
    assert in_thread(cuda.cudaPeekAtLastError)() == 0
    ok(cuda.cudaFree(0))
    assert cuda.cudaPeekAtLastError() == INVALID_VALUE
    assert cuda.cudaGetLastError() == INVALID_VALUE
    assert cuda.cudaGetLastError() == 0


def test_errors_have_their_names():
    def text(function, code):
        return ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(cuda.functions[function])(code)

    assert text("cudaGetErrorName", INVALID_VALUE) == b"cudaErrorInvalidValue"
    assert text("cudaGetErrorName", ILLEGAL_ADDRESS) == b"cudaErrorIllegalAddress"
    assert text("cudaGetErrorString", OUT_OF_MEMORY) == b"out of memory"
    assert text("cudaGetErrorName", 123456) == b"unrecognized error code"


def test_calls_are_counted():
    for _ in range(3):
        event()
    cuda.cudaFree(12345)
    assert {name: n for name, n in host.calls().items() if n} == {"cudaEventCreateWithFlags": 3, "cudaFree": 1}


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


@both_modes
def test_host_functions_are_not_called_once_the_context_is_dead(schedule):
    """A flag that only such a function sets never comes then."""
    host.configure(seed=schedule)
    s, gated, called = stream(), stream(), []
    gate = Gate(gated) if schedule is None else None
    ok(cuda.cudaStreamWaitEvent(s, mark(gated), 0))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
    ok(cuda.cudaLaunchHostFunc(s, ctypes.cast(function, ctypes.c_void_p).value, 0))
    host.fail("cudaStreamQuery", 1, ILLEGAL_ADDRESS)
    assert cuda.cudaStreamQuery(s) == ILLEGAL_ADDRESS
    if gate:
        gate.open()
    assert cuda.cudaStreamSynchronize(s) == ILLEGAL_ADDRESS
    host.configure()
    assert called == []


def test_a_dead_context_is_dead_for_every_thread_and_device():
    host.configure(devices=2)
    s = stream()
    host.fail("cudaEventQuery", 1, ILLEGAL_ADDRESS)
    assert cuda.cudaEventQuery(mark(s)) == ILLEGAL_ADDRESS

    def elsewhere():
        return cuda.cudaSetDevice(1), cuda.cudaStreamQuery(s), cuda.cudaPeekAtLastError()

    assert in_thread(elsewhere)() == (ILLEGAL_ADDRESS,) * 3


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
