// The functions that fill the table, under the names and with the types of the real ones.
#pragma once

#include "table.h"

#include <type_traits>

namespace host_runtime::api {

#define STRATA_DECLARE(f) decltype(::f) f;
STRATA_CUDART_FUNCTIONS(STRATA_DECLARE)
#undef STRATA_DECLARE

std::remove_pointer_t<strata_device_properties_fn> device_properties;
std::remove_pointer_t<strata_pointer_range_fn> pointer_range;
std::remove_pointer_t<strata_event_captured_fn> event_captured;
std::remove_pointer_t<strata_word_fn> observed;
std::remove_pointer_t<strata_word_fn> published;
std::remove_pointer_t<strata_adopt_worker_fn> adopt_worker;
std::remove_pointer_t<strata_idle_fn> idle;
std::remove_pointer_t<strata_unchanged_fn> unchanged;
std::remove_pointer_t<strata_accessed_fn> accessed;

}  // namespace host_runtime::api
