"""Who waits for whom. On the host runtime's scheduled mode nothing moves before it must and any order that is not
forbidden occurs, so that what is not ordered is wrong for some seed; tests that show this stand beside those that show
the order."""

import random
import threading

import pytest

import strata_copy as sc
from fixtures import HOST, SYNCED, Memory, after_copy, allocate, differences, needed_by, read, small_layout, write
from strata_copy import host_runtime, runtime

LAYOUT = small_layout("int8", layers=6)
UPTO = 21
PAIRS = [("device", "device"), ("device", "pinned"), ("pinned", "device")]
TRIPLES = [
    ("device", "device", "device"),
    ("device", "pinned", "device"),
    ("pinned", "device", "pinned"),
    ("device", "device", "pinned"),
]
any_pair = pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
any_triple = pytest.mark.parametrize("kinds", TRIPLES, ids="-".join)


made = []


@pytest.fixture(autouse=True)
def given_back():
    """What readers and writers made; the host runtime drops it by itself."""
    yield
    while made:
        free, thing = made.pop()
        if not HOST:
            free(thing)


def new_stream():
    made.append((runtime.stream_destroy, runtime.stream_create()))
    return made[-1][1]


def new_event():
    made.append((runtime.event_destroy, runtime.event_create()))
    return made[-1][1]


class Reader:
    """Work of other code that reads memory on a stream of its own: what it saw is known later."""

    def __init__(self):
        self.stream, self.seen = new_stream(), []

    def read(self, memory, layers=None):
        for i, (part, (kind, base, size)) in enumerate(zip(memory.layout.parts, memory.blocks, strict=True)):
            if layers is None or needed_by(part) in layers:
                copy = allocate("device" if kind == "pinned" else "pinned", 0, size)
                made.append((runtime.free if kind == "pinned" else runtime.host_free, copy))
                runtime.memcpy_async(copy, base, size, self.stream)
                self.seen.append((i, copy, size))

    def differences(self, wanted):
        """The parts in which something else than `wanted` was seen."""
        runtime.stream_synchronize(self.stream)
        assert self.seen
        return [i for i, copy, size in self.seen if (read(copy, size) != wanted[i]).any()]


class Writer:
    """Work of other code that writes memory on a stream of its own, late."""

    def __init__(self, memory, tag):
        self.stream, self.event = new_stream(), new_event()
        self.new = Memory(memory.layout, tag, "pinned" if memory.blocks[0][0] == "device" else "device")
        made.append((Memory.free, self.new))
        for (_, target, size), (_, source, _) in zip(memory.blocks, self.new.blocks, strict=True):
            runtime.memcpy_async(target, source, size, self.stream)
        runtime.event_record(self.event, self.stream)


def waits(edges, how):
    return [sc.Event(edge.event) if how == "event" else sc.Stream(edge.stream) for edge in edges]


# ---- behind a copy


@any_pair
def test_a_consumer_behind_wait_layer_sees_the_layer(memory, copier, kinds, seed):
    source, target = memory(LAYOUT, 1, kinds[0]), memory(LAYOUT, 2, kinds[1])
    ticket = copier.submit(source.state, target.state, upto=UPTO, after=SYNCED)
    readers = [Reader() for _ in range(LAYOUT.layers)]
    for layer in reversed(range(LAYOUT.layers)):
        assert ticket.wait_layer(layer, readers[layer].stream)
        readers[layer].read(target, [layer])
    wanted = after_copy(source, target, UPTO)
    assert [reader.differences(wanted) for reader in readers] == [[]] * LAYOUT.layers
    assert ticket.sync()


@any_pair
def test_a_consumer_behind_wait_done_sees_everything(memory, copier, kinds, seed):
    source, target = memory(LAYOUT, 1, kinds[0]), memory(LAYOUT, 2, kinds[1])
    ticket = copier.submit(source.state, target.state, upto=UPTO, after=SYNCED)
    reader = Reader()
    assert ticket.wait_done(reader.stream)
    reader.read(target)
    assert reader.differences(after_copy(source, target, UPTO)) == []


@any_pair
def test_who_overwrites_the_source_behind_wait_source_does_no_harm(memory, copier, kinds, seed):
    source, target = memory(LAYOUT, 1, kinds[0]), memory(LAYOUT, 2, kinds[1])
    ticket = copier.submit(source.state, target.state, upto=UPTO, after=SYNCED)
    stream = new_stream()
    assert ticket.wait_source(stream)
    for _, base, size in source.blocks:
        runtime.memset_async(base, 0, size, stream)
    runtime.stream_synchronize(stream)
    assert ticket.sync()
    assert differences(target, after_copy(source, target, UPTO)) == []


