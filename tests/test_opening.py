"""Opening and closing a copier: every CUDA call in them fails in turn, and what can be given back is given back."""

import signal
import threading
import time

import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, run_python, small_layout, untouched
from host_table import Gate
from strata_copy import host_runtime, runtime

INVALID_VALUE = 1
OPEN_CALLS = [
    "cudaThreadExchangeStreamCaptureMode",
    "cudaHostAlloc",
    "cudaSetDevice",
    "cudaDeviceGetAttribute",
    "cudaStreamCreateWithFlags",
    "cudaEventCreateWithFlags",
    "cudaMalloc",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
]
CLOSE_CALLS = {
    "cudaStreamDestroy": "streams",
    "cudaEventDestroy": "events",
    "cudaFree": "allocations",
    "cudaFreeHost": "host_allocations",
}
SMALL = {"tickets": 2, "layer_events": 3}


def copies_again():
    layout = sc.Layout([sc.Part(name="s", layer=0, unit_bytes=64, growth=sc.Growth.state())])
    places = [sc.Place(base=runtime.malloc(64)) for _ in range(2)]
    runtime.view(places[0].base, 64)[:] = 7
    with sc.Copier((0, 1), **SMALL) as copier:
        copier.submit(*(sc.State(layout, [place]) for place in places), upto=0, after=SYNCED).sync()
    assert (runtime.view(places[1].base, 64) == 7).all()
    for place in places:
        runtime.free(place.base)


@pytest.mark.host
@pytest.mark.parametrize(
    ("function", "forever"),
    # A stream that can never be waited for may still write: its device is not touched again, and its objects stay.
    [
        (name, forever)
        for name in OPEN_CALLS
        for forever in (False, True)
        if (name, forever) != ("cudaStreamSynchronize", True)
    ],
)
def test_every_call_of_opening_fails_in_turn(function, forever):
    before, nth, fired = host_runtime.live(), 0, 1
    while fired:
        nth += 1
        host_runtime.fail(function, nth, INVALID_VALUE, forever)
        copier = error = None
        try:
            copier = sc.Copier((0, 1), **SMALL)
        except sc.CopyError as refused:
            error = refused
        fired = host_runtime.clear_faults()
        if error is not None:
            assert type(error) is sc.Refused
            assert (error.reason, error.call, error.cuda_code) == ("cuda", function, INVALID_VALUE)
        else:
            assert not fired or function == "cudaThreadExchangeStreamCaptureMode"  # on a thread that ends
            copier.close()
        assert runtime.peek_last_error() == 0
        assert host_runtime.live() == before
        copies_again()
        assert host_runtime.live() == before
    assert nth > 1


@pytest.mark.host
@pytest.mark.parametrize("function", CLOSE_CALLS)
def test_every_call_of_closing_fails_in_turn(function):
    """What could not be given back is one object; all others are, and the first failure is told."""
    nth = 0
    while True:
        nth += 1
        before = host_runtime.live()
        copier = sc.Copier((0, 1), **SMALL)
        host_runtime.fail(function, nth, INVALID_VALUE)
        error = None
        try:
            copier.close()
        except sc.CopyError as failed:
            error = failed
        fired = host_runtime.clear_faults()
        assert copier.closed
        left = {name: count - before[name] for name, count in host_runtime.live().items() if count != before[name]}
        if not fired:
            break
        assert type(error) is sc.Failed
        assert (error.call, error.cuda_code) == (function, INVALID_VALUE)
        assert left == {CLOSE_CALLS[function]: 1}
        assert runtime.peek_last_error() == 0
        copies_again()
    assert error is None
    assert left == {}
    assert nth > 1


@pytest.mark.host
def test_a_synchronize_of_closing_that_fails_once_is_asked_again():
    before = host_runtime.live()
    for nth in range(1, 40):
        copier = sc.Copier((0, 1), **SMALL)
        host_runtime.fail("cudaStreamSynchronize", nth, INVALID_VALUE)
        copier.close()
        host_runtime.clear_faults()
        assert host_runtime.live() == before
        copies_again()


@pytest.mark.host
def test_without_pinned_memory_nothing_opens():
    host_runtime.configure(devices=2, pinned=0)
    before = host_runtime.live()
    with pytest.raises(sc.Refused) as refused:
        sc.Copier()
    assert (refused.value.call, refused.value.cuda_code) == ("cudaHostAlloc", 2)
    assert host_runtime.live() == before


