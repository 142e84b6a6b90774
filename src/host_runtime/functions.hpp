// The functions of the table as numbers, for counting calls and injecting faults.
#pragma once

#include "table.h"

#include <cstddef>

namespace host_runtime {

enum class Function {
#define STRATA_ENUMERATOR(f) f,
    STRATA_CUDART_FUNCTIONS(STRATA_ENUMERATOR)
#undef STRATA_ENUMERATOR
    device_properties,
    pointer_range,
    event_captured,
};

constexpr size_t kFunctions = static_cast<size_t>(Function::event_captured) + 1;

constexpr const char *kFunctionNames[kFunctions] = {
#define STRATA_NAME(f) #f,
    STRATA_CUDART_FUNCTIONS(STRATA_NAME)
#undef STRATA_NAME
    "device_properties",
    "pointer_range",
    "event_captured",
};

// Whether a call makes a context on its thread's current device where there is none. Those that were seen to make none on GPUs are
// named, all others count; cudaSetDevice makes one on the device that it sets.
constexpr bool makes_context(Function function) {
    switch (function) {
    case Function::cudaRuntimeGetVersion:  // which answers without a driver too
    case Function::cudaDriverGetVersion:
    case Function::cudaGetLastError:
    case Function::cudaPeekAtLastError:
    case Function::cudaGetDeviceCount:
    case Function::cudaGetDevice:
    case Function::cudaSetDevice:
    case Function::cudaDeviceGetAttribute:
    case Function::cudaDeviceGetPCIBusId:
    case Function::cudaDeviceCanAccessPeer:
    case Function::cudaPointerGetAttributes:
    case Function::device_properties:
        return false;
    default:
        return true;
    }
}

inline const char *name(Function function) { return kFunctionNames[static_cast<size_t>(function)]; }

}  // namespace host_runtime
