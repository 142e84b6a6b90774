"""Modules of another project, in Cython, C and C++, built against this one and used."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, untouched
from strata_copy import _core, host_runtime, runtime

HERE = Path(__file__).parent
PACKAGE = Path(sc.__file__).parent
MODULES = ("consumer", "consumer_c", "consumer_cpp")

# The functions that other modules cimport, with their C signatures: a module that was built before must still run.
CAPI = {
    "cancel": "int (strata_ticket, strata_error *)",
    "finished": "int (strata_copier *, strata_ticket *, int32_t)",
    "submit": "int (strata_plan *, strata_request const *, strata_ticket *, strata_error *)",
    "reset": "int (strata_state *, strata_error *)",
    "wait_layer": "int (strata_ticket, int32_t, void *, int64_t, strata_error *)",
    "sync": "int (strata_ticket, int64_t, strata_error *)",
    "poll": "int (strata_ticket, strata_progress *)",
    "wait_done": "int (strata_ticket, void *, int64_t, strata_error *)",
    "wait_source": "int (strata_ticket, void *, int64_t, strata_error *)",
    "copier_of": "strata_copier *(PyObject *)",
    "plan_of": "strata_plan *(PyObject *)",
    "state_of": "strata_state *(PyObject *)",
    "generation": "uint64_t (strata_state const *)",
    "release": "void (strata_ticket *)",
    "advanced": "int (strata_state *, int64_t const *, uint32_t, strata_error *)",
    "rewound": "int (strata_state *, int64_t const *, uint32_t, strata_error *)",
    "rewindable": "int (strata_state *, int64_t const *, uint32_t, strata_error *)",
    "image_reserve": "int (strata_state *, int64_t const *, uint32_t, strata_error *)",
    "image_blob": "int (strata_state *, void const *, size_t, strata_error *)",
    "image_publish": "int (strata_state *, uint64_t, strata_error *)",
    "dirty": "int (strata_state *, int32_t, int64_t, int64_t, strata_error *)",
}

# Bytes of the structs of strata_copy.h. Requests carry their size; the others may not change.
SIZES = {
    "Error": 288,
    "Progress": 40,
    "Growth": 56,
    "PartSpec": 112,
    "PlaceSpec": 96,
    "Wait": 16,
    "Pages": 24,
    "Request": 144,
    "Ticket": 8,
    "table": 152,
}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The consumer's modules, by name."""
    folder = tmp_path_factory.mktemp("consumer")
    for file in (HERE / "consumer").glob("*.*"):
        if file.suffix in (".pyx", ".py", ".c", ".cpp"):
            shutil.copy(file, folder)
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    modules = {}
    for name in MODULES:
        (file,) = folder.glob(f"{name}.*.so")
        spec = importlib.util.spec_from_file_location(name, file)
        modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[name])
    return modules


@pytest.fixture
def consumer(built):
    return built["consumer"]


@pytest.fixture
def stream():
    made = runtime.stream_create()
    yield made
    runtime.stream_synchronize(made)
    runtime.stream_destroy(made)


def plan_of(scene):
    return scene.copier.plan(scene.source.state, scene.target.state)


OK, AGAIN, REFUSED, STREAM, TICKET = 0, 1, -1, 10, 16


def test_the_codes_of_outcomes_are_those_of_the_header(consumer):
    assert consumer.codes() == {"OK": OK, "AGAIN": AGAIN, "REFUSED": REFUSED, "TICKET": TICKET}


def test_a_copy_from_cython_without_the_gil(consumer, scene, stream):
    flight, layout = consumer.Flight(), scene.source.layout
    assert flight.submit(plan_of(scene), 21) == OK
    assert flight.value != 0
    assert [flight.wait_layer(layer, stream) for layer in range(layout.layers)] == [OK] * layout.layers
    assert flight.wait_done(stream) == OK
    assert flight.sync() == OK
    assert flight.poll() == (OK, layout.layers, layout.bytes_at([21]), layout.bytes_at([21]))
    assert consumer.generation(scene.target.state) == scene.target.state.generation == 2
    for room in (0, -1):  # writes nothing, and gives nothing away
        assert consumer.finished(scene.copier, room) == ([], 0)
    assert consumer.finished(scene.copier, 16) == ([flight.value], 1)
    assert consumer.finished(scene.copier, 16) == ([], 0)
    flight.release()
    assert flight.value == 0
    assert differences(scene.target, after_copy(scene.source, scene.target, 21)) == []


