"""The engine loop's parked conversations: what a park and a take move, what is found again and what is not, and that
slots go on meanwhile."""

import contextlib
import gc
import random
import re
import sys
from functools import partial

import pytest

import reference
import strata_copy as sc
from fixtures import read
from loops import CAPACITY, Bytes, Loop, after_copy, settled
from strata_copy import host_runtime

GROUPS = ["kv", "running", "draft"]


@pytest.fixture
def pooled(package):
    """Makes (loop, engine) with a main session, `slots` and a pool of so many bytes; all is gone after the test."""
    made = []

    def make(slots=1, mode=0, draft_mode=2, budget=4 << 20, chunk=32 << 20, **how):
        loop = Loop(package, sc.Copier(tickets=16, layer_events=40, chunk=chunk))
        sessions = [loop.session(f"slot {k - 1}" if k else "main", mode, draft_mode) for k in range(slots + 1)]
        arena = sc.Arena(budget, piece=budget, pause=0.0, threads=1)
        engine = loop.engine(*sessions, direct=True, pool=sc.Pool(arena, sessions[0].layout, chunk=16), **how)
        made.append((loop, engine, arena))
        return loop, engine

    yield make
    for loop, engine, arena in made:
        with contextlib.suppress(Exception):  # where the test has made a park fail
            engine.parks.close()
        loop.free()
        loop.copier.close()
        for image in [thing for thing in gc.get_objects() if isinstance(thing, sc.Image)]:
            with contextlib.suppress(sc.Refused):
                image.discard()
        arena.close()


def units_bytes(session, marks, begin):
    """Bytes of the units that an append from `begin` to `marks` may have changed, running state with them."""
    units = reference.moved_units(session.layout, marks, begin)
    return sum(session.layout.parts[i].unit_bytes for i, *_ in units)


def takes(copy, source, target, marks):
    """`copy` leaves the target as one of the whole session `source` would, which holds the same conversation."""
    settled(source)
    wanted = after_copy(source, target, settled(target), marks, GROUPS)
    copied = copy()
    assert Bytes(target).differences(wanted) == []
    assert (target.tokens, target.draft_tokens) == marks
    assert target.ids.tolist() == source.ids.tolist()[: marks[0]]
    return copied


@pytest.mark.parametrize("mode", [0, 1])
def test_a_turn_parks_and_takes_what_changed(pooled, mode):
    """A conversation goes from slot to slot through its image; the main session holds another one meanwhile."""
    _, engine = pooled(slots=2, mode=mode)
    main, (a, b) = engine.main, engine.slots
    main.append(1, 41)
    engine.copy_to_slot(0, main.ids)
    engine.park(a, "one", wait=True)
    main.clear()
    main.append(2, 70)
    whole = takes(lambda: engine.take(1, "one", a.ids), a, b, (41, 41))
    assert whole.moved == whole.bytes == a.layout.bytes_at((41, 41))
    before, tokens = b, 41
    for session in (a, b, a):
        before.append(1, 3)
        tokens += 3
        engine.park(before, "one", wait=True)
        new = units_bytes(a, (tokens, tokens), (tokens - 3, tokens - 3))
        take = partial(engine.take, engine.slots.index(session), "one", before.ids)
        copied = takes(take, before, session, (tokens, tokens))
        assert copied.moved == new
        before = session


def test_a_take_after_a_park_without_a_step_moves_nothing(pooled):
    _, engine = pooled()
    slot = engine.slots[0]
    slot.append(1, 41)
    engine.park(slot, "one", wait=True)
    layout = slot.state.layout
    spare = sum(layout.parts[layout.index(patch.layer, patch.part)].unit_bytes for patch in layout.patches)
    assert engine.take(0, "one", slot.ids).moved == spare  # the slot's are what its engine wrote
    assert engine.take(0, "one", slot.ids).moved == 0
    restored = takes(lambda: engine.restore("one", slot.ids), slot, engine.main, (41, 41))
    assert restored.moved == restored.bytes
    assert engine.copy_from_slot(0, slot.ids).moved == 0  # through any chain


