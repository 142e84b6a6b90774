"""Copies in flight as the interpreter ends, as their copier is dropped, and as handlers and finalizers close it."""

import textwrap

import pytest

from fixtures import run_python

# In processes of their own, which end with copies in flight, or would wait for themselves: so each has a limit.
IN_A_PROCESS = """
import atexit, faulthandler, gc, signal, sys, threading, time, warnings, weakref
sys.path.insert(0, sys.argv[2])
at_the_end = []
atexit.register(lambda: [act() for act in at_the_end])      # behind all that the library does at the end
import numpy as np
import strata_copy as sc
from strata_copy import host_runtime, runtime
faulthandler.dump_traceback_later(40, exit=True)
runtime.open(sys.argv[1])
LONG = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=1 << 20, growth=sc.Growth.linear())])
SHORT = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=1 << 10, growth=sc.Growth.linear())])
SYNCED = sc.CALLER_SYNCED

class Bytes(np.ndarray):
    pass                        # may be weakly referenced

def state(layout, units, value):
    array = np.full(units * layout.parts[0].unit_bytes, value, np.uint8).view(Bytes)
    return sc.State(layout, [sc.Place(base=array, units=units, kind="pageable")], owner=array)
"""


def in_a_process(code):
    return run_python(IN_A_PROCESS + textwrap.dedent(code)).split("\n")[:-1]


@pytest.mark.parametrize("drop", ["", "del copier, ticket; gc.collect(); time.sleep(0.3)"])
def test_a_process_may_end_with_copies_in_flight_whose_memory_nobody_else_has(drop):
    """What the worker copies is there until it has copied it."""
    lines = in_a_process(
        f"""
        copier = sc.Copier(helpers=0)
        ticket = copier.submit(state(LONG, 256, 1), state(LONG, 256, 0), upto=256, after=SYNCED)
        {drop}
        print("at its end")
        """
    )
    assert lines == ["at its end"]


def test_copies_in_flight_are_whole_when_the_interpreter_ends_and_nothing_comes_behind_them():
    lines = in_a_process(
        """
        source, target = state(LONG, 256, 1), state(LONG, 256, 0)
        copier = sc.Copier(helpers=0)
        plan = copier.plan(source, target)
        ticket = plan.submit(256, after=SYNCED)

        def look():
            print("bytes", bool((target.owner == 1).all()), ticket.done, ticket.error)
            for act in (lambda: plan.submit(1, after=SYNCED), sc.Copier):
                try:
                    print("went on", act())
                except (RuntimeError, sc.Refused) as error:
                    print(type(error).__name__, error)
            copier.close()

        at_the_end.append(look)
        """
    )
    assert lines[0] == "bytes True True None"
    assert lines[1].startswith("Refused the copier is closed")
    assert lines[2:] == ["RuntimeError the interpreter is ending: no copier opens any more"]


def test_copies_end_before_the_arenas_and_the_runtime_that_they_need():
    code = """
        import atexit
        register, names = atexit.register, []
        atexit.register = lambda act, *a, **k: (names.append(act.__module__), register(act, *a, **k))[1]
        import strata_copy
        print([name for name in reversed(names) if name.startswith("strata_copy.")])
    """
    assert run_python(code) == "['strata_copy.at_exit', 'strata_copy.arena', 'strata_copy.host_runtime']\n"


@pytest.mark.host
def test_a_process_ends_though_a_copy_in_flight_never_does():
    """It says so, and what the copy reads and writes stays where it is."""
    lines = in_a_process(
        """
        from host_table import Gate
        warnings.showwarning = lambda message, kind, *_: print(kind.__name__, message)
        sc.at_exit.PATIENCE = 0.3
        copier = sc.Copier(helpers=0)
        gate = Gate(writer := runtime.stream_create())
        source, target = state(SHORT, 64, 1), state(SHORT, 64, 0)
        ticket = copier.submit(source, target, upto=64, after=sc.Stream(writer))
        for one in (source, target):
            weakref.finalize(one.owner, print, "freed").atexit = False
        del source, target, one
        began = time.monotonic()
        at_the_end.append(lambda: print("in time", 0.2 < time.monotonic() - began < 20))
        """
    )
    assert lines[0].startswith("RuntimeWarning copies are in flight as the interpreter ends")
    assert lines[1:] == ["in time True"]


@pytest.mark.host
def test_the_memory_of_a_dropped_copiers_copies_is_held_until_the_next_one_opens():
    lines = in_a_process(
        """
        from host_table import Gate
        warnings.simplefilter("ignore")
        gate = Gate(writer := runtime.stream_create())
        source, target = state(SHORT, 64, 1), state(SHORT, 64, 0)
        owners = [weakref.ref(source.owner), weakref.ref(target.owner)]
        copier = sc.Copier(helpers=0)
        ticket = copier.submit(source, target, upto=64, after=sc.Stream(writer))
        dropped = weakref.ref(copier)
        del copier, ticket, source, target
        gc.collect()
        print(dropped() is None, [owner() is not None for owner in owners])
        gate.open()
        with sc.Copier(helpers=0):
            gc.collect()
            print([owner() is None for owner in owners])
        """
    )
    assert lines == ["True [True, True]", "[True, True]"]


