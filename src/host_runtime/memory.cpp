#include "memory.hpp"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace host_runtime {

namespace {

constexpr size_t kPatternBytes = 65536;
constexpr int kGarbage = 0xA5;
constexpr int kPoison = 0xDD;
// Freed ranges that stay mapped: a use after free is found until so many more have been freed.
constexpr size_t kQuarantine = 1024;

size_t whole_pages(size_t bytes) {
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

uintptr_t number(const void *address) { return reinterpret_cast<uintptr_t>(address); }

// The range that shares a byte with [start, start + bytes) and lies lowest, or the end.
std::map<uintptr_t, RangeRef>::const_iterator first_touched(const std::map<uintptr_t, RangeRef> &ranges, const void *start,
                                                            size_t bytes) {
    auto next = ranges.upper_bound(number(start));
    if (next != ranges.begin()) {
        const auto before = std::prev(next);
        if (number(start) - before->first < before->second->size) return before;
    }
    return next != ranges.end() && next->first - number(start) < bytes ? next : ranges.end();
}

}  // namespace

Memory::Memory(int devices, size_t device_limit, size_t pinned_limit)
    : device_limit_(device_limit), pinned_limit_(pinned_limit), device_used_(static_cast<size_t>(devices)) {}

Memory::~Memory() {
    for (const auto &[start, range] : live_)
        if (range->kind != RangeKind::registered) munmap(range->start, whole_pages(range->size));
    while (!freed_in_order_.empty()) unmap_oldest();
}

cudaError_t Memory::allocate(RangeKind kind, int device, size_t size, void **start) {
    size_t &used = kind == RangeKind::device ? device_used_[device] : pinned_used_;
    const size_t limit = kind == RangeKind::device ? device_limit_ : pinned_limit_;
    if (size > limit - used) return cudaErrorMemoryAllocation;
    void *mapped = mmap(nullptr, whole_pages(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;

    std::memset(mapped, kGarbage, std::min(size, kPatternBytes));
    used += size;
    live_[number(mapped)] = std::make_shared<Range>(Range{kind, device, static_cast<char *>(mapped), size});
    *start = mapped;
    return cudaSuccess;
}

cudaError_t Memory::add_registration(int device, void *start, size_t size) {
    const auto touched = first_touched(live_, start, size);
    if (touched != live_.end())
        return touched->second->kind == RangeKind::device ? cudaErrorInvalidValue : cudaErrorHostMemoryAlreadyRegistered;
    if (size > pinned_limit_ - pinned_used_) return cudaErrorMemoryAllocation;
    pinned_used_ += size;
    registered_ += size;
    most_registered_ = std::max(most_registered_, registered_);
    live_[number(start)] = std::make_shared<Range>(Range{RangeKind::registered, device, static_cast<char *>(start), size});
    return cudaSuccess;
}

void Memory::release(const RangeRef &range) {
    range->live = false;
    live_.erase(number(range->start));
    (range->kind == RangeKind::device ? device_used_[range->device] : pinned_used_) -= range->size;
    if (range->kind == RangeKind::registered) {
        registered_ -= range->size;
        return;
    }

    // Dropping the pages beyond the pattern gives their room back and keeps the addresses.
    if (range->size > kPatternBytes)
        madvise(range->start + kPatternBytes, whole_pages(range->size) - kPatternBytes, MADV_DONTNEED);
    std::memset(range->start, kPoison, std::min(range->size, kPatternBytes));
    freed_[number(range->start)] = range;
    freed_in_order_.push_back(range);
    if (freed_in_order_.size() > kQuarantine) unmap_oldest();
}

Placement Memory::locate(const void *start, size_t bytes) const {
    const auto touched = first_touched(live_, start, bytes);
    if (touched == live_.end())
        return {first_touched(freed_, start, bytes) == freed_.end() ? Placement::pageable : Placement::freed, nullptr};
    const RangeRef &range = touched->second;
    const size_t offset = number(start) - touched->first;  // wraps to more than any size if the operand begins before it
    if (offset > range->size || bytes > range->size - offset) return {Placement::split, nullptr};
    return {Placement::inside, range};
}

RangeRef Memory::lowest_in(const char *start, size_t bytes) const {
    const auto touched = first_touched(live_, start, bytes);
    return touched == live_.end() ? nullptr : touched->second;
}

size_t Memory::count(RangeKind kind) const {
    return static_cast<size_t>(
        std::count_if(live_.begin(), live_.end(), [kind](const auto &entry) { return entry.second->kind == kind; }));
}

void Memory::unmap_oldest() {
    const RangeRef range = freed_in_order_.front();
    freed_in_order_.pop_front();
    freed_.erase(number(range->start));
    munmap(range->start, whole_pages(range->size));
}

}  // namespace host_runtime
