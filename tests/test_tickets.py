"""Tickets: what may be asked of them, how they end, and that nothing piles up."""

import copy
import functools
import gc
import pickle
import re
import threading
import time
import weakref

import numpy as np
import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, small_layout, untouched
from strata_copy import host_runtime, runtime

LAYOUT = small_layout("q4_0")


# ---- progress


def test_progress_of_a_copy_in_flight(held, scene):
    ticket = scene.submit(after=held.wait)
    total = scene.source.layout.bytes_at([9])
    before = ticket.poll()
    assert (before.bytes, before.bytes_total, before.layers_queued) == (0, total, scene.source.layout.layers)
    assert not ticket.done
    assert ticket.error is None
    held.open()
    assert ticket.sync()
    after = ticket.poll()
    assert (after.bytes, after.bytes_total, after.layers_queued) == (total, total, scene.source.layout.layers)
    assert after.seconds >= after.submit_seconds > 0
    assert ticket.seconds == after.seconds
    assert ticket.bytes == total
    assert ticket.target is scene.target.state
    assert ticket.routes == {("out", 0)}
    assert ticket.done


@pytest.mark.host
def test_looking_at_a_ticket_makes_no_cuda_call(held, scene):
    ticket = scene.submit()
    for _ in range(2):
        before = host_runtime.calls()
        ticket.poll()
        assert not ticket.done or ticket.sync()
        _ = ticket.error, ticket.bytes, ticket.seconds, repr(ticket), scene.target.state.busy, scene.target.state.valid
        scene.copier.finished()
        assert host_runtime.calls() == before
        ticket.sync()


def test_a_sync_that_may_not_wait_comes_back(held, scene):
    ticket = scene.submit(after=held.wait)
    started = time.monotonic()
    assert ticket.sync(timeout=0) in (False, True)
    assert time.monotonic() - started < 5
    held.open()
    assert ticket.sync()
    assert ticket.sync(timeout=0)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(float("nan"), ValueError), (1 << 33, ValueError), (-1, ValueError), (-1e-9, ValueError), ("x", TypeError)],
)
def test_a_timeout_without_meaning_is_refused(held, scene, timeout, error):
    """A -1 is what C means by None: here it is a slip, and so is what is left of a time that is over."""
    ticket = scene.submit(after=held.wait)
    said = f"timeout is {re.escape(str(timeout) if error is ValueError else repr(timeout))}; .* for as long as it takes"
    for call in (
        ticket.sync,
        lambda timeout: ticket.wait_layer(0, 99, timeout),
        lambda timeout: ticket.wait_done(99, timeout),
        lambda timeout: ticket.wait_source(99, timeout),
    ):
        with pytest.raises(error, match=said):
            call(timeout)
    with pytest.raises(error, match=r"patience is .* seconds.*, or None for never"):
        sc.Copier(patience=timeout)
    held.open()
    assert ticket.sync(timeout=float("inf"))
    assert ticket.sync(timeout=np.float32(0))


@pytest.mark.parametrize("wait", ["wait_layer", "wait_done", "wait_source"])
def test_a_stream_is_named_to_a_wait_as_to_a_submit(held, scene, wait):
    stream = runtime.stream_create()
    ticket = scene.submit(after=held.wait)
    act = getattr(ticket, wait) if wait != "wait_layer" else functools.partial(ticket.wait_layer, 0)
    with pytest.raises(TypeError, match="a stream or event is an int handle or an object that has one, not Event"):
        act(sc.Event(stream))
    with pytest.raises(sc.Refused, match="stream"):
        act(sc.Stream(0))
    assert act(sc.Stream(stream), timeout=None)
    assert not runtime.stream_query(stream)
    held.open()
    assert ticket.sync()
    runtime.stream_synchronize(stream)
    runtime.stream_destroy(stream)


def test_a_layer_that_the_layout_has_not_is_refused(held, scene):
    ticket = scene.submit(after=held.wait)
    stream = runtime.stream_create()
    for layer in (-1, scene.source.layout.layers):
        with pytest.raises(ValueError, match=r"layer is .*; may be 0 to 3"):
            ticket.wait_layer(layer, stream)
    held.open()
    ticket.sync()
    runtime.stream_destroy(stream)


