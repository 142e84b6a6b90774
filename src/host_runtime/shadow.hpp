// Who touched the bytes of one allocation last. The caller holds the runtime's lock.
#pragma once

#include "clock.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace host_runtime {

// One operand of an operation, or what the program's own code did; with what a report says of it.
struct Access {
    size_t timeline;
    uint64_t step;
    bool writes;
    const char *function;
    uint64_t call;    // of the function, from 1
    uint64_t stream;  // 0: none
    size_t thread;    // that asked for it, from 1
    const char *start;
    size_t width, pitch, rows;

    bool known_to(const Clock &clock) const { return clock.at(timeline) >= step; }
};
using AccessRef = std::shared_ptr<const Access>;

// For every byte the last write and the reads since then. That is enough: a write that is ordered behind these is ordered behind
// all that came before them, or that was reported when it came.
class Shadow {
public:
    // Notes an access by something that knows `clock`, and adds to `unordered` those from before that it does not know and that
    // clash with it. `common`: what whatever may still come knows, so that it need not be kept.
    void note(const AccessRef &access, const Clock &clock, const Clock &common, std::vector<AccessRef> &unordered);

    size_t pieces() const { return pieces_.size(); }

private:
    struct Piece {
        uintptr_t end;
        AccessRef write;
        std::vector<AccessRef> reads;
    };
    using Pieces = std::map<uintptr_t, Piece>;

    void note_row(uintptr_t start, uintptr_t end, const AccessRef &access, const Clock &clock, const Clock &common,
                  std::vector<AccessRef> &unordered);
    void split(uintptr_t at);
    Pieces::iterator join_with_one_before(Pieces::iterator piece);
    void forget(const Clock &common);

    Pieces pieces_;  // by first byte; they do not overlap
    size_t kept_ = 0;
};

}  // namespace host_runtime
