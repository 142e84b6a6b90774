// The one runtime of the process: its parts, its lock, and what every call has in common.
#pragma once

#include "capture.hpp"
#include "engine.hpp"
#include "faults.hpp"
#include "functions.hpp"
#include "memory.hpp"
#include "operations.hpp"
#include "peers.hpp"
#include "races.hpp"
#include "record.hpp"
#include "thread_state.hpp"

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <unordered_map>
#include <vector>

namespace host_runtime {

struct Config {
    int devices = 1;
    std::optional<uint64_t> seed{};                // scheduled mode
    size_t memory = size_t{64} << 30;              // of each device
    size_t pinned = std::numeric_limits<size_t>::max();  // allocated and registered together
    bool races = false;                            // whether they are looked for
    std::vector<uint8_t> peers{};                  // devices x devices: who can reach whom; empty: all
};

// All that one configuration holds. Used with the runtime's lock held.
struct State {
    State(const Config &config, uint64_t number)
        : number(number), devices(config.devices), contexts(static_cast<size_t>(config.devices)),
          memory(config.devices, config.memory, config.pinned), peers(config.devices, config.peers), races(record, config.races),
          engine(record, races, faults, config.devices, config.seed) {}

    const uint64_t number;
    const int devices;
    std::vector<bool> contexts;  // of each device: CUDA would have made one
    Record record;
    Faults faults;
    Memory memory;
    Peers peers;
    Captures captures;
    Races races;
    std::unordered_map<uint64_t, EventRef> events;
    Engine engine;
};

constexpr size_t kMaxPitch = 0x7fffffff;

enum Traits : unsigned {
    kPlain = 0,
    kNeedsContext = 1,         // fails when a sticky error has killed the context
    kUnsafeInCapture = 2 | 1,  // besides, fails and spoils a capture whose mode forbids it
};

class Runtime {
public:
    // Never destroyed: worker threads may outlive the static objects of a process that exits.
    static Runtime &instance();

    void configure(const Config &config);

    // The frame of every function of the table: counts the call, lets a fault take its place, and keeps the thread's last
    // error. `body` gets the state, the thread and the lock, and returns the code.
    template <class Body>
    cudaError_t call(Function function, unsigned traits, Body body) {
        if (forked) return cudaErrorInitializationError;
        let_work(4);
        Lock lock(mutex);
        ThreadState &thread = enter();
        const std::optional<cudaError_t> refusal = admit(function, traits, thread);
        cudaError_t code = refusal.value_or(cudaSuccess);
        if (!refusal) {
            try {
                code = body(*state, thread, lock);
            } catch (const std::bad_alloc &) {
                code = cudaErrorMemoryAllocation;
            } catch (const std::system_error &) {
                code = cudaErrorOperatingSystem;
            }
        }
        if (code != cudaSuccess && code != cudaErrorNotReady) thread.last_error = code;
        return code;
    }
    // The same for what comes from the driver, which leaves no last error.
    template <class Body>
    cudaError_t driver_call(Function function, unsigned traits, Body body) {
        if (forked) return cudaErrorInitializationError;
        Lock lock(mutex);
        const std::optional<cudaError_t> refusal = admit(function, traits, enter());
        return refusal ? *refusal : body(*state);
    }
    // The same for the calls that are about the last error and so must not change it.
    cudaError_t last_error(Function function, bool clear);

    // What the program's threads do by themselves: `body` gets the state and the thread. Host functions are not looked at.
    template <class Body>
    void by_itself(Body body) {
        if (forked || !looks_for_races_.load(std::memory_order_acquire)) return;  // a poll may be here: it takes no lock for nothing
        Lock lock(mutex);
        const ThreadState &thread = enter();
        if (state->races.on() && !thread.in_host_function) body(*state, thread, lock);
    }
    // Scheduled mode: takes over a program's worker, or lets it go (null). False in threads mode.
    bool adopt(int (*step)());
    // Calls the worker in one of so many cases, as a thread of its own would be.
    void let_work(unsigned one_in) {
        if (worker_.load(std::memory_order_acquire)) maybe_work(one_in);
    }
    // A thread ends. It may be in a fork, where nobody gives back the lock.
    void leave(const ThreadState &thread);

    // Handles are numbers that are never used twice, in the life of the process: use after destruction is always found.
    uint64_t new_handle() { return next_handle_++; }

    std::mutex mutex;
    std::unique_ptr<State> state;
    // This process is a fork of the one that used the runtime. It may not use it, and the lock may be held by a thread that is not here.
    bool forked = false;

private:
    Runtime();
    ThreadState &enter();
    // Counts a call. The code of one that shall do nothing; the others make a context where CUDA's would.
    std::optional<cudaError_t> admit(Function function, unsigned traits, ThreadState &thread);

    void maybe_work(unsigned one_in);

    std::mutex configuring_;
    std::atomic<int (*)()> worker_{nullptr};
    std::mutex working_;
    ThreadState worker_thread_;  // what belongs to the worker as a thread
    int worker_device_ = 0;  // on which it stands: that of the thread that lent it
    std::atomic<bool> looks_for_races_{false};
    uint64_t next_handle_ = 0x10000;  // far from the handles 0, 1 and 2 of the legacy and per-thread streams
};

template <class Handle>
uint64_t number(Handle handle) {
    return reinterpret_cast<uintptr_t>(handle);
}

}  // namespace host_runtime
