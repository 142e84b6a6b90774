"""P2P is believed only after bytes were seen to arrive: the proof, what it leaves behind, and what is asked of it."""

import threading
import time

import numpy as np
import pytest

import strata_copy as sc
from fixtures import HOST, SYNCED, after_copy, differences, small_layout, untouched
from host_table import cuda
from strata_copy import host_runtime, peers, runtime

INVALID_VALUE, NO_MEMORY, INVALID_DEVICE, UNSUPPORTED, ALREADY, TOO_MANY, ILLEGAL = 1, 2, 101, 217, 704, 711, 700
SMALL = (4096, 8192, 16384)
COPIES = 5  # of each size
LAYOUT = small_layout("k8v4")
UPTO = 41


@pytest.fixture
def small(monkeypatch):
    """Proofs with small copies, which are as many as those of a proof with large ones."""
    monkeypatch.setattr(peers, "SIZES", SMALL)


def access_is_enabled(device, peer):
    """Asks CUDA, and leaves it as it was."""
    with runtime.on_device(device):
        code = cuda.cudaDeviceEnablePeerAccess(peer, 0)
        if code == 0:
            assert cuda.cudaDeviceDisablePeerAccess(peer) == 0
        runtime.get_last_error()
    assert code in (0, ALREADY)
    return code == ALREADY


def enable(device, peer):
    runtime.set_device(device)
    assert cuda.cudaDeviceEnablePeerAccess(peer, 0) == 0
    runtime.set_device(0)


def copied_right(memory, copier, source=0, target=1, tag=1):
    a, b = memory(LAYOUT, tag, device=source), memory(LAYOUT, tag + 1, device=target)
    ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED)
    assert ticket.sync()
    assert differences(b, after_copy(a, b, UPTO)) == []
    assert untouched(a)
    return {route for route, _ in ticket.routes}


def opened(**how):
    return sc.Copier((0, 1), tickets=4, layer_events=24, **how)


# ---- what is found


@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_what_works_is_proven_and_used(memory, second_device, way):
    found = peers.link(*way)
    assert (found.source, found.target) == way
    with opened() as copier:
        assert copied_right(memory, copier, *way) == {"peer" if found.p2p else "relay"}
        assert copier.links == (found,)
    if HOST:
        assert found.p2p
        assert found.reason == f"P2P from device {way[0]} to device {way[1]}: proven by data"
        assert access_is_enabled(*way)  # once for the process
        assert not access_is_enabled(*way[::-1])


