"""Builds the benchmarks' loops against the strata_copy that Python finds: python bench/setup.py build_ext --inplace"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cuda_headers import cuda_include

import strata_copy

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
PACKAGE = Path(strata_copy.__file__).resolve().parent
INCLUDE = str(Path(strata_copy.get_include()).resolve())
os.chdir(BENCH)  # names of modules count from here
EXAMPLE = ROOT / "examples" / "engine_loop"
LOOPS = ["common.failure", "common.extents", "common.small", "submit.loops", "copies.loops", "copies.latency"]
LOOPS += ["neighbour.loops", "queueing.loops", "strata.loops", "arena.loops", "images.loops"]
C_SOURCES = {"submit.loops": ["submit/twin.c"], "strata.loops": ["strata/save.c"]}


def extension(name: str, *sources: str) -> Extension:
    ext = Extension(
        name,
        [name.replace(".", "/") + ".pyx", *sources],
        include_dirs=["common", "submit", "strata", INCLUDE, str(ROOT / "src" / "cudart")],
        # All that describes the library's memory: a loop that was built against other structs would read wrong bytes.
        depends=[
            str(path)
            for folder in (PACKAGE, ROOT / "include", ROOT / "src" / "cudart", BENCH)
            for kind in ("*.pxd", "*.h")
            for path in folder.rglob(kind)
        ],
        extra_compile_args=["-O3", "-std=gnu11", "-pthread"],
    )
    ext.cython_include_dirs = [str(BENCH), str(PACKAGE.parent)]
    ext.cython_c_in_temp = True
    ext.cython_directives = {"language_level": 3, "boundscheck": False, "wraparound": False, "cdivision": True}
    return ext


class BuildExt(build_ext):
    def build_extensions(self):
        include = str(cuda_include())
        for ext in self.extensions:
            ext.include_dirs.append(include)
        super().build_extensions()
        # The engine loop is a package of its own, built as any other that cimports strata_copy.
        paths = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=EXAMPLE, env={**os.environ, "PYTHONPATH": paths}, check=True)


setup(
    name="strata_copy_bench",
    py_modules=[],
    ext_modules=[extension(name, *C_SOURCES.get(name, ())) for name in LOOPS],
    cmdclass={"build_ext": BuildExt},
    options={"build": {"build_base": str(ROOT / "build" / "bench")}},
)
