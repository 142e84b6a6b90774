"""What the probe measures is what arrived; it says which links are slow, and what it does not know."""

import io
import json
import os
import re
import sys
import types

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from fixtures import KIND
from strata_copy import cli, host_runtime, links, peers, probing, runtime
from strata_copy.probe import Ceilings
from test_cli import ended_well, strata_copy

WAYS = [("d2d", (0,)), ("h2d", (0,)), ("d2h", (0,)), ("two_way", (0,))]
OF_TWO = [
    ("peer", (0, 1)),
    ("peer", (1, 0)),
    ("peer_two_way", (0, 1)),
    ("h2d", (0, 1)),
    ("d2h", (0, 1)),
    ("two_way", (0, 1)),
]
COPIES = {"d2d": 1, "h2d": 1, "d2h": 1, "two_way": 2, "peer": 1, "peer_two_way": 2}
SMALL = 300_000, 200_000  # bytes within and between devices, and to pinned memory


@pytest.fixture
def ceilings():
    with Ceilings(*SMALL) as opened:
        yield opened


def bytes_of(way, devices):
    each = SMALL[0] if way in ("d2d", "peer", "peer_two_way") else SMALL[1]
    return each * COPIES[way] * (1 if way.startswith("peer") else len(devices))


@pytest.mark.parametrize(("way", "devices"), WAYS + OF_TWO)
def test_each_way_moves_its_bytes_in_each_sample(monkeypatch, ceilings, second_device, way, devices):
    """The rate is all bytes by the time; the copies are counted by the runtime where it counts them."""
    import strata_copy.probe as probe

    measured = []
    real = probe.timed
    monkeypatch.setattr(probe, "timed", lambda *how: measured.append(real(*how)) or measured[-1])
    before = host_runtime.calls()["cudaMemcpyAsync"] if KIND == "host" else 0
    rate = ceilings.measure(way, devices)
    (times,) = measured
    assert len(times) == 5
    assert rate.best == pytest.approx(bytes_of(way, devices) / min(times))
    assert rate.median == pytest.approx(bytes_of(way, devices) / np.median(times))
    assert ceilings.found[way, devices] == rate.best
    assert runtime.get_device() == 0
    if KIND == "host":
        copies = COPIES[way] * (1 if way.startswith("peer") else len(devices))
        assert host_runtime.calls()["cudaMemcpyAsync"] - before == 8 * copies  # 3 warm-ups, 5 samples
        sizes = [size for name, _, size in host_runtime.log() if name == "cudaMemcpyAsync"]
        assert sum(sizes) == 8 * bytes_of(way, devices)


@pytest.mark.host
@pytest.mark.parametrize(("way", "devices"), WAYS + OF_TWO)
def test_bytes_that_do_not_arrive_are_found(ceilings, way, devices):
    """All copies to one target of a way are lost: it holds what it was filled with."""
    ceilings.measure(way, devices)
    copies = COPIES[way] * (1 if way.startswith("peer") else len(devices))
    for lost in range(1, copies + 1):
        for sample in range(8):
            host_runtime.skip("cudaMemcpyAsync", sample * copies + lost)
        with pytest.raises(RuntimeError, match=f"{way} on .*: wrong bytes arrived, at 0 of"):
            ceilings.measure(way, devices)
        assert host_runtime.clear_faults() == 8


def test_the_largest_rate_is_kept(ceilings):
    rates = [ceilings.measure("h2d").best for _ in range(3)]
    assert ceilings.found == {("h2d", (0,)): max(rates)}


def test_another_way_is_refused(ceilings):
    with pytest.raises(ValueError, match="way is 'p2p'; may be d2d, h2d"):
        ceilings.measure("p2p")


@pytest.mark.parametrize("way", COPIES)
def test_devices_that_a_way_cannot_be_on_are_refused(ceilings, way):
    """Before anything is taken; all that can be are named."""
    there = runtime.device_count()
    of_two = way.startswith("peer")
    many = "two different ones" if of_two else "one or more, each once,"
    for devices in ((), (there,), (0, there), (-1,), (0, 0), *([(0,), (0, 1, 0)] if of_two else [])):
        said = f"{way} on devices {devices}; {many} are needed of those that this process sees: 0 to {there - 1}"
        with pytest.raises(ValueError, match=re.escape(said)):
            ceilings.measure(way, devices)
        with pytest.raises(ValueError, match=re.escape(said)), ceilings.running(way, devices):
            pass
    assert ceilings.found == {}


@pytest.mark.host
@pytest.mark.parametrize(
    "function", ["cudaMemcpyAsync", "cudaStreamSynchronize", "cudaMalloc", "cudaHostAlloc", "cudaMemcpy"]
)
def test_a_call_that_fails_is_told_and_all_is_given_back(function):
    before = host_runtime.live()
    with Ceilings(*SMALL) as ceilings:
        host_runtime.fail(function, 1, 999)
        with pytest.raises(runtime.CudaError) as raised:
            ceilings.measure("two_way", (0, 1))
        assert (raised.value.call, raised.value.code) == (function, 999)
        assert runtime.get_device() == 0
        runtime.get_last_error()
        assert ceilings.measure("two_way", (0, 1)).best > 0
    assert host_runtime.live() == before


