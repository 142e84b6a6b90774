#include "races.hpp"

#include <memory>

namespace host_runtime {

namespace {

// A word that a program watches is no longer than this; what is longer is data.
constexpr size_t kWordBytes = 64;
// How often it is looked up what all threads know, where there are several.
constexpr uint64_t kCommonEvery = 64;

// "cudaMemcpyAsync call 12 of thread 1 on stream 65540"
std::string who(const Access &access) {
    std::string text = std::string(access.function) + " call " + std::to_string(access.call) + " of thread " +
                       std::to_string(access.thread);
    if (access.stream != 0) text += " on stream " + std::to_string(access.stream);
    return text;
}

// "writes [0x7f0000001000, +4096)"
std::string what(const Access &access) {
    std::string text = (access.writes ? "writes " : "reads ") + range_text(access.start, access.width);
    if (access.rows > 1) text += " x " + std::to_string(access.rows) + " rows, pitch " + std::to_string(access.pitch);
    return text;
}

bool from_pageable_to_device(const Copy &copy) {
    return !copy.source_range && copy.target_range && copy.target_range->kind == RangeKind::device;
}

bool is_word(const RangeRef &range, size_t bytes) { return range && range->kind != RangeKind::device && bytes <= kWordBytes; }

}  // namespace

void Races::open(Timeline &timeline) {
    if (on_) timeline.number = timelines_++;
}

void Races::enter(ThreadState &thread) {
    if (!on_) return;
    HostThread born{{timelines_++, departed_}};
    for (const HostThread &other : threads_) born.timeline.clock.join(other.timeline.clock);
    thread.number = threads_.size() + 1;
    threads_.push_back(born);
}

void Races::leave(size_t thread) {
    HostThread &gone = threads_[thread - 1];
    departed_.join(gone.timeline.clock);
    gone.gone = true;
}

void Races::queued(const ThreadState &thread, Function function, Stream &stream, Operation &operation) {
    if (!on_) return;
    Timeline &timeline = stream.timeline;
    timeline.clock.join(threads_[thread.number - 1].timeline.clock);
    if (const auto *waiting = std::get_if<Waiting>(&operation)) timeline.clock.join(waiting->mark->known);
    uint64_t step = timeline.step();
    Access access{timeline.number, step,          false, name(function), thread.call, stream.handle, thread.number,
                  nullptr,         0,             0,     1};
    if (auto *recording = std::get_if<Recording>(&operation)) {
        recording->mark->known = timeline.clock;
    } else if (auto *copy = std::get_if<Copy>(&operation)) {
        access.width = copy->width;
        access.rows = copy->rows;
        access.start = copy->source;
        access.pitch = copy->source_pitch;
        note(copy->source_range, access, timeline.clock);
        access.step = timeline.step();  // a step of its own: see told_by
        access.writes = true;
        access.start = copy->target;
        access.pitch = copy->target_pitch;
        note(copy->target_range, access, timeline.clock);
        if (is_word(copy->target_range, copy->bytes())) copy->told = std::make_shared<Clock>(timeline.clock);
    } else if (auto *fill = std::get_if<Fill>(&operation)) {
        access.writes = true;
        access.start = fill->target;
        access.width = access.pitch = fill->bytes;
        note(fill->range, access, timeline.clock);
        if (is_word(fill->range, fill->bytes)) fill->told = std::make_shared<Clock>(timeline.clock);
    }
}

void Races::learn(const ThreadState &thread, const Clock &clock) {
    if (on_) threads_[thread.number - 1].timeline.clock.join(clock);
}

// A copy from pageable memory to a device returns when its source has been read; the bytes may still be on their way (CUDA Runtime
// API, API synchronization behavior).
Clock Races::told_by(const Copy &copy, const Stream &stream) const {
    Clock told = stream.timeline.clock;
    if (on_ && from_pageable_to_device(copy)) told.set(stream.timeline.number, told.at(stream.timeline.number) - 1);
    return told;
}

void Races::host_access(const ThreadState &thread, bool writes, const RangeRef &range, const char *start, size_t bytes) {
    if (!on_ || bytes == 0) return;
    Timeline &timeline = threads_[thread.number - 1].timeline;
    const uint64_t step = timeline.step();
    const Access access{timeline.number, step, writes, writes ? "host_write" : "host_read", ++host_accesses_, 0, thread.number,
                        start,           bytes, bytes, 1};
    note(range, access, timeline.clock);
}

void Races::publish(const ThreadState &thread, const void *word) {
    if (!on_) return;
    Timeline &timeline = threads_[thread.number - 1].timeline;
    words_[reinterpret_cast<uintptr_t>(word)] = timeline.clock;
}

void Races::observe(const ThreadState &thread, const void *word) {
    const auto found = words_.find(reinterpret_cast<uintptr_t>(word));
    if (found != words_.end()) learn(thread, found->second);
}

void Races::forget_words(const RangeRef &range) {
    const auto start = reinterpret_cast<uintptr_t>(range->start);
    words_.erase(words_.lower_bound(start), words_.lower_bound(start + range->size));
}

void Races::executed(const void *target, const ClockRef &told) {
    if (told) words_[reinterpret_cast<uintptr_t>(target)] = *told;
}

void Races::note(const RangeRef &range, const Access &access, const Clock &clock) {
    if (!range) return;
    std::vector<AccessRef> unordered;
    range->shadow.note(std::make_shared<const Access>(access), clock, common(), unordered);
    for (const AccessRef &before : unordered)
        record_.violation("race: " + who(access) + " " + what(access) + ", and nothing orders it behind " + who(*before) +
                          ", which " + what(*before));
}

// It only grows, so an old value drops less and nothing wrong.
const Clock &Races::common() {
    if (noted_++ % kCommonEvery != 0 && threads_.size() > 1) return common_;
    bool first = true;
    for (const HostThread &thread : threads_) {
        if (thread.gone) continue;
        if (first)
            common_ = thread.timeline.clock;
        else
            common_.meet(thread.timeline.clock);
        first = false;
    }
    return common_;
}

}  // namespace host_runtime
