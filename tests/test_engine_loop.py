"""The engine loop of examples/: what it has today and strata_copy leave the same bytes, in every format and mode, at
every length; nothing is written where it refuses; a failed copy takes nothing but its target with it."""

import importlib
import itertools
import random
import re
import threading
import time
from functools import partial

import pytest
from click.testing import CliRunner

import strata_copy as sc
from fixtures import KIND, read, settle
from loops import CAPACITY, LENGTHS, Bytes, Loop, after_copy, settled
from strata_copy import host_runtime, runtime

GROUPS = ["kv", "running", "draft"]
WAYS = [pytest.param(False, id="off"), pytest.param(True, id="on")]
FORMATS = ["fp16", "int8", "int8-rotated", "q4_0", "k8v4"]
MODES = list(itertools.product((0, 1), repeat=2))  # of the rows, source and target
DRAFTS = list(itertools.product((0, 2), repeat=2))


@pytest.fixture
def loop(package):
    """Makes a Loop on a copier of its own; both are gone after the test."""
    made = []

    def make(format="int8", split=(8,)):
        copier = sc.Copier(range(len(split)), tickets=8, layer_events=40)
        made.append(Loop(package, copier, format, split))
        return made[-1]

    yield make
    for one in made:
        one.free()
        one.copier.close()


@pytest.fixture
def pair(loop):
    """(engine, main, slot) with a conversation of 41 tokens in the main session, and another one in the slot."""

    def make(direct, split=(8,), mode=0, draft_mode=2, **how):
        one = loop(split=split)
        main, slot = one.session("main", mode, draft_mode), one.session("slot 0", mode, draft_mode)
        main.append(1, 41)
        slot.append(2, 70)
        return one.engine(main, slot, direct=direct, **how), main, slot

    return make


def check(copy, source, target, marks, at=None):
    """`copy` leaves what the reference says and nothing else, and does not touch the source."""
    settled(source)
    wanted = after_copy(source, target, settled(target), marks, GROUPS, at)
    untouched = Bytes(source)
    copied = copy()
    assert copied.draft
    assert copied.bytes == source.layout.bytes_at(marks)
    assert Bytes(target).differences(wanted) == []
    assert Bytes(source).differences(untouched) == []
    assert (target.tokens, target.draft_tokens) == marks
    assert target.ids.tolist() == source.ids.tolist()[: marks[0]]
    assert target.previous_ids == tuple([-1, -1, *target.ids.tolist()][-2:])
    for layer in range(target.geometry.layers):
        if target.mode == 1 and target.geometry.is_attention(layer):
            assert target.resident_pages(layer) == []


def spare_rows_are_dead(session, tokens):
    places, layout = session.state.places, session.layout
    for layer in range(session.geometry.layers):
        if session.geometry.is_attention(layer) and tokens:
            key = session.geometry.key
            spare = places[layout.index(layer, "pooled")].base + tokens // 4 * key
            assert (read(spare, key) == read(places[layout.index(layer, "idx_dead")].base, key)).all()


@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda d: f"draft{d[0]}to{d[1]}")
@pytest.mark.parametrize("modes", MODES, ids=lambda m: f"mode{m[0]}to{m[1]}")
@pytest.mark.parametrize("format", FORMATS)
def test_both_ways_leave_what_the_reference_says(loop, cells, format, modes, drafts):
    """Into a slot, back, and back at a checkpoint, at every length, in sessions that held longer conversations."""
    one = loop(format)
    main, slot = one.session("main", modes[0], drafts[0]), one.session("slot 0", modes[1], drafts[1])
    for direct in (False, True):
        engine = one.engine(main, slot, direct=direct)
        for n in LENGTHS:
            for session, tokens, conversation in ((main, n, 1), (slot, CAPACITY - 1, 2)):
                session.clear()
                session.append(conversation + n, tokens)
            check(partial(engine.copy_to_slot, 0, main.ids), main, slot, (n, n))
            slot.append(3 + n, min(5, CAPACITY - n))
            main.clear()
            main.append(4 + n, CAPACITY)
            there = slot.tokens
            check(partial(engine.copy_from_slot, 0, slot.ids), slot, main, (there, there))
            spare_rows_are_dead(main, there)
            at_checkpoint(engine, main, slot, n)
            cells(f"{format:12} mode {modes[0]} and {modes[1]}, draft {drafts[0]} and {drafts[1]}", direct, n)


