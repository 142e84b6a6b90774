"""Which codes each CUDA function may return besides success, as CUDA's headers, its manual and the field have them."""

# The context is gone: every later call fails until the process ends (driver_types.h says it of most).
STICKY = (214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)
# "May also return ... if this call tries to initialize internal CUDA RT state", and calls inside a stream's callback.
UNPREPARED = (3, 35, 100, 800)
# What no manual names and the field has seen: the runtime unloads, the context is not there (any more).
NO_CONTEXT = (4, 201, 709)

INVALID_VALUE, NO_MEMORY, BAD_PITCH, BAD_DIRECTION, NO_DEVICE_NOW, BAD_DEVICE = 1, 2, 12, 21, 46, 101
BAD_HANDLE, NOT_READY, UNSUPPORTED, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_IMPLICIT = (
    400, 600, 801, 900, 901, 905, 906,
)  # fmt: skip
CAPTURED_EVENT = 907

# Of each function what it documents itself, and what facts about captures and pinned memory add.
OWN = {
    "cudaThreadExchangeStreamCaptureMode": (INVALID_VALUE,),
    "cudaGetDevice": (INVALID_VALUE, NO_DEVICE_NOW),
    "cudaSetDevice": (BAD_DEVICE, NO_DEVICE_NOW, 34, 36, 802, 803, 804),
    "cudaDeviceGetAttribute": (INVALID_VALUE, BAD_DEVICE),
    "cudaMalloc": (INVALID_VALUE, NO_MEMORY, CAPTURE_UNSUPPORTED),
    "cudaFree": (INVALID_VALUE, CAPTURE_UNSUPPORTED),
    "cudaHostAlloc": (INVALID_VALUE, NO_MEMORY, 208, CAPTURE_UNSUPPORTED),
    "cudaFreeHost": (INVALID_VALUE, CAPTURE_UNSUPPORTED),
    "cudaMemcpyAsync": (INVALID_VALUE, BAD_DIRECTION, NOT_READY),
    "cudaMemcpy2DAsync": (INVALID_VALUE, BAD_PITCH, BAD_DIRECTION, NOT_READY),
    "cudaMemcpyPeerAsync": (INVALID_VALUE, BAD_DEVICE, NOT_READY),
    "cudaMemcpy3DPeerAsync": (INVALID_VALUE, BAD_DEVICE, BAD_PITCH, NOT_READY),
    "cudaMemcpyBatchAsync": (NOT_READY, CAPTURE_UNSUPPORTED),
    "cudaStreamCreateWithFlags": (INVALID_VALUE,),
    "cudaStreamDestroy": (INVALID_VALUE, BAD_HANDLE),
    "cudaStreamSynchronize": (BAD_HANDLE, CAPTURE_UNSUPPORTED),
    "cudaStreamWaitEvent": (INVALID_VALUE, BAD_HANDLE, CAPTURE_INVALIDATED, CAPTURE_ISOLATION),
    "cudaStreamIsCapturing": (INVALID_VALUE, CAPTURE_IMPLICIT),
    "cudaEventCreateWithFlags": (INVALID_VALUE, NO_MEMORY),
    "cudaEventDestroy": (INVALID_VALUE, BAD_HANDLE),
    "cudaEventRecord": (INVALID_VALUE, BAD_HANDLE, CAPTURE_INVALIDATED),
    "cudaEventQuery": (INVALID_VALUE, BAD_HANDLE, CAPTURE_UNSUPPORTED, CAPTURED_EVENT),
    # A function of the driver. What it says of captured, untimed and unfinished events is an answer.
    "event_captured": (INVALID_VALUE, UNSUPPORTED),
}
CODES = {function: tuple(dict.fromkeys((*own, *UNPREPARED, *NO_CONTEXT, *STICKY))) for function, own in OWN.items()}

# Documented, and answers: not what a fault is.
ANSWERS = {"cudaEventQuery": (NOT_READY,), "cudaMemcpyBatchAsync": (INVALID_VALUE, UNSUPPORTED)}
# They ask for what is pending on the thread, or for a text, and have no failure of their own.
NEVER_FAIL = ("cudaPeekAtLastError", "cudaGetLastError", "cudaGetErrorName")