def test_a_main_session_that_was_lent_is_restored(pooled):
    """park, another conversation, restore: the prompt goes on from what was parked."""
    _, engine = pooled()
    main = engine.main
    main.append(1, 50)
    ids = main.ids
    engine.park(main, "one", wait=True)
    main.clear()
    main.append(2, 90)
    engine.restore("one", [*ids, 7, 8])
    assert main.ids.tolist() == ids.tolist()
    settled(main)
    copied = takes(lambda: engine.copy_to_slot(0, ids), main, engine.slots[0], (50, 50))
    assert copied.draft


@pytest.mark.host
def test_slots_decode_while_a_conversation_is_parked(pooled):
    """Nothing of the park is queued yet when the parked slot itself goes on: what it writes comes behind the read."""
    _, engine = pooled(slots=2)
    a, b = engine.slots
    a.append(1, 60)
    wanted = a.ids
    engine.park(a, "one")
    b.append(2, 40)
    assert engine.main.reads == []
    assert len(a.reads) == 1
    a.append(1, 9)  # running state that the park reads
    assert a.reads == []
    while not engine.tend():
        b.append(2, 1)
    other = engine.main
    other.append(1, 60)
    takes(lambda: engine.take(1, "one", wanted), other, b, (60, 60))
    assert host_runtime.violations() == []


@pytest.mark.host
def test_a_conversation_that_comes_back_cancels_its_park(pooled, monkeypatch):
    """Where it is parked for the first time. Where its image only lacks a turn, the park goes on."""
    lines = []
    _, engine = pooled(chunk=2000, log=lines.append)
    monkeypatch.setattr(sys.modules["engine_loop.parks"], "AHEAD", 4000)
    slot = engine.slots[0]
    slot.append(1, 90)
    before = settled(slot)
    engine.park(slot, "one")
    assert engine.take(0, "one", slot.ids, request=4).moved == 0
    assert slot.request == 4
    assert "the park of one is cancelled" in lines
    assert "one" not in engine.parks.pool
    assert settled(slot) == before
    engine.park(slot, "one", wait=True)
    slot.append(1, 2)
    engine.park(slot, "one")
    assert engine.take(0, "one", slot.ids).moved == 0
    slot.append(1, 1)
    engine.parks.close()
    assert engine.parks.pool["one"].marks == (92, 92)


def test_what_is_not_parked_or_another_conversation_is_refused(pooled, package):
    _, engine = pooled()
    slot = engine.slots[0]
    slot.append(1, 41)
    engine.park(slot, "one", wait=True)
    before = settled(slot)
    with pytest.raises(package.Refused, match="no conversation is parked as two"):
        engine.take(0, "two", slot.ids)
    with pytest.raises(package.Refused, match="does not go on from what the image of one holds"):
        engine.take(0, "one", slot.ids + 1)
    with pytest.raises(package.Refused, match="the image of one holds 41 tokens, the prompt has 40"):
        engine.restore("one", slot.ids[:40])
    assert settled(slot) == before


def test_an_engine_without_a_pool_or_with_another_model_s_is_refused(pooled, package):
    loop, engine = pooled()
    plain = loop.engine(engine.main, direct=True)
    with pytest.raises(package.Refused, match="the engine has no pool"):
        plain.park(engine.main, "one")
    with pytest.raises(ValueError, match="a pool is filled by direct copies"):
        loop.engine(engine.main, direct=False, pool=engine.parks.pool)
    other = loop.session("main", format="fp16")
    with pytest.raises(package.Refused, match="the pool's images and the sessions differ in format"):
        loop.engine(other, direct=True, pool=engine.parks.pool)


def test_a_slot_without_a_draft_takes_the_rows(pooled):
    loop, engine = pooled()
    bare = loop.session("slot 0", draft_mode=None)
    other = loop.engine(engine.main, bare, direct=True, pool=engine.parks.pool)
    engine.main.append(1, 41)
    engine.park(engine.main, "one", wait=True)
    copied = other.take(0, "one", engine.main.ids)
    assert (copied.draft, bare.tokens, bare.draft_tokens) == (False, 41, 0)
    bare.append(1, 4)
    other.park(bare, "one", wait=True)
    assert not engine.restore("one", bare.ids).draft
    assert (engine.main.tokens, engine.main.draft_tokens) == (45, 0)


