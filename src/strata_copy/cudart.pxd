"""The CUDA runtime: its table of functions, which errors end a device, and the guard every entry of this library runs under.

The table is filled once, by `open_runtime`, and never changes: `rt` may be read without a lock. Calls are written with CUDA's own
names, `rt.cudaMemcpyAsync(...)`; their contracts are in the CUDA Runtime API manual.
"""

from libc.stdint cimport int32_t, int64_t

from strata_copy.abi cimport Error


cdef extern from "table.h" nogil:
    ctypedef int cudaError_t
    ctypedef void *cudaStream_t
    ctypedef void *cudaEvent_t
    ctypedef void *cudaGraph_t
    ctypedef void *cudaGraphNode_t
    ctypedef int cudaMemcpyKind "enum cudaMemcpyKind"
    ctypedef int cudaDeviceAttr "enum cudaDeviceAttr"
    ctypedef int cudaMemcpySrcAccessOrder "enum cudaMemcpySrcAccessOrder"
    ctypedef int cudaStreamCaptureStatus "enum cudaStreamCaptureStatus"
    ctypedef int cudaStreamCaptureMode "enum cudaStreamCaptureMode"

    ctypedef struct cudaPointerAttributes "struct cudaPointerAttributes":
        int type, device
        void *devicePointer
        void *hostPointer

    ctypedef struct cudaPitchedPtr "struct cudaPitchedPtr":
        void *ptr
        size_t pitch, xsize, ysize

    ctypedef struct cudaExtent "struct cudaExtent":
        size_t width, height, depth

    ctypedef struct cudaMemcpy3DPeerParms "struct cudaMemcpy3DPeerParms":
        cudaPitchedPtr srcPtr, dstPtr
        int srcDevice, dstDevice
        cudaExtent extent

    ctypedef struct cudaMemcpyAttributes "struct cudaMemcpyAttributes":
        cudaMemcpySrcAccessOrder srcAccessOrder

    enum:
        CUDART_VERSION
        STRATA_DEVICE_PROPERTIES_BYTES
        cudaSuccess
        cudaErrorInvalidValue
        cudaErrorInvalidDevice
        cudaErrorMemoryAllocation
        cudaErrorNotReady
        cudaErrorPeerAccessAlreadyEnabled
        cudaErrorNotSupported
        cudaErrorCapturedEvent
        cudaErrorStreamCaptureImplicit
        cudaErrorHostMemoryAlreadyRegistered
        cudaMemcpyDefault
        cudaMemcpyDeviceToHost
        cudaMemcpySrcAccessOrderStream
        cudaHostAllocPortable
        cudaHostAllocMapped
        cudaHostRegisterPortable
        cudaHostRegisterMapped
        cudaStreamNonBlocking
        cudaEventDisableTiming
        cudaEventBlockingSync
        cudaEventDefault
        cudaMemoryTypeUnregistered
        cudaMemoryTypeHost
        cudaMemoryTypeDevice
        cudaStreamCaptureModeRelaxed
        cudaStreamCaptureStatusNone
        cudaDevAttrMaxPitch

    ctypedef struct strata_cudart:
        cudaError_t (*cudaRuntimeGetVersion)(int *) noexcept nogil
        cudaError_t (*cudaDriverGetVersion)(int *) noexcept nogil
        const char *(*cudaGetErrorName)(cudaError_t) noexcept nogil
        const char *(*cudaGetErrorString)(cudaError_t) noexcept nogil
        cudaError_t (*cudaGetLastError)() noexcept nogil
        cudaError_t (*cudaPeekAtLastError)() noexcept nogil
        cudaError_t (*cudaGetDeviceCount)(int *) noexcept nogil
        cudaError_t (*cudaGetDevice)(int *) noexcept nogil
        cudaError_t (*cudaSetDevice)(int) noexcept nogil
        cudaError_t (*cudaDeviceGetAttribute)(int *, cudaDeviceAttr, int) noexcept nogil
        cudaError_t (*cudaDeviceGetPCIBusId)(char *, int, int) noexcept nogil
        cudaError_t (*cudaDeviceSynchronize)() noexcept nogil
        cudaError_t (*cudaDeviceCanAccessPeer)(int *, int device, int peer) noexcept nogil
        cudaError_t (*cudaDeviceEnablePeerAccess)(int peer, unsigned int) noexcept nogil
        cudaError_t (*cudaDeviceDisablePeerAccess)(int peer) noexcept nogil
        cudaError_t (*cudaMemGetInfo)(size_t *, size_t *) noexcept nogil
        cudaError_t (*cudaMalloc)(void **, size_t) noexcept nogil
        cudaError_t (*cudaFree)(void *) noexcept nogil
        cudaError_t (*cudaHostAlloc)(void **, size_t, unsigned int) noexcept nogil
        cudaError_t (*cudaFreeHost)(void *) noexcept nogil
        cudaError_t (*cudaHostRegister)(void *, size_t, unsigned int) noexcept nogil
        cudaError_t (*cudaHostUnregister)(void *) noexcept nogil
        cudaError_t (*cudaHostGetDevicePointer)(void **, void *, unsigned int) noexcept nogil
        cudaError_t (*cudaPointerGetAttributes)(cudaPointerAttributes *, const void *) noexcept nogil
        cudaError_t (*cudaMemcpy)(void *, const void *, size_t, cudaMemcpyKind) noexcept nogil
        cudaError_t (*cudaMemcpyAsync)(void *, const void *, size_t, cudaMemcpyKind, cudaStream_t) noexcept nogil
        cudaError_t (*cudaMemcpy2DAsync)(void *, size_t, const void *, size_t, size_t, size_t, cudaMemcpyKind,
                                         cudaStream_t) noexcept nogil
        cudaError_t (*cudaMemcpyPeerAsync)(void *, int, const void *, int, size_t, cudaStream_t) noexcept nogil
        cudaError_t (*cudaMemcpy3DPeerAsync)(const cudaMemcpy3DPeerParms *, cudaStream_t) noexcept nogil
        cudaError_t (*cudaMemcpyBatchAsync)(void *const *, const void *const *, const size_t *, size_t, cudaMemcpyAttributes *, size_t *,
                                            size_t, cudaStream_t) noexcept nogil
        cudaError_t (*cudaMemsetAsync)(void *, int, size_t, cudaStream_t) noexcept nogil
        cudaError_t (*cudaStreamCreateWithFlags)(cudaStream_t *, unsigned int) noexcept nogil
        cudaError_t (*cudaStreamDestroy)(cudaStream_t) noexcept nogil
        cudaError_t (*cudaStreamQuery)(cudaStream_t) noexcept nogil
        cudaError_t (*cudaStreamSynchronize)(cudaStream_t) noexcept nogil
        cudaError_t (*cudaStreamWaitEvent)(cudaStream_t, cudaEvent_t, unsigned int) noexcept nogil
        cudaError_t (*cudaStreamIsCapturing)(cudaStream_t, cudaStreamCaptureStatus *) noexcept nogil
        cudaError_t (*cudaStreamBeginCapture)(cudaStream_t, cudaStreamCaptureMode) noexcept nogil
        cudaError_t (*cudaStreamEndCapture)(cudaStream_t, cudaGraph_t *) noexcept nogil
        cudaError_t (*cudaGraphGetNodes)(cudaGraph_t, cudaGraphNode_t *, size_t *) noexcept nogil
        cudaError_t (*cudaGraphDestroy)(cudaGraph_t) noexcept nogil
        cudaError_t (*cudaThreadExchangeStreamCaptureMode)(cudaStreamCaptureMode *) noexcept nogil
        cudaError_t (*cudaLaunchHostFunc)(cudaStream_t, void (*)(void *) noexcept nogil, void *) noexcept nogil
        cudaError_t (*cudaEventCreateWithFlags)(cudaEvent_t *, unsigned int) noexcept nogil
        cudaError_t (*cudaEventDestroy)(cudaEvent_t) noexcept nogil
        cudaError_t (*cudaEventRecord)(cudaEvent_t, cudaStream_t) noexcept nogil
        cudaError_t (*cudaEventQuery)(cudaEvent_t) noexcept nogil
        cudaError_t (*cudaEventSynchronize)(cudaEvent_t) noexcept nogil
        cudaError_t (*cudaEventElapsedTime)(float *, cudaEvent_t, cudaEvent_t) noexcept nogil
        cudaError_t (*device_properties)(void *, int) noexcept nogil
        cudaError_t (*pointer_range)(const void *, void **, size_t *) noexcept nogil
        cudaError_t (*event_captured)(cudaEvent_t) noexcept nogil
        void (*observed)(const void *) noexcept nogil       # NULL for CUDA
        void (*published)(const void *) noexcept nogil      # NULL for CUDA
        int (*adopt_worker)(int (*)() noexcept nogil) noexcept nogil    # NULL for CUDA
        int (*idle)() noexcept nogil                        # NULL for CUDA
        void (*unchanged)(const void *, size_t, const void *, size_t, size_t, size_t, cudaStream_t) noexcept nogil      # NULL for CUDA
        void (*accessed)(const void *, size_t, size_t, size_t, int) noexcept nogil      # NULL for CUDA

    int strata_cudart_load(strata_cudart *, const char *path, int loaded_only, int *version, int *missing, char *reason,
                           size_t reason_size)
    void *strata_cudart_function(const strata_cudart *, const char *name)


