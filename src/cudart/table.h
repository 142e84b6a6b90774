/* The CUDA runtime as one table of functions, typed by the runtime's own header (13.x).
 *
 * Two libraries fill it: libcudart, through dlopen (table.c), and the host runtime (src/host_runtime),
 * which is the same functions over host memory. Nothing else in this project names a CUDA symbol.
 */
#ifndef STRATA_CUDART_TABLE_H
#define STRATA_CUDART_TABLE_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#if CUDART_VERSION < 13000
#error "strata_copy needs the headers of CUDA 13 (nvidia-cuda-runtime and nvidia-cuda-crt, or CUDA_HOME)"
#endif

/* Every function that has one type in all runtimes that are supported. */
#define STRATA_CUDART_FUNCTIONS(X) \
    X(cudaRuntimeGetVersion) \
    X(cudaDriverGetVersion) \
    X(cudaGetErrorName) \
    X(cudaGetErrorString) \
    X(cudaGetLastError) \
    X(cudaPeekAtLastError) \
    X(cudaGetDeviceCount) \
    X(cudaGetDevice) \
    X(cudaSetDevice) \
    X(cudaDeviceGetAttribute) \
    X(cudaDeviceGetPCIBusId) \
    X(cudaDeviceSynchronize) \
    X(cudaDeviceCanAccessPeer) \
    X(cudaDeviceEnablePeerAccess) \
    X(cudaDeviceDisablePeerAccess) \
    X(cudaMemGetInfo) \
    X(cudaMalloc) \
    X(cudaFree) \
    X(cudaHostAlloc) \
    X(cudaFreeHost) \
    X(cudaHostRegister) \
    X(cudaHostUnregister) \
    X(cudaHostGetDevicePointer) \
    X(cudaPointerGetAttributes) \
    X(cudaMemcpy) \
    X(cudaMemcpyAsync) \
    X(cudaMemcpy2DAsync) \
    X(cudaMemcpyPeerAsync) \
    X(cudaMemcpy3DPeerAsync) \
    X(cudaMemcpyBatchAsync) \
    X(cudaMemsetAsync) \
    X(cudaStreamCreateWithFlags) \
    X(cudaStreamDestroy) \
    X(cudaStreamQuery) \
    X(cudaStreamSynchronize) \
    X(cudaStreamWaitEvent) \
    X(cudaStreamIsCapturing) \
    X(cudaStreamBeginCapture) \
    X(cudaStreamEndCapture) \
    X(cudaGraphGetNodes) \
    X(cudaGraphDestroy) \
    X(cudaThreadExchangeStreamCaptureMode) \
    X(cudaLaunchHostFunc) \
    X(cudaEventCreateWithFlags) \
    X(cudaEventDestroy) \
    X(cudaEventRecord) \
    X(cudaEventQuery) \
    X(cudaEventSynchronize) \
    X(cudaEventElapsedTime)

/* cudaGetDeviceProperties has another symbol and another struct in runtime 12 than in 13. Only `name`, the first member of
 * both, is read: the caller gives room for either. */
#define STRATA_DEVICE_PROPERTIES_BYTES 4096
typedef cudaError_t (*strata_device_properties_fn)(void *properties, int device);

/* The allocation or registration that holds an address: its first byte and its size. It comes from the driver
 * (cuPointerGetAttribute, RANGE_START_ADDR and RANGE_SIZE); the runtime has no call for it. */
typedef cudaError_t (*strata_pointer_range_fn)(const void *address, void **start, size_t *size);

/* Whether an event is part of a graph capture, which goes on: cudaErrorCapturedEvent where it is, cudaSuccess where it is not, another
 * code where that cannot be told. It comes from the driver (cuEventElapsedTime): cudaEventQuery ends the capture to say so, and the
 * runtime's own call leaves an error on the thread for every event without timing. */
typedef cudaError_t (*strata_event_captured_fn)(cudaEvent_t event);

/* For a runtime that looks for races: the calling thread has read a word that a device wrote or a thread published, and from now on
 * knows what the writer knew; and the calling thread is about to store a word. NULL for CUDA, where such words are plain memory. */
typedef void (*strata_word_fn)(const void *word);

/* For a runtime that decides itself when things run: it takes over a program's background worker, calls `step` now and then (NULL: no
 * more) from inside any other call, and returns 1; 0 where the program needs a thread of its own for it. And: the calling thread waits
 * for something that no call stands for; 1 where something was done meanwhile. NULL for CUDA. */
typedef int (*strata_adopt_worker_fn)(int (*step)(void));
typedef int (*strata_idle_fn)(void);

/* For a runtime that judges: at this point of the stream both rectangles hold the same bytes, as the caller believes, who therefore does
 * not copy them. NULL for CUDA. */
typedef void (*strata_unchanged_fn)(const void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                                    size_t rows, cudaStream_t stream);

/* For a runtime that looks for races: the calling thread itself reads these rows now, or writes them. NULL for CUDA. */
typedef void (*strata_accessed_fn)(const void *start, size_t pitch, size_t width, size_t rows, int writes);

/* A member may have its function's name only where that is looked up outside of the struct. */
#ifdef __cplusplus
#define STRATA_FIELD(f) __typeof__(&::f) f;
#else
#define STRATA_FIELD(f) __typeof__(&f) f;
#endif

typedef struct strata_cudart {
    STRATA_CUDART_FUNCTIONS(STRATA_FIELD)
#undef STRATA_FIELD
    strata_device_properties_fn device_properties;
    strata_pointer_range_fn pointer_range;
    strata_event_captured_fn event_captured;
    strata_word_fn observed;
    strata_word_fn published;
    strata_adopt_worker_fn adopt_worker;
    strata_idle_fn idle;
    strata_unchanged_fn unchanged;
    strata_accessed_fn accessed;
} strata_cudart;

#ifdef __cplusplus
extern "C" {
#endif

/* Loads `path` (a file, or a name for the system loader) and fills `table`. With `loaded_only`, a library that this process
 * has not loaded already is not loaded now. Returns 0, or -1 with the reason in `reason`. A function that the library lacks
 * becomes an entry that returns cudaErrorNotSupported; `missing` counts them. */
int strata_cudart_load(strata_cudart *table, const char *path, int loaded_only, int *version, int *missing,
                       char *reason, size_t reason_size);

/* The function of that name in a filled table, or NULL where the table has none. */
void *strata_cudart_function(const strata_cudart *table, const char *name);

#ifdef __cplusplus
}
#endif
#endif
