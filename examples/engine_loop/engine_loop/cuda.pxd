"""The CUDA calls that the loop makes by itself, and how a failed one is told.

An engine has the calls from cuda_runtime.h. The loop takes them from the runtime that strata_copy has opened, so that it runs on the
host runtime too, and is built without CUDA. Each returns CUDA's code, 0 where all is well; streams are plain pointers.
"""

from libc.stdint cimport int64_t

cimport strata_copy as sc

cdef enum:
    cudaMemcpyDefault = 4

cdef struct Calls:
    int (*cudaGetDevice)(int *device) noexcept nogil
    int (*cudaSetDevice)(int device) noexcept nogil
    int (*cudaDeviceSynchronize)() noexcept nogil
    int (*cudaStreamSynchronize)(void *stream) noexcept nogil
    int (*cudaMemcpyAsync)(void *to, const void *from_, size_t bytes, int kind, void *stream) noexcept nogil
    int (*cudaMemcpy2DAsync)(void *to, size_t to_pitch, const void *from_, size_t from_pitch, size_t width, size_t rows, int kind,
                             void *stream) noexcept nogil
    int (*cudaMemsetAsync)(void *to, int value, size_t bytes, void *stream) noexcept nogil
    int (*cudaHostGetDevicePointer)(void **device, void *host, unsigned int flags) noexcept nogil
    const char *(*cudaGetErrorName)(int code) noexcept nogil

cdef Calls cuda

# OK, or FAILED with the call and its code in `error`.
cdef int noted(int code, const char *call, sc.Error *error) noexcept nogil
cdef int copy(void *to, const void *from_, size_t bytes, void *stream, sc.Error *error) noexcept nogil
cdef int stream_done(void *stream, sc.Error *error) noexcept nogil
# REFUSED, with a text of two numbers in `error`.
cdef int refused(sc.Error *error, const char *format, int64_t wanted, int64_t found) noexcept nogil
