#include "engine.hpp"

#include "thread_state.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>

namespace host_runtime {

namespace {

// What a stream takes before the next submission blocks its thread.
constexpr size_t kQueueDepth = 1020;

// How long a copy that a fault delays takes in threads mode.
constexpr std::chrono::milliseconds kDelay{50};

// Keys of the queues of the blocking cudaMemcpy, far above any handle.
constexpr uint64_t kBlockingQueues = uint64_t{1} << 62;

class Counted {
public:
    explicit Counted(size_t &count) : count_(count) { ++count_; }
    ~Counted() { --count_; }
    Counted(const Counted &) = delete;
    Counted &operator=(const Counted &) = delete;

private:
    size_t &count_;
};

class InUse {
public:
    explicit InUse(const RangeRef &range) : range_(range) {
        if (range_) ++range_->users;
    }
    ~InUse() {
        if (range_) --range_->users;
    }
    InUse(const InUse &) = delete;
    InUse &operator=(const InUse &) = delete;

private:
    const RangeRef &range_;
};

class Unlocked {
public:
    explicit Unlocked(Lock &lock) : lock_(lock) { lock_.unlock(); }
    ~Unlocked() { lock_.lock(); }
    Unlocked(const Unlocked &) = delete;
    Unlocked &operator=(const Unlocked &) = delete;

private:
    Lock &lock_;
};

// What the first operation of a stream waits for; null if it is not a wait, or no longer one.
const Point *blocker(const Stream &stream) {
    const auto *waiting = std::get_if<Waiting>(&stream.queue.front());
    return waiting && !waiting->mark->point.reached() ? &waiting->mark->point : nullptr;
}

// Its way never brings it to an end.
bool hangs(const Stream &stream) {
    const auto *copy = std::get_if<Copy>(&stream.queue.front());
    return copy && copy->fault == PeerFault::hang;
}

bool delayed(const Stream &stream) {
    const auto *copy = std::get_if<Copy>(&stream.queue.front());
    return copy && copy->delayed;
}

}  // namespace

Engine::Engine(Record &record, Races &races, Faults &faults, int devices, std::optional<uint64_t> seed)
    : record_(record), races_(races), faults_(faults), blocking_queues_(static_cast<size_t>(devices)) {
    if (seed) random_.emplace(*seed);
}

StreamRef Engine::open_stream(Lock &lock, uint64_t handle, int device) {
    reap();
    return streams_[handle] = start_stream(lock, handle, device);
}

void Engine::close_stream(const StreamRef &stream) {
    stream->closed = true;
    stream->work.notify_one();
    reap();
}

StreamRef Engine::find_stream(uint64_t handle) const {
    const auto found = streams_.find(handle);
    return found == streams_.end() || found->second->closed ? nullptr : found->second;
}

StreamRef Engine::blocking_queue(Lock &lock, int device) {
    StreamRef &queue = blocking_queues_[static_cast<size_t>(device)];
    if (!queue) queue = streams_[kBlockingQueues + static_cast<uint64_t>(device)] = start_stream(lock, 0, device);
    return queue;
}

cudaError_t Engine::submit(Lock &lock, Function caller, const StreamRef &stream, Operation operation, Point *end) {
    while (stream->queue.size() >= kQueueDepth)
        if (const cudaError_t error = wait(lock, caller, {stream, stream->executed + 1}); error != cudaSuccess) return error;
    if (stopped_) return cudaErrorCudartUnloading;
    if (stream->closed) return cudaErrorInvalidResourceHandle;  // while this thread waited for room

    if (auto *copy = std::get_if<Copy>(&operation)) copy->delayed = faults_.delays_next_copy() || copy->fault == PeerFault::delay;
    races_.queued(this_thread(), caller, *stream, operation);
    if (stream->queue.empty()) stream->work.notify_one();
    stream->queue.push_back(std::move(operation));
    ++stream->queued;
    fullest_ = std::max(fullest_, stream->queue.size());
    if (end) *end = {stream, stream->queued};
    return cudaSuccess;
}

cudaError_t Engine::wait(Lock &lock, Function caller, const Point &point) {
    const Counted inside(waiting_);
    while (!point.reached()) {
        if (const cudaError_t error = broken(); error != cudaSuccess) return error;
        if (!scheduled()) {
            sleep_until(lock, point);
        } else if (const StreamRef stream = choose(point.stream)) {
            execute(lock, stream);
        } else if (running_ > 0) {
            sleep_until(lock, point);  // another thread executes something
        } else {
            record_.violation(caller, "deadlock: nothing that is queued can be executed");
            return cudaErrorLaunchTimeout;
        }
    }
    return cudaSuccess;
}

cudaError_t Engine::wait_for_device(Lock &lock, Function caller, int device) {
    std::vector<Point> ends;
    for (const auto &[handle, stream] : streams_)
        if (stream->device == device) ends.push_back({stream, stream->queued});
    disorder(ends);
    for (const Point &end : ends)
        if (const cudaError_t error = wait(lock, caller, end); error != cudaSuccess) return error;
    return cudaSuccess;
}

Clock Engine::known_behind_device(int device) const {
    Clock known;
    for (const auto &[handle, stream] : streams_)
        if (stream->device == device) known.join(stream->timeline.clock);
    return known;
}

void Engine::wait_until_unused(Lock &lock, const RangeRef &range) {
    const Counted inside(waiting_), for_any(waiting_for_any_);
    while (range->users > 0) progress_.wait(lock);
}

void Engine::make_progress(Lock &lock) {
    if (scheduled()) step(lock, 1 + (*random_)() % 4);
}

size_t Engine::step(Lock &lock, size_t n) {
    const Counted inside(waiting_);
    size_t done = 0;
    for (; done < n; ++done) {
        const StreamRef stream = choose(nullptr);
        if (!stream) break;
        execute(lock, stream);
    }
    return done;
}

void Engine::drain(Lock &lock) {
    const Counted inside(waiting_), for_any(waiting_for_any_);
    while (!scheduled() && pending() > 0 && broken() == cudaSuccess)
        if (progress_.wait_for(lock, std::chrono::seconds(1)) == std::cv_status::timeout) return;
}

void Engine::stop(Lock &lock) {
    stopped_ = true;
    for (const auto &[handle, stream] : streams_) stream->work.notify_one();
    progress_.notify_all();
    // Nobody opens or closes a stream of a stopped engine, so the map does not change while the lock is released.
    lock.unlock();
    for (const auto &[handle, stream] : streams_)
        if (stream->worker.joinable()) stream->worker.join();
    lock.lock();
    while (waiting_ > 0) progress_.wait_for(lock, std::chrono::milliseconds(1));
    for (const auto &[handle, stream] : streams_) stream->queue.clear();  // it may hold its own stream, through a mark
}

size_t Engine::pending() const {
    size_t operations = 0;
    for (const auto &[handle, stream] : streams_) operations += stream->queue.size();
    return operations;
}

size_t Engine::open_streams() const {
    return static_cast<size_t>(std::count_if(streams_.begin(), streams_.end(), [](const auto &entry) {
        return entry.first < kBlockingQueues && !entry.second->closed;
    }));
}

cudaError_t Engine::broken() const { return stopped_ ? cudaErrorCudartUnloading : faults_.dead(); }

StreamRef Engine::start_stream(Lock &lock, uint64_t handle, int device) {
    const auto stream = std::make_shared<Stream>(handle, device);
    races_.open(stream->timeline);
    if (scheduled()) return stream;
    // A signal is for the threads of the program: one that waits for this runtime must be the one that wakes up.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        stream->worker = std::thread([this, mutex = lock.mutex(), stream] { work(Lock(*mutex), stream); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return stream;
}

void Engine::work(Lock lock, const StreamRef &stream) {
    while (!stopped_ && !(stream->closed && stream->queue.empty())) {
        if (stream->queue.empty())
            stream->work.wait(lock);
        else if (ready(*stream))
            execute(lock, stream);
        else if (const Point *point = blocker(*stream))
            sleep_until(lock, *point);
        else
            progress_.wait(lock);  // the context is dead, or the copy hangs: until the engine is stopped
    }
    stream->finished = true;
}

// Forgets the destroyed streams that are empty.
void Engine::reap() {
    for (auto entry = streams_.begin(); entry != streams_.end();) {
        Stream &stream = *entry->second;
        const bool gone = stream.closed && (scheduled() ? stream.queue.empty() : stream.finished);
        if (gone && stream.worker.joinable()) stream.worker.join();
        entry = gone ? streams_.erase(entry) : std::next(entry);
    }
}

bool Engine::ready(const Stream &stream) const {
    return !stream.queue.empty() && !stream.running && broken() == cudaSuccess && !blocker(stream) && !hangs(stream);
}

// Scheduled mode: a stream whose first operation is ready, or null. In half of the choices it is one that `awaited` needs, so
// that both kinds of order occur: everything else comes first, and nothing else comes at all. A copy that a fault delays comes when
// there is nothing else.
StreamRef Engine::choose(const StreamRef &awaited) {
    if (awaited && (*random_)() % 2 == 0) {
        StreamRef needed = awaited;
        while (const Point *point = blocker(*needed)) needed = point->stream;
        if (ready(*needed) && !delayed(*needed)) return needed;
    }
    std::vector<StreamRef> candidates, late;
    for (const auto &[handle, stream] : streams_)
        if (ready(*stream)) (delayed(*stream) ? late : candidates).push_back(stream);
    if (candidates.empty()) candidates = late;
    return candidates.empty() ? nullptr : candidates[(*random_)() % candidates.size()];
}

// Executes the first operation of a stream, which is ready.
void Engine::execute(Lock &lock, const StreamRef &stream) {
    stream->running = true;
    ++running_;
    std::visit([&](const auto &operation) { run(lock, *stream, operation); }, stream->queue.front());
    --running_;
    stream->running = false;
    stream->queue.pop_front();
    ++stream->executed;
    if (scheduled() || stream->executed >= stream->wake_at || waiting_for_any_ > 0) {
        stream->wake_at = std::numeric_limits<uint64_t>::max();
        progress_.notify_all();
    }
}

void Engine::run(Lock &lock, const Stream &stream, const Copy &copy) {
    const bool target_usable = usable(copy.function, copy.target_range, copy.target, copy.target_span());
    if (!usable(copy.function, copy.source_range, copy.source, copy.source_span()) || !target_usable) return;
    const bool corrupts = faults_.corrupts_next_copy();
    {
        const InUse target(copy.target_range), source(copy.source_range);
        std::optional<Unlocked> unlocked(std::in_place, lock);
        if (copy.delayed && !scheduled()) std::this_thread::sleep_for(kDelay);
        if (copy.told) unlocked.reset();  // who reads a word and asks what it tells must not come in between
        if (copy.fault != PeerFault::drop) copy.move();
        if (corrupts || copy.fault == PeerFault::corrupt) copy.corrupt();
    }
    record_.executed(copy.function, stream.handle, copy.bytes());
    races_.executed(copy);
}

void Engine::run(Lock &lock, const Stream &, const Fill &fill) {
    if (!usable(Function::cudaMemsetAsync, fill.range, fill.target, fill.bytes)) return;
    {
        const InUse target(fill.range);
        std::optional<Unlocked> unlocked;
        if (!fill.told) unlocked.emplace(lock);  // see above
        std::memset(fill.target, fill.value, fill.bytes);
    }
    races_.executed(fill);
}

void Engine::run(Lock &lock, const Stream &, const Comparison &comparison) {
    constexpr Function self = Function::cudaMemcpyAsync;
    const bool target_usable = usable(self, comparison.target_range, comparison.target, comparison.target_span());
    if (!usable(self, comparison.source_range, comparison.source, comparison.source_span()) || !target_usable) return;
    size_t row;
    {
        const InUse target(comparison.target_range), source(comparison.source_range);
        const Unlocked unlocked(lock);
        row = comparison.first_difference();
    }
    if (row < comparison.rows)
        record_.violation("lineage: " + range_text(comparison.target + row * comparison.target_pitch, comparison.width) +
                          " is not what " + range_text(comparison.source + row * comparison.source_pitch, comparison.width) +
                          " is, as it would be if every write to both had been told: advanced, rewound, dirty or reset is missing");
}

void Engine::run(Lock &, const Stream &, const Recording &recording) {
    recording.mark->time = std::chrono::steady_clock::now();
}

void Engine::run(Lock &, const Stream &, const Waiting &) {}

void Engine::run(Lock &lock, const Stream &, const HostCall &call) {
    const Unlocked unlocked(lock);
    this_thread().in_host_function = true;
    call.function(call.data);
    this_thread().in_host_function = false;
}

bool Engine::usable(Function function, const RangeRef &range, const char *start, size_t bytes) {
    if (!range || range->live) return true;
    record_.violation(function, range_text(start, bytes) + " was freed or unregistered before it was executed");
    return false;
}

void Engine::sleep_until(Lock &lock, const Point &point) {
    point.stream->wake_at = std::min(point.stream->wake_at, point.position);
    progress_.wait(lock);
}

}  // namespace host_runtime
