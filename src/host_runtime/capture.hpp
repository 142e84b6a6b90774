// Stream captures and what they forbid. The caller holds the runtime's lock.
#pragma once

#include "table.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

namespace host_runtime {

struct Capture {
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    size_t nodes = 0;  // copies, fills and host functions that it took
    bool invalidated = false;
};
using CaptureRef = std::shared_ptr<Capture>;

class Captures {
public:
    CaptureRef begin(cudaStreamCaptureMode mode);
    void end(const CaptureRef &capture);
    // A graph is no more than its handle and the number of its nodes: what is captured is not kept.
    void add_graph(uint64_t graph, size_t nodes) { graphs_[graph] = nodes; }
    bool destroy_graph(uint64_t graph) { return graphs_.erase(graph) == 1; }
    std::optional<size_t> nodes(uint64_t graph) const;

    // Whether a capture forbids an unsafe call to this thread, which is in the given mode. The capture is lost then.
    bool forbid(cudaStreamCaptureMode thread_mode);

private:
    std::vector<CaptureRef> active_;
    std::unordered_map<uint64_t, size_t> graphs_;  // nodes of each
};

}  // namespace host_runtime
