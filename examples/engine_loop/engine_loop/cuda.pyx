"""CUDA's calls. Declared in cuda.pxd."""

from libc.stdio cimport snprintf

from strata_copy import runtime


def connect():
    """Takes the calls from the runtime that is open."""
    cuda.cudaGetDevice = <int (*)(int *) noexcept nogil>address("cudaGetDevice")
    cuda.cudaSetDevice = <int (*)(int) noexcept nogil>address("cudaSetDevice")
    cuda.cudaDeviceSynchronize = <int (*)() noexcept nogil>address("cudaDeviceSynchronize")
    cuda.cudaStreamSynchronize = <int (*)(void *) noexcept nogil>address("cudaStreamSynchronize")
    cuda.cudaMemcpyAsync = <int (*)(void *, const void *, size_t, int, void *) noexcept nogil>address("cudaMemcpyAsync")
    cuda.cudaMemcpy2DAsync = <int (*)(void *, size_t, const void *, size_t, size_t, size_t, int, void *) noexcept nogil>address(
        "cudaMemcpy2DAsync")
    cuda.cudaMemsetAsync = <int (*)(void *, int, size_t, void *) noexcept nogil>address("cudaMemsetAsync")
    cuda.cudaHostGetDevicePointer = <int (*)(void **, void *, unsigned int) noexcept nogil>address("cudaHostGetDevicePointer")
    cuda.cudaGetErrorName = <const char *(*)(int) noexcept nogil>address("cudaGetErrorName")


cdef void *address(str name) except NULL:
    return <void *><size_t>runtime.function(name)


cdef int noted(int code, const char *call, sc.Error *error) noexcept nogil:
    if code == 0:
        return sc.OK
    error.status, error.reason, error.cuda_code = sc.FAILED, sc.REASON_CUDA, code
    snprintf(error.text, sizeof(error.text), "%s: %s (%d)", call, cuda.cudaGetErrorName(code), code)
    return sc.FAILED


cdef int copy(void *to, const void *from_, size_t bytes, void *stream, sc.Error *error) noexcept nogil:
    if bytes == 0:
        return sc.OK
    return noted(cuda.cudaMemcpyAsync(to, from_, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync", error)


cdef int stream_done(void *stream, sc.Error *error) noexcept nogil:
    return noted(cuda.cudaStreamSynchronize(stream), "cudaStreamSynchronize", error)


cdef int refused(sc.Error *error, const char *format, int64_t wanted, int64_t found) noexcept nogil:
    error.status, error.wanted, error.found = sc.REFUSED, wanted, found
    snprintf(error.text, sizeof(error.text), format, wanted, found)
    return sc.REFUSED
