"""The host runtime called through its own table, so that nothing it judges stands in between: for the tests of it."""

import ctypes
import threading
from typing import ClassVar

import numpy as np
import pytest

from strata_copy import host_runtime as host

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


both_modes = pytest.mark.parametrize("schedule", [None, 0, 1, 2])
