// What tests do to the host runtime and ask of it. None of this has a counterpart in CUDA.
#pragma once

#include "record.hpp"
#include "runtime.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace host_runtime {

// Objects that the callers have made and not yet destroyed.
struct Live {
    size_t streams, events, registrations, allocations, host_allocations;
};

// Bytes that the callers have registered, now and at most at any time.
struct Registered {
    size_t now, most;
};

// Drops everything, which takes until the operations that are running have ended, and starts anew.
void configure(const Config &config);

size_t function_count();
const char *function_name(size_t index);
uint64_t function_calls(size_t index);

// From now on, where each call comes from; and of the calls of a function since then.
void keep_paths();
std::vector<uint64_t> function_paths(size_t index);

// The n-th call from now of a function returns `code` and does nothing else; with `forever`, the later ones too.
// False if there is no such function.
bool fail(const std::string &function, uint64_t nth, int code, bool forever);
// The n-th call from now of a function does nothing and returns success. False if there is no such function, or if it gives
// something back that its caller then would not have.
bool skip(const std::string &function, uint64_t nth);
// The n-th copy queued from now is executed as late as its stream allows.
void delay(uint64_t nth);
// The n-th copy executed from now gets one wrong byte.
void corrupt(uint64_t nth);
// The copies `first` to `last` from now on that go from device to device without host memory are broken.
void break_peer(int source, int target, PeerFault fault, uint64_t first, uint64_t last);
// How many have gone that way.
uint64_t peer_copies(int source, int target);
// Counts the calls of `configure`.
uint64_t configuration();
// Disarms all kinds and returns how many have fired since it was last asked.
uint64_t clear_faults();

// The calling thread reads or writes memory by itself.
void host_access(const void *start, size_t bytes, bool writes);

Live live();
Registered registered();
// Devices on which CUDA would have made a context: by cudaSetDevice, or by a call on them as the thread's current device.
std::vector<int> contexts();
std::vector<ExecutedCopy> copy_log();
std::vector<OrderCall> order_log();
std::vector<std::string> violations();
size_t pending();
size_t fullest();
bool scheduled();
// Executes up to `n` ready operations in scheduled mode; returns how many it found.
size_t step(size_t n);
// Lets the worker threads empty their queues, for as long as they make progress.
void drain();

}  // namespace host_runtime
