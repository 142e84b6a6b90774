// What happened: calls, executed copies, violations. The caller holds the runtime's lock.
#pragma once

#include "functions.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace host_runtime {

struct ExecutedCopy {
    const char *function;
    uint64_t stream;  // 0 for the blocking cudaMemcpy
    size_t bytes;
};

// An event that was recorded in a stream, that a stream was told to wait for, or (stream 0) that a thread found complete.
struct OrderCall {
    const char *function;
    uint64_t stream;
    uint64_t event;
};

class Record {
public:
    uint64_t count(Function function);
    uint64_t calls(Function function) const { return calls_[static_cast<size_t>(function)]; }

    // From now on it is kept where each call came from: a number for the way down to it through the program. Calls of one loop
    // have the same one.
    void keep_paths() { keeps_paths_ = true; }
    const std::vector<uint64_t> &paths(Function function) const { return paths_[static_cast<size_t>(function)]; }

    void executed(Function function, uint64_t stream, size_t bytes);
    const std::deque<ExecutedCopy> &copies() const { return copies_; }

    void ordered(Function function, uint64_t stream, uint64_t event);
    const std::deque<OrderCall> &orders() const { return orders_; }

    // Something that a real runtime would let pass, or would report only sometimes.
    void violation(Function function, const std::string &what) { violation(std::string(name(function)) + ": " + what); }
    void violation(std::string text);
    const std::vector<std::string> &violations() const { return violations_; }

private:
    std::array<uint64_t, kFunctions> calls_{};
    bool keeps_paths_ = false;
    std::array<std::vector<uint64_t>, kFunctions> paths_;
    std::deque<ExecutedCopy> copies_;
    std::deque<OrderCall> orders_;
    std::vector<std::string> violations_;
};

// "[0x7f0000001000, +4096)"
std::string range_text(const void *start, size_t bytes);

}  // namespace host_runtime
