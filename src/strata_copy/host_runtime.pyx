"""The CUDA runtime over host memory, for tests and demos without a GPU: how it is set up, and what it has seen.

It does what CUDA allows at its latest: no byte moves inside the call that asks for it, and a copy reads its source when it is
executed. It checks what CUDA leaves undefined, finds accesses that nothing orders, and keeps what it finds as violations. New and
freed memory holds a pattern in its first 64 KiB; a use after free is found for the latest 1024 ranges.

There is one runtime in a process. It begins as `configure()` makes it, and belongs to all threads.
"""

import atexit

from libc.stdint cimport uint8_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "host_runtime.h" nogil:
    const strata_cudart *host_runtime_table()


cdef extern from "control.hpp" namespace "host_runtime" nogil:
    cdef cppclass Config:
        int devices
        optional[uint64_t] seed
        size_t memory
        size_t pinned
        cbool races
        vector[uint8_t] peers

    cdef enum class PeerFault:
        none
        drop
        corrupt
        delay
        hang

    cdef cppclass Live:
        size_t streams, events, registrations, allocations, host_allocations

    cdef cppclass Registered:
        size_t now, most

    cdef cppclass ExecutedCopy:
        const char *function
        uint64_t stream
        size_t bytes

    cdef cppclass OrderCall:
        const char *function
        uint64_t stream
        uint64_t event

    void c_configure "host_runtime::configure"(const Config &) except +
    size_t function_count()
    const char *function_name(size_t)
    uint64_t function_calls(size_t)
    void c_keep_paths "host_runtime::keep_paths"() except +
    vector[uint64_t] function_paths(size_t) except +
    cbool c_fail "host_runtime::fail"(const string &, uint64_t, int, cbool) except +
    cbool c_skip "host_runtime::skip"(const string &, uint64_t) except +
    void c_delay "host_runtime::delay"(uint64_t)
    void c_corrupt "host_runtime::corrupt"(uint64_t)
    void c_break_peer "host_runtime::break_peer"(int, int, PeerFault, uint64_t, uint64_t)
    uint64_t c_peer_copies "host_runtime::peer_copies"(int, int)
    uint64_t c_configuration "host_runtime::configuration"()
    uint64_t c_clear_faults "host_runtime::clear_faults"()
    void host_access(const void *, size_t, cbool)
    Live c_live "host_runtime::live"()
    Registered c_registered "host_runtime::registered"()
    vector[int] c_contexts "host_runtime::contexts"() except +
    vector[ExecutedCopy] copy_log() except +
    vector[OrderCall] order_log() except +
    vector[string] c_violations "host_runtime::violations"() except +
    size_t c_pending "host_runtime::pending"()
    size_t c_fullest "host_runtime::fullest"()
    cbool scheduled()
    size_t c_step "host_runtime::step"(size_t) except +
    void drain()


cdef int _devices = 1


cdef const strata_cudart *table() noexcept nogil:
    return host_runtime_table()


def configure(devices=1, seed=None, memory=None, pinned=None, races=None, peers=None):
    """Drops all streams, events, memory, faults and records, and starts anew.

    Operations that are running end first; threads that wait inside a call return with cudaErrorCudartUnloading.

    devices: how many.
    seed: None gives every stream a worker thread. An int means scheduled mode: nothing runs until a call has to wait, which then
        executes ready operations of any stream in an order that the seed decides.
    memory: bytes of each device; None means 64 GiB. What is not touched costs nothing.
    pinned: bytes that may be allocated as pinned memory or registered, together; None means no limit.
    races: whether every two accesses to one byte that nothing orders, one of them a write, are a violation, in whatever order they
        were executed; None means in scheduled mode only.
    peers: which device can reach which other one's memory: pairs (device, peer); None means all can.
    """
    cdef Config config
    if devices < 1:
        raise ValueError(f"devices is {devices}, at least 1 is needed")
    config.devices = devices
    if seed is not None:
        config.seed = <uint64_t>seed
    if memory is not None:
        config.memory = memory
    if pinned is not None:
        config.pinned = pinned
    config.races = seed is not None if races is None else races
    if peers is not None:
        config.peers.resize(devices * devices, 0)
        for device, peer in peers:
            config.peers[_way(device, peer, devices)] = 1
    global _devices
    with nogil:
        c_configure(config)
    _devices = devices


def calls():
    """How often each function of the table was called since `configure`: a dict from name to count."""
    return {function_name(i).decode(): function_calls(i) for i in range(function_count())}


def keep_paths():
    """From now on, until `configure`, it is kept where each call comes from, for `paths`."""
    c_keep_paths()


def paths():
    """Where the calls since `keep_paths` came from: a dict from a function's name to a number for each call, which stands for the way
    down to it through native code. The calls of one loop have the same number."""
    return {function_name(i).decode(): list(function_paths(i)) for i in range(function_count())}


def log():
    """The latest 65536 copies in the order in which they were executed: tuples of function, stream (0 for cudaMemcpy), bytes."""
    return [(copy.function.decode(), copy.stream, copy.bytes) for copy in copy_log()]


def orders():
    """The latest 65536 calls that order something, as they came: tuples of function (cudaEventRecord, cudaStreamWaitEvent, or
    cudaEventQuery that found the event complete), stream (0 for a query), event."""
    return [(call.function.decode(), call.stream, call.event) for call in order_log()]


