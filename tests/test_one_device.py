"""A process that uses device 1 is on device 1 alone: nothing of the library makes a context on another."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alone
import strata_copy as sc
from fixtures import SYNCED, Memory
from strata_copy import host_runtime, peers, runtime

CONTEXT = 64 << 20  # bytes that a context takes at least
INVALID_VALUE, ILLEGAL_ADDRESS = 1, 700
MODE_CALL = "cudaThreadExchangeStreamCaptureMode"
# Stands on devices in turn, uses the last one, says where it is, and stays until it is told to end.
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from strata_copy import runtime
runtime.open("cuda")
for device in sys.argv[2].split(","):
    runtime.set_device(int(device))
import alone
kept = alone.use(runtime.get_device())
print(json.dumps([runtime.get_device(), alone.contexts()]), flush=True)
sys.stdin.read()
"""


@pytest.mark.host
@pytest.mark.parametrize("schedule", [None, 0, 1])
def test_no_context_is_made_on_another_device(schedule):
    host_runtime.configure(devices=3, seed=schedule)
    runtime.set_device(1)
    for memory in alone.use(1):
        memory.free()
    assert host_runtime.contexts() == [1]
    assert runtime.get_device() == 1


@pytest.mark.host
@pytest.mark.parametrize("peers", [None, ()], ids=["P2P", "by ring"])
def test_copies_between_two_devices_make_none_on_a_third(peers):
    host_runtime.configure(devices=3, peers=peers)
    runtime.set_device(2)
    source, target = (Memory(alone.LAYOUT, device, device=device) for device in (1, 2))
    with sc.Copier((1, 2), tickets=4, layer_events=24) as copier:
        for feed in (False, True):
            for one, other in ((source, target), (target, source)):
                one.fill()
                alone.copy(copier, one, other, feed)
    assert host_runtime.contexts() == [1, 2]
    assert runtime.get_device() == 2


def open_and_close():
    sc.Copier((1,), tickets=4, layer_events=4).close()


def drop_and_open():
    copier = sc.Copier((1,), tickets=4, layer_events=4)
    with pytest.warns(ResourceWarning):
        del copier
    open_and_close()


def open_one_that_is_not_there(*devices):
    with pytest.raises(sc.Refused, match="cudaSetDevice failed on device 9"):
        sc.Copier(devices, tickets=4, layer_events=4)


def grow(background):
    with sc.Arena(2 * alone.PIECE, piece=alone.PIECE, device=1, background=background, pause=0.0) as arena:
        assert arena.wait()


# What threads of the library do alone, and the devices that it is for.
OF_OURS = {
    "a copier": (open_and_close, [1]),
    "a copier that was dropped": (drop_and_open, [1]),
    "a copier of a device that is not there": (lambda: open_one_that_is_not_there(9), []),
    "a copier whose first device is not there": (lambda: open_one_that_is_not_there(9, 1), []),
    "a copier whose second device is not there": (lambda: open_one_that_is_not_there(1, 9), [1]),
    "an arena": (lambda: grow(background=False), [1]),
    "an arena in the background": (lambda: grow(background=True), [1]),
    "an arena with memory of others": (lambda: alone.pin(1), [1]),
    "a proof": (lambda: peers.link(2, 1), [1, 2]),
    "a proof of no access": (lambda: peers.link(1, 2), [1]),
    "a proof of a device that is not there": (lambda: peers.link(9, 1), []),
}


@pytest.mark.host
@pytest.mark.parametrize("what", OF_OURS)
def test_threads_of_ours_stand_on_a_device_of_theirs(what):
    """The caller's has set none, and makes no call itself."""
    act, devices = OF_OURS[what]
    host_runtime.configure(devices=3, peers=[(2, 1)])
    act()
    assert host_runtime.contexts() == devices