@pytest.mark.parametrize("language", ["consumer_c", "consumer_cpp"])
def test_a_copy_from_c(built, scene, stream, language):
    layout, plan = scene.source.layout, plan_of(scene)
    said = built[language].copy(
        plan.address,
        scene.copier.address,
        scene.source.state.address,
        scene.target.state.address,
        stream,
        21,
        layout.layers,
    )
    steps = ("submitted", "waited", "done", "source_done", "synced", "polled", "reset")
    assert {step: said[step] for step in steps} == dict.fromkeys(steps, OK)
    assert (said["found"], said["bytes"], said["grown"], said["ticket"]) == (1, layout.bytes_at([21]), 1, 0)
    assert (said["said"], said["rewindable"], said["unsaid"], said["room"]) == (OK, OK, REFUSED, 3 * REFUSED)
    assert (said["released"], said["reason"]) == (OK, 0) or (said["released"], said["reason"]) == (REFUSED, TICKET)
    assert scene.source.state.generation == 2
    assert differences(scene.target, after_copy(scene.source, scene.target, 21)) == []


def test_what_an_engine_says_from_cython(consumer, scene):
    main, slot = scene.source, scene.target
    assert consumer.say(main.state, "rewindable", 0)[0] == REFUSED
    assert consumer.say(main.state, "advanced", 21) == (OK, 0)
    assert consumer.say(main.state, "rewindable", 21) == (OK, 0)
    plan = plan_of(scene)
    assert plan.submit(21, after=SYNCED).sync(timeout=60)
    assert plan.submit(21, after=SYNCED).bytes == 0
    for word, value in (("rewound", 20), ("dirty", 0), ("advanced", 21)):
        assert consumer.say(main.state, word, value) == (OK, 0)
        ticket = plan.submit(21, after=SYNCED)
        assert ticket.bytes > 0
        assert ticket.sync(timeout=60)
    for word, value, part in (("rewound", -1, 0), ("dirty", 0, 99), ("room", 1, 0), ("blob", 1, 0), ("publish", 0, 0)):
        assert consumer.say(slot.state, word, value, part)[0] == REFUSED


def test_an_image_from_cython(consumer, scene):
    with sc.Arena(1 << 20, piece=1 << 20) as arena:
        image = sc.Image(arena, scene.source.layout, chunk=32)
        assert consumer.say(image, "room", 21) == (OK, 0)
        assert consumer.say(image, "blob", 7) == (OK, 0)
        assert consumer.say(image, "publish", 0)[0] == REFUSED
        assert scene.copier.submit(scene.source.state, image, upto=21, after=SYNCED).sync(timeout=60)
        assert consumer.say(image, "publish", image.generation) == (OK, 0)
        assert image.marks == (21,)
        assert image.blob == (7).to_bytes(8, "little")
        image.discard()


def test_a_ticket_in_flight_is_not_yet(held, consumer, scene):
    flight = consumer.Flight()
    before = host_runtime.calls()
    assert flight.submit(plan_of(scene), 21) == OK
    if held.memory == ():  # the host runtime in scheduled mode: nothing runs by itself
        assert flight.poll()[0] == AGAIN
        assert consumer.finished(scene.copier, 4) == ([], 0)
        assert consumer.reset(scene.target.state) == REFUSED
        assert before != host_runtime.calls()
    assert flight.sync() == OK
    assert consumer.reset(scene.target.state) == OK
    flight.release()


@pytest.mark.host
def test_poll_and_finished_make_no_cuda_call(held, consumer, scene):
    flight = consumer.Flight()
    flight.submit(plan_of(scene), 21)
    for _ in range(2):
        before = host_runtime.calls()
        flight.poll()
        consumer.finished(scene.copier, 0)
        assert host_runtime.calls() == before
        flight.sync()
    flight.release()


def test_finished_gives_out_no_more_than_it_was_asked_for(consumer, scene):
    flights = [consumer.Flight() for _ in range(5)]
    plan = plan_of(scene)
    for flight in flights:
        assert flight.submit(plan, 9) == OK
    for flight in flights:
        assert flight.sync() == OK
    found = []
    while len(found) < 5:
        some, written = consumer.finished(scene.copier, 2)
        assert len(some) == written <= 2
        found += some
    assert sorted(found) == sorted(flight.value for flight in flights)
    for flight in flights:
        flight.release()


