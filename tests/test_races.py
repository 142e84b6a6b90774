"""The host runtime finds what nothing orders: programs that are wrong on purpose, right ones that look wrong, and this
library with each of its waits taken away in turn."""

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import strata_copy as sc
from fixtures import SYNCED, Memory
from lost_calls import LAYOUT, ROUTES, SEED, UPTO, Beside, unreported
from strata_copy import host_runtime, runtime, testing

pytestmark = pytest.mark.host
SIZE = 4096


@pytest.fixture(autouse=True)
def scheduled():
    """The races of a test are for the test to look at."""
    host_runtime.configure(devices=2, seed=SEED)
    yield
    host_runtime.configure(devices=2)


class Program:
    """Streams s, t, u, device memory a, b, c and pinned memory p, q, and what may be done with them."""

    def __init__(self):
        self.s, self.t, self.u = (runtime.stream_create() for _ in range(3))
        self.a, self.b, self.c = (runtime.malloc(SIZE) for _ in range(3))
        self.p, self.q = runtime.host_alloc(SIZE), runtime.host_alloc(SIZE)

    def copy(self, target, source, stream, size=SIZE):
        runtime.memcpy_async(target, source, size, stream)

    def record(self, stream, event=None):
        event = event or runtime.event_create()
        runtime.event_record(event, stream)
        return event

    def order(self, first, then):
        runtime.stream_wait_event(then, self.record(first))


@pytest.fixture
def program(scheduled):
    return Program()


def races():
    found = host_runtime.violations()
    assert all(text.startswith("race: ") for text in found)
    return found


# ---- wrong programs


def test_a_read_behind_no_write(program):
    program.copy(program.b, program.a, program.s)
    program.copy(program.c, program.b, program.t)
    assert races() == [
        f"race: cudaMemcpyAsync call 2 of thread 1 on stream {program.t} reads [0x{program.b:x}, +{SIZE}), and nothing "
        f"orders it behind cudaMemcpyAsync call 1 of thread 1 on stream {program.s}, which writes "
        f"[0x{program.b:x}, +{SIZE})"
    ]


def test_a_write_behind_no_read(program):
    program.copy(program.b, program.a, program.s)
    runtime.memset_async(program.a + 100, 0, 8, program.t)
    assert len(races()) == 1
    assert "cudaMemsetAsync call 1" in races()[0]
    assert f"reads [0x{program.a:x}" in races()[0]


def test_a_write_behind_no_write(program):
    program.copy(program.b, program.a, program.s)
    program.copy(program.b + SIZE - 1, program.p, program.t, 1)
    assert len(races()) == 1


@pytest.mark.parametrize("steps", range(6))
def test_the_order_in_which_it_was_executed_does_not_count(program, steps):
    program.order(program.u, program.s)
    program.copy(program.b, program.a, program.s)
    host_runtime.step(steps)
    program.copy(program.c, program.b, program.t)
    assert len(races()) == 1


def test_a_store_of_the_cpu_under_a_late_read(program):
    program.copy(program.a, program.p, program.s)
    host_runtime.host_write(program.p, 1)
    assert len(races()) == 1
    runtime.stream_synchronize(program.s)
    host_runtime.host_write(program.p, 1)
    assert len(races()) == 1


def test_a_load_of_the_cpu_before_the_bytes(program):
    program.copy(program.p, program.a, program.s)
    host_runtime.host_read(program.p, 1)
    assert len(races()) == 1


def test_a_wait_on_the_wrong_event(program):
    wrong = program.record(program.u)
    program.copy(program.b, program.a, program.s)
    program.record(program.s)
    runtime.stream_wait_event(program.t, wrong)
    program.copy(program.c, program.b, program.t)
    assert len(races()) == 1


def test_a_record_before_what_it_should_stand_for(program):
    event = program.record(program.s)
    program.copy(program.b, program.a, program.s)
    runtime.stream_wait_event(program.t, event)
    program.copy(program.c, program.b, program.t)
    assert len(races()) == 1


def test_an_event_that_was_recorded_again_elsewhere(program):
    program.copy(program.b, program.a, program.s)
    event = program.record(program.s)
    program.record(program.u, event)
    runtime.stream_wait_event(program.t, event)
    program.copy(program.c, program.b, program.t)
    assert len(races()) == 1


