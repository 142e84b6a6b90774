#include "control.hpp"

#include <algorithm>

namespace host_runtime {

namespace {

Runtime &runtime() { return Runtime::instance(); }

}  // namespace

void configure(const Config &config) { runtime().configure(config); }

size_t function_count() { return kFunctions; }

const char *function_name(size_t index) { return kFunctionNames[index]; }

uint64_t function_calls(size_t index) {
    const Lock lock(runtime().mutex);
    return runtime().state->record.calls(static_cast<Function>(index));
}

bool fail(const std::string &function, uint64_t nth, int code, bool forever) {
    const auto *const found = std::find(std::begin(kFunctionNames), std::end(kFunctionNames), function);
    if (found == std::end(kFunctionNames)) return false;
    const auto which = static_cast<Function>(found - std::begin(kFunctionNames));
    const Lock lock(runtime().mutex);
    State &state = *runtime().state;
    state.faults.fail(which, state.record.calls(which) + nth, static_cast<cudaError_t>(code), forever);
    return true;
}

void corrupt(uint64_t nth) {
    const Lock lock(runtime().mutex);
    runtime().state->faults.corrupt(nth);
}

uint64_t clear_faults() {
    const Lock lock(runtime().mutex);
    return runtime().state->faults.clear();
}

Live live() {
    const Lock lock(runtime().mutex);
    const State &state = *runtime().state;
    return {state.engine.open_streams(), state.events.size(), state.memory.count(RangeKind::registered),
            state.memory.count(RangeKind::device), state.memory.count(RangeKind::host)};
}

std::vector<ExecutedCopy> copy_log() {
    const Lock lock(runtime().mutex);
    const auto &copies = runtime().state->record.copies();
    return {copies.begin(), copies.end()};
}

std::vector<std::string> violations() {
    const Lock lock(runtime().mutex);
    return runtime().state->record.violations();
}

size_t pending() {
    const Lock lock(runtime().mutex);
    return runtime().state->engine.pending();
}

bool scheduled() {
    const Lock lock(runtime().mutex);
    return runtime().state->engine.scheduled();
}

size_t step(size_t n) {
    Lock lock(runtime().mutex);
    return runtime().state->engine.step(lock, n);
}

void drain() {
    Lock lock(runtime().mutex);
    runtime().state->engine.drain(lock);
}

}  // namespace host_runtime
