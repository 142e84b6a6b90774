// Events.
#include "api.hpp"
#include "stream_access.hpp"

#include <chrono>

namespace host_runtime::api {

namespace {

EventRef find_event(const State &state, cudaEvent_t handle) {
    const auto found = state.events.find(number(handle));
    return found == state.events.end() ? nullptr : found->second;
}

// A captured event has no state; whoever asks for it ends the capture.
cudaError_t end_capture_of(const Event &event) {
    event.capture->invalidated = true;
    return cudaErrorCapturedEvent;
}

// An event that was never recorded counts as complete and orders nothing, which is never what the caller means.
bool recorded(State &state, Function caller, const Event &event) {
    if (!event.mark) state.record.violation(caller, "unrecorded event");
    return event.mark != nullptr;
}

}  // namespace

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    constexpr Function self = Function::cudaEventCreateWithFlags;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &thread, Lock &) {
        if (!out || flags & ~(cudaEventBlockingSync | cudaEventDisableTiming)) return cudaErrorInvalidValue;
        const uint64_t handle = Runtime::instance().new_handle();
        state.events[handle] = std::make_shared<Event>(Event{thread.device, (flags & cudaEventDisableTiming) == 0});
        *out = reinterpret_cast<cudaEvent_t>(handle);
        return cudaSuccess;
    });
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    return Runtime::instance().call(Function::cudaEventDestroy, kNeedsContext, [&](State &state, ThreadState &, Lock &) {
        return state.events.erase(number(handle)) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle;
    });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    constexpr Function self = Function::cudaEventRecord;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &lock) {
        const StreamRef stream = find_stream(state, self, stream_handle);
        const EventRef event = find_event(state, handle);
        if (!stream || !event || stream->device != event->device) return cudaErrorInvalidResourceHandle;
        if (stream->capture) {
            if (stream->capture->invalidated) return cudaErrorStreamCaptureInvalidated;
            event->capture = stream->capture;
            return cudaSuccess;
        }
        const auto mark = std::make_shared<Mark>();
        const cudaError_t error = state.engine.submit(lock, self, stream, Recording{mark}, &mark->point);
        if (error != cudaSuccess) return error;
        state.record.ordered(self, stream->handle, number(handle));
        event->mark = mark;
        event->capture = nullptr;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
    constexpr Function self = Function::cudaStreamWaitEvent;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &lock) {
        const StreamRef stream = find_stream(state, self, stream_handle);
        const EventRef event = find_event(state, handle);
        if (!stream || !event) return cudaErrorInvalidResourceHandle;
        if (flags != cudaEventWaitDefault) return cudaErrorInvalidValue;
        if (event->capture != nullptr && event->capture != stream->capture) {
            event->capture->invalidated = true;
            return cudaErrorInvalidValue;
        }
        if (stream->capture) {
            if (stream->capture->invalidated) return cudaErrorStreamCaptureInvalidated;
            if (event->capture) return cudaSuccess;
            stream->capture->invalidated = true;
            return cudaErrorStreamCaptureIsolation;
        }
        if (!recorded(state, self, *event)) return cudaSuccess;
        state.record.ordered(self, stream->handle, number(handle));
        return state.engine.submit(lock, self, stream, Waiting{event->mark});
    });
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    constexpr Function self = Function::cudaEventQuery;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &lock) {
        const EventRef event = find_event(state, handle);
        if (!event) return cudaErrorInvalidResourceHandle;
        if (event->capture) return end_capture_of(*event);
        if (!recorded(state, self, *event)) return cudaSuccess;
        const MarkRef mark = event->mark;
        if (!mark->point.reached()) state.engine.make_progress(lock);
        if (!mark->point.reached()) return cudaErrorNotReady;
        state.record.ordered(self, 0, number(handle));
        state.races.learn(thread, mark->known);
        return cudaSuccess;
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    constexpr Function self = Function::cudaEventSynchronize;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &lock) {
        const EventRef event = find_event(state, handle);
        if (!event) return cudaErrorInvalidResourceHandle;
        if (event->capture) return end_capture_of(*event);
        if (!recorded(state, self, *event)) return cudaSuccess;
        const MarkRef mark = event->mark;
        const cudaError_t error = state.engine.wait(lock, self, mark->point);
        if (error == cudaSuccess) state.races.learn(thread, mark->known);
        return error;
    });
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
    constexpr Function self = Function::cudaEventElapsedTime;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &thread, Lock &) {
        if (!milliseconds) return cudaErrorInvalidValue;
        const EventRef start = find_event(state, start_handle), end = find_event(state, end_handle);
        if (!start || !end) return cudaErrorInvalidResourceHandle;
        if (start->capture || end->capture) return cudaErrorCapturedEvent;  // before timing is looked at, and the capture stays valid
        if (!start->timed || !end->timed || start->device != end->device) return cudaErrorInvalidResourceHandle;
        if (!start->mark || !end->mark) return cudaErrorInvalidResourceHandle;
        if (!start->mark->point.reached() || !end->mark->point.reached()) return cudaErrorNotReady;
        state.races.learn(thread, start->mark->known);
        state.races.learn(thread, end->mark->known);
        *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
        return cudaSuccess;
    });
}

cudaError_t event_captured(cudaEvent_t handle) {
    return Runtime::instance().driver_call(Function::event_captured, kNeedsContext, [&](State &state) {
        const EventRef event = find_event(state, handle);
        return event && event->capture ? cudaErrorCapturedEvent : cudaSuccess;
    });
}

}  // namespace host_runtime::api
