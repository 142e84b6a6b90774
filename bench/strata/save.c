#include "save.h"

#include <stdlib.h>
#include <string.h>

#define TRY(call)                   \
    do {                            \
        int code_ = (int)(call);    \
        if (code_) return code_;    \
    } while (0)

enum { SEGMENT = 16 << 20 };

static int64_t segments_of(const save_run *run) { return (run->bytes + SEGMENT - 1) / SEGMENT; }

static size_t segment_bytes(const save_run *run, int64_t i) {
    int64_t left = run->bytes - i * SEGMENT;
    return (size_t)(left < SEGMENT ? left : SEGMENT);
}

static int copy(const strata_cudart *rt, void *to, const void *from, size_t bytes, cudaStream_t stream) {
    TRY(rt->cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    return (int)rt->cudaStreamSynchronize(stream);
}

/* Zeroed after all are allocated: of malloc and memset side by side a compiler makes calloc, which would spare the pass over memory
 * that a growing std::vector makes. */
static int grow(const save_run *run, char **segments) {
    int64_t n = segments_of(run);
    for (int64_t i = 0; i < n; i++)
        if (!(segments[i] = malloc(segment_bytes(run, i)))) return -1;
    for (int64_t i = 0; i < n; i++) memset(segments[i], 0, segment_bytes(run, i));
    return 0;
}

static int one_step(const strata_cudart *rt, const save_run *runs, int64_t n, char **segments, cudaStream_t stream) {
    char **at = segments;
    TRY(rt->cudaDeviceSynchronize());
    for (int64_t r = 0; r < n; r++) {
        TRY(grow(&runs[r], at));
        for (int64_t i = 0; i < segments_of(&runs[r]); i++)
            TRY(copy(rt, *at++, (const char *)(intptr_t)runs[r].source + i * SEGMENT, segment_bytes(&runs[r], i), stream));
    }
    TRY(rt->cudaDeviceSynchronize());
    at = segments;
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < segments_of(&runs[r]); i++)
            TRY(copy(rt, (char *)(intptr_t)runs[r].target + i * SEGMENT, *at++, segment_bytes(&runs[r], i), stream));
    return 0;
}

int save_path(const strata_cudart *rt, const save_run *runs, int64_t n, cudaStream_t stream) {
    int64_t most = 0, first, end;
    int code = 0;
    for (int64_t r = 0; r < n; r++) most += segments_of(&runs[r]);
    char **segments = malloc((size_t)(most + 1) * sizeof *segments);
    if (!segments) return -1;
    for (first = 0; first < n && !runs[first].direct && !code; first = end) {
        int64_t used = 0;
        for (end = first; end < n && !runs[end].direct && runs[end].step == runs[first].step; end++) used += segments_of(&runs[end]);
        memset(segments, 0, (size_t)used * sizeof *segments);
        code = one_step(rt, runs + first, end - first, segments, stream);
        for (int64_t i = 0; i < used; i++) free(segments[i]);
    }
    free(segments);
    for (; first < n && !code; first++)
        code = (int)rt->cudaMemcpyAsync((void *)(intptr_t)runs[first].target, (const void *)(intptr_t)runs[first].source,
                                        (size_t)runs[first].bytes, cudaMemcpyDefault, stream);
    if (!code) code = (int)rt->cudaStreamSynchronize(stream);
    return code ? code : (int)rt->cudaDeviceSynchronize();
}