def test_a_wait_keeps_the_record_that_it_saw(program):
    program.copy(program.b, program.a, program.s)
    event = program.record(program.s)
    runtime.stream_wait_event(program.t, event)
    program.record(program.u, event)
    program.copy(program.c, program.b, program.t)
    assert races() == []


def test_a_query_that_says_not_yet_orders_nothing(program):
    for _ in range(9):  # more than are executed at one query
        program.copy(program.p, program.a, program.s)
    assert not runtime.stream_query(program.s)
    host_runtime.host_read(program.p, SIZE)
    assert len(races()) == 1
    while not runtime.stream_query(program.s):
        pass
    host_runtime.host_read(program.p, SIZE)
    assert len(races()) == 1


def test_pageable_memory_is_read_when_the_call_returns_and_may_land_later(program):
    """On a GPU the last of it may still be on its way, and a non-blocking stream does not wait for it."""
    pageable = bytearray(SIZE)
    address = runtime.np.frombuffer(pageable, runtime.np.uint8).ctypes.data
    runtime.memcpy(program.a, address, SIZE)
    program.copy(program.b, program.a, program.s)
    assert len(races()) == 1
    runtime.device_synchronize()
    program.copy(program.b, program.a, program.s)
    runtime.memcpy(address, program.b, SIZE)
    assert len(races()) == 2  # the blocking copy waits for no stream


def test_two_threads_without_a_word_between_them(program):
    program.copy(program.p, program.a, program.s)
    other = threading.Thread(target=runtime.stream_synchronize, args=(program.s,))
    other.start()
    other.join()
    host_runtime.host_read(program.p, SIZE)
    assert len(races()) == 1


# ---- right programs