def test_copies_run_beside_a_block(ceilings):
    with ceilings.running("two_way", times=3):
        pass
    assert runtime.peek_last_error() == 0


# ---- links


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Writes what Linux says of a device."""

    def write(bus_id="0000:65:00.0", **files):
        (tmp_path / bus_id).mkdir(exist_ok=True)
        for name, text in files.items():
            (tmp_path / bus_id / name).write_text(f"{text}\n")

    monkeypatch.setattr(links, "DEVICES", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return write


def full(**other):
    files = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    return {**files, "current_link_width": "16", "max_link_width": "16", **other}


def test_a_link_at_its_rating_is_not_pointed_out(folder):
    folder(**full())
    link = links.read("0000:65:00.0")
    assert link == links.Link(5, 16, 5, 16)
    assert link.slower() == ""


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"current_link_width": "8"}, "x8 of x16"),
        ({"current_link_speed": "16.0 GT/s PCIe"}, "generation 4 of 5"),
        ({"current_link_width": "4", "current_link_speed": "2.5 GT/s PCIe"}, "x4 of x16, generation 1 of 5"),
    ],
)
def test_a_link_below_its_rating_is_pointed_out(folder, files, text):
    folder(**full(**files))
    link = links.read("0000:65:00.0")
    assert link.slower() == text
    rates = dict.fromkeys(probing.DEVICE_WAYS, probing.Rate(1.0, 1.0))
    found = probing.Found("cuda", 1024, [probing.DeviceFound(0, "a GPU", "0000:65:00.0", link, rates)])
    assert found.warnings() == [f"device 0: its PCIe link is slower than rated: {text}"]
    assert probing.as_values(found)["warnings"] == found.warnings()
    assert probing.link_text(link).endswith(", slower than rated")


def test_bus_addresses_are_written_as_linux_does(folder):
    folder("0000:ab:00.0", **full())
    assert isinstance(links.read("00000000:AB:00.0"), links.Link)


@pytest.mark.parametrize("files", [{}, {"current_link_speed": "Unknown"}, {"current_link_width": "0"}])
def test_what_is_not_known_of_a_link_is_said(folder, files):
    folder(**(full(**files) if files else {}))
    said = links.read("0000:65:00.0")
    assert said.startswith(f"{links.DEVICES / '0000:65:00.0'} ")
    assert said.endswith("; nvidia-ml-py is not installed")


class NVMLError(Exception):
    pass


def nvml(**answers):
    """A stand-in for pynvml that answers by name, or fails."""

    def answer(name):
        def call(*arguments):
            if name in answers and isinstance(answers[name], Exception):
                raise answers[name]
            return answers.get(name)

        return call

    names = ["nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByPciBusId"]
    names += [f"nvmlDeviceGet{which}PcieLink{what}" for which in ("Curr", "Max") for what in ("Generation", "Width")]
    return types.SimpleNamespace(NVMLError=NVMLError, **{name: answer(name) for name in names})


def test_the_drivers_library_is_asked_where_linux_does_not_tell(folder, monkeypatch):
    answers = {"CurrPcieLinkGeneration": 4, "CurrPcieLinkWidth": 8, "MaxPcieLinkGeneration": 5, "MaxPcieLinkWidth": 16}
    answers = {f"nvmlDeviceGet{name}": value for name, value in answers.items()}
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**answers))
    assert links.read("0000:65:00.0") == links.Link(4, 8, 5, 16)
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=NVMLError("driver not loaded")))
    assert links.read("0000:65:00.0").endswith("NVML: driver not loaded")


def test_memory_is_made_near_the_device_where_linux_tells(folder):
    mine = os.sched_getaffinity(0)
    one = min(mine)
    folder(local_cpulist=f"{one}-{one},100000-100001")
    with links.near("0000:65:00.0"):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == mine
    for told in ("100000-100001", "", "x"):
        folder(local_cpulist=told)
        with links.near("0000:65:00.0"):
            assert os.sched_getaffinity(0) == mine


# ---- the command


def test_the_command_prints_each_device_and_pair(second_device):
    said = ended_well(strata_copy("probe", "--devices", "0,1", "--size", "2", "--json", STRATA_COPY_RUNTIME=KIND))
    found = json.loads(said)
    assert found["runtime"] == KIND
    assert found["bytes"] == {"pinned": 2 << 20, "device": 4 << 20}
    assert [one["device"] for one in found["devices"]] == [0, 1]
    assert [(pair["source"], pair["target"]) for pair in found["pairs"]] == [(0, 1), (1, 0)]
    rates = [one[way] for one in found["devices"] for way in ("h2d", "d2h", "two_way", "d2d")]
    rates += [pair[way] for pair in found["pairs"] for way in ("peer", "peer_two_way")]
    rates += [found["together"][way] for way in ("h2d", "d2h", "two_way")]
    assert all(0 < rate["median"] <= rate["best"] for rate in rates)
    assert all(pair["reason"] for pair in found["pairs"])
    assert all((one["link"] is None) == bool(one["link_unknown"]) for one in found["devices"])


@pytest.mark.host
def test_the_command_says_who_reaches_whom_and_that_the_figures_mean_nothing():
    done = strata_copy(
        "probe", "--devices", "0,1,2", "--peers", "2-0", "--size", "1", "--json", STRATA_COPY_RUNTIME=KIND
    )
    found = json.loads(ended_well(done))
    assert [(pair["source"], pair["target"]) for pair in found["pairs"] if pair["p2p"]] == [(2, 0)]
    assert found["warnings"] == [probing.OF_THE_HOST_RUNTIME]
    done = strata_copy(
        "probe", "--devices", "0,1", "--size", "1", STRATA_COPY_RUNTIME=KIND, STRATA_COPY_P2P="off", COLUMNS="200"
    )
    said = ended_well(done)
    assert said.count("STRATA_COPY_P2P=off") == 2
    assert "PCIe link of device 1: " in said
    assert probing.OF_THE_HOST_RUNTIME in said


@pytest.mark.host
@pytest.mark.parametrize("how", ["drop", "corrupt", "hang"])
def test_the_command_says_why_a_broken_pair_has_no_p2p(monkeypatch, how):
    """A pair that hangs has no figures: its copies would never end."""
    monkeypatch.setattr(peers, "SIZES", (4096,))
    host_runtime.configure(devices=2)
    host_runtime.break_peer(0, 1, how, 1, 5 if how != "hang" else None)  # what is measured goes well
    run = CliRunner(env={"STRATA_COPY_RUNTIME": KIND}).invoke
    done = run(cli.main, ["probe", "--devices", "0,1", "--size", "1", "--json"])
    assert done.exit_code == 0, done.output
    there, back = json.loads(done.stdout)["pairs"]
    assert ("hangs" if how == "hang" else "brings wrong bytes") in there["reason"]
    assert back["p2p"] == (how != "hang")
    for pair in (there, back):
        assert ("peer" in pair) == ("peer_two_way" in pair) == (how != "hang")
    done = run(cli.main, ["probe", "--devices", "0,1", "--size", "1"])
    assert done.exit_code == 0, done.output


@pytest.mark.host
def test_a_bar_shows_how_much_is_measured():
    host_runtime.configure(devices=2)
    shown = []

    class Bar(probing.Progress):
        def advance(self, task, *how):
            super().advance(task, *how)
            shown.append((self.tasks[0].description, self.tasks[0].percentage))

    found = probing.Found("host", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "Progress", Bar)
        probing.measure((0, 1), found, Console(file=io.StringIO(), force_terminal=True))
    names = ["device 0", "device 1", "device 0 to device 1", "device 1 to device 0", "all links at once"]
    assert shown == [(name, 20.0 * n) for n, name in enumerate(names, 1)]


@pytest.mark.host
def test_one_device_has_no_pairs_and_touches_no_other(monkeypatch):
    monkeypatch.setenv("STRATA_COPY_RUNTIME", KIND)
    host_runtime.configure(devices=3)
    done = CliRunner().invoke(cli.main, ["probe", "--devices", "1", "--size", "1", "--json"])
    found = json.loads(done.stdout)
    assert ([one["device"] for one in found["devices"]], found["pairs"], found["together"]) == ([1], [], {})
    assert host_runtime.contexts() == [1]


@pytest.mark.parametrize(
    ("arguments", "environment", "text"),
    [
        (("--devices", "0,0"), {}, "--devices names one twice: 0,0"),
        (("--devices", "a"), {}, "'a' is not a list of whole numbers"),
        (("--devices", "0,1", "--size", "1"), {"STRATA_COPY_P2P": "yes"}, "STRATA_COPY_P2P is 'yes'"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(second_device, arguments, environment, text):
    environment = {"STRATA_COPY_RUNTIME": KIND, **environment}
    done = CliRunner().invoke(cli.main, ["probe", *arguments], env=environment, terminal_width=200)
    assert done.exit_code == 2, done.output
    assert text in done.stderr


@pytest.mark.host
@pytest.mark.parametrize(
    ("function", "code", "text"),
    [("cudaMalloc", 2, "; a smaller --size needs less memory"), ("cudaMemcpyAsync", 999, "cudaErrorUnknown (999)")],
)
def test_a_call_that_fails_ends_the_command_with_1(monkeypatch, function, code, text):
    monkeypatch.setenv("STRATA_COPY_RUNTIME", KIND)
    host_runtime.fail(function, 1, code)
    done = CliRunner().invoke(cli.main, ["probe", "--size", "1"])
    assert done.exit_code == 1
    assert f"Error: {function}" in done.stderr
    assert text in done.stderr
    runtime.get_last_error()
