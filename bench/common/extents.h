/* One piece of a conversation as one CUDA call takes it: `rows` of `width` bytes. */
#ifndef BENCH_EXTENTS_H
#define BENCH_EXTENTS_H
#include <stddef.h>

#include "table.h"

typedef struct {
    char *target;
    const char *source;
    size_t width, rows, target_pitch, source_pitch;
    int layer; /* -1: small parts of many layers, before the first */
} bench_extent;

static inline cudaError_t bench_copy(const strata_cudart *rt, const bench_extent *e, cudaStream_t stream) {
    if (e->rows == 1) return rt->cudaMemcpyAsync(e->target, e->source, e->width, cudaMemcpyDefault, stream);
    return rt->cudaMemcpy2DAsync(e->target, e->target_pitch, e->source, e->source_pitch, e->width, e->rows, cudaMemcpyDefault, stream);
}

#endif
