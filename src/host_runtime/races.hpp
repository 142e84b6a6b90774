// Finds accesses that nothing orders, whatever order they happen to be executed in. Each stream and each thread of the program is
// a timeline with a vector clock. Knowledge goes
//   - along a stream and along a thread,
//   - from a thread to the operation that it queues,
//   - from a recorded event to the streams that wait for that record,
//   - to a thread from what it waited for, or found complete, or was blocked by,
//   - through words: a device writes one, or a thread publishes one, and a thread observes it.
// Order is only ever made from what was queued before to what is queued later, so each access is judged when it is queued.
//
// Memory that CUDA does not know is not looked at: the C library gives it to the next caller without a trace here. A host function
// (cudaLaunchHostFunc) may not declare accesses.
//
// The caller holds the runtime's lock.
#pragma once

#include "clock.hpp"
#include "operations.hpp"
#include "record.hpp"
#include "thread_state.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace host_runtime {

class Races {
public:
    Races(Record &record, bool on) : record_(record), on_(on) {}

    bool on() const { return on_; }

    // A timeline for a stream.
    void open(Timeline &timeline);
    // A thread's first call. It knows what all threads knew then: who started it, nobody tells.
    void enter(ThreadState &thread);
    // A thread of the program has ended.
    void leave(size_t thread);

    // An operation goes into its stream's queue.
    void queued(const ThreadState &thread, Function function, Stream &stream, Operation &operation);
    // An operation with a clock for whoever sees the word that it wrote.
    void executed(const Copy &copy) { executed(copy.target, copy.told); }
    void executed(const Fill &fill) { executed(fill.target, fill.told); }

    // A thread learns that something is over.
    void learn(const ThreadState &thread, const Clock &clock);
    // What the return of a copy that holds its caller says.
    Clock told_by(const Copy &copy, const Stream &stream) const;

    // The program's own code reads or writes memory.
    void host_access(const ThreadState &thread, bool writes, const RangeRef &range, const char *start, size_t bytes);

    // The words.
    void publish(const ThreadState &thread, const void *word);
    void observe(const ThreadState &thread, const void *word);
    void forget_words(const RangeRef &range);

private:
    struct HostThread {
        Timeline timeline;
        bool gone = false;
    };

    void executed(const void *target, const ClockRef &told);
    void note(const RangeRef &range, const Access &access, const Clock &clock);
    const Clock &common();

    Record &record_;
    const bool on_;
    size_t timelines_ = 0;
    std::vector<HostThread> threads_;
    Clock departed_;  // what the threads that have ended knew
    Clock common_;    // what every thread knows, and so all that is still to come
    uint64_t noted_ = 0;
    uint64_t host_accesses_ = 0;
    std::map<uintptr_t, Clock> words_;
};

}  // namespace host_runtime
