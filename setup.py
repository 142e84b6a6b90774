"""Builds the extension modules; everything else about the package stands in pyproject.toml."""

import importlib.util
import os
import re
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CUDA_MAJOR = 13
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


def cuda_version(include: Path) -> int:
    """The CUDART_VERSION of the headers in `include`, or 0 where they are missing or incomplete."""
    header = include / "cuda_runtime_api.h"
    if not header.is_file() or not (include / "crt" / "host_defines.h").is_file():
        return 0
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return int(found.group(1)) if found else 0


def cuda_include() -> Path:
    """CUDA_HOME where its headers are of CUDA 13, else those of the packages nvidia-cuda-runtime and nvidia-cuda-crt."""
    tried = []
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    places = [home / "include" for home in homes]
    package = importlib.util.find_spec("nvidia")
    if package is not None:
        places += [Path(p) / f"cu{CUDA_MAJOR}" / "include" for p in package.submodule_search_locations or []]
    places.append(Path("/usr/local/cuda/include"))
    for include in places:
        version = cuda_version(include)
        if version // 1000 == CUDA_MAJOR:
            for line in tried:
                print(f"strata_copy: passed over {line}", file=sys.stderr)
            print(f"strata_copy: CUDA headers {version // 1000}.{version % 1000 // 10} from {include}", file=sys.stderr)
            return include
        what = f"are of CUDA {version // 1000}.{version % 1000 // 10}" if version else "are missing or incomplete"
        tried.append(f"{include}: its headers {what}, {CUDA_MAJOR}.x are needed")
    raise SystemExit(
        "strata_copy needs the headers of CUDA 13: install nvidia-cuda-runtime and nvidia-cuda-crt (13.x) "
        "or set CUDA_HOME.\n  " + "\n  ".join(tried)
    )


def extension(name: str, *sources: str, language: str = "c") -> Extension:
    flags = ["-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]
    # Cython's own output trips these; the hand-written sources are clean under -Wextra by themselves.
    flags += ["-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type"]
    ext = Extension(
        f"strata_copy.{name}",
        list(sources),
        include_dirs=["include", "src/cudart", "src/host_runtime"],
        depends=[*glob("include/*.h"), *glob("src/cudart/*.h"), *glob("src/host_runtime/*.h*"), *glob("src/strata_copy/*.pxd")],
        language=language,
        libraries=["dl"],
        extra_compile_args=[*flags, "-std=c++17" if language == "c++" else "-std=gnu11"],
        extra_link_args=["-pthread"],
    )
    ext.cython_include_dirs = ["src"]
    ext.cython_c_in_temp = True
    ext.cython_directives = DIRECTIVES
    return ext


ROOMS = ["raising", "runtime", "layout", "states", "plan", "lanes", "tickets", "submit", "values", "opening"]
EXTENSIONS = [
    extension("cudart", "src/strata_copy/cudart.pyx", "src/cudart/table.c"),
    extension(
        "host_runtime", "src/strata_copy/host_runtime.pyx", *sorted(glob("src/host_runtime/*.cpp")), language="c++"
    ),
    *(extension(room, f"src/strata_copy/{room}.pyx") for room in ROOMS),
    extension("_core", "strata_copy.pyx"),
]


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
