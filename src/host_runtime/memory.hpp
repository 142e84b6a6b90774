// The ranges of memory that the runtime knows: device memory, pinned memory that it allocated, registered memory.
// The caller holds the runtime's lock.
#pragma once

#include "shadow.hpp"
#include "table.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

namespace host_runtime {

enum class RangeKind { device, host, registered };

struct Range {
    RangeKind kind;
    int device;  // where it lies, or the device that was current when it was made
    char *start;
    size_t size;
    bool live = true;  // false once freed or unregistered; queued operations still refer to it then
    int users = 0;     // operations that are moving its bytes now
    Shadow shadow{};
};
using RangeRef = std::shared_ptr<Range>;

// Where the bytes of one operand lie. A copy takes `inside` and `pageable`.
struct Placement {
    enum { inside, pageable, split, freed } where;
    RangeRef range;  // for `inside`
};

class Memory {
public:
    Memory(int devices, size_t device_limit, size_t pinned_limit);
    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    // New memory holds garbage in its first 64 KiB; what follows reads as zeros and takes no room until it is touched.
    cudaError_t allocate(RangeKind kind, int device, size_t size, void **start);
    cudaError_t add_registration(int device, void *start, size_t size);
    // Ends a range that no operation uses now. Memory of the runtime is overwritten like new memory and stays mapped for
    // long, so that a use after free is found in this registry and does not end the process.
    void release(const RangeRef &range);

    Placement locate(const void *start, size_t bytes) const;
    // Calls `visit` with each range that holds some of these bytes, and with which.
    template <class Visit>
    void for_each_inside(const char *start, size_t bytes, Visit visit) const {
        for (const char *at = start, *const end = start + bytes; at < end;) {
            const RangeRef range = lowest_in(at, static_cast<size_t>(end - at));
            if (!range) return;
            at = std::max(at, static_cast<const char *>(range->start));
            const char *const stop = std::min(end, static_cast<const char *>(range->start) + range->size);
            visit(range, at, static_cast<size_t>(stop - at));
            at = stop;
        }
    }
    RangeRef holding(const void *address) const { return locate(address, 1).range; }

    size_t device_limit() const { return device_limit_; }
    size_t used(int device) const { return device_used_[device]; }
    size_t count(RangeKind kind) const;
    // Bytes that callers have registered, now and at most at any time.
    size_t registered() const { return registered_; }
    size_t most_registered() const { return most_registered_; }

private:
    using Ranges = std::map<uintptr_t, RangeRef>;

    RangeRef lowest_in(const char *start, size_t bytes) const;
    void unmap_oldest();

    size_t device_limit_;
    size_t pinned_limit_;
    std::vector<size_t> device_used_;
    size_t pinned_used_ = 0;
    size_t registered_ = 0;
    size_t most_registered_ = 0;
    Ranges live_;
    Ranges freed_;
    std::deque<RangeRef> freed_in_order_;
};

}  // namespace host_runtime
