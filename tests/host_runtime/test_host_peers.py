"""Peers of the host runtime: who may reach whom, the copies that name two devices, and ways broken on purpose."""

import ctypes

import pytest

from host_table import (
    BAD_DEVICE,
    CAPTURE_UNSUPPORTED,
    INVALID_PITCH,
    INVALID_VALUE,
    NOT_READY,
    copy,
    cuda,
    malloc,
    ok,
    stream,
    view,
    violations,
)
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host
ALREADY, NOT_ENABLED = 704, 705
SIZE = 256


class Rows(ctypes.Structure):
    """cudaMemcpy3DPeerParms."""

    _fields_ = (
        *((f"src_{name}", ctypes.c_size_t) for name in ("array", "x", "y", "z", "ptr", "pitch", "xsize", "ysize")),
        ("src_device", ctypes.c_int),
        *((f"dst_{name}", ctypes.c_size_t) for name in ("array", "x", "y", "z", "ptr", "pitch", "xsize", "ysize")),
        ("dst_device", ctypes.c_int),
        *((name, ctypes.c_size_t) for name in ("width", "height", "depth")),
    )


class Two:
    """Memory and a stream of device 0, memory of device 1, filled differently."""

    def __init__(self, **how):
        host.configure(**{"devices": 2, **how})
        self.a, self.s = malloc(SIZE), stream()
        ok(cuda.cudaSetDevice(1))
        self.b = malloc(SIZE)
        ok(cuda.cudaSetDevice(0))
        view(self.a, SIZE)[:] = range(SIZE)
        view(self.b, SIZE)[:] = 0xEE

    def copy(self, target_device=1, source_device=0, size=SIZE):
        return cuda.cudaMemcpyPeerAsync(self.b, target_device, self.a, source_device, size, self.s)

    def rows(self, **how):
        fields = {
            "src_ptr": self.a,
            "src_pitch": 32,
            "src_device": 0,
            "dst_ptr": self.b,
            "dst_pitch": 16,
            "dst_device": 1,
        }
        rows = Rows(**{**fields, "width": 8, "height": 4, "depth": 1, **how})
        return cuda.cudaMemcpy3DPeerAsync(ctypes.addressof(rows), self.s)

    def landed(self):
        ok(cuda.cudaStreamSynchronize(self.s))
        return view(self.b, SIZE).tolist()


def can_reach(device, peer):
    can = ctypes.c_int(-1)
    ok(cuda.cudaDeviceCanAccessPeer(ctypes.addressof(can), device, peer))
    return can.value


def test_access_is_for_one_direction_and_as_asked_for():
    host.configure(devices=3, peers=[(0, 1), (2, 0)])
    assert [can_reach(a, b) for a in range(3) for b in range(3)] == [0, 1, 0, 0, 0, 0, 1, 0, 0]
    ok(cuda.cudaDeviceEnablePeerAccess(1, 0))
    assert cuda.cudaDeviceEnablePeerAccess(1, 0) == ALREADY
    assert cuda.cudaGetLastError() == ALREADY
    assert cuda.cudaDeviceEnablePeerAccess(2, 0) == BAD_DEVICE
    assert cuda.cudaDeviceEnablePeerAccess(0, 0) == BAD_DEVICE
    assert cuda.cudaDeviceEnablePeerAccess(1, 1) == INVALID_VALUE
    ok(cuda.cudaSetDevice(1))
    assert cuda.cudaDeviceEnablePeerAccess(0, 0) == BAD_DEVICE
    assert cuda.cudaDeviceDisablePeerAccess(0) == NOT_ENABLED
    ok(cuda.cudaSetDevice(0))
    ok(cuda.cudaDeviceDisablePeerAccess(1))
    ok(cuda.cudaDeviceEnablePeerAccess(1, 0))
    can = ctypes.c_int()
    assert cuda.cudaDeviceCanAccessPeer(ctypes.addressof(can), 0, 3) == BAD_DEVICE
    cuda.cudaGetLastError()


def test_all_reach_all_where_nothing_is_said():
    host.configure(devices=3)
    assert [can_reach(a, b) for a in range(3) for b in range(3)] == [0, 1, 1, 1, 0, 1, 1, 1, 0]


