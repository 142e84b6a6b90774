"""Memory of the host runtime: limits, kinds, registrations, and what ends before the work that uses it."""

import ctypes
import mmap

import pytest

from host_table import (
    ALREADY_REGISTERED,
    ANY_DIRECTION,
    BAD_HANDLE,
    INVALID_VALUE,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PAGE,
    UNLOADING,
    Gate,
    copy,
    cuda,
    event,
    in_thread,
    made,
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

MAP_NORESERVE = 0x4000


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


def test_one_call_registers_less_than_512_gib():
    size = 512 << 30
    start = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(start))
    assert cuda.cudaHostRegister(address, size, 0) == OUT_OF_MEMORY
    ok(cuda.cudaHostRegister(address, size - PAGE, 0))
    ok(cuda.cudaHostRegister(address + size - PAGE, PAGE, 0))


def test_ranges_that_share_a_page_register():
    start = pages(1).ctypes.data
    ok(cuda.cudaHostRegister(start, 100, 0))
    ok(cuda.cudaHostRegister(start + 100, 100, 0))
    assert cuda.cudaHostRegister(start + 199, 2, 0) == ALREADY_REGISTERED


@pytest.mark.parametrize("wrong", ["overlap", "inner pointer", "nothing"])
def test_what_registering_refuses_stays_pending(wrong):
    block = pages(2)
    start = block.ctypes.data
    ok(cuda.cudaHostRegister(start, PAGE, 0))
    code = {
        "overlap": lambda: cuda.cudaHostRegister(start + 8, PAGE, 0),
        "inner pointer": lambda: cuda.cudaHostUnregister(start + 8),
        "nothing": lambda: cuda.cudaHostRegister(start + PAGE, 0, 0),
    }[wrong]()
    assert code in (ALREADY_REGISTERED, INVALID_VALUE)
    ok(cuda.cudaHostUnregister(start))
    assert cuda.cudaPeekAtLastError() == cuda.cudaGetLastError() == code
    assert cuda.cudaGetLastError() == 0


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
