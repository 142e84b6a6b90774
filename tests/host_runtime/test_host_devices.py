"""Devices of the host runtime: what belongs to one, and what may cross from one to another."""

import ctypes

import pytest

from host_table import (
    BAD_DEVICE,
    BAD_HANDLE,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    PAGE,
    Gate,
    copy,
    cuda,
    event,
    in_thread,
    made,
    malloc,
    mark,
    ok,
    stream,
    view,
    violations,
)
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host


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


def test_an_event_belongs_to_the_device_of_its_creation():
    host.configure(devices=2)
    e = event()
    ok(cuda.cudaSetDevice(1))
    s = stream()
    assert cuda.cudaEventRecord(e, s) == BAD_HANDLE
    ok(cuda.cudaEventRecord(event(), s))


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


def test_the_current_device_belongs_to_its_thread():
    host.configure(devices=2)
    ok(cuda.cudaSetDevice(1))
    assert made("cudaGetDevice") == 1
    assert in_thread(lambda: made("cudaGetDevice"))() == 0
    assert cuda.cudaSetDevice(2) == BAD_DEVICE
    assert made("cudaGetDevice") == 1


def two_devices():
    """A stream and an allocation of each."""
    host.configure(devices=2, seed=1)
    made_on = []
    for device in (0, 1):
        ok(cuda.cudaSetDevice(device))
        made_on.append((stream(), malloc(64)))
    ok(cuda.cudaSetDevice(0))
    return made_on


@pytest.mark.parametrize("on", [0, 1])
def test_a_copy_between_two_devices_arrives_without_peer_access(on):
    """The driver stages it, on a stream of either side, whatever device is current."""
    (_, a), (_, b) = sides = two_devices()
    s = sides[on][0]
    view(a, 64)[:] = 5
    copy(b, a, 64, s)
    assert host.pending() == 1
    ok(cuda.cudaStreamSynchronize(s))
    assert (view(b, 64) == 5).all()


def test_a_copy_between_two_devices_is_in_the_order_of_its_own_stream_only():
    (s, a), (t, b) = two_devices()
    copy(b, a, 64, s)
    ok(cuda.cudaMemsetAsync(b, 1, 64, t))
    found = violations()
    assert len(found) == 1
    assert found[0].startswith("race: cudaMemsetAsync")


def test_a_wait_may_cross_devices():
    (s, a), (t, b) = two_devices()
    copy(b, a, 64, s)
    ok(cuda.cudaStreamWaitEvent(t, mark(s), 0))
    ok(cuda.cudaMemsetAsync(b, 1, 64, t))
    ok(cuda.cudaStreamSynchronize(t))
    assert (view(b, 64) == 1).all()


def test_events_and_streams_are_asked_from_any_device():
    (s, a), _ = two_devices()
    ok(cuda.cudaMemsetAsync(a, 1, 64, s))
    e = mark(s)
    ok(cuda.cudaSetDevice(1))
    ok(cuda.cudaEventSynchronize(e))
    ok(cuda.cudaEventQuery(e))
    ok(cuda.cudaStreamSynchronize(s))
    ok(cuda.cudaFree(a))


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