@pytest.mark.host
@pytest.mark.parametrize("wait", ["wait_layer", "wait_done", "wait_source"])
def test_without_a_wait_some_seed_is_wrong(wait):
    """Else the tests above could not fail. The races are reported for every seed."""
    wrong = 0
    for seed in range(20):
        host_runtime.configure(seed=seed)
        source, target = Memory(LAYOUT, 1), Memory(LAYOUT, 2)
        with sc.Copier(tickets=2, layer_events=24) as copier:
            ticket = copier.submit(source.state, target.state, upto=UPTO, after=SYNCED)
            wanted = after_copy(source, target, UPTO)
            if wait == "wait_source":
                stream = new_stream()
                for _, base, size in source.blocks:
                    runtime.memset_async(base, 0, size, stream)
                runtime.stream_synchronize(stream)
                ticket.sync()
                wrong += bool(differences(target, wanted))
            else:
                reader = Reader()
                reader.read(target, [3] if wait == "wait_layer" else None)
                wrong += bool(reader.differences(wanted))
        assert "race: " in host_runtime.violations()[0]
    host_runtime.configure()
    assert wrong > 0


# ---- before a copy


@any_pair
@pytest.mark.parametrize("how", ["event", "stream"])
def test_a_late_writer_of_the_source_that_is_named_comes_first(memory, copier, kinds, how, seed):
    source, target = memory(LAYOUT, 1, kinds[0]), memory(LAYOUT, 2, kinds[1])
    writer = Writer(source, 3)
    ticket = copier.submit(source.state, target.state, upto=UPTO, after=waits([writer], how))
    assert ticket.sync()
    assert differences(target, after_copy(writer.new, target, UPTO)) == []


@any_pair
@pytest.mark.parametrize("how", ["event", "stream"])
def test_a_late_reader_of_the_target_that_is_named_sees_the_old_bytes(memory, copier, kinds, how, seed):
    source, target = memory(LAYOUT, 1, kinds[0]), memory(LAYOUT, 2, kinds[1])
    reader, writer = Reader(), Writer(source, 3)
    reader.read(target)
    reader.event = new_event()
    runtime.event_record(reader.event, reader.stream)
    ticket = copier.submit(source.state, target.state, upto=UPTO, after=waits([reader, writer], how))
    assert ticket.sync()
    assert reader.differences(target.pattern()) == []
    assert differences(target, after_copy(writer.new, target, UPTO)) == []


@pytest.mark.host
@pytest.mark.parametrize("edge", ["writer", "reader"])
def test_an_edge_that_is_not_named_is_missed_by_some_seed(edge):
    wrong = 0
    for seed in range(20):
        host_runtime.configure(seed=seed)
        source, target = Memory(LAYOUT, 1), Memory(LAYOUT, 2)
        with sc.Copier(tickets=2, layer_events=24) as copier:
            if edge == "writer":
                writer = Writer(source, 3)
                copier.submit(source.state, target.state, upto=UPTO, after=SYNCED).sync()
                wrong += bool(differences(target, after_copy(writer.new, target, UPTO)))
            else:
                reader = Reader()
                reader.read(target)
                copier.submit(source.state, target.state, upto=UPTO, after=SYNCED).sync()
                wrong += bool(reader.differences(target.pattern()))
        assert "race: " in host_runtime.violations()[0]
    host_runtime.configure()
    assert wrong > 0


def test_an_event_may_be_recorded_again_once_submit_is_back(memory, copier, seed):
    """What a request names is taken as it is at the call."""
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2)
    writer = Writer(source, 3)
    ticket = copier.submit(source.state, target.state, upto=UPTO, after=sc.Event(writer.event))
    later = new_stream()
    assert ticket.wait_source(later)
    for _, base, size in source.blocks:
        runtime.memset_async(base, 0, size, later)
    runtime.event_record(writer.event, later)
    assert ticket.sync()
    assert differences(target, after_copy(writer.new, target, UPTO)) == []


@pytest.mark.parametrize("pending", [0, 101])
def test_a_submit_leaves_the_error_of_other_code_pending(memory, copier, pending):
    source, target = memory(LAYOUT, 1), memory(LAYOUT, 2)
    writer = Writer(source, 3)
    if pending:
        with pytest.raises(runtime.CudaError):
            runtime.set_device(99)
    ticket = copier.submit(
        source.state, target.state, upto=UPTO, after=waits([writer], "event") + waits([writer], "stream")
    )
    ticket.wait_done(writer.stream)
    ticket.sync()
    assert runtime.get_last_error() == pending


# ---- tickets that share states


@any_triple
def test_what_is_being_written_is_read_behind_it(memory, copier, kinds, seed):
    a, b, c = (memory(LAYOUT, n, kind) for n, kind in enumerate(kinds, 1))
    tickets = [copier.submit(x.state, y.state, upto=UPTO, after=SYNCED) for x, y in ((a, b), (b, c))]
    assert all(ticket.sync() for ticket in reversed(tickets))
    assert differences(b, after_copy(a, b, UPTO)) == []
    assert differences(c, after_copy(a, c, UPTO)) == []


@any_triple
def test_what_is_being_read_is_written_behind_it(memory, copier, kinds, seed):
    a, b, c = (memory(LAYOUT, n, kind) for n, kind in enumerate(kinds, 1))
    tickets = [copier.submit(x.state, y.state, upto=UPTO, after=SYNCED) for x, y in ((a, b), (c, a))]
    assert all(ticket.sync() for ticket in reversed(tickets))
    assert differences(b, after_copy(a, b, UPTO)) == []
    assert differences(a, after_copy(c, a, UPTO)) == []


