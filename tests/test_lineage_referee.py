"""The host runtime finds what an engine forgot to say: both sides of what a copy leaves out are compared behind it."""

import numpy as np
import pytest

import strata_copy as sc
from fixtures import SYNCED
from lineage_world import World
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host


def world_of_two_alike(copier):
    world = World(copier, np.random.default_rng(3), {"main": "device", "slot": "device"})
    main, slot = world.states
    main.append((20, 9))
    world.copy(main, slot, sync=True)
    return world, main, slot


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("name", ["k", "recurrent", "v", "dead"])
def test_a_write_that_was_not_told_is_found(who, name):
    host_runtime.configure(devices=1, seed=4)
    with sc.Copier(tickets=8, layer_events=16) as copier:
        world, main, slot = world_of_two_alike(copier)
        world.copy(main, slot, sync=True)
        assert host_runtime.violations() == []
        written = main if who == "source" else slot
        at = written.unit(name, 0)
        stream = runtime.stream_create()
        runtime.memset_async(written.base + at, int(written.view[at]) ^ 0xFF, 1, stream)
        runtime.stream_synchronize(stream)
        assert world.plan(main, slot).submit((20, 9), after=SYNCED).sync(timeout=60)
        found = host_runtime.violations()
        assert all(text.startswith("lineage: ") for text in found)
        assert f"{slot.base + slot.unit(name, 0):x}" in found[-1]
        assert "advanced, rewound, dirty or reset is missing" in found[-1]
    host_runtime.configure()


def test_the_referee_sees_an_append_without_a_word():
    """As where an engine decodes in a slot and forgets to say so."""
    host_runtime.configure(devices=1, seed=4)
    with sc.Copier(tickets=8, layer_events=16) as copier:
        world, main, slot = world_of_two_alike(copier)
        slot.append((1, 1), say=False)
        assert world.plan(main, slot).submit((20, 9), after=SYNCED).sync(timeout=60)
        assert any(text.startswith("lineage: ") for text in host_runtime.violations())
    host_runtime.configure()