def test_all_tickets_taken_says_again(consumer, memory, scene):
    plan, flights = plan_of(scene), []
    for _ in range(8):
        flights.append(consumer.Flight())
        assert flights[-1].submit(plan, 9) == OK
        assert flights[-1].sync() == OK
    late = consumer.Flight()
    assert late.submit(plan, 9) == AGAIN  # ended, but not released: their numbers are still in use
    assert late.value == 0
    flights.pop().release()
    assert late.submit(plan, 9) == OK
    assert late.sync() == OK
    for flight in [*flights, late]:
        flight.release()


@pytest.mark.parametrize("value", ["released", 0, 7, (1 << 40) + 1, 255])
def test_a_ticket_that_is_none_is_refused_by_name(consumer, scene, stream, value):
    flight = consumer.Flight()
    if value == "released":
        assert flight.submit(plan_of(scene), 9) == OK
        assert flight.sync() == OK
        value = flight.value
        flight.release()
        flight.release()
        assert scene.submit().sync()  # numbers are used again, tickets are not
    flight.value = value
    assert flight.poll()[0] == REFUSED
    for status in (flight.wait_layer(0, stream), flight.wait_done(stream), flight.sync(0)):
        assert status == REFUSED
        assert flight.said[0] == TICKET
        assert "was released" in flight.said[1]


def test_a_layer_that_the_ticket_has_not_is_refused(held, consumer, scene, stream):
    flight = consumer.Flight()
    assert flight.submit_after(plan_of(scene), 9, stream) == OK
    for layer in (-1, 4):
        assert flight.wait_layer(layer, stream) == REFUSED
        assert flight.said[1] == f"layer {layer} of a ticket with 4"
    assert flight.sync() == OK
    flight.release()


def test_a_wait_on_a_default_stream_is_refused_in_every_state(consumer, scene):
    flight = consumer.Flight()
    assert flight.submit(plan_of(scene), 9) == OK
    for _ in range(2):  # the copy may be in flight, then it has ended
        for default in (0, 1, 2):
            for wait in (functools.partial(flight.wait_layer, 0), flight.wait_done):
                assert wait(default) == REFUSED
                assert flight.said[0] == STREAM
        assert flight.sync() == OK
    flight.release()


@pytest.mark.host
def test_a_layer_that_is_not_queued_yet_is_waited_for_or_said_to_be_late(consumer, memory, stream):
    """It is long, so the worker queues it: the first window now, the rest once the gate has opened."""
    from host_table import Gate

    growth = sc.Growth.linear()
    layout = sc.Layout(
        [sc.Part(name=name, layer=layer, unit_bytes=8, growth=growth) for layer in range(1000) for name in "kv"]
    )
    source, target = memory(layout, 1), memory(layout, 2, "pinned")
    writer = runtime.stream_create()
    gate = Gate(writer)
    flight, answers = consumer.Flight(), []
    with sc.Copier(tickets=2, layer_events=1000, window=1000) as copier:
        plan = copier.plan(source.state, target.state)
        threads = [threading.Thread(target=lambda: answers.append(flight.submit_after(plan, 9, writer)))]
        threads[0].start()
        try:
            until = time.monotonic() + 30
            while flight.value == 0 or flight.poll()[1] < 1:
                assert time.monotonic() < until
            assert flight.wait_layer(0, stream) == OK
            assert flight.wait_layer(999, 0) == REFUSED
            assert flight.wait_layer(999, stream) == AGAIN
            assert flight.wait_layer(999, stream, 5_000_000) == AGAIN
            assert flight.wait_done(stream, 1000) == AGAIN
            assert flight.poll()[0] == AGAIN
            assert consumer.finished(copier, 4) == ([], 0)
            threads[0].join(30)
            assert not threads[0].is_alive()  # submit has returned
            threads.append(threading.Thread(target=lambda: answers.append(flight.wait_layer(999, stream, -1))))
            threads[1].start()
        finally:
            gate.open()
            for thread in threads:
                thread.join(60)
        assert answers == [OK, OK]
        assert flight.sync() == OK
        flight.release()
    runtime.stream_destroy(writer)
    assert differences(target, after_copy(source, target, 9)) == []


