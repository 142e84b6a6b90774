// Words that tell of an end: what reading and storing them means to the clocks.
#include "api.hpp"
#include "runtime.hpp"

namespace host_runtime::api {

void observed(const void *word) {
    Runtime::instance().by_itself([&](State &state, const ThreadState &thread) { state.races.observe(thread, word); });
}

void published(const void *word) {
    Runtime::instance().by_itself([&](State &state, const ThreadState &thread) { state.races.publish(thread, word); });
}

}  // namespace host_runtime::api