def test_pairs_that_are_none_are_refused():
    for pair in ((0, 0), (0, 2), (-1, 0)):
        with pytest.raises(ValueError, match="there are 2"):
            host.configure(devices=2, peers=[pair])
    host.configure(devices=2)
    with pytest.raises(ValueError, match="how is 'bend'"):
        host.break_peer(0, 1, "bend")
    with pytest.raises(ValueError, match="there are 2"):
        host.break_peer(0, 2, "drop")


@pytest.mark.parametrize("access", [False, True])
def test_a_peer_copy_brings_the_bytes_with_access_and_without(access):
    two = Two()
    if access:
        ok(cuda.cudaDeviceEnablePeerAccess(1, 0))
    ok(two.copy())
    assert two.landed() == list(range(SIZE))
    assert host.peer_copies(0, 1) == access
    assert host.log()[-1] == ("cudaMemcpyPeerAsync", two.s, SIZE)


def test_a_peer_copy_names_the_devices_on_which_the_memory_is():
    two = Two()
    assert two.copy(0, 0) == two.copy(1, 1) == INVALID_VALUE
    assert two.copy(2, 0) == two.copy(1, -1) == BAD_DEVICE
    assert two.rows(src_device=1) == INVALID_VALUE
    ok(two.copy(size=0))
    cuda.cudaGetLastError()
    assert two.landed() == [0xEE] * SIZE


def test_a_peer_copy_on_the_legacy_stream_is_a_violation():
    two = Two()
    cuda.cudaMemcpyPeerAsync(two.b, 1, two.a, 0, SIZE, 0)
    cuda.cudaGetLastError()
    assert violations() == ["cudaMemcpyPeerAsync: legacy stream 0"]


def test_rows_between_devices():
    two = Two()
    ok(two.rows())
    wanted = [0xEE] * SIZE
    for row in range(4):
        wanted[16 * row : 16 * row + 8] = range(32 * row, 32 * row + 8)
    assert two.landed() == wanted
    assert two.rows(src_pitch=7) == INVALID_PITCH
    cuda.cudaGetLastError()


@pytest.mark.parametrize("how", [{"src_array": 1}, {"dst_x": 1}, {"depth": 2}, {"depth": 0}], ids=str)
def test_what_else_the_call_for_rows_can_do_is_a_violation(how):
    two = Two()
    assert two.rows(**how) == INVALID_VALUE
    cuda.cudaGetLastError()
    assert "only rectangles" in violations()[0]


def test_rows_by_the_call_without_devices_need_access():
    two = Two()
    ok(cuda.cudaMemcpy2DAsync(two.b, 16, two.a, 32, 8, 4, 4, two.s))
    two.landed()
    assert "cudaMemcpy3DPeerAsync is for that" in violations()[0]
    two = Two()
    ok(cuda.cudaDeviceEnablePeerAccess(1, 0))
    ok(cuda.cudaMemcpy2DAsync(two.b, 16, two.a, 32, 8, 4, 4, two.s))
    two.landed()


@pytest.mark.parametrize("how", ["drop", "corrupt"])
def test_a_broken_way_is_broken_for_the_copies_that_were_named(how):
    two = Two()
    ok(cuda.cudaDeviceEnablePeerAccess(1, 0))
    host.break_peer(0, 1, how, 2, 3)
    broken = []
    for n in range(4):
        view(two.b, SIZE)[:] = 0xEE
        if n % 2:
            copy(two.b, two.a, SIZE, two.s)  # whatever call takes it there
        else:
            ok(two.copy())
        found = two.landed()
        broken.append(sum(a != b for a, b in zip(found, range(SIZE), strict=True)))
    assert broken == [0, *[SIZE - 1 if how == "drop" else 1] * 2, 0]


def test_without_access_no_way_is_broken():
    two = Two()
    host.break_peer(0, 1, "drop")
    ok(two.copy())
    assert two.landed() == list(range(SIZE))


@pytest.mark.parametrize("schedule", [3, None])
def test_a_copy_that_hangs_never_ends_and_holds_up_no_others(schedule):
    two = Two(seed=schedule)
    ok(cuda.cudaDeviceEnablePeerAccess(1, 0))
    host.break_peer(0, 1, "hang")
    ok(two.copy())
    other, p = stream(), malloc(64)
    ok(cuda.cudaMemsetAsync(p, 3, 64, other))
    ok(cuda.cudaStreamSynchronize(other))
    assert (view(p, 64) == 3).all()
    assert [cuda.cudaStreamQuery(two.s) for _ in range(20)] == [NOT_READY] * 20
    assert host.pending() == 1


