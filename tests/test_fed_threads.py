"""The worker's own thread beside threads that feed, wait, cancel, look and close, as fast as they can: nobody hangs, no
byte is wrong."""

import ctypes
import random
import threading
import time

import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, small_layout
from hooks import Hook
from strata_copy import runtime

pytestmark = pytest.mark.timeout(120)
LAYOUT = small_layout("k8v4")
UPTO = 90
OK, AGAIN, CANCELLED = 0, 1, -3


class Table(ctypes.Structure):
    """The C table of strata_copy.h, as far as it is used here: its functions let the GIL go."""

    CANCEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
    WAIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    WAIT_LAYER = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    )
    _fields_ = [
        ("version", ctypes.c_uint32), ("size", ctypes.c_uint32), ("submit", ctypes.c_void_p),
        ("wait_layer", WAIT_LAYER), ("wait_done", WAIT), ("wait_source", WAIT),
        *((name, ctypes.c_void_p) for name in
          ("poll", "finished", "sync", "release", "state_generation", "state_reset")), ("cancel", CANCEL),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return Table.from_address(get(sc._core._C_API, b"strata_copy._core._C_API"))


def small(**how):
    """A copier in whose eyes the small conversation is long."""
    how = {"tickets": 32, "layer_events": 32, "chunk": 1000, "window": 1, "device_memory": 4096, "ring_slots": 2,
           "pinned_memory": 2048, **how}  # fmt: skip
    return sc.Copier((0,), **how)


def all_at_once(*works):
    """Runs them in threads of their own, each of which ends within the time."""
    failed = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []


@pytest.mark.parametrize("number", range(3))
def test_feed_wait_cancel_and_look(memory, number):
    """Threads with states of their own, and one that looks at everybody's tickets."""
    kinds = (("device", "pinned"), ("pinned", "device"), ("pinned", "pinned"))
    pairs = [(memory(LAYOUT, n, x), memory(LAYOUT, n + 10, y)) for n, (x, y) in enumerate(kinds, 1)]
    working = list(range(len(pairs)))

    def work(n, a, b):
        chance, stream = random.Random(number * 10 + n), runtime.stream_create()
        for _ in range(25):
            how = {"priority": chance.choice([0, -1]), "bytes_ahead": chance.choice([0, 700])}
            while (ticket := copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True, **how)) is None:
                time.sleep(0.001)
            layer, timeout = chance.randrange(LAYOUT.layers), chance.choice([None, 0, 0.0001, 10])
            if chance.random() < 0.4:
                ticket.cancel()
            try:
                assert ticket.wait_layer(layer, stream, timeout=timeout) or timeout in (0, 0.0001)
                assert ticket.wait_done(stream, timeout=timeout) or timeout in (0, 0.0001)
                assert ticket.sync()
            except sc.Cancelled:
                while b.state.busy:
                    time.sleep(0.0001)
                b.state.reset()
            runtime.stream_synchronize(stream)
        while (ticket := copier.submit(a.state, b.state, upto=UPTO, after=SYNCED)) is None:
            time.sleep(0.001)
        assert ticket.sync()
        working.remove(n)

    def look():
        while working:
            for ticket in copier.finished():
                assert ticket.error is None or type(ticket.error) is sc.Cancelled
            assert not pairs[0][0].state.busy or pairs[0][0].state.valid

    with small() as copier:
        all_at_once(look, *(lambda n=n, a=a, b=b: work(n, a, b) for n, (a, b) in enumerate(pairs)))
    for a, b in pairs:
        assert differences(b, after_copy(a, b, UPTO)) == []


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("timeout_ns", [-1, 30 * 10**9])
def test_waits_of_c_that_have_no_end_end_with_the_ticket(memory, table, cancelled, timeout_ns):
    """Threads wait in C for what the worker has not queued; another one cancels, or the copy goes on."""
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    for turn in range(10):
        told, stream = [], runtime.stream_create()
        with small(chunk=300) as copier:
            ticket = copier.submit(a.state, b.state, upto=UPTO, after=SYNCED, feed=True)

            def wait(layer, value=ticket.value, told=told, stream=stream):
                told.append(table.wait_layer(value, layer, stream, timeout_ns, None) if layer >= 0 else
                            table.wait_done(value, stream, timeout_ns, None))  # fmt: skip

            def act(turn=turn, value=ticket.value):
                time.sleep(0.0002 * turn)
                if cancelled:
                    assert table.cancel(value, None) in (OK, AGAIN)

            all_at_once(act, *(lambda layer=layer, wait=wait: wait(layer) for layer in range(-1, LAYOUT.layers)))
            while not ticket.done:
                time.sleep(0.0001)
        assert len(told) == LAYOUT.layers + 1
        assert set(told) <= ({OK, CANCELLED} if cancelled else {OK})
        assert (ticket.error is None) == b.state.valid
        runtime.stream_synchronize(stream)
        b.state.reset()


@pytest.mark.parametrize("turn", range(5))
def test_close_while_tickets_are_fed(memory, turn):
    """Waits without an end and syncs are in flight, and more is submitted until the copier refuses it."""
    a, b, c = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned"), memory(LAYOUT, 3, "pinned")
    copier, hook = small(chunk=300), Hook()
    plans = [copier.plan(a.state, b.state), copier.plan(b.state, c.state)]
    tickets, streams = [], [runtime.stream_create() for _ in range(2)]

    def submit():
        while not copier.closed:
            for plan in plans:
                try:
                    ticket = plan.submit(UPTO, after=SYNCED, feed=True, **(hook.how if turn % 2 else {}))
                except sc.Refused as refused:
                    assert refused.reason == "closed", refused  # noqa: PT017
                    return
                tickets.extend([ticket] if ticket else [])

    def wait(stream):
        seen = 0
        while not copier.closed:
            for ticket in tickets[seen:]:
                seen += 1
                try:
                    assert ticket.wait_layer(seen % LAYOUT.layers, stream, timeout=None)
                    assert ticket.sync()
                except sc.Refused as refused:
                    assert refused.reason in ("closed", "ticket"), refused  # noqa: PT017

    def close():
        time.sleep(0.02 + 0.01 * turn)
        copier.close()

    all_at_once(submit, close, *(lambda stream=stream: wait(stream) for stream in streams))
    assert copier.closed
    assert hook.errors == []
    assert tickets
    assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert differences(b, after_copy(a, b, UPTO)) == []
