// A program's background worker, which scheduled mode runs by itself: inside any call, at the seed's choice.
#include "api.hpp"
#include "runtime.hpp"

namespace host_runtime::api {

int adopt_worker(int (*step)()) { return Runtime::instance().adopt(step); }

int idle() {
    Runtime &runtime = Runtime::instance();
    if (this_thread().in_host_function) return 0;
    {
        Lock lock(runtime.mutex);
        if (!runtime.state->engine.scheduled()) return 0;
        runtime.state->engine.make_progress(lock);
    }
    runtime.let_work(2);
    return 1;
}

}  // namespace host_runtime::api