@any_triple
def test_the_last_of_two_writers_wins(memory, copier, kinds, seed):
    a, b, c = (memory(LAYOUT, n, kind) for n, kind in enumerate(kinds, 1))
    tickets = [copier.submit(x.state, b.state, upto=upto, after=SYNCED) for x, upto in ((a, 50), (c, UPTO))]
    assert all(ticket.sync() for ticket in reversed(tickets))
    assert differences(b, after_copy(c, b, UPTO, before=after_copy(a, b, 50))) == []


def test_the_same_copy_twice_in_flight(memory, copier, seed):
    a, b = memory(LAYOUT, 1), memory(LAYOUT, 2, "pinned")
    plan = copier.plan(a.state, b.state)
    tickets = [plan.submit(upto, after=SYNCED) for upto in (UPTO, 50)]
    assert all(ticket.sync() for ticket in reversed(tickets))
    assert differences(b, after_copy(a, b, 50)) == []


KINDS_OF_FIVE = ["device", "pinned", "device", "pinned", "device"]


def test_a_random_programme_ends_as_if_its_copies_had_run_one_after_the_other(memory, seed):
    """Any copies between five states, looked at and stepped at random, against a model that copies in the order of
    submits."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    held = [memory(LAYOUT, n, kind) for n, kind in enumerate(KINDS_OF_FIVE, 1)]
    model = [one.pattern() for one in held]
    with sc.Copier(tickets=5, layer_events=24, chunk=chance.choice([700, 4000, 1 << 20])) as copier:
        flying = []
        for _ in range(25):
            x, y = chance.sample(range(5), 2)
            begin = chance.choice([None, None, chance.randint(0, 20)])
            upto = chance.randint(20, 96)
            ticket = copier.submit(held[x].state, held[y].state, upto=upto, begin=begin, after=SYNCED)
            if ticket is None:
                flying.pop(chance.randrange(len(flying))).sync()
                copier.finished()
                continue
            flying.append(ticket)
            how = {"begin": None if begin is None else (begin,)}
            model[y] = after_copy(held[x], held[y], upto, before=model[y], source_bytes=model[x], **how)
            if HOST:
                host_runtime.step(chance.randint(0, 40))
        for ticket in flying:
            assert ticket.sync()
        assert [differences(one, wanted) for one, wanted in zip(held, model, strict=True)] == [[]] * 5


def test_threads_submit_at_once(memory):
    """Three threads and a source that all of them read; what each thread writes, it alone writes."""
    shared = memory(LAYOUT, 1)
    mine = [[memory(LAYOUT, 10 * n + i, kind) for i, kind in enumerate(("pinned", "device"))] for n in range(1, 4)]
    failed = []

    def work(image, slot):
        try:
            for turn in range(30):
                for source, target in ((shared, image), (image, slot)):
                    while (ticket := copier.submit(source.state, target.state, upto=40 + turn, after=SYNCED)) is None:
                        copier.finished()
                if turn % 7 == 0:
                    ticket.sync()
                ticket.wait_layer(1, streams[threading.current_thread().name])
            ticket.sync()
        except BaseException as error:
            failed.append(error)

    with sc.Copier(tickets=8, layer_events=24) as copier:
        threads = [threading.Thread(target=work, args=pair) for pair in mine]
        streams = {thread.name: new_stream() for thread in threads}
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert failed == []
    for image, slot in mine:
        for one in (image, slot):
            assert differences(one, after_copy(shared, one, 69)) == []


def test_a_state_is_busy_until_its_copy_has_ended(held, scene):
    ticket = scene.submit(after=held.wait)
    assert scene.source.state.busy
    assert scene.target.state.busy
    for state in (scene.source.state, scene.target.state):
        with pytest.raises(sc.Refused) as refused:
            state.reset()
        assert refused.value.reason == "busy"
    held.open()
    assert ticket.sync()
    scene.source.state.reset()
    scene.target.state.reset()
    assert not scene.source.state.busy


def test_generations_count_what_changed_the_content(scene):
    source, target = scene.source.state, scene.target.state
    before = target.generation
    scene.submit(dst_generation=before, src_generation=source.generation).sync()
    assert target.generation > before
    assert source.generation == 1
    with pytest.raises(sc.Refused):
        scene.submit(dst_generation=before)
    reset = target.generation
    target.reset()
    assert target.generation > reset


def test_writes_of_the_caller_are_read_at_once(scene):
    """A source that was written by plain stores before submit."""
    address = scene.source.address(1, "k")
    wanted = after_copy(scene.source, scene.target, 9)
    i = scene.source.layout.index(1, "k")
    wanted[i][512 : 512 + 64] = 9
    write(address, wanted[i][512 : 512 + 64])
    assert scene.submit().sync()
    assert differences(scene.target, wanted) == []
