"""The examples of README run as they stand there."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import strata_copy as sc
from strata_copy import presets, runtime

README = Path(__file__).parents[1] / "README.md"


def example(language):
    found = re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert len(found) == 1
    return found[0]


def test_the_python_example_runs_as_it_stands():
    source = example("python")
    if os.environ.get("STRATA_COPY_RUNTIME") == "cuda":
        source = "\n".join(line for line in source.splitlines() if "leave this out" not in line)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "local" in done.stdout


def test_the_cython_example_compiles_and_copies(tmp_path):
    """Two conversations of other bytes; the copied one is read back."""
    source = tmp_path / "first.pyx"
    source.write_text(example("cython"), encoding="utf-8")
    package = Path(sc.__file__).parent
    subprocess.run(
        [sys.executable, "-m", "cython", "-3", "-I", str(package.parent), str(source)], check=True, timeout=300
    )
    module = tmp_path / f"first{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{sc.get_include()}"]
    compiler = ["gcc", "-shared", "-fPIC", "-O1", *includes]
    subprocess.run([*compiler, str(source.with_suffix(".c")), "-o", str(module)], check=True, timeout=300)
    spec = importlib.util.spec_from_file_location("first", module)
    first = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(first)

    layout = presets.uniform(layers=4, kv_heads=2, head_dim=64)
    sizes = [64 * part.unit_bytes for part in layout.parts]
    memory = [[runtime.malloc(n) for n in sizes] for _ in range(2)]
    main, slot = (sc.State(layout, [sc.Place(base=p, units=64) for p in ps]) for ps in memory)
    pinned = runtime.host_alloc(max(sizes))
    stream = runtime.stream_create()
    for value, addresses in enumerate(memory, start=1):
        for p, n in zip(addresses, sizes, strict=True):
            runtime.view(pinned, n)[:] = value
            runtime.memcpy(p, pinned, n)
    with sc.Copier() as copier:
        plan = copier.plan(main, slot)
        assert first.run(plan, 10, layout.layers, stream) == 0
    for p, n, part in zip(memory[1], sizes, layout.parts, strict=True):
        runtime.memcpy(pinned, p, n)
        found = runtime.view(pinned, n)
        moved = 10 * part.unit_bytes
        assert (found[:moved] == 1).all()
        assert (found[moved:] == 2).all()
    runtime.stream_destroy(stream)
    runtime.host_free(pinned)
    for p in memory[0] + memory[1]:
        runtime.free(p)