@pytest.mark.host
@pytest.mark.parametrize("code", [INVALID_VALUE, ILLEGAL_ADDRESS])
@pytest.mark.parametrize("function", ["cudaSetDevice", MODE_CALL, "cudaHostAlloc", "cudaMalloc"])
def test_a_copier_that_does_not_open_is_on_no_other_device(function, code):
    host_runtime.configure(devices=3)
    host_runtime.fail(function, 1, code)
    with pytest.raises(sc.Poisoned if code == ILLEGAL_ADDRESS else sc.Refused, match=function):
        sc.Copier((1,), tickets=4, layer_events=4)
    assert host_runtime.contexts() == ([] if function == "cudaSetDevice" else [1])


@pytest.mark.host
def test_a_copier_whose_device_has_failed_closes_on_no_other():
    host_runtime.configure(devices=3)
    runtime.set_device(1)
    source, target = (Memory(alone.LAYOUT, tag, device=1) for tag in (1, 2))
    copier = sc.Copier((1,), tickets=4, layer_events=24)
    plan = copier.plan(source.state, target.state)
    host_runtime.fail("cudaMemcpyAsync", 1, ILLEGAL_ADDRESS)
    with pytest.raises(sc.Poisoned):
        plan.submit(alone.UPTO, after=SYNCED)
    with pytest.raises(sc.Poisoned):
        copier.close()
    assert host_runtime.contexts() == [1]


@pytest.mark.host
def test_calls_that_ask_make_no_context():
    """Those that make none on GPUs either."""
    host_runtime.configure(devices=2)
    runtime.describe()
    runtime.device_count()
    runtime.get_device()
    runtime.pci_bus_id(1)
    runtime.device_name(1)
    runtime.peek_last_error()
    runtime.get_last_error()
    assert runtime.memory_type(1 << 12)[0] == 0
    assert host_runtime.contexts() == []


@pytest.mark.host
@pytest.mark.parametrize("call", [lambda: runtime.capture_mode(1), runtime.stream_create, runtime.memory_info])
def test_the_first_other_call_of_a_thread_makes_a_context_on_device_0(call):
    host_runtime.configure(devices=2)
    call()
    assert host_runtime.contexts() == [0]


@pytest.mark.host
def test_a_context_that_is_made_is_seen():
    host_runtime.configure(devices=3)
    assert host_runtime.contexts() == []
    runtime.set_device(2)
    assert host_runtime.contexts() == [2]
    with pytest.raises(runtime.CudaError):
        runtime.set_device(3)
    assert host_runtime.contexts() == [2]
    host_runtime.configure(devices=3)
    runtime.free(runtime.malloc(64))  # a thread that has set no device
    assert host_runtime.contexts() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize(("devices", "on"), [("1", [1]), ("0,1", [0, 1])], ids=["1", "0 and 1, which is seen"])
def test_a_process_of_device_1_is_on_no_other(second_device, devices, on):
    """By what the driver tells that process; by the free memory of device 0, where this process is already, unless
    other tests use it meanwhile; and by the driver's list of processes where that lists any."""
    runtime.set_device(0)
    runtime.malloc(0)
    free = runtime.memory_info()[0]
    folder = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, folder, devices], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        said = json.loads(child.stdout.readline())
        taken, listed = free - runtime.memory_info()[0], busy_devices(child.pid)
        child.stdin.close()
        assert child.wait(60) == 0
    assert said == [second_device, on]
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert (taken > CONTEXT) == (0 in on)
    if listed:
        here, other = (runtime.pci_bus_id(device)[-12:].lower() for device in (0, second_device))
        assert other in listed
        assert (here in listed) == (0 in on)


def busy_devices(pid):
    """Bus addresses of the devices on which the driver lists a process: none in most containers, which have numbers of
    their own for processes."""
    if shutil.which("nvidia-smi") is None:
        return set()
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_bus_id", "--format=csv,noheader"]
    rows = [line.split(", ") for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]
    return {row[1].lower()[-12:] for row in rows if row[0] == str(pid)}
