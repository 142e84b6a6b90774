"""Threads and processes on the host runtime."""

import subprocess
import sys
import textwrap

import pytest

from host_table import NOT_READY, PAGE, copy, cuda, in_thread, malloc, mark, ok, pinned, stream, view
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host


@pytest.mark.parametrize("schedule", [None, 1, 2])
def test_several_threads_may_call_at_once(schedule):
    host.configure(devices=2, seed=schedule)

    def work(n):
        ok(cuda.cudaSetDevice(n % 2))
        s, p, q = stream(), malloc(PAGE), pinned(PAGE)
        for value in range(200):
            view(q, PAGE)[:] = (value + n) % 256
            copy(p, q, PAGE, s)
            e = mark(s)
            while (code := cuda.cudaEventQuery(e)) == NOT_READY:
                pass
            ok(code)
            if not (view(p, PAGE) == (value + n) % 256).all():
                return False
            ok(cuda.cudaEventDestroy(e))
        ok(cuda.cudaStreamSynchronize(s))
        ok(cuda.cudaFree(p))
        ok(cuda.cudaFreeHost(q))
        ok(cuda.cudaStreamDestroy(s))
        return True

    results = [in_thread(lambda n=n: work(n)) for n in range(6)]
    assert all(result() for result in results)
    assert set(host.live().values()) == {0}


def run_program(program):
    """What a process of its own prints that runs it, and nothing else."""
    path = [str(p) for p in sys.path if p]
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{textwrap.dedent(program)}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


EXIT_WITH_WORK = """
    import ctypes, threading
    import numpy as np
    from strata_copy import host_runtime as host
    import host_table as t

    host.configure()
    s, gated = t.stream(), t.stream()
    block = np.zeros(64 << 20, np.uint8)
    t.ok(t.cuda.cudaHostRegister(block.ctypes.data, block.nbytes, 0))
    p = t.malloc(block.nbytes)
    for _ in range(4):
        t.copy(block.ctypes.data, p, block.nbytes, s)
    {gate}
    print("left with", host.pending())
"""


@pytest.mark.parametrize("gate", ["", "gate = t.Gate(gated)"], ids=["copies", "a host function that never ends"])
def test_the_process_ends_with_work_in_the_queues(gate):
    assert int(run_program(EXIT_WITH_WORK.format(gate=gate)).split()[-1]) > 0


IN_A_FORK = """
    import os
    import host_table as t

    s = t.stream()
    child = os.fork()
    if child == 0:
        codes = [t.cuda.cudaSetDevice(0), t.cuda.cudaStreamQuery(s)]
        codes += [t.cuda.cudaPeekAtLastError(), t.cuda.event_captured(s)]
        os._exit(0 if codes == [3] * 4 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), t.cuda.cudaStreamQuery(s))
"""


def test_a_forked_child_may_not_call():
    assert run_program(IN_A_FORK).split() == ["0", "0"]