cdef extern from "outcome.h" nogil:
    void clear "strata_error_clear"(Error *)
    int outcome "strata_outcome"(Error *, int status, int reason, const char *format, ...)


# The open runtime, or NULL before `open_runtime`.
cdef const strata_cudart *rt

# What an entry of this library found on its thread and puts back. It never changes the current device: no call that is made
# after the copier is open depends on it, and setting another would make a context there (CUDA Runtime API, cudaSetDevice).
cdef struct Guard:
    int mode            # capture mode at entry
    int pending         # CUDA error that other code had left on this thread


# The first CUDA call of each thread of ours: makes a device its current one, which the process uses anyway. A thread that has set none
# stands on device 0, and nearly every call makes a context there, that which exchanges the capture mode too.
cdef int stand_on(int device, int status_of_failure, Error *error) noexcept nogil
cdef int guard_enter(Guard *guard, Error *error) noexcept nogil
cdef int guard_leave(Guard *guard, int status, Error *error) noexcept nogil

# Where a thread learns of an end without a CUDA call, a runtime that looks for races is told of it: a device's word, which says that
# everything on it is done; the status that the first to see the words leaves for the others; that a state was let go, after which a
# later ticket does not wait for the one that held it. CUDA has no such entries: a load and a branch, and only where something ended.
cdef void observed(const void *word) noexcept nogil
cdef void published(const void *word) noexcept nogil

cdef bint is_sticky(int code) noexcept nogil
# Writes a failed CUDA call into `error`: POISONED where the code ends the device, else `status`, which it returns.
cdef int cuda_failed(int status, int code, const char *call, int device, const Guard *guard, Error *error) noexcept nogil

cpdef str open_runtime(object kind=*)
cdef int require_runtime() except -1
