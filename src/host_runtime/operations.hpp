// What a stream executes, and the streams and events that order it. The caller holds the runtime's lock.
#pragma once

#include "capture.hpp"
#include "clock.hpp"
#include "functions.hpp"
#include "memory.hpp"
#include "peers.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <thread>
#include <variant>
#include <vector>

namespace host_runtime {

struct Stream;
using StreamRef = std::shared_ptr<Stream>;
using ClockRef = std::shared_ptr<const Clock>;

// A point in a stream's order. The points of one stream are reached one after another.
struct Point {
    StreamRef stream;
    uint64_t position = 0;  // this many operations come before it

    bool reached() const;
};

// One record of an event. An event that is recorded again gets a new mark; who waits for the old one keeps it.
struct Mark {
    Point point;
    std::chrono::steady_clock::time_point time;  // set when the point is reached
    Clock known{};                               // to whoever comes behind it
};
using MarkRef = std::shared_ptr<Mark>;

// A rectangle of `rows` times `width` bytes. A plain copy is one row.
struct Copy {
    Function function;
    char *target;
    size_t target_pitch;
    const char *source;
    size_t source_pitch;
    size_t width;
    size_t rows;
    RangeRef target_range;  // null: pageable memory
    RangeRef source_range;
    ClockRef told{};       // what its target says to whoever observes it, if that is a word
    bool delayed = false;  // goes last, where streams allow
    std::shared_ptr<const std::vector<char>> staged{};  // what pageable memory held when the call was made
    PeerFault fault = PeerFault::none;  // of its way from device to device

    size_t target_span() const { return (rows - 1) * target_pitch + width; }
    size_t source_span() const { return (rows - 1) * source_pitch + width; }
    size_t bytes() const { return rows * width; }
    // Whether a byte is both read and written. Interleaved rows do not overlap.
    bool overlaps() const;
    void move() const;
    // Makes one byte of the target wrong, in the middle of the rectangle.
    void corrupt() const;
};

struct Fill {
    char *target;
    int value;
    size_t bytes;
    RangeRef range;
    ClockRef told{};
};

// Two rectangles that somebody takes for equal.
struct Comparison {
    const char *target;
    size_t target_pitch;
    const char *source;
    size_t source_pitch;
    size_t width;
    size_t rows;
    RangeRef target_range;  // null: pageable memory
    RangeRef source_range;

    size_t target_span() const { return (rows - 1) * target_pitch + width; }
    size_t source_span() const { return (rows - 1) * source_pitch + width; }
    // The row that differs first, or `rows`.
    size_t first_difference() const;
};

struct Recording {
    MarkRef mark;
};

struct Waiting {
    MarkRef mark;
};

struct HostCall {
    cudaHostFn_t function;
    void *data;
};

using Operation = std::variant<Copy, Fill, Comparison, Recording, Waiting, HostCall>;

struct Stream {
    const uint64_t handle;  // 0: the queue of the blocking cudaMemcpy
    const int device;
    std::deque<Operation> queue{};  // the first one may be running
    uint64_t queued = 0;            // since creation
    uint64_t executed = 0;
    bool running = false;
    bool closed = false;    // destroyed by its owner; what is queued still executes
    bool finished = false;  // the worker has left
    uint64_t wake_at = std::numeric_limits<uint64_t>::max();  // the lowest position that another thread sleeps for
    std::condition_variable work{};                           // the queue is no longer empty, or the stream is closed
    std::thread worker{};
    CaptureRef capture{};
    Timeline timeline{};

    Stream(uint64_t handle, int device) : handle(handle), device(device) {}
};

inline bool Point::reached() const { return stream->executed >= position; }

struct Event {
    int device;
    bool timed;
    MarkRef mark{};        // null until it is recorded in a stream that executes
    CaptureRef capture{};  // set if the last record was captured
};
using EventRef = std::shared_ptr<Event>;

}  // namespace host_runtime
