// Copies and fills.
#include "api.hpp"
#include "stream_access.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

namespace host_runtime::api {

namespace {

bool is_device(const State &state, int device) { return device >= 0 && device < state.devices; }

// Finds the range of an operand. Pageable memory is no error here and has none.
cudaError_t place(State &state, Function self, const void *start, size_t bytes, RangeRef &range) {
    if (!start || number(start) + bytes < bytes) return cudaErrorInvalidValue;
    const Placement placement = state.memory.locate(start, bytes);
    range = placement.range;
    if (placement.where == Placement::freed)
        state.record.violation(self, range_text(start, bytes) + " was freed before the call");
    return placement.where == Placement::inside || placement.where == Placement::pageable ? cudaSuccess : cudaErrorInvalidValue;
}

bool on_device(const RangeRef &range) { return range && range->kind == RangeKind::device; }

bool lies_on(const RangeRef &range, int device) { return on_device(range) && range->device == device; }

bool fits(cudaMemcpyKind kind, bool from_device, bool to_device) {
    switch (kind) {
    case cudaMemcpyHostToHost:
        return !from_device && !to_device;
    case cudaMemcpyHostToDevice:
        return !from_device && to_device;
    case cudaMemcpyDeviceToHost:
        return from_device && !to_device;
    case cudaMemcpyDeviceToDevice:
        return from_device && to_device;
    default:
        return true;
    }
}

// Checks a copy that is not empty, and finds its ranges.
cudaError_t check(State &state, Copy &copy, cudaMemcpyKind kind) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    cudaError_t error = place(state, copy.function, copy.target, copy.target_span(), copy.target_range);
    if (error == cudaSuccess) error = place(state, copy.function, copy.source, copy.source_span(), copy.source_range);
    if (error != cudaSuccess) return error;
    if (!fits(kind, on_device(copy.source_range), on_device(copy.target_range))) return cudaErrorInvalidValue;
    if (copy.overlaps())
        state.record.violation(copy.function, range_text(copy.target, copy.target_span()) + " overlaps its source " +
                                                  range_text(copy.source, copy.source_span()));
    return cudaSuccess;
}

// A copy from one device's memory to another's, its numbers given or not. Strided ones without access between the two fail on some
// systems (pytorch#146256): the call with device numbers is the one for them.
void note_way(State &state, Copy &copy) {
    if (!on_device(copy.source_range) || !on_device(copy.target_range)) return;
    const int source = copy.source_range->device, target = copy.target_range->device;
    if (source == target) return;
    copy.fault = state.peers.next_copy(source, target);
    if (copy.function == Function::cudaMemcpy2DAsync && !state.peers.enabled(source, target))
        state.record.violation(copy.function, "rows from device " + std::to_string(source) + " to device " + std::to_string(target) +
                                                  ", which has no access: cudaMemcpy3DPeerAsync is for that");
}

// Only these return before the bytes have landed: copies between devices, and between a device and pinned memory.
bool asynchronous(const Copy &copy) {
    return copy.source_range && copy.target_range && (on_device(copy.source_range) || on_device(copy.target_range));
}

bool pageable(const Copy &copy) { return !copy.source_range || !copy.target_range; }

void stage(Copy &copy) {
    copy.staged = std::make_shared<const std::vector<char>>(copy.source, copy.source + copy.bytes());
    copy.source = copy.staged->data();
}

// Until a copy that was queued last has been executed.
cudaError_t wait_for(State &state, const ThreadState &thread, Lock &lock, const Copy &copy, const Point &end) {
    const Clock told = state.races.told_by(copy, *end.stream);
    const cudaError_t error = state.engine.wait(lock, copy.function, end);
    if (error == cudaSuccess) state.races.learn(thread, told);
    return error;
}

// A copy that holds its caller does so in its stream's order, and reads its source as late as the others.
// devices: source and target, where the call names them.
cudaError_t copy_async(Copy copy, cudaMemcpyKind kind, cudaStream_t handle, const int *devices = nullptr) {
    return Runtime::instance().call(copy.function, kNeedsContext, [&](State &state, ThreadState &thread, Lock &lock) {
        const StreamRef stream = find_stream(state, copy.function, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (devices && (!is_device(state, devices[0]) || !is_device(state, devices[1]))) return cudaErrorInvalidDevice;
        if (copy.width > copy.target_pitch || copy.width > copy.source_pitch) return cudaErrorInvalidPitchValue;
        const size_t pitch = std::max(copy.target_pitch, copy.source_pitch);
        if (copy.rows > 1 && pitch > kMaxPitch) return cudaErrorInvalidPitchValue;
        if (copy.width == 0 || copy.rows == 0) return cudaSuccess;
        if (copy.rows > std::numeric_limits<size_t>::max() / pitch) return cudaErrorInvalidValue;
        cudaError_t error = check(state, copy, kind);
        if (error != cudaSuccess) return error;
        if (devices && !lies_on(copy.source_range, devices[0])) return cudaErrorInvalidValue;
        if (devices && !lies_on(copy.target_range, devices[1])) return cudaErrorInvalidValue;
        if (stream->capture && pageable(copy)) {
            stream->capture->invalidated = true;
            return cudaErrorStreamCaptureUnsupported;
        }
        const bool holds_caller = !asynchronous(copy);
        if (!stream->capture) note_way(state, copy);
        Point end;
        error = submit(state, lock, copy.function, stream, copy, &end);
        if (error != cudaSuccess || !holds_caller || !end.stream) return error;  // no end: a capture took it
        return wait_for(state, thread, lock, copy, end);
    });
}

// Whether a row of one copy and a row of another one have a byte in common.
bool meet(const char *one, const Copy &of_one, const char *other, const Copy &of_other) {
    return number(one) < number(other) + of_other.width && number(other) < number(one) + of_one.width;
}

Copy one_row(Function function, void *target, const void *source, size_t bytes) {
    return {function, static_cast<char *>(target), bytes, static_cast<const char *>(source), bytes, bytes, 1, nullptr, nullptr};
}

}  // namespace

// Holds its caller, with two exceptions (CUDA Runtime API, API synchronization behavior). Copies between devices: "no host-side
// synchronization is performed". From pageable memory to a device it returns once the source has been staged, "but the DMA to final
// destination may not have completed".
cudaError_t cudaMemcpy(void *target, const void *source, size_t bytes, cudaMemcpyKind kind) {
    constexpr Function self = Function::cudaMemcpy;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &lock) {
        if (bytes == 0) return cudaSuccess;
        Copy copy = one_row(self, target, source, bytes);
        cudaError_t error = check(state, copy, kind);
        if (error != cudaSuccess) return error;
        Point end;
        const StreamRef queue = state.engine.blocking_queue(lock, thread.device);
        const bool stages = !copy.source_range && on_device(copy.target_range);
        if (stages) {
            error = state.engine.wait(lock, self, {queue, queue->queued});
            if (error != cudaSuccess) return error;
            stage(copy);
        }
        note_way(state, copy);
        error = state.engine.submit(lock, self, queue, copy, &end);
        if (error != cudaSuccess || stages || (on_device(copy.source_range) && on_device(copy.target_range))) return error;
        return wait_for(state, thread, lock, copy, end);
    });
}

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_async(one_row(Function::cudaMemcpyAsync, target, source, bytes), kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_async({Function::cudaMemcpy2DAsync, static_cast<char *>(target), target_pitch,
                       static_cast<const char *>(source), source_pitch, width, rows, nullptr, nullptr},
                      kind, stream);
}

cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device, size_t bytes,
                                cudaStream_t stream) {
    const int devices[] = {source_device, target_device};
    return copy_async(one_row(Function::cudaMemcpyPeerAsync, target, source, bytes), cudaMemcpyDefault, stream, devices);
}

// Of rectangles in plain memory that begin where their pointers say; the rest of what CUDA can do here nobody uses.
cudaError_t cudaMemcpy3DPeerAsync(const cudaMemcpy3DPeerParms *p, cudaStream_t stream) {
    constexpr Function self = Function::cudaMemcpy3DPeerAsync;
    const auto nothing = [](const cudaPos &pos) { return pos.x == 0 && pos.y == 0 && pos.z == 0; };
    if (!p || p->srcArray || p->dstArray || !nothing(p->srcPos) || !nothing(p->dstPos) || p->extent.depth != 1)
        return Runtime::instance().call(self, kPlain, [&](State &state, ThreadState &, Lock &) {
            state.record.violation(self, "only rectangles in plain memory are possible, at position 0 and of depth 1");
            return cudaErrorInvalidValue;
        });
    const int devices[] = {p->srcDevice, p->dstDevice};
    return copy_async({self, static_cast<char *>(p->dstPtr.ptr), p->dstPtr.pitch, static_cast<const char *>(p->srcPtr.ptr),
                       p->srcPtr.pitch, p->extent.width, p->extent.height, nullptr, nullptr},
                      cudaMemcpyDefault, stream, devices);
}