def test_rows_that_lie_between_one_anothers_are_apart(program):
    for n, stream in enumerate((program.s, program.t)):
        runtime.memcpy_2d_async(program.b + 64 * n, 128, program.a + 64 * n, 128, 64, SIZE // 128, stream)
    assert races() == []
    runtime.memcpy_2d_async(program.b + 63, 128, program.a, 64, 2, SIZE // 128 - 1, program.u)
    assert len(races()) == 2
    assert "31 rows, pitch 128" in races()[0]


def test_a_chain_over_three_streams_and_two_threads(program):
    def second():
        program.order(program.s, program.t)
        program.copy(program.b, program.a, program.t)
        program.order(program.t, program.u)
        host_runtime.publish(1)

    program.copy(program.a, program.p, program.s)
    other = threading.Thread(target=second)
    other.start()
    other.join()
    host_runtime.observe(1)
    program.copy(program.q, program.b, program.u)
    runtime.stream_synchronize(program.u)
    for address in (program.p, program.q, program.a, program.b):
        host_runtime.host_write(address, SIZE)
    assert races() == []


@pytest.mark.parametrize("how", ["query", "synchronize", "device", "event", "event query"])
def test_what_a_thread_has_waited_for_is_over(program, how):
    program.copy(program.p, program.a, program.s)
    event = program.record(program.s)
    if how == "query":
        while not runtime.stream_query(program.s):
            pass
    elif how == "event query":
        while not runtime.event_query(event):
            pass
    elif how == "synchronize":
        runtime.stream_synchronize(program.s)
    elif how == "device":
        runtime.device_synchronize()
    else:
        runtime.event_synchronize(event)
    host_runtime.host_write(program.p, SIZE)
    program.copy(program.b, program.p, program.t)
    assert races() == []


def test_a_word_that_the_device_writes_tells_of_what_came_before_it(program):
    program.copy(program.p, program.a, program.s, 2048)
    program.copy(program.q, program.a, program.s, 8)
    host_runtime.observe(program.q)  # too early: it was not written yet
    host_runtime.host_read(program.p, 8)
    assert len(races()) == 1
    host_runtime.step(2)
    host_runtime.observe(program.q)
    host_runtime.host_read(program.p, 8)
    assert len(races()) == 1


def test_new_memory_has_no_past(program):
    program.copy(program.p, program.a, program.s)
    runtime.host_free(runtime.host_alloc(8))
    runtime.stream_synchronize(program.s)
    runtime.host_free(program.p)
    program.p = runtime.host_alloc(SIZE)
    program.copy(program.p, program.c, program.t)
    assert races() == []


def test_what_everybody_knows_is_not_kept(program):
    """A loop of many small copies that are synchronized now and then: the time of a copy does not grow."""
    for turn in range(200):
        for n in range(0, SIZE, 64):
            program.copy(program.b + n, program.a + n, (program.s, program.t)[n // 64 % 2], 64)
        if turn % 10 == 0:
            runtime.device_synchronize()
    assert races() == []


def test_threads_mode_looks_only_when_asked():
    for asked, found in ((None, 0), (True, 1)):
        host_runtime.configure(races=asked)
        program = Program()
        program.copy(program.b, program.a, program.s)
        program.copy(program.c, program.b, program.t)
        assert len(races()) == found
        runtime.device_synchronize()


# ---- the ends of tickets, between threads


@pytest.fixture
def elsewhere(scheduled):
    """Runs a function on another thread that has called before, and so knows nothing of what this one does next."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(host_runtime.host_read, 0, 0).result()
        yield lambda *call: pool.submit(*call).result()


def one_ticket(copier):
    a, b = (Memory(LAYOUT, n, kind) for n, kind in ((1, "device"), (2, "pinned")))
    return a, b, copier.submit(a.state, b.state, upto=UPTO, after=SYNCED)


SEEN = {
    "done": lambda copier, ticket, a, b: ticket.done,
    "sync": lambda copier, ticket, a, b: ticket.sync(),
    "wait": lambda copier, ticket, a, b: ticket.wait_done(runtime.stream_create()),
    "reset": lambda copier, ticket, a, b: b.state.reset() is None,
    "busy": lambda copier, ticket, a, b: not b.state.busy,
    "submit": lambda copier, ticket, a, b: copier.submit(b.state, a.state, upto=UPTO, after=SYNCED).sync(),
}


@pytest.mark.parametrize("how", SEEN)
def test_a_thread_that_sees_the_end_that_another_saw_first_knows_it_too(elsewhere, how):
    with sc.Copier(tickets=2, layer_events=24) as copier:
        a, b, ticket = one_ticket(copier)
        assert elsewhere(ticket.sync)
        elsewhere(a.state.reset)
        assert SEEN[how](copier, ticket, a, b)
        b.bytes()
        assert races() == []


def test_the_word_alone_tells_of_the_end(scheduled):
    with sc.Copier(tickets=2, layer_events=24) as copier:
        _, b, ticket = one_ticket(copier)
        while host_runtime.step(100):
            pass
        asked = host_runtime.calls()
        assert ticket.done
        assert host_runtime.calls() == asked
        b.bytes()
        assert races() == []


def test_a_thread_that_does_not_look_does_not_know(elsewhere):
    with sc.Copier(tickets=2, layer_events=24) as copier:
        _, b, ticket = one_ticket(copier)
        assert elsewhere(ticket.sync)
        b.bytes()
        assert races() != []


@pytest.mark.parametrize("other_first", [False, True])
def test_a_submit_that_finds_the_slot_used_again_knows_how_it_got_free(elsewhere, other_first):
    """The other thread lets the states go and uses their slot for others: nothing is left to wait for."""
    with sc.Copier(tickets=1, layer_events=24) as copier:
        a, b, ticket = one_ticket(copier)
        assert elsewhere(ticket.sync)
        del ticket
        c, d = (Memory(LAYOUT, n, "device") for n in (3, 4))
        if other_first:
            host_runtime.publish(1)
            elsewhere(host_runtime.observe, 1)
            elsewhere(lambda: copier.submit(c.state, d.state, upto=UPTO, after=SYNCED).sync())
        assert elsewhere(copier.finished)
        assert copier.submit(b.state, a.state, upto=UPTO, after=SYNCED).sync()
        assert races() == []


# ---- faults


def test_a_wait_that_is_skipped_is_a_race(program):
    testing.skip("cudaStreamWaitEvent", 1)
    program.copy(program.b, program.a, program.s)
    program.order(program.s, program.t)
    program.copy(program.c, program.b, program.t)
    assert len(races()) == 1
    assert testing.clear_faults() == 1


@pytest.mark.parametrize("function", ["cudaMalloc", "cudaEventCreateWithFlags", "nothing"])
def test_what_gives_something_back_is_not_skipped(program, function):
    with pytest.raises(ValueError, match="gives its caller something back"):
        testing.skip(function, 1)


@pytest.mark.parametrize("schedule", range(10))
def test_a_delayed_copy_comes_last(schedule):
    host_runtime.configure(seed=schedule)
    program = Program()
    testing.delay(1)
    program.copy(program.b, program.a, program.s, 1)
    for n in range(2, 6):
        program.copy(program.c, program.a, program.t, n)
    runtime.device_synchronize()
    assert [size for _, _, size in host_runtime.log()] == [2, 3, 4, 5, 1]


def test_a_delayed_copy_is_late_in_threads_mode():
    host_runtime.configure()
    program = Program()
    start, end = runtime.event_create(True), runtime.event_create(True)
    testing.delay(1)
    program.record(program.s, start)
    program.copy(program.b, program.a, program.s)
    program.record(program.s, end)
    runtime.stream_synchronize(program.s)
    assert runtime.event_elapsed(start, end) > 40


# ---- for engines


def a_race(then=None):
    program = Program()
    program.copy(program.b, program.a, program.s)
    program.copy(program.c, program.b, program.t)
    if then is not None:
        raise then


def test_the_block_ends_with_what_was_found():
    with pytest.raises(AssertionError, match=r"1 violations with seed 5:\n  race: ") as raised, testing.host(seed=5):
        a_race()
    assert str(raised.value).endswith(host_runtime.violations()[0])
    with testing.host(devices=2, seed=None):
        assert runtime.device_count() == 2


def test_an_exception_of_the_block_goes_first():
    with pytest.raises(KeyError), testing.host():
        a_race(then=KeyError)


def test_the_example_of_the_page_finds_the_missing_wait():
    page = (Path(__file__).parents[1] / "docs" / "testing.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, re.S)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "violations with seed 0:\n  race: " in done.stdout


# ---- the library, with each of its waits and records taken away in turn


def one_copy_with_neighbours(copier, a, b, _):
    """A late writer of the source and a late reader of the target come before; consumers of each layer and of
    everything, and who overwrites the source, come behind."""
    writer, reader, everything, overwriter = (runtime.stream_create() for _ in range(4))
    consumers = [runtime.stream_create() for _ in range(LAYOUT.layers)]
    Beside(a).write_it(writer)
    Beside(b).read_it(reader)
    ticket = copier.submit(a.state, b.state, upto=UPTO, after=[sc.Stream(writer), sc.Stream(reader)])
    assert ticket.wait_done(everything)
    Beside(b).read_it(everything)
    for layer, stream in enumerate(consumers):
        assert ticket.wait_layer(layer, stream)
        Beside(b).read_it(stream, layer)
    assert ticket.wait_source(overwriter)
    Beside(a).write_it(overwriter)
    assert ticket.sync()
    b.bytes()


def two_tickets(second):
    def scene(copier, *states):
        memories = dict(zip("abc", states, strict=True))
        tickets = [
            copier.submit(memories[x].state, memories[y].state, upto=UPTO, after=SYNCED) for x, y in ("ab", second)
        ]
        assert all(ticket.sync() for ticket in reversed(tickets))
        memories[second[1]].bytes()
        memories["b"].bytes()

    return scene


read_behind_a_write, write_behind_a_read, write_behind_a_write = map(two_tickets, ("bc", "ca", "cb"))


@pytest.mark.parametrize("route", ROUTES)
def test_each_wait_and_record_around_a_copy_is_needed(route):
    """The chain of a pair of streams makes gaps; of its links only those that carry the first waits over and those
    before a layer's event are needed for the order too."""
    lost, of = unreported(one_copy_with_neighbours, route)
    assert set(lost) <= {"chain"}
    assert route in ("local", "peer") or 0 < lost["chain"] < of["chain"]  # the chunks of these are never full


@pytest.mark.parametrize("route", ROUTES)
def test_the_records_and_the_end_of_a_copy_with_bundles_are_needed(route):
    lost, _ = unreported(one_copy_with_neighbours, route, together=True)
    assert set(lost) <= {"chain"}


@pytest.mark.parametrize("route", ["out", "in"])
@pytest.mark.parametrize("scene", [read_behind_a_write, write_behind_a_read], ids=["read", "write"])
def test_tickets_on_the_same_states_need_each_others_end(scene, route):
    lost, of = unreported(scene, route)
    assert of["end"] >= 3
    assert lost["end"] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_ticket_without_its_end_is_reported(route):
    """Two tickets that use the same lanes are in order without; the end is waited for all the same."""
    lost, of = unreported(write_behind_a_write, route)
    assert lost["end"] <= of["end"] - 2
