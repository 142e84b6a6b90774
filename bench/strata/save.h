/* The save path in plain C: what an engine does today to copy a conversation, with nothing between it and CUDA's runtime. The engine
 * loop's own (examples/engine_loop/engine_loop/save_path.pyx) is measured against it. */
#ifndef BENCH_SAVE_H
#define BENCH_SAVE_H
#include <stdint.h>

#include "table.h"

/* One array. Those of a step stand together; they are saved, then restored. `direct`: it is copied at the end, over the others. */
typedef struct {
    int64_t step, source, target, bytes, direct;
} save_run;

/* 0, the CUDA code that ended it, or -1 without host memory. The device that holds everything is current. */
int save_path(const strata_cudart *rt, const save_run *runs, int64_t n, cudaStream_t stream);

#endif