@pytest.mark.parametrize("call", ["sc.Copier()", "runtime.malloc(8)", "runtime.open()"])
@pytest.mark.parametrize("path", ["", "nowhere"])
def test_without_cuda_it_is_said_how_to_go_on(call, path):
    """No GPU is visible, or no library is to be found."""
    code = f"""
        import os
        os.environ.update(STRATA_COPY_RUNTIME="", CUDA_VISIBLE_DEVICES="")
        import strata_copy as sc
        from strata_copy import cudart, runtime
        if {path!r}:
            cudart._candidates = lambda: [("a library", {path!r}, False)]
        try:
            {call}
        except sc.RuntimeUnavailable as reason:
            print(reason)
        """
    assert run_python(code).endswith("; without a GPU: STRATA_COPY_RUNTIME=host, or runtime.open('host')\n")


def test_no_view_is_made_of_bytes_at_address_0():
    with pytest.raises(ValueError, match="8 bytes at address 0; the address of memory is needed"):
        runtime.view(0, 8)
    assert runtime.view(0, 0).size == 0


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(sc.Refused) as refused:
        sc.Copier((0, 99))
    assert (refused.value.call, refused.value.device) == ("cudaSetDevice", 99)
    assert f"this process sees {runtime.device_count()}, which are numbered from 0" in str(refused.value)
    sc.Copier().close()


@pytest.mark.host
@pytest.mark.parametrize("patience", [None, float("inf")])
def test_a_copier_without_limit_to_its_patience_never_asks_by_age(memory, patience):
    layout = small_layout()
    source, target = memory(layout, 1), memory(layout, 2)
    gate = Gate(writer := runtime.stream_create())
    with sc.Copier(tickets=2, layer_events=16, patience=patience) as copier:
        ticket = copier.submit(source.state, target.state, upto=9, after=sc.Stream(writer))
        before = host_runtime.calls()["cudaEventQuery"]
        for _ in range(3):
            assert copier.finished() == []
        asked = host_runtime.calls()["cudaEventQuery"] - before
        gate.open()
        assert ticket.sync()
    assert asked == 0
    runtime.stream_destroy(writer)


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": ()},
        {"devices": (0, 0)},
        {"devices": range(17)},
        {"tickets": 0},
        {"tickets": 257},
        {"layer_events": 0},
        {"chunk": 0},
    ],
)
def test_numbers_without_meaning_are_refused(fields):
    with pytest.raises(ValueError, match=r"may be 1 to|1 to 16, each once"):
        sc.Copier(**fields)


def on_devices(memory, *devices):
    layout = small_layout()
    return [memory(layout, n, device=device) for n, device in enumerate(devices, 1)]


def test_memory_of_a_device_that_is_not_open_is_refused(memory, second_device):
    source, target = on_devices(memory, second_device, second_device)
    with sc.Copier((0,), tickets=2, layer_events=16) as copier, pytest.raises(sc.Refused) as refused:
        copier.plan(source.state, target.state)
    assert (refused.value.reason, refused.value.device) == ("place", second_device)
    assert "is on device 1, which the copier has not open" in str(refused.value)


def test_a_stream_of_another_device_than_was_said_is_refused(memory, second_device):
    source, target = on_devices(memory, 0, 0)
    runtime.set_device(second_device)
    stream = runtime.stream_create()
    runtime.set_device(0)
    with sc.Copier((0, second_device), tickets=2, layer_events=16) as copier:
        with pytest.raises(sc.Refused) as refused:
            copier.submit(source.state, target.state, upto=9, after=sc.Stream(stream, 0))
        assert (refused.value.call, refused.value.cuda_code) == ("cudaEventRecord", 400)
        assert untouched(target)
        assert copier.submit(source.state, target.state, upto=9, after=sc.Stream(stream, second_device)).sync()
    assert differences(target, after_copy(source, target, 9)) == []
    runtime.stream_destroy(stream)


def test_the_callers_device_stays_as_it_is(second_device):
    runtime.set_device(second_device)
    with sc.Copier((0,)):
        assert runtime.get_device() == second_device
    assert runtime.get_device() == second_device
    runtime.set_device(0)


