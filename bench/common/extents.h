/* One contiguous copy of a conversation, and the layer that it belongs to. */
#ifndef BENCH_EXTENTS_H
#define BENCH_EXTENTS_H
#include <stddef.h>

typedef struct {
    char *target;
    const char *source;
    size_t bytes;
    int layer;
} bench_extent;

#endif
