"""Builds the extension modules; everything else about the package stands in pyproject.toml."""

import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # a build frontend does not put it there
from cuda_headers import cuda_include

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "annotation_typing": False,
    "auto_pickle": False,
    "autotestdict": False,
    "embedsignature": True,
    "embedsignature.format": "python",
}


def extension(name: str, *sources: str, language: str = "c") -> Extension:
    flags = ["-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
    # Cython's own output trips these; the hand-written sources are clean under -Wextra by themselves.
    flags += ["-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type"]
    ext = Extension(
        f"strata_copy.{name}",
        list(sources),
        include_dirs=["include", "src/cudart", "src/host_runtime"],
        depends=[
            *glob("include/*.h"),
            *glob("src/cudart/*.h"),
            *glob("src/host_runtime/*.h*"),
            *glob("src/strata_copy/*.pxd"),
        ],
        language=language,
        libraries=["dl"],
        extra_compile_args=[*flags, "-std=c++17" if language == "c++" else "-std=gnu11"],
        # What the compiler links in statically stays inside.
        extra_link_args=["-pthread", "-Wl,--exclude-libs,ALL"],
    )
    ext.cython_include_dirs = ["src"]
    ext.cython_c_in_temp = True
    ext.cython_directives = DIRECTIVES
    return ext


ROOMS = [
    "raising",
    "runtime",
    "layout",
    "states",
    "plan",
    "lanes",
    "staging",
    "helpers",
    "copier",
    "ways",
    "news",
    "hooks",
    "courses",
    "endings",
    "tickets",
    "legs",
    "worker_thread",
    "worker",
    "submit",
    "checks",
    "values",
    "on_thread",
    "opening",
    "peers",
    "save_path",
    "probe",
    "pieces",
    "growing",
    "arena",
    "lineage",
    "kinship",
    "images",
    "pool",
    "latch",
    "held",
    "flight",
    "at_exit",
    "face_state",
    "face_image",
    "face_pool",
    "face_plan",
    "face_ticket",
]
EXTENSIONS = [
    extension("cudart", "src/strata_copy/cudart.pyx", "src/cudart/table.c"),
    extension(
        "host_runtime", "src/strata_copy/host_runtime.pyx", *sorted(glob("src/host_runtime/*.cpp")), language="c++"
    ),
    *(extension(room, f"src/strata_copy/{room}.pyx") for room in ROOMS),
    extension("_core", "strata_copy.pyx"),
]
EXTENSIONS[0].depends.append("cuda_headers.py")  # so that a source distribution, which needs it to build, has it


class BuildExt(build_ext):
    def build_extensions(self):
        # Only now: metadata queries and source distributions need no CUDA headers.
        include = str(cuda_include())
        for ext in self.extensions:
            ext.include_dirs.append(include)
        super().build_extensions()


class BuildPy(build_py):
    """Ships include/ inside the package, where strata_copy.get_include() finds it."""

    def headers(self):
        if self.editable_mode:
            return []
        return [(p, Path(self.build_lib, "strata_copy", p)) for p in sorted(Path("include").glob("*.h"))]

    def run(self):
        super().run()
        for source, target in self.headers():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode=1):
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self.headers())]


setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