def at_checkpoint(engine, main, slot, n):
    """Behind the checkpoint the slot goes on, so that the pooled row at the spare one's place is a finished block's."""
    slot.clear()
    slot.append(5 + n, n)
    checkpoint = engine.checkpoint(slot)
    slot.append(6 + n, CAPACITY - n)
    main.clear()
    main.append(7 + n, CAPACITY - 3)
    check(lambda: engine.copy_from_slot(0, slot.ids, checkpoint), slot, main, (n, n), checkpoint)
    spare_rows_are_dead(main, n)


@pytest.mark.host
@pytest.mark.parametrize("split", [(4, 8), (3, 8), (5, 8)], ids=["even", "no attention in the first", "uneven"])
@pytest.mark.parametrize("direct", WAYS)
def test_stages_of_two_devices(pair, direct, split):
    engine, main, slot = pair(direct, split, mode=1)
    check(lambda: engine.copy_to_slot(0, main.ids), main, slot, (41, 41))
    slot.append(3, 20)
    check(lambda: engine.copy_from_slot(0, slot.ids), slot, main, (61, 61))
    at_checkpoint(engine, main, slot, 23)


@pytest.mark.host
@pytest.mark.parametrize("draft_mode", [0, 2])
def test_what_is_compared_is_read_when_all_streams_are_done(pair, seed, draft_mode):
    """The drafter's stream is none of a stage's, and the device of the last stage is not the current one."""
    _, main, _ = pair(True, (3, 8), draft_mode=draft_mode)
    settled(main)
    assert all(runtime.stream_query(stream) for stream, _ in main.streams)


def test_off_and_on_give_the_same_bytes_over_random_sessions(loop, seed):
    """Admit, decode, give back, checkpoint, rewind, in two engines that differ in nothing but the way. Nothing waits
    for the device between most steps: what a copy does not wait for is found."""
    rng = random.Random(seed)
    one = loop(rng.choice(FORMATS), rng.choice([(8,), (4, 8), (6, 8)]) if runtime.device_count() > 1 else (8,))
    kept = [(rng.choice((0, 1)), rng.choice((0, 2))) for _ in range(3)]
    engines = []
    for direct in (True, False):  # the save path synchronizes the device: it comes behind
        sessions = [one.session(f"session {i}", *how) for i, how in enumerate(kept)]
        engines.append(one.engine(*sessions, direct=direct))
    checkpoints, number = {}, itertools.count(1)
    for number_of_step in range(14):
        i = rng.randrange(3)
        step = rng.choice(["read", "decode", "admit", "back", "back at", "keep", "rewind"])
        sides = [(engine, (engine.main, *engine.slots)[i]) for engine in engines]
        session, conversation = sides[0][1], next(number)
        mine = [pair for pair in checkpoints.get(i, []) if pair[0].bank in session.taken and
                session.taken[pair[0].bank].serial == pair[0].serial]  # fmt: skip
        chosen = rng.choice(mine) if mine else None
        n = rng.randint(0, CAPACITY - session.tokens)
        for side, (engine, session) in enumerate(sides):
            if step == "read" and i == 0:
                session.clear()
                session.append(conversation, min(n + 1, CAPACITY))
            elif step in ("read", "decode"):
                session.append(conversation, min(n, 9))
            elif step == "admit":
                engine.copy_to_slot(i % 2, engine.main.ids)
            elif step == "back" and i > 0:
                engine.copy_from_slot(i - 1, session.ids)
            elif step == "back at" and i > 0 and chosen:
                engine.copy_from_slot(i - 1, session.ids, chosen[side])
            elif step == "keep":
                made = engine.checkpoint(session)
                checkpoints.setdefault(i, []).append([made]) if side == 0 else checkpoints[i][-1].append(made)
            elif step == "rewind" and chosen:
                engine.rewind(session, chosen[side])
        if number_of_step < 13 and rng.random() < 0.7:
            continue
        settle(stage.device for stage in one.stages)
        pairs = zip((engines[0].main, *engines[0].slots), (engines[1].main, *engines[1].slots), strict=True)
        for on, off in pairs:
            assert Bytes(off).differences(Bytes(on)) == [], (seed, step, i, off.name)
            assert off.ids.tolist() == on.ids.tolist()
            assert off.previous_ids == on.previous_ids


