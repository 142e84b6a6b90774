"""What once went wrong where several tickets, threads, devices or faults met."""

import sys
import threading

import pytest

import strata_copy as sc
from fixtures import SYNCED, Memory, after_copy, differences, run_python, untouched
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host
ROWS = sc.Growth.linear()


def rows(layers, groups="a", unit_bytes=64):
    """A row that grows in each layer, for each group."""
    return sc.Layout(
        [
            sc.Part(name=f"row_{group}", layer=layer, unit_bytes=unit_bytes, growth=ROWS, group=group)
            for layer in range(layers)
            for group in groups
        ]
    )


def by_group(i, part):
    """Group a on device 0, group b on device 1."""
    return {"device": "ab".index(part.group)}


def run_everything():
    while host_runtime.step(100):
        pass


@pytest.mark.parametrize("between", [254, 255, 256, 257])
def test_a_ticket_is_not_ended_by_the_word_of_one_long_before(held, memory, between):
    """The words that tell an end repeat after 256 tickets."""
    layout = rows(2)
    source, target = memory(layout, 1), memory(layout, 2)
    with sc.Copier(tickets=4, layer_events=8) as copier:
        plan = copier.plan(source.state, target.state)
        assert plan.submit(50, after=SYNCED).sync()
        run_everything()
        for _ in range(between):
            assert plan.submit(0, after=SYNCED).sync()
        run_everything()
        ticket = plan.submit(60, after=SYNCED)
        assert not ticket.done
        assert host_runtime.pending() > 0
        assert target.state.busy
        assert ticket.sync()
    assert differences(target, after_copy(source, target, 60)) == []


@pytest.mark.parametrize("between", [254, 255, 256])
def test_a_ticket_is_not_ended_by_an_old_word_of_a_device_that_paused(held, memory, between):
    layout = rows(1, "ab")
    source, target = memory(layout, 1, by_group), memory(layout, 2, by_group)
    with sc.Copier((0, 1), tickets=4, layer_events=8) as copier:
        plan = copier.plan(source.state, target.state)
        assert plan.submit(10, groups="b", after=SYNCED).sync()
        run_everything()
        for _ in range(between):
            assert plan.submit(10, groups="a", after=SYNCED).sync()
        run_everything()
        ticket = plan.submit(20, groups="b", after=SYNCED)
        assert not ticket.done
        assert ticket.sync()


def test_a_reader_is_told_of_a_failure_only_when_its_own_devices_are_quiet(memory, seed):
    """The copy that failed is on device 0 alone, the one that reads its target on both."""
    layout = rows(1, "ab")
    first, second, third = (memory(layout, tag, by_group) for tag in (1, 2, 3))
    with sc.Copier((0, 1), tickets=8, layer_events=8) as copier:
        failing = copier.submit(first.state, second.state, upto=90, groups=["a"], after=SYNCED)
        reader = copier.submit(second.state, third.state, upto=90, after=SYNCED)
        host_runtime.fail("cudaEventQuery", 1, 999)
        with pytest.raises(sc.Failed):
            failing.sync()
        assert isinstance(reader.error, sc.Failed)
        assert host_runtime.pending() == 0
        third.state.reset()
        third.fill()
        run_everything()
        assert untouched(third)


@pytest.mark.parametrize("how", ["begin", "after"])
def test_a_copy_of_nothing_keeps_the_order(memory, seed, how):
    """Who waits for it waits for the earlier writer of its target, and for what it was told to wait for."""
    layout = rows(2)
    source, other, target = (memory(layout, tag) for tag in (1, 2, 3))
    stream, seen = runtime.stream_create(), runtime.malloc(target.blocks[0][2])
    with sc.Copier(tickets=4, layer_events=8) as copier:
        if how == "begin":
            copier.submit(source.state, target.state, upto=80, after=SYNCED)
            wanted = after_copy(source, target, 80)[0]
            empty = copier.submit(other.state, target.state, upto=80, begin=80, after=SYNCED)
        else:
            writer = runtime.stream_create()
            runtime.memcpy_async(target.blocks[0][1], other.blocks[0][1], target.blocks[0][2], writer)
            wanted = other.pattern()[0]
            empty = copier.submit(source.state, target.state, upto=80, begin=80, after=sc.Stream(writer))
        assert empty.wait_done(stream)
        runtime.memcpy_async(seen, target.blocks[0][1], target.blocks[0][2], stream)
        runtime.stream_synchronize(stream)
        assert (runtime.view(seen, target.blocks[0][2]) == wanted).all()


