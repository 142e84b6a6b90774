#include "capture.hpp"

#include <algorithm>

namespace host_runtime {

CaptureRef Captures::begin(cudaStreamCaptureMode mode) {
    active_.push_back(std::make_shared<Capture>(Capture{mode, std::this_thread::get_id()}));
    return active_.back();
}

void Captures::end(const CaptureRef &capture) {
    active_.erase(std::find(active_.begin(), active_.end(), capture));
}

std::optional<size_t> Captures::nodes(uint64_t graph) const {
    const auto found = graphs_.find(graph);
    if (found == graphs_.end()) return std::nullopt;
    return found->second;
}

bool Captures::forbid(cudaStreamCaptureMode thread_mode) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) return false;
    bool forbidden = false;
    for (const CaptureRef &capture : active_) {
        const bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
        const bool foreign = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
        if (!own && !foreign) continue;
        capture->invalidated = true;
        forbidden = true;
    }
    return forbidden;
}

}  // namespace host_runtime
