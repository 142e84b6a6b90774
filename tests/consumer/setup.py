"""Builds the modules of another project that uses strata_copy from Cython, C and C++."""

import sysconfig

from Cython.Build import cythonize
from setuptools import Extension, setup

import strata_copy

STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]
INCLUDE = [strata_copy.get_include()]
PYTHON = ["-isystem", sysconfig.get_path("include")]

setup(
    name="consumer",
    ext_modules=cythonize(
        [
            Extension("consumer", ["consumer.pyx"], include_dirs=INCLUDE),
            Extension(
                "consumer_c", ["consumer_c.c"], include_dirs=INCLUDE, extra_compile_args=[*PYTHON, "-std=c11", *STRICT]
            ),
            Extension(
                "consumer_cpp",
                ["consumer_cpp.cpp"],
                include_dirs=INCLUDE,
                depends=["consumer_c.c"],
                language="c++",
                extra_compile_args=[*PYTHON, "-std=c++17", *STRICT],
            ),
        ],
        language_level=3,
        compiler_directives={"show_performance_hints": False},
    ),
)