def test_each_configuration_has_a_number():
    before = host.configuration()
    host.configure()
    assert host.configuration() > before


class Batch:
    """Entries (target, source, bytes) for one call."""

    def __init__(self, *entries, order=1, first=0):
        targets, sources, sizes = zip(*entries, strict=True)
        words = ctypes.c_size_t * len(entries)
        self.arrays = words(*targets), words(*sources), words(*sizes)
        self.attributes, self.first = (ctypes.c_int * 8)(order), ctypes.c_size_t(first)

    def queue(self, stream, kinds=1):
        arrays = map(ctypes.addressof, self.arrays)
        rest = ctypes.addressof(self.attributes), ctypes.addressof(self.first), kinds, stream
        return cuda.cudaMemcpyBatchAsync(*arrays, len(self.arrays[0]), *rest)


def parts(two, n=4):
    """Of a's bytes, in n entries."""
    size = SIZE // n
    return [(two.b + i * size, two.a + i * size, size) for i in range(n)]


@pytest.mark.parametrize("access", [False, True])
def test_a_batch_brings_the_bytes_of_all_its_entries_in_any_order(access):
    orders = set()
    for seed in range(8):
        two = Two(seed=seed)
        if access:
            ok(cuda.cudaDeviceEnablePeerAccess(1, 0))
        ok(Batch(*((target, source, size - i) for i, (target, source, size) in enumerate(parts(two)))).queue(two.s))
        wanted = list(range(SIZE))
        for i in range(4):
            wanted[(i + 1) * SIZE // 4 - i : (i + 1) * SIZE // 4] = [0xEE] * i
        assert two.landed() == wanted
        assert host.peer_copies(0, 1) == 4 * access
        orders.add(tuple(size for _, _, size in host.log()))
    assert len(orders) > 1


def test_a_batch_with_a_wrong_entry_is_refused_whole():
    for wrong in ((0, 16, 8), (16, 0, 8), (16, 16, 0)):
        two = Two()
        target, source, size = wrong
        entry = (two.b + target if target else 0, two.a + source if source else 0, size)
        assert Batch(*parts(two), entry).queue(two.s) == INVALID_VALUE
        cuda.cudaGetLastError()
        assert two.landed() == [0xEE] * SIZE
    two, plain = Two(), (ctypes.c_char * SIZE)()
    assert Batch(*parts(two), (ctypes.addressof(plain), two.a, 8)).queue(two.s) == INVALID_VALUE
    assert Batch(*parts(two)).queue(two.s, kinds=0) == INVALID_VALUE
    assert Batch(*parts(two), first=1).queue(two.s) == INVALID_VALUE
    cuda.cudaGetLastError()
    assert two.landed() == [0xEE] * SIZE


def test_a_batch_whose_entries_meet_is_a_violation():
    two = Two()
    ok(Batch((two.b, two.a, 16), (two.b + 15, two.a + 32, 8)).queue(two.s))
    assert "is another entry's too" in violations()[0]
    two = Two()
    ok(Batch((two.b, two.a, 16), (two.a + 15, two.a + 32, 8)).queue(two.s))
    assert "is another entry's too" in violations()[0]
    two = Two()
    ok(Batch((two.b, two.a, 16), (two.b + 16, two.a, 16)).queue(two.s))  # both read the same
    assert violations() == []


def test_a_batch_on_the_legacy_stream_or_that_reads_its_sources_at_once_is_a_violation():
    two = Two()
    assert Batch(*parts(two)).queue(0) == INVALID_VALUE
    assert violations() == ["cudaMemcpyBatchAsync: legacy stream 0"]
    two = Two()
    assert Batch(*parts(two), order=2).queue(two.s) == INVALID_VALUE
    assert "in the stream's order" in violations()[0]
    cuda.cudaGetLastError()


def test_a_batch_in_a_capture_is_refused_and_the_capture_goes_on():
    two = Two()
    ok(cuda.cudaStreamBeginCapture(two.s, 2))
    assert Batch(*parts(two)).queue(two.s) == CAPTURE_UNSUPPORTED
    cuda.cudaGetLastError()
    graph = ctypes.c_size_t()
    ok(cuda.cudaStreamEndCapture(two.s, ctypes.addressof(graph)))
    assert two.landed() == [0xEE] * SIZE