def test_a_layer_without_bytes_of_its_own_does_not_wait_for_a_large_one():
    """Small parts that moved together are all that layer 1 needs; behind it come rows of megabytes. If it waited for
    them, they would have been executed with every seed."""
    state = sc.Growth.state()
    parts = [sc.Part(name="s", layer=layer, unit_bytes=64, growth=state) for layer in range(4)]
    parts.append(sc.Part(name="k", layer=3, unit_bytes=1 << 18, growth=ROWS))
    layout, executed = sc.Layout(parts), []
    for seed in range(20):
        host_runtime.configure(seed=seed)
        source, target = Memory(layout, 1, marks=(32,)), Memory(layout, 2, "pinned", marks=(32,))
        with sc.Copier(tickets=2, layer_events=16) as copier:
            copy = copier.submit(source.state, target.state, upto=32, after=SYNCED)
            stream = runtime.stream_create()
            assert copy.wait_layer(1, stream)
            runtime.stream_synchronize(stream)
            executed.append(sum(size for _, _, size in host_runtime.log()))
    assert min(executed) < 1 << 18


def test_a_ticket_that_was_told_ok_stays_so(memory):
    """Four threads look at one ticket while CUDA answers a question with an error: all are told the same, and the
    target agrees."""
    layout = rows(4)
    source, target = memory(layout, 1), memory(layout, 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with sc.Copier(tickets=4, layer_events=8) as copier:
            plan = copier.plan(source.state, target.state)
            for _ in range(60):
                ticket = plan.submit(50, after=SYNCED)
                host_runtime.fail("cudaEventQuery", 1, 999)
                told, start = [], threading.Barrier(4)

                def look(act, ticket=ticket, told=told, start=start):
                    start.wait()
                    try:
                        while not ticket.done:
                            act()
                        act()
                        told.append(sc.Progress)
                    except sc.CopyError as error:
                        told.append(type(error))

                acts = [ticket.poll, ticket.poll, ticket.poll, ticket.sync]
                threads = [threading.Thread(target=look, args=(act,)) for act in acts]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                host_runtime.clear_faults()
                assert len(told) == 4
                assert set(told) in ({sc.Progress}, {sc.Failed}), told
                assert target.state.valid == (told[0] is sc.Progress), told
                target.state.reset()
    finally:
        sys.setswitchinterval(interval)


PREPARE = """
    import sys, threading, time
    sys.path.insert(0, sys.argv[2])
    import numpy as np
    import strata_copy as sc
    from fixtures import Memory
    from strata_copy import host_runtime, runtime
    runtime.open(sys.argv[1])
    growth = sc.Growth.linear()
    layout = sc.Layout([sc.Part(name="row", layer=layer, unit_bytes=64, growth=growth) for layer in range(8)])
"""


def test_closing_while_others_submit_loses_no_ticket():
    code = (
        PREPARE
        + """
    states = [Memory(layout, tag).state for tag in range(10)]
    wrong = []
    for turn in range(15):
        copier, tickets = sc.Copier(tickets=32, layer_events=8), [[] for _ in range(5)]

        def submit(k):
            try:
                plan = copier.plan(states[2 * k], states[2 * k + 1])
                while True:
                    ticket = plan.submit(90, after=sc.CALLER_SYNCED)
                    if ticket is not None:
                        tickets[k].append(ticket)
            except sc.Refused as refused:
                wrong.extend([] if refused.reason == "closed" else [repr(refused)])

        def look():
            while not copier.closed:
                for mine in tickets:
                    if mine:
                        mine[-1].sync(0.001)

        threads = [threading.Thread(target=submit, args=(k,)) for k in range(5)]
        threads.append(threading.Thread(target=look))
        for thread in threads: thread.start()
        time.sleep(0.01)
        copier.close()
        for thread in threads: thread.join()
        wrong += [(t.value, t.error) for mine in tickets for t in mine if not t.done or t.error is not None]
        wrong += [state for state in states if state.busy]
    print(wrong, host_runtime.violations())
    """
    )
    assert run_python(code) == "[] []\n"


def test_a_state_that_a_dead_device_still_holds_does_no_harm_to_the_next_copier():
    """Its last writer had a number that the next copier, with fewer tickets, has not."""
    code = (
        PREPARE
        + """
    host_runtime.configure(devices=2, seed=3)
    memory = np.zeros((8, 64 * 100), np.uint8)
    target = sc.State(layout, [sc.Place(base=row, units=100, kind="pageable") for row in memory])
    source, others = Memory(layout, 1), [Memory(layout, 2).state for _ in range(60)]
    copier = sc.Copier(tickets=64, layer_events=8)
    flying = [copier.submit(source.state, other, upto=20, after=sc.CALLER_SYNCED) for other in others[:50]]
    flying.append(copier.submit(source.state, target, upto=20, after=sc.CALLER_SYNCED))
    host_runtime.fail("cudaMemcpyAsync", 1, 700)
    fails = lambda: copier.submit(source.state, others[-1], upto=20, after=sc.CALLER_SYNCED)
    for act in (fails, flying[-1].sync, copier.close):
        try:
            act()
        except sc.Poisoned:
            print("poisoned")
    host_runtime.configure(devices=2, seed=1)
    source = Memory(layout, 3)
    with sc.Copier(tickets=1, layer_events=8) as copier:
        try:
            target.reset()
        except sc.Refused:
            pass
        try:
            print(copier.submit(source.state, target, upto=20, after=sc.CALLER_SYNCED).sync())
        except sc.Refused as refused:
            print(refused.reason)
    """
    )
    lines = run_python(code).split()
    assert lines[:2] == ["poisoned", "poisoned"]
    assert lines[-1] in ("True", "busy")


@pytest.mark.parametrize(
    "fault",
    ['("cudaThreadExchangeStreamCaptureMode", 1, 999)', '("cudaStreamSynchronize", 1, 700)'],
    ids=["guard", "dead"],
)
def test_a_call_that_fails_in_closing_leaves_no_ticket_in_flight(fault):
    """Whether the copies ended well or the device is dead: who asks is told, and the next copier is not led astray."""
    code = (
        PREPARE
        + f"""
    host_runtime.configure(devices=2, seed=1)
    source, target, last = (Memory(layout, tag) for tag in (1, 2, 3))
    copier = sc.Copier(tickets=8, layer_events=8)
    tickets = [copier.submit(source.state, Memory(layout, 4).state, upto=50, after=sc.CALLER_SYNCED) for _ in range(5)]
    tickets.append(copier.submit(source.state, target.state, upto=50, after=sc.CALLER_SYNCED))
    host_runtime.fail{fault}
    try:
        copier.close()
        closed = "quietly"
    except sc.CopyError as error:
        closed = type(error).__name__
    print(closed, all(t.done for t in tickets), {{type(t.error).__name__ for t in tickets}})
    dead = closed == "Poisoned"
    if dead:
        host_runtime.configure(devices=2, seed=1)
        source = Memory(layout, 1)
    else:
        target.state.reset()
        with sc.Copier(tickets=1, layer_events=8) as copier:
            print(copier.submit(last.state, target.state, upto=50, after=sc.CALLER_SYNCED).sync())
    """
    )
    lines = run_python(code).split("\n")
    if "Synchronize" in fault:
        assert lines[0] == "Poisoned True {'NoneType'}"  # they ended well before anything was given back
    else:
        assert lines[0] in ("quietly True {'NoneType'}", "Failed True {'NoneType'}")
        assert lines[1] == "True"