def test_closing_twice_is_allowed_and_a_new_copier_may_follow():
    copier = sc.Copier(**SMALL)
    copier.close()
    copier.close()
    assert copier.closed
    assert copier.address == 0
    with sc.Copier(**SMALL) as next_one:
        assert not next_one.closed
        assert copier.closed


@pytest.mark.host
def test_a_state_is_not_copied_once_the_host_runtime_has_started_anew(memory):
    """Its memory went with the runtime that it was of."""
    layout = small_layout()
    old = memory(layout, 1).state
    host_runtime.configure(devices=2)
    one, other = memory(layout, 2).state, memory(layout, 3).state
    with sc.Copier(tickets=2, layer_events=16) as copier:
        for source_, target_ in ((old, one), (one, old)):
            with pytest.raises(sc.Refused, match=r"started anew.*make the state anew") as refused:
                copier.plan(source_, target_)
            assert refused.value.reason == "place"
        assert copier.submit(one, other, upto=3, after=SYNCED).sync()


@pytest.mark.host
def test_an_exception_under_way_goes_before_what_close_raises(memory):
    layout = small_layout()
    source, target = memory(layout, 1), memory(layout, 2)

    def use():
        with sc.Copier(tickets=2, layer_events=16) as copier:
            host_runtime.fail("cudaMemcpyAsync", 1, 700)
            with pytest.raises(sc.Poisoned):
                copier.submit(source.state, target.state, upto=3, after=SYNCED)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        use()


def test_a_closed_copier_refuses_by_name(memory):
    layout = small_layout()
    source, target = memory(layout, 1), memory(layout, 2)
    with sc.Copier(tickets=2, layer_events=16) as copier:
        plan = copier.plan(source.state, target.state)
    for act in (lambda: copier.plan(source.state, target.state), lambda: plan.submit(3, after=SYNCED)):
        with pytest.raises(sc.Refused, match="the copier is closed") as refused:
            act()
        assert refused.value.reason == "closed"
    with sc.Copier(tickets=2, layer_events=16), pytest.raises(sc.Refused, match="closed"):
        plan.submit(3, after=SYNCED)
    assert copier.finished() == []
    assert untouched(target)


def test_closing_waits_for_the_copies_in_flight(held, memory):
    layout = small_layout()
    source, target = memory(layout, 1), memory(layout, 2, "pinned")
    copier = sc.Copier(tickets=2, layer_events=16)
    ticket = copier.submit(source.state, target.state, upto=31, after=held.wait)
    copier.close()
    assert differences(target, after_copy(source, target, 31)) == []
    assert ticket.done
    assert ticket.sync(timeout=5)
    assert ticket.poll().bytes == layout.bytes_at([31])
    assert not target.state.busy