REQUEST, MARK, ORDER, GROUP, UNSUPPORTED = 17, 2, 8, 11, 15
REQUESTS = [
    ("size", 8, REQUEST, "request of 8 bytes"),
    ("flags", 6, REQUEST, "flags 0x7; CALLER_SYNCED and one of FEED and QUEUE_ALL are possible"),
    ("no flag", 0, ORDER, "nothing to wait for was named"),
    ("marks", 0, MARK, "0 marks given, the layout has 1"),
    ("marks", 2, MARK, "2 marks given, the layout has 1"),
    ("upto", 0, MARK, "marks given, the layout has 1"),
    ("groups", 2, GROUP, "groups 0x2, the layout has 1"),
    ("priority", 1, REQUEST, "priority 1, bytes_ahead 0; a priority is 0 or -1"),
    ("bytes_ahead", -1, REQUEST, "priority 0, bytes_ahead -1; a priority is 0 or -1"),
    ("page groups", 1, UNSUPPORTED, "page tables are not done by this release"),
    ("source pages", 0, UNSUPPORTED, "page tables are not done by this release"),
    ("target pages", 0, UNSUPPORTED, "page tables are not done by this release"),
    ("waits", 33, REQUEST, "33 waits; 1 to 32 are possible"),
    ("no waits", 1, REQUEST, "1 waits"),
    ("kind of wait", 7, REQUEST, "wait 0: kind 7"),
]


@pytest.mark.parametrize(("what", "value", "reason", "text"), REQUESTS)
def test_a_request_without_meaning_is_refused(consumer, scene, what, value, reason, text):
    plan = plan_of(scene)
    status, found, said, ticket = consumer.refused(plan, what, value)
    assert (status, found, ticket) == (REFUSED, reason, 0)
    assert text in said
    assert all(untouched(one) for one in scene.memories)
    assert plan.submit(9, after=SYNCED).sync()


@pytest.mark.parametrize("function", ["plan", "state", "copier"])
def test_another_object_is_refused(consumer, function):
    act = {
        "plan": lambda: consumer.refused(3, "upto"),
        "state": lambda: consumer.generation(3),
        "copier": lambda: consumer.finished(3, 1),
    }
    with pytest.raises(TypeError):
        act[function]()


def test_a_closed_copier_is_refused(consumer, scene):
    plan = plan_of(scene)
    flight = consumer.Flight()
    scene.copier.close()
    assert flight.submit(plan, 9) == REFUSED
    assert "is closed" in flight.said[1]
    with pytest.raises(RuntimeError, match="closed"):
        consumer.finished(scene.copier, 1)
    assert untouched(scene.target)


# ---- the interface itself


@pytest.mark.parametrize(("compiler", "standard"), [("cc", "c11"), ("c++", "c++17")])
def test_the_header_compiles_by_itself(tmp_path, compiler, standard):
    file = tmp_path / ("header.c" if standard == "c11" else "header.cpp")
    file.write_text("#include <strata_copy.h>\nint main(void) { return (int)strata_request_new(0, 0).n_after; }\n")
    subprocess.run(
        [
            compiler,
            f"-std={standard}",
            "-pedantic-errors",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
            sc.get_include(),
            "-fsyntax-only",
            file,
        ],
        check=True,
    )


def test_structs_have_the_sizes_that_were_promised(built):
    found = built["consumer_c"].sizes()
    assert found == SIZES
    assert built["consumer_cpp"].sizes() == SIZES
    assert built["consumer"].sizes() == {name: size for name, size in SIZES.items() if name != "table"}


def test_the_cython_functions_have_the_signatures_that_were_promised():
    assert {name: capsule_name(capsule) for name, capsule in _core.__pyx_capi__.items()} == CAPI


def capsule_name(capsule):
    """Cython names a function's capsule by its signature."""
    return repr(capsule).split('"')[1]


def test_a_library_exports_nothing_but_its_module():
    """What it exports else could take the place of another library's function of that name."""
    for file in PACKAGE.glob("*.so"):
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", file], check=True, capture_output=True, text=True
        ).stdout
        names = {line.split()[-1] for line in symbols.splitlines() if line.split()[-2] in "TDBR"}
        assert names == {f"PyInit_{file.name.split('.')[0]}"}