def test_a_copy_of_nothing_ends_well(memory, copier):
    layout = sc.Layout([sc.Part(name="k", layer=layer, unit_bytes=16, growth=sc.Growth.linear()) for layer in range(3)])
    source, target = memory(layout, 1), memory(layout, 2)
    stream = runtime.stream_create()
    plan = copier.plan(source.state, target.state)
    plan.submit(50, after=SYNCED).sync()
    target.fill()
    for how in ({"upto": 0}, {"upto": 7, "begin": 7}):
        ticket = plan.submit(**how, after=SYNCED)
        assert ticket.sync()
        assert ticket.done
        assert ticket.poll().bytes_total == 0
        assert ticket.wait_layer(2, stream)
        assert ticket.wait_done(stream)
        assert ticket.sync()
    assert untouched(target)
    runtime.stream_destroy(stream)


# ---- how they end


def test_finished_gives_each_ticket_once(memory, copier):
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    plan = copier.plan(source.state, target.state)
    tickets = [plan.submit(n, after=SYNCED) for n in range(6)]
    found = []
    while len(found) < 6:
        found += copier.finished()
        tickets[-1].sync(timeout=1)
    assert sorted(found, key=lambda ticket: ticket.value) == tickets
    assert copier.finished() == []
    assert all(ticket.done for ticket in found)


