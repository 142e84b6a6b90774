#include "twin.h"

#include <stdlib.h>
#include <string.h>

#define TRY(call)                     \
    do {                              \
        cudaError_t code_ = (call);   \
        if (code_) return (int)code_; \
    } while (0)

int twin_submit(twin *t, const bench_extent *extents, int n) {
    const strata_cudart *rt = t->rt;
    size_t queued[TWIN_LANES] = {0};
    cudaEvent_t last[TWIN_LANES] = {0};
    int i = 0;
    for (; i < n && extents[i].layer < 0; i++) TRY(bench_copy(rt, &extents[i], t->lanes[0]));
    TRY(rt->cudaEventRecord(t->bundles, t->lanes[0]));
    last[0] = t->bundles;
    while (i < n) {
        int layer = extents[i].layer, lane = 0;
        for (int l = 1; l < TWIN_LANES; l++)
            if (queued[l] < queued[lane]) lane = l;
        if (!last[lane]) TRY(rt->cudaStreamWaitEvent(t->lanes[lane], t->bundles, 0));
        for (; i < n && extents[i].layer == layer; i++) {
            TRY(bench_copy(rt, &extents[i], t->lanes[lane]));
            queued[lane] += extents[i].width * extents[i].rows;
        }
        TRY(rt->cudaEventRecord(t->layers[layer], t->lanes[lane]));
        last[lane] = t->layers[layer];
    }
    for (int l = 0; l < TWIN_LANES; l++)
        if (last[l]) TRY(rt->cudaStreamWaitEvent(t->finish, last[l], 0));
    TRY(rt->cudaEventRecord(t->done, t->finish));
    t->expected = 1 + t->expected % TWIN_CELLS;
    TRY(rt->cudaMemcpyAsync(t->word, &t->cells[t->expected - 1], sizeof *t->word, cudaMemcpyDefault, t->finish));
    return 0;
}

int twin_wait_layer(const twin *t, int layer, cudaStream_t stream) {
    return (int)t->rt->cudaStreamWaitEvent(stream, t->layers[layer], 0);
}

int twin_open(twin *t, const strata_cudart *rt, int n_layers) {
    uint64_t values[TWIN_CELLS];
    memset(t, 0, sizeof *t);
    t->rt = rt;
    t->n_layers = n_layers;
    t->layers = calloc((size_t)n_layers, sizeof *t->layers);
    if (!t->layers) return (int)cudaErrorMemoryAllocation;
    for (int l = 0; l < TWIN_LANES; l++) TRY(rt->cudaStreamCreateWithFlags(&t->lanes[l], cudaStreamNonBlocking));
    TRY(rt->cudaStreamCreateWithFlags(&t->finish, cudaStreamNonBlocking));
    for (int l = 0; l < n_layers; l++) TRY(rt->cudaEventCreateWithFlags(&t->layers[l], cudaEventDisableTiming));
    TRY(rt->cudaEventCreateWithFlags(&t->bundles, cudaEventDisableTiming));
    TRY(rt->cudaEventCreateWithFlags(&t->done, cudaEventDisableTiming));
    TRY(rt->cudaHostAlloc((void **)&t->word, sizeof *t->word, cudaHostAllocPortable));
    TRY(rt->cudaMalloc((void **)&t->cells, sizeof values));
    for (int i = 0; i < TWIN_CELLS; i++) values[i] = (uint64_t)i + 1;
    *t->word = 0;
    return (int)rt->cudaMemcpy(t->cells, values, sizeof values, cudaMemcpyDefault);
}

void twin_close(twin *t) {
    const strata_cudart *rt = t->rt;
    if (!rt) return;
    for (int l = 0; l < TWIN_LANES; l++)
        if (t->lanes[l]) rt->cudaStreamDestroy(t->lanes[l]);
    if (t->finish) rt->cudaStreamDestroy(t->finish);
    for (int l = 0; t->layers && l < t->n_layers; l++)
        if (t->layers[l]) rt->cudaEventDestroy(t->layers[l]);
    if (t->bundles) rt->cudaEventDestroy(t->bundles);
    if (t->done) rt->cudaEventDestroy(t->done);
    if (t->word) rt->cudaFreeHost(t->word);
    if (t->cells) rt->cudaFree(t->cells);
    free(t->layers);
    memset(t, 0, sizeof *t);
}