@pytest.mark.host
@pytest.mark.parametrize("at", [(1, 1), (1, None), (5, 5), (6, 6), (10, 10), (11, 11), (15, 15), (11, None)], ids=str)
@pytest.mark.parametrize("how", ["drop", "corrupt"])
def test_a_way_that_is_broken_is_found(memory, small, how, at):
    """The first copy of a size alone, the fifth alone, from some size on."""
    host_runtime.break_peer(0, 1, how, *at)
    found = peers.link(0, 1)
    assert not found.p2p
    size, copy = SMALL[(at[0] - 1) // COPIES], (at[0] - 1) % COPIES + 1
    assert found.reason == f"P2P from device 0 to device 1 brings wrong bytes: copy {copy} of {size} bytes"
    assert not access_is_enabled(0, 1)
    assert peers.link(1, 0).p2p
    with opened() as copier:
        assert copied_right(memory, copier, 0, 1) == {"relay"}
        assert copied_right(memory, copier, 1, 0, 3) == {"peer"}


@pytest.mark.host
def test_a_fault_of_long_copies_alone_is_found():
    """4 KiB, 1 MiB and 64 MiB."""
    assert peers.SIZES == (4 << 10, 1 << 20, 64 << 20)
    before = len(host_runtime.log())
    host_runtime.break_peer(0, 1, "drop", 15)
    assert "copy 5 of 67108864 bytes" in peers.link(0, 1).reason
    sizes = [size for function, _, size in host_runtime.log()[before:] if function == "cudaMemcpyPeerAsync"]
    assert sizes == [size for size in peers.SIZES for _ in range(COPIES)]


@pytest.mark.host
def test_a_slow_way_is_a_way(memory, small):
    host_runtime.break_peer(0, 1, "delay")
    assert peers.link(0, 1).p2p
    with opened() as copier:
        assert copied_right(memory, copier) == {"peer"}


@pytest.mark.host
@pytest.mark.parametrize("at", [1, 8])
@pytest.mark.parametrize("seed_or_threads", [5, None], ids=["scheduled", "threads"])
def test_a_way_that_hangs_is_left_alone(memory, small, at, seed_or_threads):
    """Nothing waits for it any more, also not what closes."""
    host_runtime.configure(devices=3, seed=seed_or_threads)
    host_runtime.break_peer(0, 1, "hang", at)
    with sc.Copier((0, 1, 2), tickets=4, layer_events=24) as copier:
        assert copied_right(memory, copier, 0, 1) == {"relay"}
        size, copy = SMALL[(at - 1) // COPIES], (at - 1) % COPIES + 1
        assert copier.links[0].reason == (
            f"P2P from device 0 to device 1 hangs: copy {copy} of {size} bytes did not end within 2 s. Its streams and "
            "its memory are left as they are"
        )
        for way in ((1, 2), (2, 0)):  # freeing what a proof of these needs would wait for it
            assert copied_right(memory, copier, *way, 5) == {"relay"}
            assert peers.link(*way).reason.endswith("was not tried: a copy to or from one of them hangs")
    with sc.Copier((2,), tickets=4, layer_events=24) as copier:
        assert copied_right(memory, copier, 2, 2, 7) == {"local"}


@pytest.mark.host
def test_a_way_hangs_from_2_s_on(small):
    host_runtime.break_peer(0, 1, "hang")
    began = time.monotonic()
    assert "hangs" in peers.link(0, 1).reason
    assert 2 <= time.monotonic() - began < 4


@pytest.mark.host
def test_what_hangs_holds_up_no_other_pair_and_no_arena(memory, small):
    """Freeing pinned memory, or unregistering it, would wait for it: neither is done any more."""
    host_runtime.configure(devices=4)
    host_runtime.break_peer(0, 1, "hang")
    buffer = np.zeros(1 << 21, np.uint8)
    in_place = buffer.ctypes.data + -buffer.ctypes.data % 4096
    arena = sc.Arena(8 << 20, piece=1 << 20, pause=10.0, threads=1, background=True)
    with sc.Copier(range(4), tickets=4, layer_events=24) as copier:
        arena.register(in_place, 1 << 20)
        assert copied_right(memory, copier, 0, 1) == {"relay"}
        before = host_runtime.calls()
        for n, way in enumerate([(2, 3), (3, 2)]):
            assert copied_right(memory, copier, *way, 5 + 2 * n) == {"peer"}
        assert host_runtime.calls()["cudaHostAlloc"] - before["cudaHostAlloc"] == 1  # the second proof uses it again
        with pytest.raises(sc.Refused, match="stays registered: a copy between two devices hangs"):
            arena.unregister(in_place)
        arena.close()
    after = host_runtime.calls()
    for function in ("cudaFreeHost", "cudaHostUnregister"):
        assert after[function] == before[function]


@pytest.mark.host
def test_the_target_of_a_proof_holds_something_else_before(small):
    """Two copies from host memory, of the whole size, for each that is looked at: to the target, and to the source."""
    assert peers.link(0, 1).p2p
    sizes = [size for function, _, size in host_runtime.log() if function == "cudaMemcpyAsync"]
    assert sizes == [size for size in SMALL for _ in range(2 * 3)]  # and back, to be looked at


@pytest.mark.host
def test_no_access_is_asked_for_where_there_is_none(memory):
    host_runtime.configure(devices=2, peers=[(1, 0)])
    before = host_runtime.calls()["cudaDeviceEnablePeerAccess"]
    assert peers.link(0, 1) == (0, 1, False, "no access from device 0 to device 1 (cudaDeviceCanAccessPeer)")
    assert host_runtime.calls()["cudaDeviceEnablePeerAccess"] == before
    with opened() as copier:
        assert copied_right(memory, copier) == {"relay"}


# ---- access of others


@pytest.mark.host
def test_access_that_the_engine_enabled_is_used_and_left(small):
    enable(0, 1)
    assert peers.link(0, 1).p2p
    assert access_is_enabled(0, 1)
    assert runtime.peek_last_error() == 0


@pytest.mark.host
def test_access_that_the_engine_enabled_stays_where_the_way_is_broken(memory, small):
    enable(0, 1)
    host_runtime.break_peer(0, 1, "corrupt")
    assert not peers.link(0, 1).p2p
    assert access_is_enabled(0, 1)
    with opened() as copier:  # neither hop goes that way
        assert copied_right(memory, copier) == {"relay"}


@pytest.mark.host
@pytest.mark.parametrize("foreign", [False, True])
def test_nothing_of_the_callers_thread_is_touched(memory, small, foreign):
    host_runtime.configure(devices=2, peers=[(0, 1)])
    enable(0, 1)
    runtime.set_device(1)
    mode = runtime.capture_mode(1)
    if foreign:
        with pytest.raises(runtime.CudaError):
            runtime.set_device(99)
    a, b = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=1)
    with opened() as copier:
        copier.plan(a.state, b.state)
        copier.plan(b.state, a.state)
        assert [link.p2p for link in copier.links] == [True, False]
    assert runtime.get_last_error() == (INVALID_DEVICE if foreign else 0)
    assert runtime.get_device() == 1
    assert runtime.capture_mode(mode) == 1
    runtime.set_device(0)


@pytest.mark.host
def test_two_threads_prove_a_pair_once(small):
    found = []
    threads = [threading.Thread(target=lambda: found.append(peers.link(0, 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert host_runtime.calls()["cudaDeviceEnablePeerAccess"] == 1


# ---- when it is made


@pytest.mark.host
def test_the_proof_is_made_with_the_first_plan_that_needs_it_and_never_in_submit(memory, small):
    a, b, c = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=1), memory(LAYOUT, 3, device=0)

    def proofs():
        return host_runtime.calls()["cudaDeviceCanAccessPeer"]

    for _ in range(2):
        with opened() as copier:
            copier.plan(a.state, c.state)
            assert copier.links == ()
            plan, again = copier.plan(a.state, b.state), copier.plan(a.state, b.state)
            before, live = host_runtime.calls(), host_runtime.live()
            assert plan.submit(UPTO, after=SYNCED).sync()
            assert again.submit(UPTO, after=SYNCED, feed=True).sync()
            made = {name for name, n in host_runtime.calls().items() if n > before[name]}
            assert not made & {"cudaSetDevice", "cudaMalloc", "cudaHostAlloc", "cudaDeviceCanAccessPeer"}
            assert host_runtime.live() == live
        assert proofs() == 1


@pytest.mark.host
@pytest.mark.parametrize("can", [True, False])
def test_a_link_takes_what_it_says_and_gives_it_back(memory, small, can):
    """32 MiB of pinned memory for a direction without P2P, at the first plan."""
    host_runtime.configure(devices=2, peers=None if can else [])
    a, b = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=1)
    before = host_runtime.live()
    with opened() as copier:
        alive = host_runtime.live()
        copier.plan(a.state, b.state)
        linked = host_runtime.live()
        assert linked["allocations"] == alive["allocations"]
        assert linked["host_allocations"] == alive["host_allocations"] + (not can)
        for _ in range(3):
            copier.plan(a.state, b.state)
        assert host_runtime.live() == linked
        copier.plan(b.state, a.state)
        assert host_runtime.live()["host_allocations"] == alive["host_allocations"] + 2 * (not can)
    assert host_runtime.live() == before


# ---- STRATA_COPY_P2P


@pytest.mark.host
def test_off_goes_through_pinned_memory_and_asks_nothing(memory, monkeypatch):
    monkeypatch.setenv("STRATA_COPY_P2P", "off")
    with opened() as copier:
        assert copied_right(memory, copier) == {"relay"}
        assert copier.links == ((0, 1, False, "STRATA_COPY_P2P=off"),)
    calls = host_runtime.calls()
    assert calls["cudaDeviceCanAccessPeer"] == calls["cudaDeviceEnablePeerAccess"] == calls["cudaMemcpyPeerAsync"] == 0


@pytest.mark.host
def test_on_refuses_a_pair_without_it(memory, small, monkeypatch):
    monkeypatch.setenv("STRATA_COPY_P2P", "on")
    host_runtime.break_peer(0, 1, "drop")
    a, b = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=1)
    with opened() as copier:
        with pytest.raises(sc.Refused) as refused:
            copier.plan(a.state, b.state)
        assert (refused.value.reason, refused.value.device) == ("unsupported", 0)
        assert str(refused.value) == (
            "STRATA_COPY_P2P=on, and P2P from device 0 to device 1 brings wrong bytes: copy 1 of 4096 bytes"
        )
        assert untouched(b)
        assert copied_right(memory, copier, 1, 0, 3) == {"peer"}


@pytest.mark.parametrize("value", ["ON", "1", "yes", "ring", " auto"])
def test_another_value_is_an_error(monkeypatch, value):
    monkeypatch.setenv("STRATA_COPY_P2P", value)
    with pytest.raises(ValueError, match=f"STRATA_COPY_P2P is '{value}'; it may be 'auto', 'on' or 'off', or not set"):
        sc.Copier((0,))
    monkeypatch.setenv("STRATA_COPY_P2P", "")
    assert peers.mode() == "auto"


def test_one_device_is_no_pair():
    with pytest.raises(ValueError, match="device 0 twice"):
        peers.link(0, 0)


@pytest.mark.host
def test_links_are_those_of_all_pairs(small):
    host_runtime.configure(devices=3, peers=[(0, 1), (2, 0)])
    found = peers.links()
    assert [(link.source, link.target) for link in found] == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert [link.p2p for link in found] == [True, False, False, False, True, False]
    assert peers.links([2, 1]) == [found[5], found[3]]


# ---- calls that fail


@pytest.mark.host
@pytest.mark.parametrize("code", [INVALID_DEVICE, UNSUPPORTED, TOO_MANY, 205])
def test_access_that_is_not_given_is_a_reason(memory, small, code):
    host_runtime.fail("cudaDeviceEnablePeerAccess", 1, code)
    found = peers.link(0, 1)
    assert not found.p2p
    assert found.reason.startswith("cudaDeviceEnablePeerAccess failed on device 0: ")
    assert f"({code})" in found.reason
    with opened() as copier:
        assert copied_right(memory, copier) == {"relay"}
    assert runtime.peek_last_error() == 0


PROOF_CALLS = (
    "cudaThreadExchangeStreamCaptureMode", "cudaDeviceCanAccessPeer", "cudaSetDevice", "cudaHostAlloc",
    "cudaStreamCreateWithFlags", "cudaMalloc", "cudaMemcpyAsync", "cudaMemcpyPeerAsync",
    "cudaStreamQuery", "cudaStreamSynchronize", "cudaStreamDestroy", "cudaFree", "cudaFreeHost",
)  # fmt: skip


@pytest.mark.host
@pytest.mark.parametrize("function", PROOF_CALLS)
def test_each_call_of_a_proof_fails_in_turn(memory, small, function):
    """No access and no object is left but the one that could not be given back, and what was not found out is tried
    again."""
    for nth in range(1, 200):
        host_runtime.configure(devices=2)
        before = host_runtime.live()
        host_runtime.fail(function, nth, NO_MEMORY)
        error = found = None
        try:
            found = peers.link(0, 1)
        except sc.Refused as refused:
            error = refused
        if not host_runtime.clear_faults():
            assert nth > 1
            break
        assert runtime.peek_last_error() == 0
        left = sum(host_runtime.live().values()) - sum(before.values())
        assert left == (function in ("cudaStreamDestroy", "cudaFree", "cudaFreeHost"))
        if error is not None:
            assert (function, error.call) == (PROOF_CALLS[0], PROOF_CALLS[0])
        else:
            assert found.p2p or function in found.reason
            assert access_is_enabled(0, 1) == found.p2p
        assert peers.link(0, 1).p2p
    else:
        pytest.fail(f"{function} is called more than 200 times")


@pytest.mark.host
@pytest.mark.parametrize("function", ["cudaMemcpyPeerAsync", "cudaStreamQuery", "cudaFree"])
def test_a_device_that_ends_in_a_proof_is_told(memory, small, function):
    a, b = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=1)
    copier = opened()
    host_runtime.fail(function, 2, ILLEGAL)
    with pytest.raises(sc.Poisoned):
        copier.plan(a.state, b.state)
    with pytest.raises(sc.Poisoned):
        copier.close()


@pytest.mark.host
@pytest.mark.parametrize("can", [True, False])
def test_each_call_of_a_link_fails_in_turn(memory, small, can):
    """The plan is refused, nothing is left, and the next plan is as if nothing had been."""
    functions = {PROOF_CALLS[0], "cudaSetDevice", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"}
    for function in functions if can else functions | {"cudaHostAlloc"}:
        for nth in range(1, 40):
            host_runtime.configure(devices=2, peers=None if can else [])
            peers.link(0, 1)
            a, b = memory(LAYOUT, 1, device=0), memory(LAYOUT, 2, device=1)
            with opened(relay_slots=2, relay_memory=1024) as copier:
                before = host_runtime.live()
                host_runtime.fail(function, nth, NO_MEMORY)
                try:
                    copier.plan(a.state, b.state)
                    error = None
                except sc.Refused as refused:
                    error = refused
                fired = host_runtime.clear_faults()
                assert (error is None) == (not fired) or function.endswith("CaptureMode")
                if error is not None:
                    assert (error.call, error.cuda_code) == (function, NO_MEMORY)
                    assert host_runtime.live() == before
                    assert copier.links == ()
                assert copied_right(memory, copier, 0, 1, 3) == {"peer" if can else "relay"}
            if not fired:
                break
        assert nth > 1