def test_without_a_free_ticket_nothing_happens_and_later_it_does(held, memory):
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    with sc.Copier(tickets=3, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        flying = [plan.submit(9, after=held.wait) for _ in range(3)]
        assert all(flying)
        generation = target.state.generation
        assert plan.submit(9, after=SYNCED) is None
        assert target.state.generation == generation
        held.open()
        assert all(ticket.sync() for ticket in flying)
        ticket = plan.submit(50, after=SYNCED)
        assert ticket is not None
        assert ticket.sync()
    assert differences(target, after_copy(source, target, 50)) == []


def test_tickets_may_be_dropped_without_a_wait(memory):
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    with sc.Copier(tickets=4, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        for n in range(40):
            while plan.submit(n, after=SYNCED) is None:
                runtime.device_synchronize()
    assert differences(target, after_copy(source, target, 39)) == []


def test_a_ticket_keeps_memory_and_states_while_it_is_in_flight(held, memory, copier):
    """Nobody else holds them here."""

    class Owner:
        pass

    owner, gone = Owner(), []
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    state = sc.State(LAYOUT, source.places, owner=owner)
    weakref.finalize(owner, gone.append, True)
    ticket = copier.submit(state, target.state, upto=9, after=held.wait)
    del owner, state
    gc.collect()
    assert gone == []
    held.open()
    assert ticket.sync()
    copier.finished()
    del ticket
    gc.collect()
    assert gone == [True]


@pytest.mark.host
@pytest.mark.parametrize("ask", ["sync", "finished"])
def test_a_lost_word_is_found_by_asking(memory, ask):
    """The word that tells the end does not arrive; the events behind the copy still know."""
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2)
    with sc.Copier(tickets=4, layer_events=24, patience=0.02) as copier:
        plan = copier.plan(source.state, target.state)
        host_runtime.corrupt(len(plan.extents(9)) + 1)
        ticket = plan.submit(9, after=SYNCED)
        runtime.device_synchronize()
        assert host_runtime.clear_faults() == 1
        assert not ticket.done
        if ask == "sync":
            assert ticket.sync()
        else:
            until = time.monotonic() + 20
            while copier.finished() != [ticket]:
                assert time.monotonic() < until
        assert ticket.done
        assert ticket.poll().bytes == LAYOUT.bytes_at([9])
        # Late or wrong, the word is not taken for that of the next ticket.
        following = plan.submit(50, after=SYNCED)
        assert following.sync()
    assert differences(target, after_copy(source, target, 50)) == []


def test_a_patient_copier_does_not_ask(held, scene):
    """What is in flight for good reason is left alone."""
    ticket = scene.submit(after=held.wait)
    assert scene.copier.finished() == []
    assert not ticket.done
    held.open()
    ticket.sync()


def test_exceptions_from_real_calls_pickle(scene):
    with pytest.raises(sc.Refused) as refused:
        scene.submit(upto=4000)
    again = pickle.loads(pickle.dumps(refused.value))
    assert type(again) is sc.Refused
    assert again.fields == refused.value.fields
    assert (again.reason, again.wanted, again.found, again.layer) == ("capacity", 1000, 25, 1)


def test_there_is_one_value_for_a_caller_who_has_synchronized(scene):
    """Whatever has carried it here."""
    for again in (copy.copy(SYNCED), copy.deepcopy([SYNCED])[0], pickle.loads(pickle.dumps(SYNCED))):
        assert again is SYNCED
        assert scene.submit(after=again).sync()


def test_what_is_printed_of_a_copy_says_how_it_is(held, scene, second_device):
    source, target = scene.source.state, scene.target.state
    plan = scene.copier.plan(source, target)
    assert repr(plan) == f"<Plan from State {source.address:#x} to State {target.address:#x}: out on device 0>"
    ticket = plan.submit(9, after=held.wait)
    total = scene.source.layout.bytes_at(9)
    said = f"<Ticket {ticket.value:#x}: {total} bytes, "
    assert repr(ticket) == f"{said}in flight>"
    assert repr(scene.copier) == "<Copier of devices (0,), open>"
    held.open()
    assert ticket.sync()
    assert repr(ticket) == f"{said}done>"
    scene.copier.close()
    assert repr(scene.copier) == "<Copier of devices (0,), closed>"


def test_what_is_printed_of_a_plan_names_each_source_once(memory, copier):
    layout = small_layout(draft=True)
    main, draft, slot = (memory(layout, n).state for n in (1, 2, 3))
    said = f"to State {slot.address:#x}: local on device 0>"
    assert repr(copier.plan(main, slot)) == f"<Plan from State {main.address:#x} {said}"
    of_two = copier.plan({"main": main, "draft": draft}, slot)
    assert repr(of_two) == f"<Plan from State {main.address:#x} and State {draft.address:#x} {said}"


def test_plans_and_tickets_are_made_by_their_makers():
    for made in (sc.Plan, sc.Ticket):
        with pytest.raises(TypeError, match="are made by"):
            made()


PLAN_CALLS = {
    "address": lambda plan: plan.address,
    "layout": lambda plan: plan.layout,
    "routes": lambda plan: plan.routes(),
    "submit": lambda plan: plan.submit(9, after=SYNCED),
    "extents": lambda plan: plan.extents(9),
    "repr": repr,
}
TICKET_CALLS = {
    "wait_layer": lambda ticket: ticket.wait_layer(0, 0x1234),
    "wait_done": lambda ticket: ticket.wait_done(0x1234),
    "wait_source": lambda ticket: ticket.wait_source(0x1234),
    "sync": lambda ticket: ticket.sync(),
    "cancel": lambda ticket: ticket.cancel(),
    "poll": lambda ticket: ticket.poll(),
    "done": lambda ticket: ticket.done,
    "error": lambda ticket: ticket.error,
    "target": lambda ticket: ticket.target,
    "routes": lambda ticket: ticket.routes,
    "bytes": lambda ticket: ticket.bytes,
    "seconds": lambda ticket: ticket.seconds,
    "repr": repr,
}


@pytest.mark.parametrize("call", PLAN_CALLS)
def test_a_plan_that_no_copier_made_is_refused(call):
    with pytest.raises(TypeError, match=r"a Plan that Copier\.plan made"):
        PLAN_CALLS[call](sc.Plan.__new__(sc.Plan))


@pytest.mark.parametrize("call", TICKET_CALLS)
def test_a_ticket_that_no_plan_made_is_refused(call):
    with pytest.raises(TypeError, match=r"a Ticket that Plan\.submit made"):
        TICKET_CALLS[call](sc.Ticket.__new__(sc.Ticket))


def test_a_waiting_thread_does_not_hold_the_others_up(held, scene):
    """sync releases the GIL."""
    ticket = scene.submit(after=held.wait)
    done, counted = [], 0
    thread = threading.Thread(target=lambda: done.append(ticket.sync()))
    thread.start()
    while thread.is_alive():
        counted += 1
    thread.join()
    assert done == [True]
    held.open()


# ---- nothing piles up


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_many_tickets_leave_nothing_behind(memory, count):
    layout = sc.Layout([sc.Part(name="s", layer=layer, unit_bytes=64, growth=sc.Growth.state()) for layer in range(2)])
    source, target = memory(layout, 1), memory(layout, 2)
    with sc.Copier(tickets=16, layer_events=4) as copier:
        plan = copier.plan(source.state, target.state)
        plan.submit(0, after=SYNCED).sync()
        before = host_runtime.live()  # empty with CUDA
        values, memory_before = set(), resident()
        for _ in range(count):
            while (ticket := plan.submit(0, after=SYNCED)) is None:
                copier.finished()
            values.add(ticket.value)
        assert ticket.sync()
        assert len(values) == count
        del values
        copier.finished()
        gc.collect()
        assert host_runtime.live() == before
        assert resident() - memory_before < 32 << 20
    assert differences(target, after_copy(source, target, 0)) == []


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
