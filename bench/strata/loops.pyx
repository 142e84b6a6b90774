"""The save path in plain C, timed."""

from libc.stdint cimport int64_t

from common.clock cimport now
from common.failure cimport check, noted
from strata_copy.abi cimport Error
from strata_copy.cudart cimport cudaStream_t, rt, strata_cudart


cdef extern from "save.h" nogil:
    ctypedef struct save_run:
        int64_t step, source, target, bytes, direct
    int save_path(const strata_cudart *, const save_run *, int64_t n, cudaStream_t)


def save_by_c(const int64_t[:, ::1] runs, size_t stream):
    """Nanoseconds of one copy. runs: (n, 5) as save.h has them: step, source, target, bytes, direct."""
    cdef Error error
    cdef int64_t start, took
    cdef int code
    with nogil:
        start = now()
        code = noted(save_path(rt, <const save_run *>&runs[0, 0], runs.shape[0], <cudaStream_t>stream), "save_path", &error)
        took = now() - start
    check(code, &error)
    return took
