// Vector clocks: what is known to be over. The caller holds the runtime's lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace host_runtime {

// For each timeline (a stream, or a thread of the program) the step up to which its work is known to be over.
class Clock {
public:
    uint64_t at(size_t timeline) const { return timeline < steps_.size() ? steps_[timeline] : 0; }
    void set(size_t timeline, uint64_t step) {
        if (timeline >= steps_.size()) steps_.resize(timeline + 1);
        steps_[timeline] = step;
    }
    // Knows what either knew.
    void join(const Clock &other) {
        if (other.steps_.size() > steps_.size()) steps_.resize(other.steps_.size());
        for (size_t i = 0; i < other.steps_.size(); ++i) steps_[i] = std::max(steps_[i], other.steps_[i]);
    }
    // Knows what both knew.
    void meet(const Clock &other) {
        if (steps_.size() > other.steps_.size()) steps_.resize(other.steps_.size());
        for (size_t i = 0; i < steps_.size(); ++i) steps_[i] = std::min(steps_[i], other.steps_[i]);
    }

private:
    std::vector<uint64_t> steps_;
};

// Something whose work is done in order.
struct Timeline {
    size_t number = 0;
    Clock clock{};

    uint64_t step() {
        const uint64_t next = clock.at(number) + 1;
        clock.set(number, next);
        return next;
    }
};

}  // namespace host_runtime
