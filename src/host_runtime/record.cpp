#include "record.hpp"

#include <cinttypes>
#include <cstdio>
#include <utility>

#include <unwind.h>

namespace host_runtime {

namespace {
// A loop that polls, or a demo that runs for hours, must not fill the memory: the newest calls and the first violations
// are the ones that tell something.
constexpr size_t kLogged = 65536;
constexpr size_t kViolations = 1000;

_Unwind_Reason_Code add_frame(_Unwind_Context *frame, void *path) {
    auto &hash = *static_cast<uint64_t *>(path);
    hash = (hash ^ _Unwind_GetIP(frame)) * 0x100000001b3;  // FNV-1a, by words
    return _URC_NO_REASON;
}

uint64_t path_here() {
    uint64_t path = 0xcbf29ce484222325;
    _Unwind_Backtrace(add_frame, &path);
    return path;
}
}  // namespace

uint64_t Record::count(Function function) {
    const auto index = static_cast<size_t>(function);
    if (keeps_paths_) paths_[index].push_back(path_here());
    return ++calls_[index];
}

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
