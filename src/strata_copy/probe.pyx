"""What the hardware gives: long plain copies, one CUDA call each, on memory and streams of their own.

The method is nvbandwidth's (github.com/NVIDIA/nvbandwidth, README): large buffers, host memory on the NUMA node of its device, warm-ups
that do not count, several samples, source and target filled differently and compared behind them, copies of several links started
together. Two things differ: a sample is wall time from the first call to one final wait, for what is compared with it is that too, and
the best of 5 counts, with the median beside it. Both ways at once is the sum of both.
"""

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from strata_copy.cudart cimport cudaMemcpyDefault, cudaStream_t, rt
from strata_copy.lanes cimport now
from strata_copy.peers cimport peer_hangs

from strata_copy import links, runtime

REPETITIONS, WARM_UPS = 5, 3
PIECES, PIECE = 16, 64 << 10        # of a target that are looked at, evenly over it


class Rate(NamedTuple):
    """GB/s of a way: bytes of all its copies in 1e9, by the time until the last has ended."""

    best: float
    median: float


class Ceilings:
    """Measures ways on devices. `close` it, or use `with`.

    A way is a name and the devices that it is on, which copy at the same time:
        "d2d": within each device. "h2d", "d2h": from pinned memory and to it. "two_way": both at once, on each device.
        "peer": from the first of two devices to the second. "peer_two_way": both ways between them.
    device_bytes: of a copy within a device or between two. pinned_bytes: of one between a device and pinned memory. Memory is taken when
    a way first needs it. `found` keeps the largest rate of each (way, devices) ever.

    Raises CudaError where a call fails (memory, above all), ValueError for another way, and for devices that it cannot be on.
    """

    def __init__(self, device_bytes, pinned_bytes):
        self.device_bytes, self.pinned_bytes = device_bytes, pinned_bytes
        self.found = {}
        self._memory, self._streams = {}, {}

    def measure(self, way, devices=(0,), repetitions=REPETITIONS, warm_ups=WARM_UPS):
        """The Rate of a way. Blocks; the GIL is released."""
        copies = self._copies(way, devices)
        for target, source, n, _ in copies:
            self._fill(target, 0x55, n)
            self._fill(source, 0xAA, n)
        times = timed(copies, repetitions, warm_ups)
        for target, _, n, _ in copies:
            self._check(way, devices, target, n)
        total = sum(n for _, _, n, _ in copies)
        rate = Rate(total / min(times), total / float(np.median(times)))
        self.found[way, tuple(devices)] = max(rate.best, self.found.get((way, tuple(devices)), 0.0))
        return rate

    @contextmanager
    def running(self, way, devices=(0,), times=4):
        """While the block runs, so do the copies of a way."""
        copies = self._copies(way, devices) * times
        for target, source, n, stream in copies:
            runtime.memcpy_async(target.address, source.address, n, stream)
        try:
            yield
        finally:
            for stream in {copy[3] for copy in copies}:
                runtime.stream_synchronize(stream)

    def close(self):
        for stream in self._streams.values():
            runtime.stream_destroy(stream)
        for memory in self._memory.values():
            if not peer_hangs(-1 if memory.pinned else memory.device):      # it would be waited for
                (runtime.host_free if memory.pinned else runtime.free)(memory.address)
        self._streams, self._memory = {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _copies(self, way, devices):
        """(target, source, bytes, stream) of each."""
        if way not in ("d2d", "h2d", "d2h", "two_way", "peer", "peer_two_way"):
            raise ValueError(f"way is {way!r}; may be d2d, h2d, d2h, two_way, peer, peer_two_way")
        devices = _seen(way, devices)
        if way == "peer":
            return [self._peer(*devices)]
        if way == "peer_two_way":
            return [self._peer(*devices), self._peer(*reversed(devices))]
        found = []
        for d in devices:
            if way == "d2d":
                found.append((self._on(d, 1), self._on(d, 0), self.device_bytes, self._stream(d, 0)))
            if way in ("h2d", "two_way"):
                found.append((self._on(d, 0), self._pinned(d, 0), self.pinned_bytes, self._stream(d, 0)))
            if way in ("d2h", "two_way"):
                found.append((self._pinned(d, 1), self._on(d, 1), self.pinned_bytes, self._stream(d, 1)))
        return found

    def _peer(self, source, target):
        """On a stream of the source's device, which is the shorter way where the driver stages the copy."""
        return self._on(target, 1), self._on(source, 0), self.device_bytes, self._stream(source, 0)

    def _on(self, device, k):
        key = "device", device, k
        if key not in self._memory:
            with runtime.on_device(device):
                n = max(self.device_bytes, self.pinned_bytes)
                self._memory[key] = Memory(runtime.malloc(n), False, device)
        return self._memory[key]

    def _pinned(self, device, k):
        key = "pinned", device, k
        if key not in self._memory:
            with runtime.on_device(device), links.near(runtime.pci_bus_id(device)):
                self._memory[key] = Memory(runtime.host_alloc(self.pinned_bytes), True, device)
        return self._memory[key]

    def _stream(self, device, k):
        if (device, k) not in self._streams:
            with runtime.on_device(device):
                self._streams[device, k] = runtime.stream_create()
        return self._streams[device, k]

    def _fill(self, memory, value, n):
        stream = self._stream(memory.device, 0)
        runtime.memset_async(memory.address, value, n, stream)
        runtime.stream_synchronize(stream)

    def _check(self, way, devices, memory, n):
        """RuntimeError where pieces of a target are not what was copied there: a figure of such a copy says nothing."""
        piece = min(PIECE, n)
        found = np.empty(piece, np.uint8)
        for at in np.linspace(0, n - piece, PIECES, dtype=np.int64):
            runtime.memcpy(found.ctypes.data, memory.address + int(at), piece)
            if not (found == 0xAA).all():
                raise RuntimeError(f"{way} on {', '.join(map(str, devices))}: wrong bytes arrived, at {int(at)} of {n}")


def _seen(way, devices):
    """The devices of a way, as a tuple."""
    devices, there = tuple(devices), runtime.device_count()
    of_two = way in ("peer", "peer_two_way")
    if (not devices or of_two and len(devices) != 2 or len(set(devices)) < len(devices)
            or not all(device in range(there) for device in devices)):
        raise ValueError(f"{way} on devices {devices}; {'two different ones' if of_two else 'one or more, each once,'} are needed of "
                         f"those that this process sees: 0 to {there - 1}")
    return devices


class Memory(NamedTuple):
    """A buffer of the probe's."""

    address: int
    pinned: bool
    device: int


cdef struct Copy:
    void *target
    void *source
    size_t bytes
    cudaStream_t stream


def timed(copies, int repetitions, int warm_ups):
    """ns of each repetition of all copies at once: (target, source, bytes, stream), each on a stream of its own."""
    cdef int n = len(copies), i, code = 0
    cdef const char *call = ""
    cdef Copy *items = <Copy *>malloc(n * sizeof(Copy))
    cdef int64_t *ns = <int64_t *>malloc((warm_ups + repetitions) * sizeof(int64_t))
    try:
        if items == NULL or ns == NULL:
            raise MemoryError
        for i in range(n):
            target, source, bytes, stream = copies[i]
            items[i].target, items[i].source = <void *><size_t>target.address, <void *><size_t>source.address
            items[i].bytes, items[i].stream = bytes, <cudaStream_t><size_t>stream
        with nogil:
            for i in range(warm_ups + repetitions):
                code = once(items, n, &ns[i], &call)
                if code != 0:
                    break
        if code != 0:
            raise runtime.CudaError(code, rt.cudaGetErrorName(code).decode(), call.decode())
        return [ns[i] for i in range(warm_ups, warm_ups + repetitions)]
    finally:
        free(items)
        free(ns)


cdef int once(const Copy *items, int n, int64_t *ns, const char **call) noexcept nogil:
    cdef int i, code
    cdef int64_t start = now()
    call[0] = "cudaMemcpyAsync"
    for i in range(n):
        code = rt.cudaMemcpyAsync(items[i].target, items[i].source, items[i].bytes, cudaMemcpyDefault, items[i].stream)
        if code != 0:
            return code
    call[0] = "cudaStreamSynchronize"
    for i in range(n):
        code = rt.cudaStreamSynchronize(items[i].stream)
        if code != 0:
            return code
    ns[0] = now() - start
    return 0
