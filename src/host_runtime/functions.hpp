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

inline const char *name(Function function) { return kFunctionNames[static_cast<size_t>(function)]; }

}  // namespace host_runtime
