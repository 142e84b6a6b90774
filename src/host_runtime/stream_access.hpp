// Finding the stream of a call.
#pragma once

#include "runtime.hpp"

namespace host_runtime {

// The stream, or null for a handle that no living stream has. The legacy and the per-thread stream are among those: they order
// work in ways that a caller never means here, so their use is a violation too.
inline StreamRef find_stream(State &state, Function caller, cudaStream_t handle) {
    if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
        state.record.violation(caller, "legacy stream " + std::to_string(number(handle)));
        return nullptr;
    }
    return state.engine.find_stream(number(handle));
}

// Queues an operation. A stream that captures takes it and executes nothing.
inline cudaError_t submit(State &state, Lock &lock, Function caller, const StreamRef &stream, Operation operation,
                          Point *end = nullptr) {
    if (stream->capture) {
        if (stream->capture->invalidated) return cudaErrorStreamCaptureInvalidated;
        ++stream->capture->nodes;
        return cudaSuccess;
    }
    return state.engine.submit(lock, caller, stream, std::move(operation), end);
}

}  // namespace host_runtime
