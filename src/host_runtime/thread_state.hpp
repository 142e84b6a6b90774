// What belongs to a thread and not to the runtime.
#pragma once

#include "table.h"

#include <cstddef>
#include <cstdint>

namespace host_runtime {

struct ThreadState {
    uint64_t configuration = 0;  // a new configuration resets what follows at the thread's next call
    int device = 0;
    cudaError_t last_error = cudaSuccess;
    cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
    bool in_host_function = false;
    bool worker = false;  // of the program, which scheduled mode calls
    size_t number = 0;  // of the threads that have called, from 1; where races are looked for
    uint64_t call = 0;  // which call of its function this is
};

inline ThreadState &this_thread() {
    static thread_local ThreadState state;
    return state;
}

}  // namespace host_runtime
