#include "control.hpp"

#include "api.hpp"

#include <algorithm>

namespace host_runtime {

namespace {

Runtime &runtime() { return Runtime::instance(); }

std::optional<Function> find(const std::string &function) {
    const auto *const found = std::find(std::begin(kFunctionNames), std::end(kFunctionNames), function);
    if (found == std::end(kFunctionNames)) return std::nullopt;
    return static_cast<Function>(found - std::begin(kFunctionNames));
}

bool gives_nothing_back(Function function) {
    switch (function) {
    case Function::cudaSetDevice:
    case Function::cudaDeviceSynchronize:
    case Function::cudaFree:
    case Function::cudaFreeHost:
    case Function::cudaHostRegister:
    case Function::cudaHostUnregister:
    case Function::cudaMemcpy:
    case Function::cudaMemcpyAsync:
    case Function::cudaMemcpy2DAsync:
    case Function::cudaMemcpyPeerAsync:
    case Function::cudaMemcpy3DPeerAsync:
    case Function::cudaMemcpyBatchAsync:
    case Function::cudaDeviceEnablePeerAccess:
    case Function::cudaDeviceDisablePeerAccess:
    case Function::cudaMemsetAsync:
    case Function::cudaStreamDestroy:
    case Function::cudaStreamQuery:
    case Function::cudaStreamSynchronize:
    case Function::cudaStreamWaitEvent:
    case Function::cudaLaunchHostFunc:
    case Function::cudaEventDestroy:
    case Function::cudaEventRecord:
    case Function::cudaEventQuery:
    case Function::cudaEventSynchronize:
        return true;
    default:
        return false;
    }
}

}  // namespace

void configure(const Config &config) { runtime().configure(config); }

size_t function_count() { return kFunctions; }

const char *function_name(size_t index) { return kFunctionNames[index]; }

uint64_t function_calls(size_t index) {
    const Lock lock(runtime().mutex);
    return runtime().state->record.calls(static_cast<Function>(index));
}

void keep_paths() {
    const Lock lock(runtime().mutex);
    runtime().state->record.keep_paths();
}

std::vector<uint64_t> function_paths(size_t index) {
    const Lock lock(runtime().mutex);
    return runtime().state->record.paths(static_cast<Function>(index));
}

bool fail(const std::string &function, uint64_t nth, int code, bool forever) {
    const std::optional<Function> which = find(function);
    if (!which) return false;
    const Lock lock(runtime().mutex);
    State &state = *runtime().state;
    state.faults.fail(*which, state.record.calls(*which) + nth, static_cast<cudaError_t>(code), forever);
    return true;
}

bool skip(const std::string &function, uint64_t nth) {
    const std::optional<Function> which = find(function);
    if (!which || !gives_nothing_back(*which)) return false;
    const Lock lock(runtime().mutex);
    State &state = *runtime().state;
    state.faults.skip(*which, state.record.calls(*which) + nth);
    return true;
}

void delay(uint64_t nth) {
    const Lock lock(runtime().mutex);
    runtime().state->faults.delay(nth);
}

void corrupt(uint64_t nth) {
    const Lock lock(runtime().mutex);
    runtime().state->faults.corrupt(nth);
}

void break_peer(int source, int target, PeerFault fault, uint64_t first, uint64_t last) {
    const Lock lock(runtime().mutex);
    runtime().state->peers.break_way(source, target, fault, first, last);
}

uint64_t peer_copies(int source, int target) {
    const Lock lock(runtime().mutex);
    return runtime().state->peers.copies(source, target);
}

uint64_t configuration() {
    const Lock lock(runtime().mutex);
    return runtime().state->number;
}

uint64_t clear_faults() {
    const Lock lock(runtime().mutex);
    return runtime().state->faults.clear();
}

void host_access(const void *start, size_t bytes, bool writes) {
    api::accessed(start, bytes, bytes, 1, writes);
}

Live live() {
    const Lock lock(runtime().mutex);
    const State &state = *runtime().state;
    return {state.engine.open_streams(), state.events.size(), state.memory.count(RangeKind::registered),
            state.memory.count(RangeKind::device), state.memory.count(RangeKind::host)};
}

Registered registered() {
    const Lock lock(runtime().mutex);
    const Memory &memory = runtime().state->memory;
    return {memory.registered(), memory.most_registered()};
}

std::vector<int> contexts() {
    const Lock lock(runtime().mutex);
    const State &state = *runtime().state;
    std::vector<int> found;
    for (int device = 0; device < state.devices; ++device)
        if (state.contexts[static_cast<size_t>(device)]) found.push_back(device);
    return found;
}

std::vector<ExecutedCopy> copy_log() {
    const Lock lock(runtime().mutex);
    const auto &copies = runtime().state->record.copies();
    return {copies.begin(), copies.end()};
}

std::vector<OrderCall> order_log() {
    const Lock lock(runtime().mutex);
    const auto &orders = runtime().state->record.orders();
    return {orders.begin(), orders.end()};
}

std::vector<std::string> violations() {
    const Lock lock(runtime().mutex);
    return runtime().state->record.violations();
}

size_t fullest() {
    const Lock lock(runtime().mutex);
    return runtime().state->engine.fullest();
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
    if (runtime().forked) return;
    Lock lock(runtime().mutex);
    runtime().state->engine.drain(lock);
}

}  // namespace host_runtime
