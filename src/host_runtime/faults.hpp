// Errors, wrong bytes, losses and delays on demand, and the state of a context that an error has killed. The caller holds the
// runtime's lock.
#pragma once

#include "functions.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace host_runtime {

class Faults {
public:
    // All count from 1; `at` is a number of calls of the function in all.
    void fail(Function function, uint64_t at, cudaError_t code, bool forever);
    // That call does nothing and returns success.
    void skip(Function function, uint64_t at) { fail(function, at, cudaSuccess, false); }
    void delay(uint64_t nth) { copies_until_delay_ = nth; }
    void corrupt(uint64_t nth) { copies_until_corruption_ = nth; }
    uint64_t clear();

    // The code that the `call`-th call of `function` shall return instead of doing anything; none for most.
    std::optional<cudaError_t> next(Function function, uint64_t call);
    // Whether the copy that is now queued shall be executed as late as possible.
    bool delays_next_copy() { return fires(copies_until_delay_); }
    // Whether the copy that is now executed shall get a wrong byte.
    bool corrupts_next_copy() { return fires(copies_until_corruption_); }

    // cudaSuccess, or the sticky error that was raised first: nothing executes any more and calls return it.
    cudaError_t dead() const { return dead_; }

private:
    struct Fault {
        Function function;
        uint64_t at;
        cudaError_t code;
        bool forever;
    };

    bool fires(uint64_t &countdown);

    std::vector<Fault> armed_;
    uint64_t copies_until_corruption_ = 0, copies_until_delay_ = 0;
    uint64_t fired_ = 0;
    cudaError_t dead_ = cudaSuccess;
};

}  // namespace host_runtime
