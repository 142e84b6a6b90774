// Streams, host functions and captures.
#include "api.hpp"
#include "stream_access.hpp"

namespace host_runtime::api {

namespace {

bool is_mode(cudaStreamCaptureMode mode) { return mode >= cudaStreamCaptureModeGlobal && mode <= cudaStreamCaptureModeRelaxed; }

// A stream that captures has nothing to wait for, and asking it spoils the capture whatever the thread's mode is.
bool spoils_capture(const StreamRef &stream) {
    if (stream->capture) stream->capture->invalidated = true;
    return stream->capture != nullptr;
}

}  // namespace

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    constexpr Function self = Function::cudaStreamCreateWithFlags;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &thread, Lock &lock) {
        if (!out || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
        const StreamRef stream = state.engine.open_stream(lock, Runtime::instance().new_handle(), thread.device);
        *out = reinterpret_cast<cudaStream_t>(stream->handle);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    constexpr Function self = Function::cudaStreamDestroy;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (stream->capture) state.captures.end(stream->capture);
        state.engine.close_stream(stream);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    constexpr Function self = Function::cudaStreamQuery;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &lock) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (spoils_capture(stream)) return cudaErrorStreamCaptureUnsupported;
        const Point end{stream, stream->queued};
        const Clock known = stream->timeline.clock;  // others may queue more meanwhile
        if (!end.reached()) state.engine.make_progress(lock);
        if (!end.reached()) return cudaErrorNotReady;
        state.races.learn(thread, known);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    constexpr Function self = Function::cudaStreamSynchronize;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &lock) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (spoils_capture(stream)) return cudaErrorStreamCaptureUnsupported;
        const Clock known = stream->timeline.clock;
        const cudaError_t error = state.engine.wait(lock, self, {stream, stream->queued});
        if (error == cudaSuccess) state.races.learn(thread, known);
        return error;
    });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
    constexpr Function self = Function::cudaLaunchHostFunc;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &lock) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        return function ? submit(state, lock, self, stream, HostCall{function, data}) : cudaErrorInvalidValue;
    });
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    constexpr Function self = Function::cudaStreamBeginCapture;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (!is_mode(mode)) return cudaErrorInvalidValue;
        if (stream->capture) return cudaErrorIllegalState;
        stream->capture = state.captures.begin(mode);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    constexpr Function self = Function::cudaStreamEndCapture;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (!graph) return cudaErrorInvalidValue;
        const CaptureRef capture = stream->capture;
        if (!capture) return cudaErrorIllegalState;
        if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
            return cudaErrorStreamCaptureWrongThread;
        state.captures.end(capture);
        stream->capture = nullptr;
        *graph = nullptr;
        if (capture->invalidated) return cudaErrorStreamCaptureInvalidated;
        const uint64_t made = Runtime::instance().new_handle();
        state.captures.add_graph(made, capture->nodes);
        *graph = reinterpret_cast<cudaGraph_t>(made);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
    constexpr Function self = Function::cudaStreamIsCapturing;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (!status) return cudaErrorInvalidValue;
        *status = !stream->capture                ? cudaStreamCaptureStatusNone
                  : stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                                  : cudaStreamCaptureStatusActive;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    return Runtime::instance().call(Function::cudaGraphDestroy, kPlain, [&](State &state, ThreadState &, Lock &) {
        return state.captures.destroy_graph(number(graph)) ? cudaSuccess : cudaErrorInvalidValue;
    });
}

// Counts nodes only: their handles are not given.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    return Runtime::instance().call(Function::cudaGraphGetNodes, kPlain, [&](State &state, ThreadState &, Lock &) {
        const std::optional<size_t> found = state.captures.nodes(number(graph));
        if (!found || !count) return cudaErrorInvalidValue;
        if (nodes) return cudaErrorNotSupported;
        *count = *found;
        return cudaSuccess;
    });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    constexpr Function self = Function::cudaThreadExchangeStreamCaptureMode;
    return Runtime::instance().call(self, kPlain, [&](State &, ThreadState &thread, Lock &) {
        if (!mode || !is_mode(*mode)) return cudaErrorInvalidValue;
        std::swap(*mode, thread.capture_mode);
        return cudaSuccess;
    });
}

}  // namespace host_runtime::api
