// Executes what the streams hold, never inside the call that queues it. Either every stream has a worker thread, or (scheduled
// mode) a thread that has to wait picks ready operations at random until it need not wait any longer.
//
// All functions are called with the runtime's lock held; those that take it as an argument may release it in between.
#pragma once

#include "faults.hpp"
#include "operations.hpp"
#include "races.hpp"
#include "record.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

namespace host_runtime {

using Lock = std::unique_lock<std::mutex>;

class Engine {
public:
    Engine(Record &record, Races &races, Faults &faults, int devices, std::optional<uint64_t> seed);

    StreamRef open_stream(Lock &lock, uint64_t handle, int device);
    void close_stream(const StreamRef &stream);
    StreamRef find_stream(uint64_t handle) const;
    // The queue of the blocking cudaMemcpy of a device, made on its first use. No handle leads to it.
    StreamRef blocking_queue(Lock &lock, int device);

    // Queues an operation; blocks while the queue is full. `end` is reached when the operation has been executed.
    cudaError_t submit(Lock &lock, Function caller, const StreamRef &stream, Operation operation, Point *end = nullptr);
    // Blocks until the point is reached. Fails when the context dies or the engine is stopped meanwhile.
    cudaError_t wait(Lock &lock, Function caller, const Point &point);
    cudaError_t wait_for_device(Lock &lock, Function caller, int device);
    // What is known once all that the device's streams hold now has been executed.
    Clock known_behind_device(int device) const;
    // For threads that wait in a context that has died.
    void wake_all() { progress_.notify_all(); }
    // Blocks while a running operation uses the range.
    void wait_until_unused(Lock &lock, const RangeRef &range);
    // Scheduled mode: executes 1 to 4 ready operations, so that a loop that polls comes to its end.
    void make_progress(Lock &lock);

    // Scheduled mode: the seed's choice, true in one of so many cases.
    bool happens(unsigned one_in) { return (*random_)() % one_in == 0; }

    bool scheduled() const { return random_.has_value(); }
    // Of things that have no order.
    template <typename T>
    void disorder(std::vector<T> &things) {
        if (scheduled()) std::shuffle(things.begin(), things.end(), *random_);
    }
    size_t step(Lock &lock, size_t n);
    void drain(Lock &lock);
    // Drops what is queued, waits for what is running and ends the workers. Threads that wait return with an error.
    void stop(Lock &lock);
    bool stopped() const { return stopped_; }

    size_t pending() const;
    size_t fullest() const { return fullest_; }  // the most that one stream has held
    size_t open_streams() const;

private:
    cudaError_t broken() const;
    StreamRef start_stream(Lock &lock, uint64_t handle, int device);
    void work(Lock lock, const StreamRef &stream);
    void reap();

    bool ready(const Stream &stream) const;
    StreamRef choose(const StreamRef &awaited);
    void execute(Lock &lock, const StreamRef &stream);
    void run(Lock &lock, const Stream &stream, const Copy &copy);
    void run(Lock &lock, const Stream &stream, const Fill &fill);
    void run(Lock &lock, const Stream &stream, const Comparison &comparison);
    void run(Lock &lock, const Stream &stream, const Recording &recording);
    void run(Lock &lock, const Stream &stream, const Waiting &waiting);
    void run(Lock &lock, const Stream &stream, const HostCall &call);
    bool usable(Function function, const RangeRef &range, const char *start, size_t bytes);
    void sleep_until(Lock &lock, const Point &point);

    Record &record_;
    Races &races_;
    Faults &faults_;
    std::optional<std::mt19937_64> random_;
    std::map<uint64_t, StreamRef> streams_;  // in order, so that a seed stands for one order; with closed ones and queues
    std::vector<StreamRef> blocking_queues_;
    std::condition_variable progress_;  // an operation that somebody sleeps for has been executed
    size_t fullest_ = 0;                // operations in one stream
    size_t running_ = 0;                // operations
    size_t waiting_ = 0;                // threads that are inside a function that waits
    size_t waiting_for_any_ = 0;        // those of them that any operation may concern
    bool stopped_ = false;
};

}  // namespace host_runtime
