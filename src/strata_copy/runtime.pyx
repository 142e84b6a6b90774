"""The open runtime's own calls on integers: memory, streams and events for examples, tests and benchmarks.

Every function is the CUDA call of its name and raises CudaError where that fails. Addresses and handles are ints, sizes bytes. The
GIL is released around each call. Nothing of the copy path goes through here.
"""

import ctypes
from contextlib import contextmanager

import numpy as np

from libc.stdlib cimport free as c_free, malloc as c_malloc

from strata_copy.atomics cimport load_i32
from strata_copy.copier cimport the_tables
from strata_copy.cudart cimport (
    STRATA_DEVICE_PROPERTIES_BYTES, cudaErrorNotReady, cudaEventDefault, cudaEventDisableTiming, cudaEvent_t, cudaGraph_t,
    cudaHostAllocMapped, cudaHostAllocPortable, cudaHostRegisterMapped, cudaHostRegisterPortable, cudaMemcpyDefault,
    cudaPointerAttributes, cudaStreamCaptureMode, cudaStreamCaptureStatus, cudaStreamNonBlocking, cudaStream_t, require_runtime, rt,
)
from strata_copy.lanes cimport CLOSED

from strata_copy.cudart import RuntimeUnavailable, describe, function, open_runtime  # no-cython-lint: they belong here for users


class CudaError(RuntimeError):
    """A CUDA call failed: `code`, `name` and `call` say which."""

    def __init__(self, int code, str name, str call):
        super().__init__(f"{call}: {name} ({code})")
        self.code, self.name, self.call = code, name, call

    def __reduce__(self):
        return type(self), (self.code, self.name, self.call)


cdef int _check(int code, str call) except -1:
    if code == 0:
        return 0
    name = rt.cudaGetErrorName(code).decode()
    raise CudaError(code, name, call)


def open(kind=None, **host_options):
    """Opens the runtime as strata_copy.cudart.open_runtime does, and returns its kind.

    host_options go to strata_copy.host_runtime.configure, which starts the host runtime anew: for kind "host" only, and not while a
    copier is open. Without options what is open stays as it is.
    """
    opened = open_runtime(kind)
    if host_options:
        if opened != "host":
            raise ValueError(f"{sorted(host_options)} belong to the host runtime; {opened} is open")
        if load_i32(&the_tables().state) != CLOSED:
            raise RuntimeError("a copier is open: close it before the host runtime starts anew")
        from strata_copy import host_runtime
        host_runtime.configure(**host_options)
    return opened


def device_count():
    cdef int n = 0
    require_runtime()
    _check(rt.cudaGetDeviceCount(&n), "cudaGetDeviceCount")
    return n


def device_name(int device):
    cdef char *properties = <char *>c_malloc(STRATA_DEVICE_PROPERTIES_BYTES)
    if properties == NULL:
        raise MemoryError
    try:
        require_runtime()
        _check(rt.device_properties(properties, device), "cudaGetDeviceProperties")
        return properties.decode(errors="replace")
    finally:
        c_free(properties)


def pci_bus_id(int device):
    """Domain, bus, device and function of a device, as in "0000:65:00.0"."""
    cdef char text[32]
    require_runtime()
    _check(rt.cudaDeviceGetPCIBusId(text, sizeof(text), device), "cudaDeviceGetPCIBusId")
    return text.decode()


def get_device():
    cdef int device = -1
    require_runtime()
    _check(rt.cudaGetDevice(&device), "cudaGetDevice")
    return device


def set_device(int device):
    require_runtime()
    cdef int code
    with nogil:
        code = rt.cudaSetDevice(device)
    _check(code, "cudaSetDevice")


@contextmanager
def on_device(int device):
    """Meanwhile another device is the thread's current one. The one before is set again, which makes a context on it."""
    before = get_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def device_synchronize():
    require_runtime()
    cdef int code
    with nogil:
        code = rt.cudaDeviceSynchronize()
    _check(code, "cudaDeviceSynchronize")