def contexts():
    """The devices on which CUDA would have made a context since `configure`: a list. cudaSetDevice makes one, and each call but a
    few that only ask makes it on the thread's current device, which is device 0 in a thread that has set none."""
    return list(c_contexts())


def live():
    """What has been made and not yet destroyed: counts of streams, events, registrations, allocations, host_allocations."""
    cdef Live counts = c_live()
    return {
        "streams": counts.streams,
        "events": counts.events,
        "registrations": counts.registrations,
        "allocations": counts.allocations,
        "host_allocations": counts.host_allocations,
    }


def registered():
    """Bytes registered by callers: a tuple of how many are now, and the most that were at any time since `configure`."""
    cdef Registered bytes = c_registered()
    return bytes.now, bytes.most


def fail(str function, nth, int code, bint forever=False):
    """The nth call of `function` from now (1 is the next) returns `code` and does nothing else; with `forever` all later ones do too.

    A code that ends a context (700, 719 and their like) does so here: nothing is executed any more and calls return that code
    until `configure`.
    """
    if nth < 1:
        raise ValueError(f"nth is {nth}, but the next call is number 1")
    if code == 0:
        raise ValueError("code 0 is success")
    if not c_fail(function.encode(), nth, code, forever):
        raise ValueError(f"no function of the table is called {function!r}")


def skip(str function, nth):
    """The nth call of `function` from now (1 is the next) does nothing and returns success.

    Only for functions that give nothing back but their code: copies, waits, records, queries, synchronizations, frees.
    """
    if nth < 1:
        raise ValueError(f"nth is {nth}, but the next call is number 1")
    if not c_skip(function.encode(), nth):
        raise ValueError(f"{function!r} is no function of the table, or gives its caller something back")


def delay(nth):
    """The nth copy queued from now (1 is the next) is executed as late as its stream and those that wait for it allow.

    In scheduled mode that is when nothing else can be; a worker thread sleeps 50 ms before it.
    """
    if nth < 1:
        raise ValueError(f"nth is {nth}, but the next copy is number 1")
    c_delay(nth)


def corrupt(nth):
    """The nth copy executed from now (1 is the next) gets one wrong byte in its target."""
    if nth < 1:
        raise ValueError(f"nth is {nth}, but the next copy is number 1")
    c_corrupt(nth)


def break_peer(source, target, str how, first=1, last=None):
    """Copies that go from device `source` to device `target` without host memory, as they do once access was enabled: the first-th to
    the last-th from now on (None: all of them). how: "drop" (nothing lands), "corrupt" (one wrong byte), "delay" (as late as possible),
    "hang" (it never ends, nor does what is behind it)."""
    cdef dict faults = {"drop": PeerFault.drop, "corrupt": PeerFault.corrupt, "delay": PeerFault.delay, "hang": PeerFault.hang}
    if how not in faults:
        raise ValueError(f"how is {how!r}; one of {list(faults)}")
    _way(source, target, _devices)
    c_break_peer(source, target, <PeerFault><int>faults[how], first, (1 << 62) if last is None else last)


def peer_copies(source, target):
    """How many copies have gone from device to device without host memory since `configure`."""
    _way(source, target, _devices)
    return c_peer_copies(source, target)


def configuration():
    """A number that is another one after each `configure`."""
    return c_configuration()


def _way(device, peer, devices):
    if not (0 <= device < devices and 0 <= peer < devices and device != peer):
        raise ValueError(f"from device {device} to device {peer}: no pair of two devices; there are {devices}, numbered from 0")
    return device * devices + peer


def clear_faults():
    """Disarms `fail`, `skip`, `delay` and `corrupt` and returns how many faults have fired since the last `clear_faults` or `configure`.

    A context that a fault has ended stays so.
    """
    return c_clear_faults()


def host_read(size_t address, size_t bytes):
    """Declares that this thread's own code reads memory now. A write that nothing orders before it is a violation."""
    with nogil:
        host_access(<const void *>address, bytes, False)


def host_write(size_t address, size_t bytes):
    """Declares that this thread's own code writes memory now. An access that nothing orders before it is a violation."""
    with nogil:
        host_access(<const void *>address, bytes, True)


def publish(size_t word):
    """Declares that this thread is about to tell others something, by a store, a lock, a queue, by ending: whoever observes the same
    number comes behind all that this thread knows now. word: an address, or any other number that both name."""
    with nogil:
        host_runtime_table().published(<const void *>word)


def observe(size_t word):
    """Declares that this thread has seen what another published under this number, or what a device wrote to this address (a copy or
    fill of at most 64 bytes that begins there)."""
    with nogil:
        host_runtime_table().observed(<const void *>word)


def violations():
    """The contract violations since `configure`, the first 1000: what a real runtime would not report, or not reliably."""
    return [text.decode() for text in c_violations()]


def pending():
    """How many operations are queued and not executed, over all streams."""
    return c_pending()


def fullest():
    """The most operations that one stream has held at a time since `configure`. One that holds 1,020 holds the thread that adds to it."""
    return c_fullest()


def step(n=1):
    """Scheduled mode: executes up to n ready operations, chosen at random, and returns how many."""
    cdef size_t wanted = n, done
    if not scheduled():
        raise RuntimeError("step needs scheduled mode: configure(seed=...)")
    with nogil:
        done = c_step(wanted)
    return done


@atexit.register
def _drain():
    """Worker threads do not survive the interpreter's memory: they finish first, unless something holds them up for a second."""
    with nogil:
        drain()
