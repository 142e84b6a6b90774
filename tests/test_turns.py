"""The demo's --pool: conversations in too few slots hold every byte each turn, and move what changed."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import reference
import strata_copy as sc
from fixtures import KIND, small_layout
from strata_copy import cli, host_runtime, presets, rig, runtime, save_path, turns
from strata_copy.stages import SaveStreams, Stages
from test_cli import ended_well, strata_copy

ROW = ["turn", "conversation", "slot", "tokens", "format", "mode", "bytes", "moved", "save_ms", "pool_ms", "verified"]
LAYOUT = small_layout("int8", draft=True)
PREFIX = 90


def play(layout=LAYOUT, prefix=PREFIX, kind=lambda part: "device", starts=()):
    stages = Stages(starts)
    streams = SaveStreams(stages.devices)
    try:
        with sc.Copier(stages.devices, tickets=8, layer_events=64) as copier:
            return turns.run(copier, layout, prefix, streams, kind=kind, mode=0, stages=stages)
    finally:
        streams.close()


def changed(layout, begin, upto):
    units = reference.moved_units(layout, (upto,) * 2, (begin,) * 2)
    return sum(layout.parts[i].unit_bytes for i, *_ in units)


def test_each_turn_moves_what_changed_and_verifies_every_byte():
    """A park what is new since the last one, a take what is behind the prefix, running state both times."""
    *rows, total = play()
    new, lengths = turns.NEW_TOKENS, [PREFIX + 2 * turns.NEW_TOKENS] * 4 + [PREFIX + turns.NEW_TOKENS]
    assert [(row.turn, row.slot) for row in rows] == [(turn, turn % 4) for turn in range(10)]
    for turn, row in enumerate(rows):
        leaves, comes = turn % 5, (turn + 4) % 5
        assert (row.conversation, row.tokens, row.wrong) == (comes, lengths[comes], [])
        assert row.bytes == sum(LAYOUT.bytes_at((lengths[talk],) * 2) for talk in (leaves, comes))
        assert row.moved == changed(LAYOUT, lengths[leaves] - new, lengths[leaves]) + changed(
            LAYOUT, PREFIX, lengths[comes]
        )
        assert row.save_ms > 0
        assert row.pool_ms > 0
        lengths[comes] += new
    assert (total.turn, total.bytes, total.moved) == (None, sum(r.bytes for r in rows), sum(r.moved for r in rows))
    assert total.save_ms == pytest.approx(sum(row.save_ms for row in rows))


def test_turns_of_stages_on_two_devices_verify_every_byte(second_device):
    *rows, total = play(starts=[2])
    assert len(rows) == turns.TURNS
    assert total.wrong == []
    assert 0 < total.moved < total.bytes


@pytest.mark.host
def test_a_wrong_byte_of_either_way_is_found(monkeypatch):
    for way in (turns.SavePath, turns.ByPool):
        takes, real = [], way.take

        def take(self, slot, key, tokens, takes=takes, real=real):
            takes.append(key)
            if len(takes) == 7:  # the first turn after the five of the beginning, and one
                host_runtime.corrupt(3)
            return real(self, slot, key, tokens)

        monkeypatch.setattr(way, "take", take)
        *rows, total = play()
        monkeypatch.undo()
        host_runtime.clear_faults()
        assert [row.turn for row in rows if row.wrong][:1] == [1]
        assert total.wrong
        assert total.as_json()["verified"] is False


def test_the_pool_demo_prints_a_row_for_each_turn_and_one_for_all():
    done = strata_copy("demo", "--pool", "--tokens", "8", "--draft", "--json", STRATA_COPY_RUNTIME=KIND)
    rows = json.loads(ended_well(done))
    assert [list(row) for row in rows] == [ROW] * 11
    assert [row["turn"] for row in rows] == [*range(10), "total"]
    assert all(row["verified"] is True and row["format"] == "int8" for row in rows)
    assert all(0 < row["moved"] < row["bytes"] for row in rows)


def test_the_pool_demo_prints_a_table():
    said = ended_well(strata_copy("demo", "--pool", "--tokens", "8", "--mode", "1", STRATA_COPY_RUNTIME=KIND))
    assert "5 conversations in 4 slots, int8, mode 1" in said
    rows = [line.split() for line in said.splitlines() if line.rstrip().endswith("yes")]
    assert [row[0] for row in rows] == [*map(str, range(10)), "total"]


def test_the_pool_demo_says_what_it_left_out():
    done = strata_copy("demo", "--pool", "--tokens", "1000000", "--memory", "300000000", STRATA_COPY_RUNTIME=KIND)
    assert done.returncode == 1
    assert "left out: int8 at 1,000,000 tokens needs" in done.stderr
    assert "no length fits into memory" in done.stderr


def test_the_pool_demo_takes_the_longest_length_that_fits(monkeypatch):
    asked = []
    monkeypatch.setenv("STRATA_COPY_RUNTIME", KIND)
    layout = presets.qwen3_8_flash_next("int8", draft=False)
    monkeypatch.setattr(turns, "run", lambda copier, layout, n, *_, **how: asked.append(n) or [])
    for n, less in ((8_700, 0), (430, 1)):
        CliRunner().invoke(cli.main, ["demo", "--pool", "--memory", str(sum(turns.memory(layout, 8_700)) - less)])
        assert asked.pop() == n


def test_a_byte_that_differs_ends_the_pool_demo_with_1(monkeypatch):
    right = turns.Turn(0, 4, 0, 72, "int8", 0, 1000, 500, 2.0, 1.0, [])
    wrong = right._replace(turn=1, wrong=["part 'k' of layer 3, offset 0"])
    monkeypatch.setenv("STRATA_COPY_RUNTIME", KIND)
    monkeypatch.setattr(turns, "run", lambda *_, **how: [right, wrong, turns.total([right, wrong])])
    done = CliRunner().invoke(cli.main, ["demo", "--pool", "--tokens", "8", "--json"])
    assert done.exit_code == 1
    assert [row["verified"] for row in json.loads(done.stdout)] == [True, False, False]
    assert done.stderr.count("int8, 72 tokens, turn 1, part 'k' of layer 3, offset 0") == 1


# ---- what it stands on


def test_every_byte_of_a_conversation_is_looked_at():
    how = {"prefix": (40, 40), "numbers": (11, 12, 13)}
    with rig.Session(LAYOUT, (90, 90), number=1) as session:
        spans = rig.conversation(session, (77, 70), **how)
        assert sum(span.end - span.begin for span in spans) == LAYOUT.bytes_at((77, 70))
        assert {span.number for span in spans} == {11, 12, 13}
        rig.put(session, spans)
        assert rig.differences(session, spans) == []
        rng = np.random.default_rng(3)
        for span in spans:
            at = int(rng.integers(span.begin, span.end))
            byte = session.read(at, 1)
            session.write(at, byte ^ 1)
            assert len(rig.differences(session, spans)) == 1
            session.write(at, byte)


def test_a_conversation_that_goes_on_is_as_one_that_was_written_at_once():
    how = {"prefix": (40, 40), "numbers": (11, 12, 13)}
    with rig.Session(LAYOUT, (90, 90), number=1) as session:
        rig.put(session, rig.conversation(session, (40, 40), **how))
        rig.put(session, rig.conversation(session, (77, 77), begin=(40, 40), **how))
        assert rig.differences(session, rig.conversation(session, (77, 77), **how)) == []


def test_what_was_saved_is_restored_whatever_its_source_is_by_then():
    stream = runtime.stream_create()
    with rig.Session(LAYOUT, (90, 90), number=1) as source, rig.Session(LAYOUT, (90, 90), number=2) as target:
        source.fill()
        target.fill()
        kept = save_path.save(rig.runs(source, source, (77, 70)), stream)
        source.fill(3)
        save_path.restore(kept, rig.runs(target, target, (77, 70)), stream)
        source.fill(1)
        assert rig.mismatches(target, source, (77, 70)) == []
        with pytest.raises(ValueError, match=r"\d+ segments were saved, the runs have \d+"):
            save_path.restore(kept, rig.runs(target, target, (77, 70))[:-1], stream)
    runtime.stream_destroy(stream)
