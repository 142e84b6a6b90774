"""The engine loop of examples/ as the tests use it: built once, small, and compared with what plain Python says."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import reference
import strata_copy as sc
from fixtures import read, settle
from strata_copy import runtime

EXAMPLE = Path(__file__).parents[1] / "examples" / "engine_loop"
LENGTHS = (0, 1, 3, 4, 5, 63, 64, 65, 96)
CAPACITY = 96
RESIDENT = 16  # cells: four pages, so that rings wrap and streamed layers evict


def build(folder):
    """Builds the example in a folder of its own against the library that the tests have imported, and imports it."""
    for path in EXAMPLE.rglob("*"):
        if path.suffix in (".pyx", ".pxd", ".py", ".toml") and "build" not in path.parts:
            to = folder / path.relative_to(EXAMPLE)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    paths = [str(Path(sc.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-j2"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CFLAGS": "-O0"},  # half the time of the build
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("engine_loop")
    finally:
        sys.path.remove(str(folder))


class Loop:
    """Sessions of one small model, and what frees them. split: the layer behind each stage; devices 0, 1, ..."""

    def __init__(self, package, copier, format="int8", split=(8,)):
        self.package, self.copier, self.format = package, copier, format
        self.geometry = package.Geometry(layers=8, head_dim=64, gdn=3060, ple=360, key=64)
        self.stages = package.Stage.split(8, split, range(len(split)))
        self.sessions, self.engines = [], []

    def session(self, name, mode=0, draft_mode=0, **how):
        how = {"format": self.format, "geometry": self.geometry, "stages": self.stages, "capacity": CAPACITY, **how}
        made = self.package.Session(name=name, mode=mode, draft_mode=draft_mode, resident=RESIDENT, **how)
        self.sessions.append(made)
        return made

    def engine(self, main, *slots, direct, log=None, **how):
        self.engines.append(
            self.package.Engine(main, slots, self.copier, direct=direct, log=log or (lambda line: None), **how)
        )
        return self.engines[-1]

    def free(self):
        settle(stage.device for stage in self.stages)
        for thing in (*self.engines, *self.sessions):
            thing.close() if thing in self.engines else thing.free()
        for stage in self.stages:
            runtime.stream_destroy(stage.stream)


class Bytes:
    """All memory of a session as it was: address to array."""

    def __init__(self, session):
        self.blocks = {base: read(base, size) for _, base, size in session.memory}

    def at(self, address, size):
        """A view of some of them."""
        base = max(base for base in self.blocks if base <= address)
        assert address + size <= base + self.blocks[base].size
        return self.blocks[base][address - base : address - base + size]

    def __eq__(self, other):
        return all(map(np.array_equal, self.blocks.values(), other.blocks.values()))

    def differences(self, other):
        """Offsets of the first bytes in which they differ, by allocation."""
        pairs = zip(self.blocks.values(), other.blocks.values(), strict=True)
        return [(i, np.flatnonzero(a != b)[:4].tolist()) for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]


def settled(session):
    """Its Bytes, once all streams of its devices are done: those of the stages, and the drafter's."""
    settle({stage.device for stage in session.stages})
    return Bytes(session)


def after_copy(source, target, before, marks, groups, at=None):
    """What the target's memory holds after a copy: rows and running state as tests/reference.py counts them, and behind
    them what is resident. before: the target's Bytes, which change. at: a checkpoint of the source."""
    given = Bytes(source)
    sides = [(source.state.places, groups if at is None else [g for g in groups if g != "running"], None)]
    if at is not None:
        sides.append((source.checkpoints.places, ["running"], {"running": at.bank}))
    for places, some, banks in sides:
        for i, to, j, from_, size in reference.moved_runs(
            source.layout, places, target.state.places, marks, groups=some, src_bank=banks
        ):
            before.at(target.state.places[i].base + to, size)[:] = given.at(places[j].base + from_, size)
    for layer in range(target.geometry.layers):
        if target.mode == 1 and target.geometry.is_attention(layer):
            address, table, counters = target.map_of(layer)
            before.at(address, table)[:] = 0xFF
            before.at(address + table, counters)[:] = 0
    if target.draft_mode == 2 and "draft" in groups:
        end = -(-marks[1] // 4)
        slots = RESIDENT // 4
        for page in range(max(0, end - slots), end):
            for rows, resident, size in target.resident_arrays(target.geometry.layers):
                before.at(resident + page % slots * size, size)[:] = before.at(rows + page * size, size)
    return before
