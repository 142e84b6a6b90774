// Which device can reach which other one's memory, who was allowed to, and what is wrong with the way. The caller holds the runtime's
// lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace host_runtime {

// What a broken way does to the bytes: they never land, one of them is wrong, they land late, the copy never ends.
enum class PeerFault : uint8_t { none, drop, corrupt, delay, hang };

class Peers {
public:
    // can: for each device whether it can reach each other one, a row for each; empty: all can.
    Peers(int devices, std::vector<uint8_t> can) : devices_(static_cast<size_t>(devices)), can_(std::move(can)), ways_(devices_ * devices_) {
        can_.resize(devices_ * devices_, can_.empty() ? 1 : 0);
    }

    bool can_reach(int device, int peer) const { return device != peer && can_[at(device, peer)] != 0; }
    bool enabled(int device, int peer) const { return ways_[at(device, peer)].enabled; }
    void enable(int device, int peer, bool enabled) { ways_[at(device, peer)].enabled = enabled; }

    // The copies `first` to `last` that go this way from now on are broken so.
    void break_way(int device, int peer, PeerFault fault, uint64_t first, uint64_t last) {
        Way &way = ways_[at(device, peer)];
        way.fault = fault;
        way.first = way.copies + first;
        way.last = way.copies + last;
    }
    // A copy is queued. Without access the driver takes it through host memory, where nothing is broken.
    PeerFault next_copy(int source, int target) {
        Way &way = ways_[at(source, target)];
        if (!way.enabled) return PeerFault::none;
        ++way.copies;
        return way.copies >= way.first && way.copies <= way.last ? way.fault : PeerFault::none;
    }
    // Copies that went from device to device without host memory.
    uint64_t copies(int source, int target) const { return ways_[at(source, target)].copies; }

private:
    struct Way {
        bool enabled = false;
        PeerFault fault = PeerFault::none;
        uint64_t first = 0, last = 0, copies = 0;
    };

    size_t at(int device, int peer) const { return static_cast<size_t>(device) * devices_ + static_cast<size_t>(peer); }

    size_t devices_;
    std::vector<uint8_t> can_;
    std::vector<Way> ways_;
};

}  // namespace host_runtime
