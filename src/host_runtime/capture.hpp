// Stream captures and what they forbid. The caller holds the runtime's lock.
#pragma once

#include "table.h"

#include <cstdint>
#include <memory>
#include <thread>
#include <unordered_set>
#include <vector>

namespace host_runtime {

struct Capture {
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool invalidated = false;
};
using CaptureRef = std::shared_ptr<Capture>;

class Captures {
public:
    CaptureRef begin(cudaStreamCaptureMode mode);
    void end(const CaptureRef &capture);
    // A graph is no more than its handle: what is captured is not kept.
    void add_graph(uint64_t graph) { graphs_.insert(graph); }
    bool destroy_graph(uint64_t graph) { return graphs_.erase(graph) == 1; }

    // Whether a capture forbids an unsafe call to this thread, which is in the given mode. The capture is lost then.
    bool forbid(cudaStreamCaptureMode thread_mode);

private:
    std::vector<CaptureRef> active_;
    std::unordered_set<uint64_t> graphs_;
};

}  // namespace host_runtime
