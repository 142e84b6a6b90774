"""The CUDA runtime: loading, errors, and the guard. The declarations and what they mean are in cudart.pxd."""

import importlib.util
import os
import threading
from pathlib import Path

from libc.string cimport strncpy

from strata_copy.abi cimport OK, POISONED, REASON_CUDA, REFUSED
from strata_copy.host_runtime cimport table

cdef const strata_cudart *rt = NULL
cdef strata_cudart loaded

_open_lock = threading.Lock()
_opened = None          # "cuda" or "host"
_library = None         # where the table's functions come from
_missing = 0
_version = 0

RUNTIME_VARIABLE = "STRATA_COPY_RUNTIME"
WITHOUT_A_GPU = f"; without a GPU: {RUNTIME_VARIABLE}=host, or runtime.open('host')"


class RuntimeUnavailable(RuntimeError):
    """The CUDA runtime that was asked for is not to be had. The text says what was tried and what each answered."""


cpdef str open_runtime(object kind=None):
    """Fills the table, once in a process, and returns which runtime it is: "cuda" or "host".

    kind: "cuda", "host", or None for what STRATA_COPY_RUNTIME says and "cuda" where it is not set. There is no fallback from one
    to the other.

    Raises ValueError for another kind or another value of the variable, RuntimeUnavailable where the runtime cannot be had, and
    RuntimeError where the other kind is open already.
    """
    global rt, _opened, _library, _pid
    if kind is None:
        kind = _kind_from_environment() or "cuda"
    if kind not in ("cuda", "host"):
        raise ValueError(f"a runtime is 'cuda' or 'host', not {kind!r}")
    with _open_lock:
        if _opened is not None:
            if _opened != kind:
                raise RuntimeError(f"the {_opened} runtime is open in this process; {kind} was asked for. Start a new process.")
            return _opened
        if kind == "host":
            rt = table()
            _library = "host runtime"
        else:
            _library = _load_cuda()
            rt = &loaded
        _opened, _pid = kind, os.getpid()
        return kind


def describe():
    """What is open: a dict of kind, library, runtime and driver version, and the count of functions that the library lacks."""
    require_runtime()
    cdef int runtime_version = 0, driver_version = 0
    rt.cudaRuntimeGetVersion(&runtime_version)
    rt.cudaDriverGetVersion(&driver_version)
    return {
        "kind": _opened,
        "library": _library,
        "runtime": _dotted(runtime_version),
        "driver": _dotted(driver_version) if driver_version else None,
        "missing": _missing,
    }


def function(str name):
    """The address of a function of CUDA's runtime in the library that is open, as an int: an engine's own code that calls through it
    runs on the host runtime too.

    Raises KeyError for a name that this library does not use.
    """
    require_runtime()
    cdef void *found = strata_cudart_function(rt, name.encode())
    if found == NULL:
        raise KeyError(f"{name} is no function of CUDA's runtime that this library uses")
    return <size_t>found


cdef int require_runtime() except -1:
    if rt == NULL:
        open_runtime()
    if _pid != os.getpid():
        raise RuntimeUnavailable(f"the runtime was opened in process {_pid}; process {os.getpid()} is a fork of it and cannot use CUDA. "
                                 "Start a new process instead.")
    return 0


cdef int stand_on(int device, int status_of_failure, Error *error) noexcept nogil:
    cdef Guard guard
    cdef int code = rt.cudaSetDevice(device)
    if code == cudaSuccess:
        return OK
    guard.pending = cudaSuccess
    return cuda_failed(status_of_failure, code, "cudaSetDevice", device, &guard, error)


cdef int guard_enter(Guard *guard, Error *error) noexcept nogil:
    """Notes the thread's pending error and makes its capture mode Relaxed: in another mode a query, synchronize or allocation of
    ours would end a capture of any other thread (CUDA Runtime API, cudaThreadExchangeStreamCaptureMode)."""
    cdef int code
    guard.pending = rt.cudaPeekAtLastError()
    guard.mode = cudaStreamCaptureModeRelaxed
    code = rt.cudaThreadExchangeStreamCaptureMode(<cudaStreamCaptureMode *>&guard.mode)
    if code != cudaSuccess:
        guard.mode = cudaStreamCaptureModeRelaxed
        return cuda_failed(REFUSED, code, "cudaThreadExchangeStreamCaptureMode", -1, guard, error)
    return OK