@pytest.mark.parametrize("direct", WAYS)
def test_a_rewound_session_goes_on_as_from_its_checkpoint(pair, direct):
    engine, main, slot = pair(direct)
    checkpoint = engine.checkpoint(main)
    main.append(7, 30)
    engine.rewind(main, checkpoint)
    assert (main.tokens, main.draft_tokens) == (41, 41)
    settled(main)
    spare_rows_are_dead(main, 41)
    check(lambda: engine.copy_to_slot(0, main.ids), main, slot, (41, 41))
    main.append(8, 5)
    assert main.tokens == 46
    checkpoint = engine.checkpoint(slot)
    slot.append(9, 7)
    engine.rewind(slot, checkpoint)
    check(lambda: engine.copy_from_slot(0, slot.ids), slot, main, (41, 41))


# ---- refusals

REFUSALS = {
    "a slot that is not there": (lambda e, m, s, c: e.copy_to_slot(1, m.ids), "slot 1 is asked for; there are 1"),
    "another request's slot": (lambda e, m, s, c: e.copy_from_slot(0, s.ids, request=9), "serves request 1, not 9"),
    "a prompt that differs": (lambda e, m, s, c: e.copy_from_slot(0, s.ids + 1), "does not go on from"),
    "a prompt that is shorter": (lambda e, m, s, c: e.copy_from_slot(0, s.ids[:-1]), "46 tokens, the prompt has 45"),
    "a prompt that was not read": (lambda e, m, s, c: e.copy_to_slot(0, m.ids[:-1]), "41 tokens, the prompt has 40"),
    "a foreign checkpoint": (lambda e, m, s, c: e.copy_from_slot(0, s.ids, c["foreign"]), "is not one of slot 0"),
    "a checkpoint that was given up": (lambda e, m, s, c: e.copy_from_slot(0, s.ids, c["given up"]), "was given up"),
    "a checkpoint without a stage": (lambda e, m, s, c: e.copy_from_slot(0, s.ids, c["partial"]), "part of a stage"),
    "a rewind to a foreign checkpoint": (lambda e, m, s, c: e.rewind(s, c["foreign"]), "is not one of slot 0"),
}


@pytest.mark.parametrize("direct", WAYS)
@pytest.mark.parametrize("what", REFUSALS)
def test_refused_by_name_before_any_write(pair, package, direct, what):
    engine, main, slot = pair(direct)
    engine.copy_to_slot(0, main.ids)
    slot.append(3, 5)
    kept = [engine.checkpoint(slot) for _ in range(3)]  # there is room for two
    checkpoints = {"foreign": engine.checkpoint(main), "given up": kept[0], "partial": kept[2]._replace(stages=0)}
    act, text = REFUSALS[what]
    before, lengths = (settled(main), settled(slot)), (main.tokens, slot.tokens, slot.request)
    with pytest.raises(package.Refused, match=text):
        act(engine, main, slot, checkpoints)
    assert settled(main) == before[0]
    assert settled(slot) == before[1]
    assert (main.tokens, slot.tokens, slot.request) == lengths


@pytest.mark.parametrize("direct", WAYS)
def test_a_smaller_slot_is_refused(loop, package, direct):
    one = loop()
    main, slot = one.session("main"), one.session("slot 0", capacity=40)
    main.append(1, 41)
    before = settled(slot)
    with pytest.raises(package.Refused, match="slot 0 has room for 40 tokens, 41 are asked for"):
        one.engine(main, slot, direct=direct).copy_to_slot(0, main.ids)
    assert settled(slot) == before


def test_a_slot_of_another_format_model_or_split_is_refused(loop, package):
    one, main = loop(), None
    main = one.session("main")
    wider = package.Geometry(layers=8, head_dim=128, gdn=3060, ple=360, key=64)
    carved = package.Stage(0, 0, 4, one.stages[0].stream), package.Stage(0, 4, 8, one.stages[0].stream)
    for how, text in (
        ({"format": "int8-rotated"}, "differ in format: 'int8', 'int8-rotated'"),
        ({"geometry": wider}, "differ in part 'k' of layer 3: unit_bytes"),
        ({"stages": carved}, "differ in identity"),
    ):
        with pytest.raises(package.Refused, match=text):
            one.engine(main, one.session("slot 0", **how), direct=True)


@pytest.mark.parametrize("direct", WAYS)
def test_a_draft_that_one_side_lacks_is_declared_absent_or_refused(loop, package, direct):
    one = loop()
    main, slot = one.session("main", draft_mode=2), one.session("slot 0", draft_mode=None)
    main.append(1, 41)
    lines = []
    engine = one.engine(main, slot, direct=direct, log=lines.append)
    with pytest.raises(package.Refused, match=r"slot 0 has no draft: declare it absent"):
        engine.copy_to_slot(0, main.ids)
    settled(main)
    wanted = after_copy(main, slot, settled(slot), (41, 0), ["kv", "running"])
    copied = engine.copy_to_slot(0, main.ids, draft=False)
    assert not copied.draft
    assert Bytes(slot).differences(wanted) == []
    assert slot.draft_tokens == 0
    assert lines[-1].endswith("; no draft)")


