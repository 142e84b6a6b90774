// Allocation, registration and questions about pointers.
#include "api.hpp"
#include "runtime.hpp"

namespace host_runtime::api {

namespace {

// What drivers from 580 on pin in one call stays below.
constexpr size_t kLargestRegistration = size_t{512} << 30;

cudaError_t allocate(Function self, RangeKind kind, void **out, size_t size) {
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &) {
        if (!out) return cudaErrorInvalidValue;
        *out = nullptr;
        return size == 0 ? cudaSuccess : state.memory.allocate(kind, thread.device, size, out);
    });
}

// The live range of this kind that begins at `start`.
RangeRef range_at(const State &state, RangeKind kind, const void *start) {
    const RangeRef range = state.memory.holding(start);
    return range && range->kind == kind && range->start == start ? range : nullptr;
}

// Work that uses the range and is only queued is found when its turn comes; work that runs must end first, since the caller
// may unmap the memory next.
void end_range(Function self, State &state, Lock &lock, const RangeRef &range) {
    if (range->users > 0)
        state.record.violation(self, range_text(range->start, range->size) + " is used by an operation that is running");
    state.engine.wait_until_unused(lock, range);
    if (!range->live) return;
    state.races.forget_words(range);
    state.memory.release(range);
}

}  // namespace

cudaError_t cudaMalloc(void **out, size_t size) { return allocate(Function::cudaMalloc, RangeKind::device, out, size); }

cudaError_t cudaFree(void *start) {
    constexpr Function self = Function::cudaFree;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &, Lock &lock) {
        if (!start) return cudaSuccess;
        const RangeRef range = range_at(state, RangeKind::device, start);
        if (!range) return cudaErrorInvalidValue;
        const cudaError_t error = state.engine.wait_for_device(lock, self, range->device);
        if (error == cudaSuccess) end_range(self, state, lock, range);
        return error;
    });
}

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
    constexpr unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    return allocate(Function::cudaHostAlloc, RangeKind::host, flags & ~known ? nullptr : out, size);
}

// Does not wait for queued work, as nothing promises that it does.
cudaError_t cudaFreeHost(void *start) {
    constexpr Function self = Function::cudaFreeHost;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &, Lock &lock) {
        if (!start) return cudaSuccess;
        const RangeRef range = range_at(state, RangeKind::host, start);
        if (!range) return cudaErrorInvalidValue;
        end_range(self, state, lock, range);
        return cudaSuccess;
    });
}

cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
    constexpr unsigned supported = cudaHostRegisterPortable | cudaHostRegisterMapped;
    constexpr unsigned unsupported = cudaHostRegisterIoMemory | cudaHostRegisterReadOnly;
    constexpr Function self = Function::cudaHostRegister;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &thread, Lock &) {
        if (!start || size == 0 || number(start) + size < size) return cudaErrorInvalidValue;
        if (flags & ~(supported | unsupported)) return cudaErrorInvalidValue;
        if (flags & unsupported) return cudaErrorNotSupported;
        if (size >= kLargestRegistration) return cudaErrorMemoryAllocation;
        return state.memory.add_registration(thread.device, start, size);
    });
}

// Does not wait for queued work either.
cudaError_t cudaHostUnregister(void *start) {
    constexpr Function self = Function::cudaHostUnregister;
    return Runtime::instance().call(self, kUnsafeInCapture, [&](State &state, ThreadState &, Lock &lock) {
        if (!start) return cudaErrorInvalidValue;
        const RangeRef range = range_at(state, RangeKind::registered, start);
        if (!range) return state.memory.holding(start) ? cudaErrorInvalidValue : cudaErrorHostMemoryNotRegistered;
        end_range(self, state, lock, range);
        return cudaSuccess;
    });
}

cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *address, unsigned flags) {
    constexpr Function self = Function::cudaHostGetDevicePointer;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &) {
        if (!device_pointer || flags != 0) return cudaErrorInvalidValue;
        const RangeRef range = state.memory.holding(address);
        if (!range || range->kind == RangeKind::device) return cudaErrorInvalidValue;
        *device_pointer = address;
        return cudaSuccess;
    });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
    constexpr Function self = Function::cudaPointerGetAttributes;
    return Runtime::instance().call(self, kNeedsContext, [&](State &state, ThreadState &, Lock &) {
        if (!attributes) return cudaErrorInvalidValue;
        void *const plain = const_cast<void *>(address);
        *attributes = {};
        const RangeRef range = state.memory.holding(address);
        if (!range) {
            attributes->type = cudaMemoryTypeUnregistered;
            attributes->device = cudaInvalidDeviceId;
            attributes->hostPointer = plain;
            return cudaSuccess;
        }
        attributes->type = range->kind == RangeKind::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        attributes->device = range->device;
        attributes->devicePointer = plain;
        attributes->hostPointer = range->kind == RangeKind::device ? nullptr : plain;
        return cudaSuccess;
    });
}

cudaError_t pointer_range(const void *address, void **start, size_t *size) {
    return Runtime::instance().driver_call(Function::pointer_range, kNeedsContext, [&](State &state) {
        const RangeRef range = state.memory.holding(address);
        if (!start || !size || !range) return cudaErrorInvalidValue;
        *start = range->start;
        *size = range->size;
        return cudaSuccess;
    });
}

}  // namespace host_runtime::api
