/* The least C that leaves what one submit of this library leaves: the bytes, an event behind each layer, one behind everything,
 * and a word in memory that the device sets at the end. */
#ifndef BENCH_TWIN_H
#define BENCH_TWIN_H
#include <stdint.h>

#include "extents.h"
#include "table.h"

enum { TWIN_LANES = 8, TWIN_CELLS = 256 }; /* as many as the library takes within a device */

typedef struct {
    const strata_cudart *rt;
    cudaStream_t lanes[TWIN_LANES], finish;
    int n_layers;
    cudaEvent_t *layers, bundles, done;
    uint64_t *cells; /* on the device: cells[i] == i + 1 */
    uint64_t *word;  /* pinned: `expected` once the latest submit has ended */
    uint64_t expected;
} twin;

/* Each returns 0 or the CUDA code that ended it. After a failed twin_open, twin_close frees what was made. */
int twin_open(twin *t, const strata_cudart *rt, int n_layers);
int twin_submit(twin *t, const bench_extent *extents, int n);
int twin_wait_layer(const twin *t, int layer, cudaStream_t stream);
void twin_close(twin *t);

#endif
