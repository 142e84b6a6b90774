"""Builds the loop against the strata_copy that is installed. No CUDA header is needed."""

from Cython.Build import cythonize
from setuptools import Extension, setup

import strata_copy

MODULES = ("cuda", "rows", "session", "save_path", "direct", "engine")
DIRECTIVES = {"language_level": 3, "cdivision": True, "embedsignature": True}

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"engine_loop.{name}",
                [f"engine_loop/{name}.pyx"],
                include_dirs=[strata_copy.get_include()],
                depends=[f"{strata_copy.get_include()}/strata_copy.h"],
            )
            for name in MODULES
        ],
        build_dir="build",
        compiler_directives=DIRECTIVES,
        quiet=True,
    ),
)
