"""What is shipped: a second project that has only the wheel imports, cimports and includes strata_copy."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.packaging, pytest.mark.host, pytest.mark.timeout(900)]

CONSUMER = """
# cython: language_level=3
cimport strata_copy as sc
from strata_copy cimport Ticket, poll

def answer():
    cdef Ticket none
    cdef sc.Progress progress
    none.v = 0
    return poll(none, &progress), sc.REFUSED, sizeof(sc.Request)
"""

CONSUMER_SETUP = """
from setuptools import Extension, setup
import strata_copy

extension = Extension("consumer", ["consumer.pyx"], include_dirs=[strata_copy.get_include()])
setup(name="consumer", version="1", ext_modules=[extension])
"""


def run(*command, cwd, **environment):
    everything = os.environ | environment
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=everything, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An interpreter that has the wheel, and what builds a package against it."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    found = folder / "venv" / "bin" / "python"
    run(found, "-m", "pip", "install", "--quiet", "cython>=3.1", "setuptools>=77", wheel, cwd=folder)
    return found


def test_the_wheel_holds_every_module_with_its_stub_pxd_and_the_header(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "strata_copy/include/strata_copy.h" in names
    assert "strata_copy/py.typed" in names
    for pxd in (ROOT / "src" / "strata_copy").glob("*.pxd"):
        assert f"strata_copy/{pxd.name}" in names
    for name in names:
        if name.endswith(".so"):
            assert f"{name.split('.')[0]}.pyi" in names
    assert not [name for name in names if name.endswith((".c", ".cpp")) or "libcudart" in name]


def test_a_project_with_only_the_wheel_cimports(python, tmp_path):
    (tmp_path / "consumer.pyx").write_text(CONSUMER, encoding="utf-8")
    (tmp_path / "setup.py").write_text(CONSUMER_SETUP, encoding="utf-8")
    run(python, "setup.py", "--quiet", "build_ext", "--inplace", cwd=tmp_path)
    said = run(python, "-c", "import consumer; print(*consumer.answer())", cwd=tmp_path).split()
    assert said[0] == said[1] == "-1"
    assert "host" in run(python, "-m", "strata_copy", "info", cwd=tmp_path).lower()


def test_the_engine_loop_builds_against_the_wheel_and_runs(python, tmp_path):
    folder = tmp_path / "engine_loop"
    shutil.copytree(ROOT / "examples" / "engine_loop", folder, ignore=shutil.ignore_patterns("*.so", "build"))
    run(python, "-m", "pip", "install", "--quiet", "--no-build-isolation", folder, cwd=tmp_path, CFLAGS="-O0")
    said = run(python, "-m", "engine_loop", "--tiny", "--tokens", "100", cwd=tmp_path, STRATA_COPY_RUNTIME="host")
    assert len(re.findall(r"slot 0 takes 100 tokens \(copied in [\d.]+ ms, [\d.]+ GB/s, \d+% of the device", said)) == 2
    assert said.count("slot 0 gave back 132 tokens") == said.count("slot 0 gave back 100 tokens") == 2


def test_the_source_distribution_builds_again(tmp_path):
    script = textwrap.dedent(f"""
        import os
        from setuptools import build_meta
        os.chdir({str(ROOT)!r})
        print(build_meta.build_sdist({str(tmp_path)!r}))
    """)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "cython>=3.1", "setuptools>=77", cwd=tmp_path)
    run(python, "-c", script, cwd=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    for wanted in (
        "strata_copy.pyx",
        "setup.py",
        "include/strata_copy.h",
        "src/cudart/table.h",
        "src/strata_copy/lanes.pyx",
    ):
        assert wanted in names
    folder = tmp_path / "wheel"
    run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, archive, cwd=tmp_path)
    assert list(folder.glob("*.whl"))
