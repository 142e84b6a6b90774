// Words that tell of an end: what reading and storing them means to the clocks. Bytes that somebody takes for equal, and those that
// the program's own code touches.
#include "api.hpp"
#include "runtime.hpp"

namespace host_runtime::api {

void observed(const void *word) {
    Runtime::instance().by_itself([&](State &state, const ThreadState &thread, Lock &) { state.races.observe(thread, word); });
}

void published(const void *word) {
    Runtime::instance().by_itself([&](State &state, const ThreadState &thread, Lock &) { state.races.publish(thread, word); });
}

void unchanged(const void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width, size_t rows,
               cudaStream_t handle) {
    Runtime::instance().by_itself([&](State &state, const ThreadState &, Lock &lock) {
        const StreamRef stream = state.engine.find_stream(reinterpret_cast<uintptr_t>(handle));
        if (!stream || stream->capture) return;
        Comparison comparison{static_cast<const char *>(target), target_pitch, static_cast<const char *>(source), source_pitch, width,
                              rows, nullptr, nullptr};
        comparison.target_range = state.memory.locate(target, comparison.target_span()).range;
        comparison.source_range = state.memory.locate(source, comparison.source_span()).range;
        state.engine.submit(lock, Function::cudaMemcpyAsync, stream, comparison);
    });
}

void accessed(const void *start, size_t pitch, size_t width, size_t rows, int writes) {
    Runtime::instance().by_itself([&](State &state, const ThreadState &thread, Lock &) {
        for (size_t row = 0; row < rows; ++row) {
            const char *const first = static_cast<const char *>(start) + row * pitch;
            state.memory.for_each_inside(first, width, [&](const RangeRef &range, const char *at, size_t size) {
                state.races.host_access(thread, writes != 0, range, at, size);
            });
        }
    });
}

}  // namespace host_runtime::api