def test_the_save_path_refuses_without_host_memory(pair, package):
    engine, main, slot = pair(False, host_memory=1000)
    before = settled(slot)
    with pytest.raises(package.Refused, match=r"\d+ bytes of host memory are needed for images, 1000 may be taken"):
        engine.copy_to_slot(0, main.ids)
    assert settled(slot) == before


def test_a_slot_that_was_written_by_others_since_is_refused(pair, package):
    engine, main, slot = pair(True)
    engine.copy_to_slot(0, main.ids)
    slot.state.reset()  # a new generation
    with pytest.raises(package.Refused, match="generation"):
        engine.copy_from_slot(0, slot.ids)


@pytest.mark.host
def test_a_session_that_another_thread_changes_meanwhile_is_refused(pair, package):
    """While the save path waits for the session's stream. The other thread changes it until the copy has ended."""
    engine, main, _ = pair(False)
    main.clear()
    big, stop = runtime.malloc(64 << 20), threading.Event()
    for _ in range(10):
        runtime.memset_async(big, 1, 64 << 20, main.stages[0].stream)

    def change():
        while not stop.is_set():
            main.clear()
            time.sleep(0)

    other = threading.Thread(target=change)
    other.start()
    try:
        with pytest.raises(package.Refused, match="main was changed meanwhile"):
            engine.copy_to_slot(0, [])
    finally:
        stop.set()
        other.join()
        runtime.stream_synchronize(main.stages[0].stream)
        runtime.free(big)


# ---- failures


@pytest.mark.host
@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaStreamSynchronize", "cudaMemsetAsync"])
@pytest.mark.parametrize("direct", WAYS)
def test_a_failed_copy_forgets_its_target_and_the_next_one_is_right(pair, package, direct, function):
    engine, main, slot = pair(direct, mode=1)
    settled(main)
    settled(slot)
    failed = []
    for nth in range(1, 30):
        source = Bytes(main)
        slot.clear()
        slot.append(2, 70)
        settled(slot)
        host_runtime.fail(function, nth, 999)
        try:
            engine.copy_to_slot(0, main.ids)
        except package.Failed as failure:
            failed.append(str(failure))
            assert slot.tokens == slot.draft_tokens == slot.request == 0
        except package.Refused:  # before the first byte
            assert slot.tokens == 70
        finally:
            host_runtime.clear_faults()
        assert settled(main).differences(source) == []
    assert failed
    assert all(function in text or "residency" in text for text in failed)
    check(lambda: engine.copy_to_slot(0, main.ids), main, slot, (41, 41))


@pytest.mark.host
@pytest.mark.parametrize("direct", WAYS)
def test_a_draft_that_cannot_be_pinned_is_resident(loop, direct):
    one = loop()
    host_runtime.fail("cudaHostAlloc", 1, 2)
    main, slot = one.session("main", draft_mode=2), one.session("slot 0", draft_mode=2)
    assert (main.draft_mode, slot.draft_mode) == (0, 2)
    main.append(1, 41)
    engine = one.engine(main, slot, direct=direct)
    check(lambda: engine.copy_to_slot(0, main.ids), main, slot, (41, 41))


# ---- how it is chosen, and what is said


@pytest.mark.parametrize(("value", "direct"), [(None, False), ("0", False), ("1", True)])
def test_the_variable_chooses_the_way(loop, package, monkeypatch, value, direct):
    monkeypatch.delenv("STRATA_SLOT_COPY_DIRECT", raising=False)
    if value is not None:
        monkeypatch.setenv("STRATA_SLOT_COPY_DIRECT", value)
    one = loop()
    assert one.engine(one.session("main"), direct=None).direct == direct


@pytest.mark.parametrize("direct", WAYS)
def test_the_log_has_the_engines_lines(pair, direct):
    lines = []
    engine, main, slot = pair(direct, log=lines.append)
    engine.probe(1 << 16)
    engine.copy_to_slot(0, main.ids)
    engine.copy_from_slot(0, slot.ids)
    share = r"\(copied in \d+\.\d ms, \d+\.\d GB/s, \d+% of the device's \d+\.\d"
    nothing = r"; 0\.000 of \d\.\d{3} MB" if direct else ""  # what came from there is there
    assert re.fullmatch(rf"slot 0 takes 41 tokens {share}\)", lines[0])
    assert re.fullmatch(rf"slot 0 gave back 41 tokens {share}{nothing}\)", lines[1])


