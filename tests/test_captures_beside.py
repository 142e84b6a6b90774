"""Another thread captures graph after graph in the strictest mode while everything of ours runs: none is lost."""

import threading
import time
from collections import Counter

import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, small_layout
from strata_copy import runtime

GLOBAL = 0
CAPTURES = 10_000
COPIERS, ROUNDS = 6, 20  # at least so many copiers are opened and closed, with so many rounds of copies each
BESIDE, WITHIN = 30, 3  # calls of each kind, at least: a capture was open meanwhile; the same one from before to behind
DEADLINE = 50  # seconds
LAYOUT = small_layout("int8")
UNSUPPORTED = 900  # cudaErrorStreamCaptureUnsupported


class Captures(threading.Thread):
    """Captures graphs of one to three nodes, one after the other, until `stop` or a failure.

    made: graphs that had the nodes they should have. failed: what went wrong, of the first that went wrong.
    begun, ended: captures; between them one is open, for sure.
    """

    def __init__(self):
        super().__init__(daemon=True)
        self.made = self.begun = self.ended = self.calls = 0
        self.failed, self.stopped = None, False
        self.stream = runtime.stream_create()
        self.memory = runtime.malloc(4096)

    def run(self):
        try:
            while not self.stopped:
                wanted = 1 + self.made % 3
                found = self.one(wanted)
                if found != wanted:
                    self.failed = f"capture {self.made}: a graph of {found} nodes, {wanted} were captured"
                    return
                self.made += 1
        except BaseException as error:
            self.failed = f"capture {self.made}: {error!r}"

    def one(self, nodes):
        runtime.stream_begin_capture(self.stream, GLOBAL)
        self.begun += 1
        try:
            for n in range(nodes):
                if n % 2:
                    runtime.memcpy_async(self.memory + 2048, self.memory, 1024, self.stream)
                else:
                    runtime.memset_async(self.memory, n, 2048, self.stream)
            if self.made % 16 == 0:
                self.wait_for_calls(3)
        finally:
            self.ended += 1
            found = runtime.stream_end_capture(self.stream)
        return found

    def wait_for_calls(self, n):
        """Lets the other thread end so many calls, two of which began meanwhile."""
        first, give_up = self.calls, time.monotonic() + 1
        while self.calls < first + n and not self.stopped and time.monotonic() < give_up:
            time.sleep(0)

    def stop(self):
        self.stopped = True
        self.join(60)
        assert not self.is_alive()

    def free(self):
        runtime.stream_destroy(self.stream)
        runtime.free(self.memory)


class Watched:
    """Makes calls and counts, by name, all of them, those during which a capture was open, and those in which one and
    the same was open from before to behind."""

    def __init__(self, captures):
        self.captures, self.all, self.beside, self.within = captures, Counter(), Counter(), Counter()

    def call(self, name, function, *args, **how):
        captures = self.captures
        ended, begun = captures.ended, captures.begun
        try:
            return function(*args, **how)
        finally:
            ended_since, begun_since = captures.ended, captures.begun
            self.all[name] += 1
            self.within[name] += begun > ended and ended_since == ended
            self.beside[name] += begun_since > ended
            captures.calls += 1


@pytest.fixture
def captures():
    made = Captures()
    yield made
    made.stop()
    made.free()


def mixed(i, part):
    return {"kind": "pinned" if i % 2 else "device"}


def routes(memory):
    """(name, source, target) of every route, and of all in one copy."""
    kinds = {
        "local": ("device", "device"),
        "out": ("device", "pinned"),
        "in": ("pinned", "device"),
        "ring": ("pinned", "pinned"),
        "mixed": ("device", mixed),
    }
    return [
        (name, memory(LAYOUT, 2 * n, source), memory(LAYOUT, 2 * n + 1, target))
        for n, (name, (source, target)) in enumerate(kinds.items())
    ]


def one_copy(watched, copier, route, after, stream):
    name, source, target = route
    ticket = watched.call(f"submit {name}", copier.submit, source.state, target.state, upto=41, after=after)
    watched.call("wait_source", ticket.wait_source, stream)
    for layer in range(LAYOUT.layers):
        watched.call("wait_layer", ticket.wait_layer, layer, stream)
    watched.call("wait_done", ticket.wait_done, stream)
    watched.call("poll", ticket.poll)
    assert watched.call("sync", ticket.sync, timeout=30)
    assert watched.call("finished", copier.finished) == [ticket]


def enough(captures, watched, opened):
    """So many captures, and of each call so many beside one and within one."""
    return (
        captures.made >= CAPTURES
        and opened >= COPIERS
        and all(
            watched.beside[name] >= (COPIERS // 2 if name in ("open", "close") else BESIDE)
            and watched.within[name] >= (0 if name in ("open", "close") else WITHIN)
            for name in watched.all
        )
    )


@pytest.mark.timeout(120)
def test_no_capture_is_lost_beside_copies(memory, captures, figure):
    copies, watched = routes(memory), Watched(captures)
    stream, event = runtime.stream_create(), runtime.event_create()
    runtime.event_record(event, stream)
    after = [SYNCED, sc.Event(event), sc.Stream(stream)]
    captures.start()
    deadline, opened = time.monotonic() + DEADLINE, 0
    while not enough(captures, watched, opened) and not captures.failed and time.monotonic() < deadline:
        copier = watched.call("open", sc.Copier, tickets=2, layer_events=24)
        for turn in range(ROUNDS):
            for n, route in enumerate(copies):
                one_copy(watched, copier, route, after[(turn + n) % len(after)], stream)
        watched.call("close", copier.close)
        opened += 1
    captures.stop()
    print(captures.made, dict(watched.all), dict(watched.beside), dict(watched.within), sep="\n")
    assert captures.failed is None
    assert enough(captures, watched, opened)
    runtime.stream_synchronize(stream)
    runtime.stream_destroy(stream)
    runtime.event_destroy(event)
    for _, source, target in copies:
        assert differences(target, after_copy(source, target, 41)) == []
    figure(
        f"{captures.made} graph captures beside {sum(watched.beside.values())} calls of ours in {opened} copiers "
        f"({sum(watched.within.values())} of them within one capture): 0 invalidated"
    )


def test_a_call_that_spoils_a_capture_is_seen(captures):
    """Else the test above could not fail. This thread is in the mode in which it may not ask."""
    stream, event = runtime.stream_create(), runtime.event_create()
    runtime.event_record(event, stream)
    captures.start()
    with pytest.raises(runtime.CudaError) as raised:
        spoil(captures, lambda: runtime.event_query(event))
    captures.stop()
    assert raised.value.code == UNSUPPORTED
    runtime.get_last_error()
    assert captures.failed.startswith(f"capture {captures.made}: CudaError('")
    runtime.stream_destroy(stream)
    runtime.event_destroy(event)


def spoil(captures, ask):
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        ask()
        captures.calls += 1
