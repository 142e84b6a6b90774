"""What the hardware gives: one long copy by one CUDA call, on memory of its own."""

from libc.stdint cimport int64_t, uintptr_t

from common.clock cimport now
from common.failure cimport check, noted
from strata_copy import runtime
from strata_copy.abi cimport Error
from strata_copy.cudart cimport cudaMemcpyDefault, cudaStream_t, rt

WAYS = ("d2d", "h2d", "d2h", "two_way")
H200 = {"d2d": 2124.0, "h2d": 55.4, "d2h": 55.5}     # GB/s, measured on one that nobody else used
SOUND = 0.92                # of these; below it something else uses the machine, and no share of a ceiling means anything


class Ceilings:
    """Measures the ways of WAYS in GB/s on the current device. `close` it.

    device_bytes: of the copy within the device. pinned_bytes: of one direction between it and pinned memory.
    """

    def __init__(self, device_bytes, pinned_bytes):
        self.device_bytes, self.pinned_bytes = device_bytes, pinned_bytes
        self.device = [runtime.malloc(max(device_bytes, pinned_bytes)) for _ in range(2)]
        self.pinned = [runtime.host_alloc(pinned_bytes) for _ in range(2)]
        self.streams = [runtime.stream_create() for _ in range(2)]
        self.found = dict.fromkeys(WAYS, 0.0)

    def measure(self, repetitions=5, warm_up=3):
        """The best of `repetitions` of each way, after `warm_up`: wall time with one final wait. `found` keeps the largest ever."""
        (a, b), (p, q), (s, t) = self.device, self.pinned, self.streams
        n = self.pinned_bytes
        ways = {
            "d2d": ((b, a, self.device_bytes, s),),
            "h2d": ((a, p, n, s),),
            "d2h": ((q, b, n, s),),
            "two_way": ((a, p, n, s), (q, b, n, t)),
        }
        found = {way: sum(copy[2] for copy in copies) / best(copies, repetitions, warm_up) for way, copies in ways.items()}
        self.found = {way: max(self.found[way], rate) for way, rate in found.items()}
        return found

    def close(self):
        for stream in self.streams:
            runtime.stream_destroy(stream)
        for address in self.device:
            runtime.free(address)
        for address in self.pinned:
            runtime.host_free(address)


def void_ways(device_name, found):
    """The ceilings that are not what they should be, as text. Only of an H200 it is known what that is."""
    expected = H200 if "H200" in device_name else {}
    return [f"{way} is {found[way]:.1f} GB/s, at least {SOUND} of {rate} is expected"
            for way, rate in expected.items() if found[way] < SOUND * rate]


cdef struct Copy:
    void *target
    void *source
    size_t bytes
    cudaStream_t stream


cdef int64_t best(copies, int repetitions, int warm_up) except -1:
    """ns of the fastest repetition of all copies at once."""
    cdef Copy items[2]
    cdef Error error
    cdef int64_t fastest = 0, ns = 0
    cdef int i, code = 0, n = len(copies)
    for i in range(n):
        items[i].target = <void *><uintptr_t>copies[i][0]
        items[i].source = <void *><uintptr_t>copies[i][1]
        items[i].bytes = copies[i][2]
        items[i].stream = <cudaStream_t><uintptr_t>copies[i][3]
    with nogil:
        for i in range(-warm_up, repetitions):
            code = once(items, n, &ns, &error)
            if code != 0:
                break
            if i == 0 or (i > 0 and ns < fastest):
                fastest = ns
    check(code, &error)
    return fastest


cdef int once(const Copy *items, int n, int64_t *ns, Error *error) noexcept nogil:
    cdef int i, code
    cdef int64_t start = now()
    for i in range(n):
        code = noted(rt.cudaMemcpyAsync(items[i].target, items[i].source, items[i].bytes, cudaMemcpyDefault, items[i].stream),
                     "cudaMemcpyAsync", error)
        if code != 0:
            return code
    for i in range(n):
        code = noted(rt.cudaStreamSynchronize(items[i].stream), "cudaStreamSynchronize", error)
        if code != 0:
            return code
    ns[0] = now() - start
    return 0
