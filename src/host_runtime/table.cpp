#include "api.hpp"
#include "host_runtime.h"

extern "C" const strata_cudart *host_runtime_table(void) {
    static const strata_cudart table = {
#define STRATA_ENTRY(f) host_runtime::api::f,
        STRATA_CUDART_FUNCTIONS(STRATA_ENTRY)
#undef STRATA_ENTRY
            host_runtime::api::device_properties,
        host_runtime::api::pointer_range,
        host_runtime::api::event_captured,
        host_runtime::api::observed,
        host_runtime::api::published,
        host_runtime::api::adopt_worker,
        host_runtime::api::idle,
        host_runtime::api::unchanged,
        host_runtime::api::accessed,
    };
    return &table;
}
