"""The command line, as a process: what it prints, and how it ends."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import strata_copy as sc
from fixtures import KIND
from strata_copy import cli, demo, demo_copies, host_runtime, presets, rig, runtime
from strata_copy.stages import SaveStreams, Stages

ROW = [
    "tokens",
    "format",
    "mode",
    "devices",
    "direction",
    "bytes",
    "save_ms",
    "direct_ms",
    "percent_of_ceiling",
    "verified",
]
INT8_AT_430 = 124_201_008


def strata_copy(*arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "STRATA_COPY_RUNTIME"}
    return subprocess.run(
        [sys.executable, "-m", "strata_copy", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def ended_well(done):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_info_says_what_was_found():
    found = json.loads(ended_well(strata_copy("info", "--json", STRATA_COPY_RUNTIME=KIND)))
    assert found["kind"] == KIND
    assert found["why"] == f"STRATA_COPY_RUNTIME={KIND}"
    assert found["library"]
    assert found["missing"] == 0
    assert found["devices"]
    for number, device in enumerate(found["devices"]):
        assert device["device"] == number
        assert device["name"]
        assert device["pci_bus_id"]
        assert 0 < device["free"] <= device["memory"]


def test_info_in_words_names_the_same():
    said = ended_well(strata_copy("info", STRATA_COPY_RUNTIME=KIND))
    assert f"runtime     {KIND}: STRATA_COPY_RUNTIME={KIND}" in said
    assert runtime.device_name(0) in said


def test_info_chooses_a_runtime_and_says_why():
    found = json.loads(ended_well(strata_copy("info", "--json")))
    if found["kind"] == "cuda":
        assert found["why"] == "there is a GPU"
    else:
        assert "CUDA is not to be had" in found["why"]
        assert "without a GPU" not in found["why"]  # it goes on by itself


@pytest.mark.parametrize("command", ["info", "demo"])
def test_a_forced_cuda_that_is_not_there_ends_with_the_reason(command):
    # No GPU is visible then, on a machine that has some too.
    done = strata_copy(command, STRATA_COPY_RUNTIME="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert done.stderr.endswith("; without a GPU: STRATA_COPY_RUNTIME=host, or runtime.open('host')\n")
    assert "no NVIDIA driver" in done.stderr or "no GPU" in done.stderr or "cudaGetDeviceCount failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["info", "demo"])
def test_another_value_of_the_variable_is_refused_by_name(command):
    done = strata_copy(command, STRATA_COPY_RUNTIME="rocm")
    assert done.returncode == 2
    assert "STRATA_COPY_RUNTIME is 'rocm'; it may be 'cuda' or 'host', or not set" in done.stderr
    assert "Traceback" not in done.stderr


def test_version_is_printed():
    assert ended_well(strata_copy("--version")).startswith("strata_copy, version ")


def test_the_demo_prints_a_row_for_each_direction():
    done = strata_copy("demo", "--tokens", "430", "--json", STRATA_COPY_RUNTIME=KIND)
    rows = json.loads(ended_well(done))
    assert [list(row) for row in rows] == [ROW, ROW]
    assert [row["direction"] for row in rows] == ["main->slot", "slot->main"]
    for row in rows:
        assert (row["tokens"], row["format"], row["mode"], row["bytes"]) == (430, "int8", 0, INT8_AT_430)
        assert row["verified"] is True
        assert row["save_ms"] > 0
        assert row["direct_ms"] > 0
        assert row["percent_of_ceiling"] > 0
    assert f"{KIND} runtime" in done.stderr


def test_the_demo_prints_a_table_with_the_draft():
    said = ended_well(strata_copy("demo", "--tokens", "8", "--draft", "--format", "k8v4", STRATA_COPY_RUNTIME=KIND))
    assert "k8v4" in said
    lines = [line.split() for line in said.splitlines() if "->" in line]
    assert [(line[0], line[1], line[-1]) for line in lines] == [("8", "main->slot", "yes"), ("8", "slot->main", "yes")]


@pytest.mark.parametrize("mode", ["1", "2"])
def test_the_demo_streams_the_kv(mode):
    done = strata_copy("demo", "--tokens", "80", "--draft", "--mode", mode, "--json", STRATA_COPY_RUNTIME=KIND)
    rows = json.loads(ended_well(done))
    assert [(row["mode"], row["verified"]) for row in rows] == [(int(mode), True)] * 2


def test_the_modes_of_the_demo_say_where_the_kv_is():
    layout = presets.qwen3_8_flash_next("int8", draft=True)
    names = {"k", "v", "k_scale", "v_scale"}
    for mode, layers in ((0, ()), (1, (*presets.QWEN3_8_ATTENTION, 48)), (2, (48,))):
        pinned = {(part.layer, part.name) for part in layout.parts if demo_copies.kind_of(mode)(part) == "pinned"}
        assert pinned == {(layer, name) for layer in layers for name in names}


def test_the_demo_needs_the_draft_for_its_mode():
    done = strata_copy("demo", "--mode", "2", STRATA_COPY_RUNTIME=KIND)
    assert done.returncode == 2
    assert "mode 2 is the draft's: --draft is needed" in done.stderr


def test_the_demo_says_what_it_left_out():
    done = strata_copy(
        "demo", "--tokens", "8", "--tokens", "1000000", "--memory", "300000000", "--json", STRATA_COPY_RUNTIME=KIND
    )
    assert [row["tokens"] for row in json.loads(ended_well(done))] == [8, 8]
    assert "left out: int8 at 1,000,000 tokens needs" in done.stderr


def test_the_demo_ends_with_1_where_nothing_fits():
    done = strata_copy("demo", "--memory", "1000", STRATA_COPY_RUNTIME=KIND)
    assert done.returncode == 1
    assert "no length fits into memory" in done.stderr


def test_a_byte_that_differs_ends_the_demo_with_1(monkeypatch):
    wrong = demo_copies.Timed(
        430, "int8", "main->slot", INT8_AT_430, 2.0, 1.0, ["direct: part 'k' of layer 3, offset 0"]
    )
    right = wrong._replace(direction="slot->main", wrong=[])
    monkeypatch.setenv("STRATA_COPY_RUNTIME", KIND)
    monkeypatch.setattr(demo_copies, "run_cases", lambda *_: ([wrong, right], {wrong.way: 100.0}))
    done = CliRunner().invoke(cli.main, ["demo", "--tokens", "430", "--json"])
    assert done.exit_code == 1
    assert [row["verified"] for row in json.loads(done.stdout)] == [False, True]
    assert "int8, 430 tokens, main->slot, direct: part 'k' of layer 3, offset 0" in done.stderr


@pytest.mark.host
def test_the_demo_finds_a_wrong_byte_of_either_way(monkeypatch):
    def corrupted(copy, **counts):
        host_runtime.corrupt(1)
        copy()
        return 1.0

    monkeypatch.setattr(demo_copies, "best_ms", corrupted)
    layout, streams = presets.uniform(2, 1, 64), SaveStreams([0])
    with (
        sc.Copier(tickets=8, layer_events=8) as copier,
        rig.Session(layout, 20, number=1) as a,
        rig.Session(layout, 20, number=2) as b,
    ):
        row = demo_copies.copy_both_ways(copier, a, b, 10, "main->slot", streams)
    streams.close()
    assert [line.split(":")[0] for line in row.wrong] == ["save", "direct"]
    assert row.as_json(1.0)["verified"] is False


@pytest.mark.host
def test_a_copy_that_fails_ends_the_demo_with_1(monkeypatch):
    def open_and_fail(*_):
        runtime.open("host")
        host_runtime.fail("cudaMemcpyAsync", 300, 1)
        return "for a test"

    monkeypatch.setattr(demo, "open_runtime", open_and_fail)
    done = CliRunner().invoke(cli.main, ["demo", "--tokens", "8"])
    assert done.exit_code == 1
    assert "Error: CudaError: cudaMemcpyAsync: cudaErrorInvalidValue (1)" in done.stderr


# ---- several devices


@pytest.mark.parametrize(
    "split", [(), ("--split", "3"), ("--split", "41")], ids=["even", "no K/V in the first", "uneven"]
)
@pytest.mark.parametrize("mode", ["0", "1", "2"])
def test_the_demo_splits_the_layers_over_devices(mode, split, second_device):
    done = strata_copy(
        "demo",
        "--tokens",
        "80",
        "--draft",
        "--devices",
        "2",
        *split,
        "--mode",
        mode,
        "--json",
        STRATA_COPY_RUNTIME=KIND,
    )
    rows = json.loads(ended_well(done))
    directions = ["main->slot", "slot->main", *(["0->1", "1->0"] if mode == "0" else [])]
    assert [(row["direction"], row["devices"], row["verified"]) for row in rows] == [(d, 2, True) for d in directions]


@pytest.mark.host
@pytest.mark.parametrize(("peers", "reached"), [("none", []), ("1-0", [(1, 0)])])
def test_the_demo_goes_by_the_peer_matrix_that_is_given(monkeypatch, peers, reached):
    monkeypatch.setenv("STRATA_COPY_RUNTIME", KIND)
    done = CliRunner().invoke(cli.main, ["demo", "--tokens", "8", "--devices", "3", "--peers", peers, "--json"])
    assert done.exit_code == 0, done.output
    assert all(row["verified"] for row in json.loads(done.stdout))
    assert [way for way in ((0, 1), (1, 0)) if host_runtime.peer_copies(*way) > 0] == reached


@pytest.mark.host
def test_the_pool_demo_splits_the_layers_over_devices():
    done = strata_copy("demo", "--pool", "--tokens", "8", "--devices", "3", "--json", STRATA_COPY_RUNTIME=KIND)
    assert all(row["verified"] for row in json.loads(ended_well(done)))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--devices", "3", "--split", "3"), "--split has the first layers of 2 stages"),
        (("--devices", "3", "--split", "20,3"), "each above the one before, from 1 to 47; it is 20,3"),
        (("--devices", "2", "--split", "48"), "from 1 to 47; it is 48"),
        (("--split", "3,x"), "'3,x' is not a list of whole numbers"),
        (("--peers", "0-0"), "'0-0' is no pair of two devices"),
        (("--split", "3"), "--split is for several devices: --devices is needed"),
    ],
)
def test_stages_without_meaning_are_refused_by_name(arguments, text):
    done = CliRunner().invoke(cli.main, ["demo", *arguments], env={"STRATA_COPY_RUNTIME": KIND}, terminal_width=200)
    assert done.exit_code == 2
    assert text in done.stderr


def test_a_p2p_mode_that_is_none_ends_the_demo_with_the_reason():
    done = CliRunner().invoke(
        cli.main, ["demo", "--tokens", "8"], env={"STRATA_COPY_RUNTIME": KIND, "STRATA_COPY_P2P": "maybe"}
    )
    assert done.exit_code == 2
    assert "STRATA_COPY_P2P is 'maybe'; it may be" in done.stderr


@pytest.mark.host
def test_a_pair_of_a_device_that_is_not_there_is_refused_with_the_number_of_devices():
    done = strata_copy("demo", "--peers", "0-1", STRATA_COPY_RUNTIME=KIND)
    assert done.returncode == 2
    assert "from device 0 to device 1: no pair of two devices; there are 1" in done.stderr


def test_stages_have_each_layer_once_and_the_draft_last():
    layout = presets.qwen3_8_flash_next("int8", draft=True)
    for devices in range(1, 9):
        stages = demo.stages_of(devices, ())
        by_layer = {part.layer: stages.device(part) for part in layout.parts}
        assert [by_layer[layer] for layer in sorted(by_layer)] == sorted(by_layer.values())
        assert set(by_layer.values()) == set(stages.devices) == set(range(devices))
        assert by_layer[48] == devices - 1
    uneven = demo.stages_of(3, (3, 20))
    firsts = [min(part.layer for part in layout.parts if uneven.device(part) == device) for device in uneven.devices]
    assert firsts == [-1, 3, 20]
    assert not any(uneven.device(part) == 0 for part in layout.parts if part.name in ("k", "v", "pooled"))


@pytest.mark.parametrize("sides", [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_the_save_path_goes_over_devices(sides, second_device):
    """Stages, and sessions that are each on a device of its own."""
    layout, stages = presets.uniform(4, 1, 64), Stages([1])
    where = {0: (0, second_device), 1: (stages.device, stages.device)}[sides[0] == sides[1]]
    streams = SaveStreams([0, second_device])
    with (
        rig.Session(layout, 20, device=where[0], number=1) as a,
        rig.Session(layout, 20, device=where[1], number=2) as b,
    ):
        source, target = (a, b) if sides[0] == 0 else (b, a)
        source.fill()
        target.fill()
        streams.save_and_restore(rig.runs_by_devices(source, target, 10))
        assert rig.mismatches(target, source, 10) == []
        assert rig.changes(source) == []
        assert runtime.get_device() == 0
    streams.close()