@pytest.mark.host
def test_a_dropped_copier_to_which_the_owner_of_memory_in_flight_leads_is_closed_by_the_next_one():
    lines = in_a_process(
        """
        from host_table import Gate
        warnings.simplefilter("ignore")
        gate = Gate(writer := runtime.stream_create())

        class Engine:
            def __init__(self):
                self.copier, self.arrays = sc.Copier(helpers=0), [np.ones(64 << 10, np.uint8) for _ in range(2)]

            def run(self):
                places = [sc.Place(base=array, units=64, kind="pageable") for array in self.arrays]
                states = [sc.State(SHORT, [place], owner=self) for place in places]
                return self.copier.submit(*states, upto=64, after=sc.Stream(writer))

        engine = Engine()
        ticket = engine.run()
        del engine, ticket
        gc.collect()
        try:
            sc.Copier(helpers=0)
        except RuntimeError as error:
            print(error)
        gate.open()
        copier = None
        while copier is None:           # until the worker has seen the end of it
            try:
                copier = sc.Copier(helpers=0)
            except RuntimeError:
                time.sleep(0.01)
        with copier:
            print(copier.submit(state(SHORT, 64, 1), state(SHORT, 64, 0), upto=64, after=SYNCED).sync())
        gc.collect()
        print([one for one in gc.get_objects() if type(one) is Engine])
        """
    )
    assert lines == ["a copier is open in this process: use that one, or close it", "True", "[]"]


def test_the_memory_of_a_copy_is_not_held_once_it_was_seen_to_have_ended():
    lines = in_a_process(
        """
        source, target = state(SHORT, 64, 1), state(SHORT, 64, 0)
        owners = [weakref.ref(source.owner), weakref.ref(target.owner)]
        copier = sc.Copier(helpers=0)
        print(copier.submit(source, target, upto=64, after=SYNCED).sync())
        print(len(copier.finished()))
        del source, target
        gc.collect()
        print([owner() is None for owner in owners])
        copier.close()
        """
    )
    assert lines == ["True", "1", "[True, True]"]


def test_a_signal_handler_may_close_the_copier_that_this_thread_is_closing():
    lines = in_a_process(
        """
        def handler(*_):
            copier.close()
            print("closed in the handler")
            try:
                sc.Copier()
            except RuntimeError as error:
                print(error)

        signal.signal(signal.SIGALRM, handler)
        copier = sc.Copier(helpers=0)
        ticket = copier.submit(state(LONG, 256, 1), state(LONG, 256, 0), upto=256, after=SYNCED)
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        copier.close()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("closed", copier.closed, ticket.sync())
        sc.Copier().close()
        """
    )
    assert lines[0] == "closed in the handler"
    assert lines[1].startswith("a copier is being closed on this thread, which a signal handler or a finalizer")
    assert lines[2:] == ["closed True True"]


FINALIZED = """
class Engine:
    def __init__(self, copier):
        self.copier, self.me = copier, self     # for the collector

    def __del__(self):
        finalized.append(self.copier)
        self.copier.close()

def collected_soon(engine_of, k):
    gc.disable()
    gc.collect()
    Engine(engine_of)
    gc.set_threshold(gc.get_count()[0] + k)
    gc.enable()

finalized = []
"""


def test_a_finalizer_may_close_a_copier_while_one_opens_or_closes():
    """The collector runs it wherever something is allocated: at each place in turn."""
    lines = in_a_process(
        FINALIZED
        + """
old = sc.Copier(tickets=1, layer_events=1, helpers=0)
old.close()
for k in range(1, 25):
    collected_soon(old, k)
    copier = sc.Copier(tickets=1, layer_events=1, helpers=0)
    gc.disable()
    for closed in (old, copier):        # an earlier one, and that which is being closed
        collected_soon(closed, k)
        copier.close()
    assert copier.closed
print(len(finalized) > 30)
"""
    )
    assert lines == ["True"]


def test_a_finalizer_may_close_a_copier_inside_its_submit():
    lines = in_a_process(
        FINALIZED
        + """
source, target = state(SHORT, 64, 1), state(SHORT, 64, 0)
ended = refused = 0
for k in range(1, 40):
    copier = sc.Copier(tickets=1, layer_events=1, helpers=0)
    plan = copier.plan(source, target)
    collected_soon(copier, k)
    try:
        ticket = plan.submit(64, after=SYNCED)
        gc.disable()
        ended += ticket.sync()
    except sc.Refused as error:
        gc.disable()
        refused += error.reason == "closed"
    copier.close()
print(ended + refused, ended > 0, refused > 0)
"""
    )
    assert lines == ["39 True True"]