@pytest.fixture
def interruptible():
    """A program that a shell starts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(wait, after):
    """KeyboardInterrupt in this thread, as by Ctrl-C, while it is in `wait`, once `after` has returned."""
    here = threading.get_ident()

    def wait_and_go_on():
        wait()
        time.sleep(10)  # where it had ended before

    def interrupt():
        after()
        signal.pthread_kill(here, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        wait_and_go_on()
    interrupting.join()


@pytest.mark.host
def test_a_close_that_waits_for_copies_can_be_interrupted_and_the_copier_stays_open(memory, interruptible):
    layout = small_layout()
    a, b, c, d = (memory(layout, n) for n in (1, 2, 3, 4))
    writer = runtime.stream_create()
    gate = Gate(writer)
    with sc.Copier(tickets=2, layer_events=24) as copier:
        held = copier.submit(a.state, b.state, upto=9, after=sc.Stream(writer))
        interrupted(copier.close, lambda: time.sleep(0.1))
        assert not copier.closed
        gate.open()
        other = copier.submit(c.state, d.state, upto=9, after=SYNCED)
    assert [held.sync(), other.sync()] == [True, True]
    assert differences(b, after_copy(a, b, 9)) == []
    assert differences(d, after_copy(c, d, 9)) == []


@pytest.mark.host
def test_a_submit_while_a_close_waits_is_refused(memory):
    layout = small_layout()
    a, b, c, d = (memory(layout, n) for n in (1, 2, 3, 4))
    writer = runtime.stream_create()
    gate = Gate(writer)
    copier = sc.Copier(tickets=2, layer_events=24)
    plan = copier.plan(c.state, d.state)
    held = copier.submit(a.state, b.state, upto=9, after=sc.Stream(writer))
    closing = threading.Thread(target=copier.close)
    closing.start()
    time.sleep(0.1)
    with pytest.raises(sc.Refused) as refused:
        plan.submit(9, after=SYNCED)
    with pytest.raises(RuntimeError, match="a copier is open"):
        runtime.open("host", devices=2)
    gate.open()
    closing.join()
    assert refused.value.reason == "closed"
    assert held.sync()


def test_a_close_for_which_no_thread_is_to_be_had_leaves_the_copier_open(memory, monkeypatch):
    layout = small_layout()
    a, b = memory(layout, 1), memory(layout, 2)

    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    with sc.Copier(tickets=2, layer_events=24) as copier:
        with monkeypatch.context() as patch:
            patch.setattr("strata_copy.on_thread.start_new_thread", no_thread)
            with pytest.raises(RuntimeError, match="can't start"):
                copier.close()
        assert not copier.closed
        assert copier.submit(a.state, b.state, upto=9, after=SYNCED).sync()


@pytest.mark.host
def test_an_interrupt_while_all_is_given_back_is_raised_once_it_is(interruptible):
    before = host_runtime.live()
    copier = sc.Copier(tickets=64, layer_events=1024)
    destroyed = host_runtime.calls()["cudaEventDestroy"]

    def in_the_midst():
        while host_runtime.calls()["cudaEventDestroy"] == destroyed:
            time.sleep(0.0001)

    interrupted(copier.close, in_the_midst)
    assert copier.closed
    assert host_runtime.live() == before
    sc.Copier(tickets=2, layer_events=24).close()


def test_a_copier_that_is_dropped_open_says_so():
    code = """
        import gc, sys, warnings
        import strata_copy as sc
        from strata_copy import runtime
        runtime.open(sys.argv[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            copier = sc.Copier(tickets=1, layer_events=1)
            del copier
            gc.collect()
        print([w.category.__name__ for w in caught], [str(w.message) for w in caught])
    """
    assert "ResourceWarning" in run_python(code)


def test_a_fork_refuses_and_the_parent_goes_on():
    """CUDA may not be used in a forked child, not even to give things back."""
    code = """
        import os, sys, warnings
        sys.path.insert(0, sys.argv[2])
        import fixtures
        import strata_copy as sc
        from strata_copy import runtime
        runtime.open(sys.argv[1])
        layout = fixtures.small_layout()
        source, target = fixtures.Memory(layout, 1), fixtures.Memory(layout, 2)
        copier = sc.Copier(tickets=4, layer_events=16)
        plan = copier.plan(source.state, target.state)
        ticket = plan.submit(4, after=sc.CALLER_SYNCED)
        warnings.simplefilter("ignore", DeprecationWarning)     # of forking with threads
        child = os.fork()
        if child == 0:
            answers = [copier.closed]
            acts = [lambda: plan.submit(4, after=sc.CALLER_SYNCED), lambda: copier.plan(source.state, target.state)]
            for act in acts:
                try:
                    act()
                    answers.append("went on")
                except sc.Refused as error:
                    answers.append("fork" in str(error) and error.reason == "closed")
            copier.close()
            del ticket, plan, copier
            os._exit(0 if answers == [True, True, True] else 1)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print("parent", ticket.sync(), fixtures.differences(target, fixtures.after_copy(source, target, 4)))
        print("again", plan.submit(9, after=sc.CALLER_SYNCED).sync())
        copier.close()
    """
    assert run_python(code).split("\n")[:3] == ["child 0", "parent True []", "again True"]


def test_two_threads_open_one_copier():
    opened, failed = [], []

    def open_one():
        try:
            opened.append(sc.Copier(**SMALL))
        except RuntimeError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=open_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1, failed
    assert all("a copier is open" in text for text in failed)
    opened[0].close()


def test_two_threads_close_one_copier():
    """In a process of its own: what goes wrong here is memory that is freed twice."""
    code = """
        import sys, threading
        import strata_copy as sc
        from strata_copy import runtime
        runtime.open(sys.argv[1])
        failed = []
        threading.excepthook = failed.append
        for _ in range(50):
            copier = sc.Copier(tickets=16, layer_events=8)
            threads = [threading.Thread(target=copier.close) for _ in range(4)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            assert copier.closed
        print(len(failed))
    """
    assert run_python(code) == "0\n"