cdef int guard_leave(Guard *guard, int status, Error *error) noexcept nogil:
    """Puts the capture mode back and returns `status`. Where that fails the error says so (`restored` is 0) and the status stands:
    what it says of the bytes is still true."""
    cdef int code
    if guard.mode != cudaStreamCaptureModeRelaxed:
        code = rt.cudaThreadExchangeStreamCaptureMode(<cudaStreamCaptureMode *>&guard.mode)
        if code != cudaSuccess:
            error.restored = 0
            error.pending_before = guard.pending
            _forget(code, guard)
    return status


cdef void observed(const void *word) noexcept nogil:
    if rt.observed != NULL:
        rt.observed(word)


cdef void published(const void *word) noexcept nogil:
    if rt.published != NULL:
        rt.published(word)


cdef bint is_sticky(int code) noexcept nogil:
    """The errors after which every call on the device fails until the process ends (driver_types.h says it of most)."""
    return (code == 214 or code == 220 or code == 226 or code == 700 or code == 702 or code == 710
            or 714 <= code <= 719 or code == 721 or code == 810 or code == 911)


cdef int cuda_failed(int status, int code, const char *call, int device, const Guard *guard, Error *error) noexcept nogil:
    """Writes a failed CUDA call into `error` and takes its code off the thread, unless other code's error was pending before it:
    that one is left, and reported."""
    if is_sticky(code):
        status = POISONED
    error.cuda_code = code
    error.device = device
    if error.pending_before == cudaSuccess:     # not so where an earlier failure of this entry has taken its place
        error.pending_before = guard.pending
    strncpy(error.call, call, sizeof(error.call) - 1)
    if device < 0:      # a call that names none
        outcome(error, status, REASON_CUDA, "%s failed: %s (%d)", call, rt.cudaGetErrorName(code), code)
    else:
        outcome(error, status, REASON_CUDA, "%s failed on device %d: %s (%d)", call, device, rt.cudaGetErrorName(code), code)
    _forget(code, guard)
    return status


cdef inline void _forget(int code, const Guard *guard) noexcept nogil:
    if guard.pending == cudaSuccess and not is_sticky(code):
        rt.cudaGetLastError()


def _kind_from_environment():
    value = os.environ.get(RUNTIME_VARIABLE, "")
    if value not in ("", "cuda", "host"):
        raise ValueError(f"{RUNTIME_VARIABLE} is {value!r}; it may be 'cuda' or 'host', or not set")
    return value


def _candidates():
    """(what, path, only if loaded already) for libcudart, in the order in which they are tried."""
    name = f"libcudart.so.{CUDART_VERSION // 1000}"
    yield "a library that this process has loaded", name, True
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        path = Path(folder) / f"cu{CUDART_VERSION // 1000}" / "lib" / name
        if path.is_file():
            yield "the package nvidia-cuda-runtime", str(path), False
    yield "the system's loader", name, False
    if os.environ.get("CUDA_HOME"):
        yield "CUDA_HOME", str(Path(os.environ["CUDA_HOME"]) / "lib64" / name), False


def _load_cuda():
    global _missing, _version
    cdef char reason[256]
    cdef int version = 0, missing = 0
    tried = []
    for what, path, loaded_only in _candidates():
        encoded = os.fsencode(path)
        if strata_cudart_load(&loaded, encoded, loaded_only, &version, &missing, reason, sizeof(reason)) == 0:
            _missing, _version = missing, version
            _check_driver(path)
            return path
        tried.append(f"{what} ({path}): {reason.decode(errors='replace')}")
    raise RuntimeUnavailable("no CUDA runtime was found:\n  " + "\n  ".join(tried) + WITHOUT_A_GPU)


def _check_driver(path):
    """A runtime without a fitting driver answers every call with an error: say which, before anything is tried."""
    cdef int driver = 0, count = 0
    loaded.cudaDriverGetVersion(&driver)
    cdef int code = loaded.cudaGetDeviceCount(&count)
    if code == cudaSuccess and count > 0:
        return
    if driver == 0:
        what = "this machine has no NVIDIA driver"
    elif driver < _version // 1000 * 1000:
        what = f"the driver is for CUDA {_dotted(driver)}, too old for runtime {_dotted(_version)}"
    elif code == cudaSuccess:
        what = "the driver sees no GPU"
    else:
        what = "cudaGetDeviceCount failed"
    if code != cudaSuccess:
        name = loaded.cudaGetErrorName(code).decode()
        what += f" ({name}, {code})"
        loaded.cudaGetLastError()
    raise RuntimeUnavailable(f"{what}; runtime {_dotted(_version)} is {path}{WITHOUT_A_GPU}")


def _dotted(version):
    return f"{version // 1000}.{version % 1000 // 10}"