def memory_info():
    """(free, total) bytes of the current device."""
    cdef size_t free_bytes = 0, total = 0
    require_runtime()
    _check(rt.cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo")
    return free_bytes, total


def malloc(size_t bytes):
    cdef void *p = NULL
    cdef int code
    require_runtime()
    with nogil:
        code = rt.cudaMalloc(&p, bytes)
    _check(code, "cudaMalloc")
    return <size_t>p


def free(size_t p):
    cdef int code
    with nogil:
        code = rt.cudaFree(<void *>p)
    _check(code, "cudaFree")


def host_alloc(size_t bytes):
    """Pinned memory, portable and mapped."""
    cdef void *p = NULL
    cdef int code
    require_runtime()
    with nogil:
        code = rt.cudaHostAlloc(&p, bytes, cudaHostAllocPortable | cudaHostAllocMapped)
    _check(code, "cudaHostAlloc")
    return <size_t>p


def host_free(size_t p):
    cdef int code
    with nogil:
        code = rt.cudaFreeHost(<void *>p)
    _check(code, "cudaFreeHost")


def host_register(size_t p, size_t bytes):
    cdef int code
    require_runtime()
    with nogil:
        code = rt.cudaHostRegister(<void *>p, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped)
    _check(code, "cudaHostRegister")


def host_unregister(size_t p):
    cdef int code
    with nogil:
        code = rt.cudaHostUnregister(<void *>p)
    _check(code, "cudaHostUnregister")


def pointer_range(size_t p):
    """(first byte, bytes) of the allocation or registration that holds an address."""
    cdef void *start = NULL
    cdef size_t bytes = 0
    require_runtime()
    _check(rt.pointer_range(<void *>p, &start, &bytes), "cuPointerGetAttribute")
    return <size_t>start, bytes


def memory_type(size_t p):
    """(type, device) as cudaPointerGetAttributes says: type 0 unregistered, 1 host, 2 device, 3 managed."""
    cdef cudaPointerAttributes found
    require_runtime()
    _check(rt.cudaPointerGetAttributes(&found, <void *>p), "cudaPointerGetAttributes")
    return found.type, found.device


def view(size_t p, size_t bytes):
    """A uint8 array over memory that the CPU can read: pinned and pageable memory, and on the host runtime device memory too. Raises
    ValueError for bytes at address 0."""
    if p == 0 and bytes:
        raise ValueError(f"{bytes} bytes at address 0; the address of memory is needed")
    return np.ctypeslib.as_array((ctypes.c_uint8 * bytes).from_address(p)) if bytes else np.empty(0, np.uint8)


def memcpy(size_t target, size_t source, size_t bytes):
    cdef int code
    require_runtime()
    with nogil:
        code = rt.cudaMemcpy(<void *>target, <void *>source, bytes, cudaMemcpyDefault)
    _check(code, "cudaMemcpy")


def memcpy_async(size_t target, size_t source, size_t bytes, size_t stream):
    cdef int code
    require_runtime()
    with nogil:
        code = rt.cudaMemcpyAsync(<void *>target, <void *>source, bytes, cudaMemcpyDefault, <cudaStream_t>stream)
    _check(code, "cudaMemcpyAsync")


def memcpy_2d_async(size_t target, size_t target_pitch, size_t source, size_t source_pitch, size_t width, size_t rows, size_t stream):
    cdef int code
    require_runtime()
    with nogil:
        code = rt.cudaMemcpy2DAsync(<void *>target, target_pitch, <void *>source, source_pitch, width, rows, cudaMemcpyDefault,
                                    <cudaStream_t>stream)
    _check(code, "cudaMemcpy2DAsync")


def memset_async(size_t p, int value, size_t bytes, size_t stream):
    cdef int code
    require_runtime()
    with nogil:
        code = rt.cudaMemsetAsync(<void *>p, value, bytes, <cudaStream_t>stream)
    _check(code, "cudaMemsetAsync")


def stream_create():
    """A non-blocking stream of the current device."""
    cdef cudaStream_t stream = NULL
    require_runtime()
    _check(rt.cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags")
    return <size_t>stream


def stream_destroy(size_t stream):
    _check(rt.cudaStreamDestroy(<cudaStream_t>stream), "cudaStreamDestroy")


def stream_query(size_t stream):
    """True where all work of the stream is done."""
    cdef int code = rt.cudaStreamQuery(<cudaStream_t>stream)
    return False if code == cudaErrorNotReady else not _check(code, "cudaStreamQuery")


def stream_synchronize(size_t stream):
    cdef int code
    with nogil:
        code = rt.cudaStreamSynchronize(<cudaStream_t>stream)
    _check(code, "cudaStreamSynchronize")


def stream_wait_event(size_t stream, size_t event):
    _check(rt.cudaStreamWaitEvent(<cudaStream_t>stream, <cudaEvent_t>event, 0), "cudaStreamWaitEvent")


def stream_is_capturing(size_t stream):
    """0 where the stream is not capturing, 1 where it is, 2 where its capture was invalidated."""
    cdef cudaStreamCaptureStatus status = 0
    _check(rt.cudaStreamIsCapturing(<cudaStream_t>stream, &status), "cudaStreamIsCapturing")
    return <int>status


def stream_begin_capture(size_t stream, int mode=0):
    """mode: 0 global, 1 thread-local, 2 relaxed."""
    cdef int code
    with nogil:
        code = rt.cudaStreamBeginCapture(<cudaStream_t>stream, <cudaStreamCaptureMode>mode)
    _check(code, "cudaStreamBeginCapture")


def stream_end_capture(size_t stream):
    """Ends the capture, drops its graph and returns how many nodes it had. Raises CudaError where the capture was invalidated."""
    cdef cudaGraph_t graph = NULL
    cdef size_t nodes = 0
    cdef int code, counted, destroyed
    with nogil:
        code = rt.cudaStreamEndCapture(<cudaStream_t>stream, &graph)
    _check(code, "cudaStreamEndCapture")
    with nogil:
        counted = rt.cudaGraphGetNodes(graph, NULL, &nodes)
        destroyed = rt.cudaGraphDestroy(graph)
    _check(counted, "cudaGraphGetNodes")
    _check(destroyed, "cudaGraphDestroy")
    return nodes


def capture_mode(int mode):
    """Sets the thread's capture mode and returns the one before."""
    cdef cudaStreamCaptureMode value = <cudaStreamCaptureMode>mode
    require_runtime()
    _check(rt.cudaThreadExchangeStreamCaptureMode(&value), "cudaThreadExchangeStreamCaptureMode")
    return <int>value


def event_create(timing=False):
    cdef cudaEvent_t event = NULL
    require_runtime()
    _check(rt.cudaEventCreateWithFlags(&event, cudaEventDefault if timing else cudaEventDisableTiming), "cudaEventCreateWithFlags")
    return <size_t>event


def event_destroy(size_t event):
    _check(rt.cudaEventDestroy(<cudaEvent_t>event), "cudaEventDestroy")


def event_record(size_t event, size_t stream):
    _check(rt.cudaEventRecord(<cudaEvent_t>event, <cudaStream_t>stream), "cudaEventRecord")


def event_query(size_t event):
    """True where the event is complete."""
    cdef int code = rt.cudaEventQuery(<cudaEvent_t>event)
    return False if code == cudaErrorNotReady else not _check(code, "cudaEventQuery")


def event_synchronize(size_t event):
    cdef int code
    with nogil:
        code = rt.cudaEventSynchronize(<cudaEvent_t>event)
    _check(code, "cudaEventSynchronize")


def event_elapsed(size_t start, size_t end):
    """Milliseconds between two events that were made with timing."""
    cdef float ms = 0
    _check(rt.cudaEventElapsedTime(&ms, <cudaEvent_t>start, <cudaEvent_t>end), "cudaEventElapsedTime")
    return ms


def peek_last_error():
    require_runtime()
    return rt.cudaPeekAtLastError()


def get_last_error():
    """The thread's pending error, which is taken off."""
    require_runtime()
    return rt.cudaGetLastError()
