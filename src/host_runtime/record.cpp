#include "record.hpp"

#include <cinttypes>
#include <cstdio>
#include <utility>

namespace host_runtime {

namespace {
// A loop that polls, or a demo that runs for hours, must not fill the memory: the newest calls and the first violations
// are the ones that tell something.
constexpr size_t kLogged = 65536;
constexpr size_t kViolations = 1000;
}  // namespace

void Record::executed(Function function, uint64_t stream, size_t bytes) {
    if (copies_.size() == kLogged) copies_.pop_front();
    copies_.push_back({name(function), stream, bytes});
}

void Record::ordered(Function function, uint64_t stream, uint64_t event) {
    if (orders_.size() == kLogged) orders_.pop_front();
    orders_.push_back({name(function), stream, event});
}

void Record::violation(std::string text) {
    if (violations_.size() < kViolations) violations_.push_back(std::move(text));
}

std::string range_text(const void *start, size_t bytes) {
    char text[64];
    std::snprintf(text, sizeof text, "[0x%" PRIxPTR ", +%zu)", reinterpret_cast<uintptr_t>(start), bytes);
    return text;
}

}  // namespace host_runtime
