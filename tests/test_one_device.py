"""A process that uses device 1 is on device 1 alone: nothing of the library makes a context on another."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alone
import strata_copy as sc
from fixtures import Memory
from strata_copy import host_runtime, runtime

CONTEXT = 64 << 20  # bytes that a context takes at least
# Stands on a device, uses another or the same, says so, and stays until it is told to end.
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from strata_copy import runtime
runtime.open("cuda")
for device in sys.argv[2].split(","):
    runtime.set_device(int(device))
import alone
kept = alone.use(runtime.get_device())
print(runtime.get_device(), flush=True)
sys.stdin.read()
"""


@pytest.mark.host
def test_no_context_is_made_on_another_device():
    host_runtime.configure(devices=3)
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
@pytest.mark.parametrize(("devices", "alone_on_it"), [("1", True), ("0,1", False)], ids=["1", "0 and 1, which is seen"])
def test_a_process_of_device_1_is_on_no_other(second_device, devices, alone_on_it):
    """By the free memory of device 0, where this process is already, and by the driver's list of processes where that
    lists any."""
    runtime.set_device(0)
    runtime.malloc(0)
    free = runtime.memory_info()[0]
    folder = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, folder, devices], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        said = child.stdout.readline()
        taken, listed = free - runtime.memory_info()[0], busy_devices(child.pid)
        child.stdin.close()
        assert child.wait(60) == 0
    assert said.strip() == str(second_device)
    assert (taken < CONTEXT) == alone_on_it
    if listed:
        here, other = (runtime.pci_bus_id(device)[-12:].lower() for device in (0, second_device))
        assert other in listed
        assert (here not in listed) == alone_on_it


def busy_devices(pid):
    """Bus addresses of the devices on which the driver lists a process: none in most containers, which have numbers of
    their own for processes."""
    if shutil.which("nvidia-smi") is None:
        return set()
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_bus_id", "--format=csv,noheader"]
    rows = [line.split(", ") for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines()]
    return {row[1].lower()[-12:] for row in rows if row[0] == str(pid)}
