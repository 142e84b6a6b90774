#include "runtime.hpp"

#include <pthread.h>

namespace host_runtime {

namespace {

struct Departure {
    ~Departure() { Runtime::instance().leave(this_thread()); }
};

}  // namespace

Runtime &Runtime::instance() {
    static Runtime *const runtime = new Runtime;
    return *runtime;
}

void Runtime::configure(const Config &config) {
    const std::lock_guard one_at_a_time(configuring_);
    Lock lock(mutex);
    const uint64_t number = state->number + 1;
    state->engine.stop(lock);
    state = std::make_unique<State>(config, number);
    looks_for_races_.store(config.races, std::memory_order_release);
}

cudaError_t Runtime::last_error(Function function, bool clear) {
    if (forked) return cudaErrorInitializationError;
    const Lock lock(mutex);
    ThreadState &thread = enter();
    if (const std::optional<cudaError_t> refusal = admit(function, kNeedsContext, thread)) return *refusal;
    const cudaError_t code = thread.last_error;
    if (clear) thread.last_error = cudaSuccess;
    return code;
}

bool Runtime::adopt(int (*step)()) {
    const Lock lock(mutex);
    const bool adopts = step && state->engine.scheduled();
    if (adopts) worker_device_ = enter().device;
    worker_.store(adopts ? step : nullptr, std::memory_order_release);
    return adopts;
}

void Runtime::maybe_work(unsigned one_in) {
    static thread_local bool working = false;
    if (working || this_thread().in_host_function) return;
    const Lock one_at_a_time(working_, std::try_to_lock);
    if (!one_at_a_time.owns_lock()) return;
    {
        const Lock lock(mutex);
        if (!state->engine.scheduled() || !state->engine.happens(one_in)) return;
    }
    working = true;
    const ThreadState caller = this_thread();
    this_thread() = worker_thread_;
    if (int (*const step)() = worker_.load(std::memory_order_acquire)) step();
    worker_thread_ = this_thread();
    this_thread() = caller;
    working = false;
}

void Runtime::leave(const ThreadState &thread) {
    const Lock lock(mutex, std::try_to_lock);
    if (lock.owns_lock() && thread.number > 0 && thread.configuration == state->number) state->races.leave(thread.number);
}

Runtime::Runtime() : state(std::make_unique<State>(Config{}, 1)) {
    worker_thread_.worker = true;
    pthread_atfork(nullptr, nullptr, [] { instance().forked = true; });
}

ThreadState &Runtime::enter() {
    ThreadState &thread = this_thread();
    if (thread.configuration != state->number) {
        const bool in_host_function = thread.in_host_function, worker = thread.worker;
        thread = ThreadState{};
        thread.configuration = state->number;
        thread.in_host_function = in_host_function;
        thread.worker = worker;
        if (worker) thread.device = worker_device_;
        if (!in_host_function) {
            state->races.enter(thread);
            static thread_local const Departure departure;
        }
    }
    return thread;
}

std::optional<cudaError_t> Runtime::admit(Function function, unsigned traits, ThreadState &thread) {
    const uint64_t calls = thread.call = state->record.count(function);
    if (state->engine.stopped()) return cudaErrorCudartUnloading;
    if (thread.in_host_function) {
        state->record.violation(function, "called inside a host function");
        return cudaErrorNotPermitted;
    }
    if (const std::optional<cudaError_t> fault = state->faults.next(function, calls)) {
        state->engine.wake_all();  // it may have ended the context
        return fault;
    }
    if (traits & kNeedsContext && state->faults.dead() != cudaSuccess) return state->faults.dead();
    if ((traits & kUnsafeInCapture) == kUnsafeInCapture && state->captures.forbid(thread.capture_mode))
        return cudaErrorStreamCaptureUnsupported;
    if (makes_context(function)) state->contexts[static_cast<size_t>(thread.device)] = true;
    return std::nullopt;
}

}  // namespace host_runtime
