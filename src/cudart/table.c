#define _GNU_SOURCE
#include "table.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* One function stands for all that are missing. The callers pass more arguments than it takes, which every ABI that CUDA
 * supports allows for a caller-cleaned call. */
static cudaError_t not_supported(void) { return cudaErrorNotSupported; }

static CUresult (*pointer_attribute)(void *, CUpointer_attribute, CUdeviceptr);

static cudaError_t driver_pointer_range(const void *address, void **start, size_t *size) {
    CUdeviceptr first = 0;
    size_t bytes = 0;
    if (pointer_attribute(&first, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, (CUdeviceptr)address) != CUDA_SUCCESS ||
        pointer_attribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, (CUdeviceptr)address) != CUDA_SUCCESS)
        return cudaErrorInvalidValue;
    *start = (void *)first;
    *size = bytes;
    return cudaSuccess;
}

static CUresult (*event_elapsed)(float *, CUevent, CUevent);

static const strata_cudart *filled;

/* On a thread that has no context yet the driver says nothing. The runtime makes one, and has no error of others to lose there. */
static CUresult runtime_event_elapsed(cudaEvent_t event) {
    float ms;
    cudaError_t code;
    if (filled->cudaPeekAtLastError() != cudaSuccess) return CUDA_ERROR_INVALID_CONTEXT;
    code = filled->cudaEventElapsedTime(&ms, event, event);
    filled->cudaGetLastError();
    return (CUresult)code;
}

static cudaError_t driver_event_captured(cudaEvent_t event) {
    float ms;
    CUresult code = event_elapsed(&ms, event, event);
    if (code == CUDA_ERROR_INVALID_CONTEXT) code = runtime_event_elapsed(event);
    /* The driver looks at captures first; "no timing", "not recorded" and "not complete" are answers of an event that is in none. */
    if (code == CUDA_SUCCESS || code == CUDA_ERROR_INVALID_HANDLE || code == CUDA_ERROR_NOT_READY) return cudaSuccess;
    return (cudaError_t)code;
}

#define STR2(x) #x
#define STR(x) STR2(x)

static void *symbol(void *library, const char *name, int *missing) {
    void *found = dlsym(library, name);
    if (found) return found;
    ++*missing;
    return (void *)not_supported;
}

int strata_cudart_load(strata_cudart *table, const char *path, int loaded_only, int *version, int *missing,
                       char *reason, size_t reason_size) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | (loaded_only ? RTLD_NOLOAD : 0));
    if (!library) {
        const char *text = dlerror();
        snprintf(reason, reason_size, "%s", text ? text : "not loaded in this process");
        return -1;
    }
    *missing = 0;
#define LOAD(f) *(void **)&table->f = symbol(library, STR(f), missing);
    STRATA_CUDART_FUNCTIONS(LOAD)

    /* dlsym resolves every name in a library of another major, whose functions take other arguments: the version decides. */
    if (table->cudaRuntimeGetVersion(version) != cudaSuccess) {
        snprintf(reason, reason_size, "cudaRuntimeGetVersion failed");
        dlclose(library);
        return -1;
    }
    if (*version / 1000 != CUDART_VERSION / 1000) {
        snprintf(reason, reason_size, "it is runtime %d.%d, built for %d.x", *version / 1000, *version % 1000 / 10,
                 CUDART_VERSION / 1000);
        dlclose(library);
        return -1;
    }
    *(void **)&table->device_properties = symbol(library, "cudaGetDeviceProperties", missing);

    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    *(void **)&pointer_attribute = driver ? dlsym(driver, "cuPointerGetAttribute") : NULL;
    *(void **)&event_elapsed = driver ? dlsym(driver, "cuEventElapsedTime") : NULL;
    table->pointer_range = driver_pointer_range;
    table->event_captured = driver_event_captured;
    table->observed = NULL;
    table->published = NULL;
    table->adopt_worker = NULL;
    table->idle = NULL;
    table->unchanged = NULL;
    table->accessed = NULL;
    filled = table;
    if (!pointer_attribute) *(void **)&table->pointer_range = (void *)not_supported;
    if (!event_elapsed) *(void **)&table->event_captured = (void *)not_supported;
    return 0;
}

void *strata_cudart_function(const strata_cudart *table, const char *name) {
#define FIND(f) if (!strcmp(name, #f)) return (void *)table->f;
    STRATA_CUDART_FUNCTIONS(FIND)
    return NULL;
}
