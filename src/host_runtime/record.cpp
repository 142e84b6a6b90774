#include "record.hpp"

#include <cinttypes>
#include <cstdio>

namespace host_runtime {

namespace {
// A loop that polls, or a demo that runs for hours, must not fill the memory: the newest copies and the first violations
// are the ones that tell something.
constexpr size_t kCopies = 65536;
constexpr size_t kViolations = 1000;
}  // namespace

void Record::executed(Function function, uint64_t stream, size_t bytes) {
    if (copies_.size() == kCopies) copies_.pop_front();
    copies_.push_back({name(function), stream, bytes});
}

void Record::violation(Function function, const std::string &what) {
    if (violations_.size() < kViolations) violations_.push_back(std::string(name(function)) + ": " + what);
}

std::string range_text(const void *start, size_t bytes) {
    char text[64];
    std::snprintf(text, sizeof text, "[0x%" PRIxPTR ", +%zu)", reinterpret_cast<uintptr_t>(start), bytes);
    return text;
}

}  // namespace host_runtime