def test_a_full_pool_gives_up_what_was_used_longest_ago(pooled, package):
    lines = []
    _, engine = pooled(slots=3, budget=160 << 10, log=lines.append)
    for k, slot in enumerate(engine.slots):
        slot.append(k + 1, 80)
        engine.park(slot, f"conversation {k}", wait=True)
    assert "conversation 0 went from the pool" in lines
    with pytest.raises(package.Refused, match="no conversation is parked as conversation 0"):
        engine.take(0, "conversation 0", engine.slots[0].ids)
    assert engine.take(0, "conversation 2", engine.slots[2].ids).tokens == 80
    assert engine.slots[0].ids.tolist() == engine.slots[2].ids.tolist()


@pytest.mark.host
@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaMemcpy2DAsync"])
def test_a_park_that_fails_leaves_no_image_and_its_session_as_it_was(pooled, package, function):
    _, engine = pooled()
    slot = engine.slots[0]
    slot.append(1, 41)
    before = settled(slot)
    host_runtime.fail(function, 3, 999)
    with pytest.raises(package.Failed):
        engine.park(slot, "one", wait=True)
    host_runtime.clear_faults()
    assert "one" not in engine.parks.pool
    assert settled(slot) == before
    engine.park(slot, "one", wait=True)
    takes(lambda: engine.restore("one", slot.ids), slot, engine.main, (41, 41))


def test_the_log_has_lines_for_parks(pooled):
    lines = []
    _, engine = pooled(log=lines.append)
    engine.probe(1 << 16)
    slot = engine.slots[0]
    slot.append(1, 41)
    engine.park(slot, "one", wait=True)
    slot.append(1, 4)
    engine.park(slot, "one", wait=True)
    engine.restore("one", slot.ids)
    engine.take(0, "one", slot.ids)
    share = r"\(copied in \d+\.\d ms, \d+\.\d GB/s, \d+% of the bus's \d+\.\d"
    part = r"; \d+\.\d{3} of \d+\.\d{3} MB"
    for line, text in zip(
        lines,
        [
            f"slot 0 parks 41 tokens as one {share}\\)",
            f"slot 0 parks 45 tokens as one {share}{part}\\)",
            f"main restores 45 tokens parked as one {share}\\)",
            f"slot 0 takes 45 tokens parked as one {share}{part}\\)",
        ],
        strict=True,
    ):
        assert re.fullmatch(text, line), line


def test_five_conversations_take_turns_in_four_slots(pooled, seed):
    """Read, decode, park in the background, come back to any slot: each conversation is always what it was."""
    rng = random.Random(seed)
    loop, engine = pooled(slots=4, mode=rng.choice((0, 1)), draft_mode=rng.choice((0, 2)))
    ids, place = {}, {}
    for _ in range(24):
        conversation, slot = rng.randrange(5), rng.randrange(4)
        for other, where in list(place.items()):  # who has to leave, and a conversation that moves
            if other == conversation or where == slot:
                engine.park(engine.slots[where], f"conversation {other}")
                del place[other]
        session = engine.slots[slot]
        if conversation in ids:
            engine.take(slot, f"conversation {conversation}", ids[conversation])
        else:
            session.clear()
        place[conversation] = slot
        session.append(conversation + 1, min(rng.choice((4, 8)), CAPACITY - session.tokens))  # whole pages
        ids[conversation] = session.ids
        engine.tend()
    engine.parks.close()
    probe = loop.session("probe", engine.main.mode, engine.main.draft_mode)
    for conversation, where in place.items():
        probe.clear()
        probe.append(conversation + 1, len(ids[conversation]))
        assert differences(probe, engine.slots[where]) == [], conversation


def differences(probe, session):
    """Parts in which the conversation of a session is not that of another one."""
    settled(probe)
    settled(session)
    places, found = session.state.places, set()
    for i, to, j, from_, size in reference.moved_runs(
        session.layout, probe.state.places, places, (session.tokens, session.draft_tokens)
    ):
        if (read(places[i].base + to, size) != read(probe.state.places[j].base + from_, size)).any():
            found.add((session.layout.parts[i].layer, session.layout.parts[i].name))
    return sorted(found)
