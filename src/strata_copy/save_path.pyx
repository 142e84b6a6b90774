"""The save path: how engines move a conversation without this library, the off side of every comparison.

It is raw runtime calls, as such engines make them: everything goes through pageable host memory that is allocated and zeroed anew,
in segments of 16 MiB, each copied on a private stream and waited for, with a device synchronize before each saving and each
restoring. Nothing of the copy path is used.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from strata_copy.cudart cimport cudaMemcpyDefault, cudaStream_t, require_runtime, rt

from strata_copy.runtime import CudaError

cdef enum:
    SEGMENT_BYTES = 16 << 20
    OUT_OF_MEMORY = -1      # beside the codes of CUDA
    # What is done of a way.
    SAVE = 1
    RESTORE = 2


cdef struct Run:
    int64_t step, source, target, bytes


# A call under way: `segments` has one pointer for each segment of all runs, NULL where there is none now.
cdef struct Way:
    const Run *runs
    int64_t n_runs
    char **segments
    int64_t n_segments
    int what
    cudaStream_t stream
    const char *call        # the CUDA call that failed


def save_and_restore(const int64_t[:, ::1] runs, size_t stream):
    """Copies every run over host memory, the runs of a step together: all are saved, then all restored.

    runs: array of shape (runs, 4): step, source address, target address, bytes; runs of a step stand together.
    stream: a non-blocking stream of the current device, which holds all the memory.

    Returns once everything is there. The GIL is released. Raises CudaError where a call fails, MemoryError without host memory.
    """
    cdef Saved kept = Saved()
    _go(kept, runs, stream, SAVE | RESTORE)


cdef class Saved:
    """What `save` has saved: images of runs in host memory, until it is dropped."""

    cdef char **segments
    cdef int64_t n_segments

    def __dealloc__(self):
        cdef int64_t i
        for i in range(self.n_segments):
            free(self.segments[i])
        free(self.segments)


def save(const int64_t[:, ::1] runs, size_t stream):
    """The first half of save_and_restore: the sources of all runs, whose targets are not looked at. Returns a Saved."""
    cdef Saved kept = Saved()
    _go(kept, runs, stream, SAVE)
    return kept


def restore(Saved kept not None, const int64_t[:, ::1] runs, size_t stream):
    """The second half: what was saved goes to the targets of runs of the same sizes, whose sources are not looked at. Raises ValueError
    for other sizes."""
    _go(kept, runs, stream, RESTORE)


cdef int _go(Saved kept, const int64_t[:, ::1] runs, size_t stream, int what) except -1:
    cdef Way way
    cdef int64_t i
    cdef int code
    if runs.shape[1] != 4:
        raise ValueError(f"runs have 4 numbers (step, source, target, bytes), not {runs.shape[1]}")
    require_runtime()
    if runs.shape[0] == 0:
        return 0
    way.runs, way.n_runs, way.stream, way.call = <const Run *>&runs[0, 0], runs.shape[0], <cudaStream_t>stream, ""
    way.what, way.n_segments = what, 0
    for i in range(way.n_runs):
        way.n_segments += segments_of(&way.runs[i])
    if what & SAVE:
        kept.segments = <char **>calloc(way.n_segments + 1, sizeof(char *))
        if kept.segments == NULL:
            raise MemoryError
        kept.n_segments = way.n_segments
    elif kept.n_segments != way.n_segments:
        raise ValueError(f"{kept.n_segments} segments were saved, the runs have {way.n_segments}")
    way.segments = kept.segments
    with nogil:
        code = every_step(&way)
    if code == OUT_OF_MEMORY:
        raise MemoryError
    if code != 0:
        raise CudaError(code, rt.cudaGetErrorName(code).decode(), way.call.decode())
    return 0


cdef int every_step(Way *way) noexcept nogil:
    cdef int64_t first = 0, end
    cdef char **segments = way.segments
    cdef int code = 0
    while code == 0 and first < way.n_runs:
        end = first + 1
        while end < way.n_runs and way.runs[end].step == way.runs[first].step:
            end += 1
        code = one_step(way, first, end, &segments)
        first = end
    return device_sync(way) if code == 0 else code


cdef int one_step(Way *way, int64_t first, int64_t end, char ***segments) noexcept nogil:
    """Saves and restores the runs first to end, and moves `segments` on behind theirs."""
    cdef int64_t i, used = 0
    cdef int code = device_sync(way) if way.what & SAVE else 0
    for i in range(first, end if way.what & SAVE else first):
        if code == 0:
            code = grow(&way.runs[i], segments[0] + used)
        if code == 0:
            code = copy(way, &way.runs[i], segments[0] + used, True)
        used += segments_of(&way.runs[i])
    if code == 0 and way.what & RESTORE:
        code = device_sync(way)
    used = 0
    for i in range(first, end):
        if code == 0 and way.what & RESTORE:
            code = copy(way, &way.runs[i], segments[0] + used, False)
        used += segments_of(&way.runs[i])
    if code == 0 and way.what == SAVE | RESTORE:
        for i in range(used):
            free(segments[0][i])
            segments[0][i] = NULL
    segments[0] += used
    return code


cdef int grow(const Run *run, char **segments) noexcept nogil:
    """New zeroed segments. Zeroed after all are allocated: of malloc and memset side by side a compiler makes calloc, which would
    spare the pass over memory that a growing std::vector makes."""
    cdef int64_t i, n = segments_of(run)
    for i in range(n):
        segments[i] = <char *>malloc(segment_bytes(run, i))
        if segments[i] == NULL:
            return OUT_OF_MEMORY
    for i in range(n):
        memset(segments[i], 0, segment_bytes(run, i))
    return 0


cdef int copy(Way *way, const Run *run, char **segments, bint save) noexcept nogil:
    cdef int64_t i
    cdef char *outside = <char *><size_t>(run.source if save else run.target)
    cdef int code
    for i in range(segments_of(run)):
        if save:
            code = rt.cudaMemcpyAsync(segments[i], outside, segment_bytes(run, i), cudaMemcpyDefault, way.stream)
        else:
            code = rt.cudaMemcpyAsync(outside, segments[i], segment_bytes(run, i), cudaMemcpyDefault, way.stream)
        way.call = "cudaMemcpyAsync"
        if code == 0:
            code = rt.cudaStreamSynchronize(way.stream)
            way.call = "cudaStreamSynchronize"
        if code != 0:
            return code
        outside += SEGMENT_BYTES
    return 0


cdef int device_sync(Way *way) noexcept nogil:
    way.call = "cudaDeviceSynchronize"
    return rt.cudaDeviceSynchronize()


cdef inline int64_t segments_of(const Run *run) noexcept nogil:
    return (run.bytes + SEGMENT_BYTES - 1) // SEGMENT_BYTES


cdef inline int64_t segment_bytes(const Run *run, int64_t i) noexcept nogil:
    return min(run.bytes - i * SEGMENT_BYTES, <int64_t>SEGMENT_BYTES)