// One wrong entry refuses the whole call. "Copies within a batch are not guaranteed to execute in any specific order": no byte that an
// entry writes may be another one's.
cudaError_t cudaMemcpyBatchAsync(void *const *targets, const void *const *sources, const size_t *sizes, size_t count,
                                 cudaMemcpyAttributes *attributes, size_t *first, size_t kinds, cudaStream_t handle) {
    constexpr Function self = Function::cudaMemcpyBatchAsync;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &lock) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidValue;
        if (stream->capture) return cudaErrorStreamCaptureUnsupported;  // which goes on
        if (!targets || !sources || !sizes || count == 0 || !attributes || !first || kinds != 1 || *first != 0) return cudaErrorInvalidValue;
        if (attributes->srcAccessOrder != cudaMemcpySrcAccessOrderStream) {
            state.record.violation(self, "only sources that are read in the stream's order are possible");
            return cudaErrorInvalidValue;
        }
        std::vector<Copy> copies;
        for (size_t i = 0; i < count; ++i) {
            copies.push_back(one_row(self, targets[i], sources[i], sizes[i]));
            if (sizes[i] == 0) return cudaErrorInvalidValue;
            if (const cudaError_t error = check(state, copies.back(), cudaMemcpyDefault); error != cudaSuccess) return error;
            if (pageable(copies.back())) return cudaErrorInvalidValue;
        }
        for (const Copy &copy : copies)
            for (const Copy &other : copies)
                if (&copy != &other && (meet(copy.target, copy, other.target, other) || meet(copy.target, copy, other.source, other)))
                    state.record.violation(self, range_text(copy.target, copy.bytes()) + " is another entry's too");
        state.engine.disorder(copies);
        for (Copy &copy : copies) {
            note_way(state, copy);
            if (const cudaError_t error = submit(state, lock, self, stream, copy); error != cudaSuccess) return error;
        }
        return cudaSuccess;
    });
}

cudaError_t cudaMemsetAsync(void *target, int value, size_t bytes, cudaStream_t handle) {
    constexpr Function self = Function::cudaMemsetAsync;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &lock) {
        const StreamRef stream = find_stream(state, self, handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (bytes == 0) return cudaSuccess;
        Fill fill{static_cast<char *>(target), value, bytes, nullptr};
        const cudaError_t error = place(state, self, target, bytes, fill.range);
        if (error != cudaSuccess) return error;
        if (!fill.range) return cudaErrorInvalidValue;  // a GPU has no access to pageable memory
        return submit(state, lock, self, stream, std::move(fill));
    });
}

}  // namespace host_runtime::api
