"""The benchmarks run, once and tiny, so that they are in order when somebody wants a figure."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import strata_copy
from strata_copy import runtime

BENCH = Path(__file__).resolve().parents[1] / "bench"
# A figure of each benchmark that it would be worthless without.
FIGURES = {
    "submit": "submit, ours / twin",
    "copies": "both directions at once, int8, 2000 tokens",
    "neighbour": "h2d beside ours, p95",
    "queueing": "into fresh pageable memory, ours / cudaMemcpy",
    "strata": "k8v4, mode 1, 120 tokens, back, on",
    "arena": "longest copy beside arena, 8 threads",
    "images": "both directions at once, k8v4, 3000 tokens",
    "peers": "by P2P, k8v4, 3000 tokens, one way",
}
# Figures that need a GPU: without one it is said that they were not measured.
LEFT_OUT = {"images": [f"a read-bound kernel beside {what}, beside / alone" for what in ("a park", "a take")]}
# One wrong byte in each copy of the library: the fifth that is executed once a target was made ready for it; the
# twelfth into an image, which has rows. In fresh memory, which is verified in a way of its own, the first.
SABOTAGE = """
import sys
sys.path.insert(0, sys.argv[1])
import run
from common.setting import Case
from images.cases import Park
from queueing.pageable import Fresh
from strata_copy import host_runtime

def then_corrupt(kind, name, nth):
    ready = getattr(kind, name)
    setattr(kind, name, lambda *args, **how: [ready(*args, **how), host_runtime.corrupt(nth)][0])

if sys.argv[3] == "submit":
    then_corrupt(Case, "spoil", 5)
elif sys.argv[3] == "images":
    then_corrupt(Park, "spoil", 12)
else:
    then_corrupt(Fresh, "__init__", 1)
run.main([sys.argv[3], "--quick", "--out", sys.argv[2]])
"""


def python(*arguments, kind):
    """The measured library is the one that the tests have imported."""
    environment = os.environ | {"STRATA_COPY_RUNTIME": kind, "PYTHONPATH": str(Path(strata_copy.__file__).parents[1])}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def built():
    done = python(BENCH / "setup.py", "-q", "build_ext", "--inplace", "-j2", kind="host")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bench", FIGURES)
def test_runs(bench, built, tmp_path):
    kind = os.environ.get("STRATA_COPY_RUNTIME") or "host"
    done = python(BENCH / "run.py", bench, "--quick", "--rings", "--out", tmp_path, kind=kind)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name == f"{bench}-{found['device'].lower().replace(' ', '-')}-{found['date']}.json"
    assert found["quick"]
    assert found["verified"]
    assert found["runtime"].startswith(kind)
    names = [figure["name"] for figure in found["figures"]]
    if bench == "peers" and runtime.device_count() < 2:
        assert (names, list(found["left_out"])) == ([], ["copies between two devices"])
    else:
        assert FIGURES[bench] in names
    for name in LEFT_OUT.get(bench, ()) if kind == "host" else ():
        assert name in found["left_out"]
        assert "not measured" in done.stdout
    for figure in found["figures"]:
        may_be_nothing = figure["goal"] == 0 or figure["unit"] == "us/s"
        assert 0 < figure["value"] < math.inf or (may_be_nothing and figure["value"] == 0), figure
        assert (figure["met"] is None) == (figure["goal"] is None)
        assert figure["name"] in done.stdout


@pytest.mark.parametrize("bench", ["submit", "queueing", "images"])
def test_wrong_bytes_fail_the_run(bench, built, tmp_path):
    done = python("-c", SABOTAGE, BENCH, tmp_path, bench, kind="host")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG BYTES" in done.stdout
    (path,) = tmp_path.iterdir()
    assert not json.loads(path.read_text())["verified"]


def test_low_ceilings_void_the_run_of_a_known_device(built, tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); from common.ceilings import void_ways; "
    code += "print([void_ways(name, dict(d2d=2100.0, h2d=50.0, d2h=54.0)) for name in ('NVIDIA H200', 'another')])"
    done = python("-c", code, BENCH, kind="host")
    assert done.stdout.strip() == "[['h2d is 50.0 GB/s, at least 0.92 of 55.4 is expected'], []]", done.stderr