def test_rows_are_a_function_of_conversation_and_position(loop):
    """However they were appended."""
    one = loop()
    at_once, in_steps = one.session("main"), one.session("slot 0")
    at_once.append(1, 50)
    for n in (1, 2, 4, 5, 30, 0, 8):
        in_steps.append(1, n)
    assert settled(at_once).differences(settled(in_steps)) == []
    other = one.session("slot 1")
    other.append(2, 50)
    assert settled(other).differences(settled(at_once)) != []


# ---- as a program


@pytest.fixture
def program(package):
    """Runs `python -m engine_loop` in this process, tiny; its result, and its rows of copies as lists of words."""
    module = importlib.import_module("engine_loop.__main__")

    def run(*arguments):
        done = CliRunner().invoke(
            module.main, ["--tiny", "--tokens", "41", *arguments], env={"STRATA_COPY_RUNTIME": KIND}
        )
        lines = done.stdout.splitlines()
        rows = lines[[line.split()[:1] for line in lines].index(["copy"]) + 1 :] if "copy  " in done.stdout else []
        return done, [row.split() for row in rows]

    run.module = module
    return run


@pytest.mark.parametrize("mode", ["0", "1"])
@pytest.mark.parametrize(
    "split", [(), ("--split", "3"), ("--split", "5")], ids=["even", "no K/V in the first", "uneven"]
)
def test_the_program_has_stages_on_devices_and_verifies_each_copy(program, second_device, split, mode):
    done, rows = program("--devices", "2", *split, "--mode", mode)
    assert done.exit_code == 0, done.output
    assert [row[-1] for row in rows] == ["yes"] * 6
    assert [row[-5] for row in rows] == ["2"] * 6
    assert runtime.get_device() == 0


@pytest.mark.host
def test_the_program_has_as_many_devices_as_are_asked_for(program):
    for devices in (1, 3, 8):
        done, rows = program("--devices", str(devices))
        assert done.exit_code == 0, done.output
        assert [(row[-5], row[-1]) for row in rows] == [(str(devices), "yes")] * 6


@pytest.mark.host
def test_a_wrong_byte_of_each_copy_ends_the_program_with_1(program, monkeypatch):
    """One copy of each of the six gets a byte wrong; it is found behind that one."""
    real, copies = program.module.verified, []
    for wrong in range(6):
        copies.clear()

        def verified(what, copy, source, *rest, wrong=wrong):
            settled(source)
            if len(copies) == wrong:
                host_runtime.corrupt(1)
            copies.append(what)
            return real(what, copy, source, *rest)

        monkeypatch.setattr(program.module, "verified", verified)
        done, rows = program("--draft", "none")
        assert done.exit_code == 1
        assert "no:" in rows[wrong]
        assert [row[-1] for row in rows[:wrong]] == ["yes"] * wrong


@pytest.mark.host
@pytest.mark.parametrize("function", ["cudaMalloc", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"])
def test_a_call_that_fails_ends_the_program_with_a_line(program, monkeypatch, function):
    # A new start of the host runtime would end the fault.
    monkeypatch.setattr(program.module.runtime, "open", lambda *_, **how: how or "host")
    host_runtime.fail(function, 1, 2)
    done, _ = program()
    assert done.exit_code == 1
    assert f"{function}" in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert type(done.exception) is SystemExit


def test_the_program_says_how_to_go_on_without_a_gpu(program, monkeypatch):
    def opened():
        raise runtime.RuntimeUnavailable("no GPU")

    monkeypatch.setattr(program.module.runtime, "open", opened)
    done, _ = program()
    assert (done.exit_code, done.stderr) == (1, "Error: RuntimeUnavailable: no GPU\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--devices", "9"), "the 8 layers are not 9 stages"),
        (("--devices", "2", "--split", "8"), "they would end at [8, 8]"),
        (("--devices", "2", "--split", "3,5"), "they would end at [3, 5, 8]"),
        (("--split", "a"), "--split is 'a'; numbers of layers are needed"),
    ],
)
def test_stages_without_meaning_are_refused_by_the_program(program, arguments, text):
    done, _ = program(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr
