"""All that a process does which uses one device: opening, states, every route, fed and not, a hook, a pool, closing."""

import strata_copy as sc
from fixtures import SYNCED, Memory, after_copy, differences, small_layout
from hooks import Hook
from strata_copy import runtime

LAYOUT = small_layout("int8", layers=4)
UPTO = 60


def use(device):
    """The calling thread stands on the device already. Nothing is left but the memories, which are returned."""
    kinds = ("device", "pinned", "pageable")
    memories = {(kind, side): Memory(LAYOUT, i, kind, device=device) for i, (kind, side) in enumerate(pairs(kinds))}
    with sc.Copier((device,), tickets=4, layer_events=24, chunk=4096) as copier:
        for source in kinds:
            for target in kinds:
                for feed in (False, True):
                    copy(copier, memories[source, 0], memories[target, 1], feed)
        park(copier, memories["device", 0], device)
    return list(memories.values())


def pairs(kinds):
    return [(kind, side) for kind in kinds for side in (0, 1)]


def copy(copier, source, target, feed):
    """Each with a hook, which the worker calls where it feeds."""
    hook, stream = Hook(), runtime.stream_create()
    target.fill()
    ticket = copier.submit(source.state, target.state, upto=UPTO, begin=0, after=SYNCED, feed=feed, **hook.how)
    for layer in range(LAYOUT.layers):
        while not ticket.wait_layer(layer, stream):
            pass
    ticket.sync()
    runtime.stream_synchronize(stream)
    runtime.stream_destroy(stream)
    assert hook.errors == []
    assert differences(target, after_copy(source, target, UPTO)) == []


def park(copier, memory, device):
    arena = sc.Arena(8 << 20, piece=4 << 20, device=device, pause=0.0)
    pool = sc.Pool(arena, LAYOUT, chunk=16)
    image = pool.image("a", UPTO)
    copier.submit(memory.state, image, upto=UPTO, after=SYNCED).sync()
    assert image.publish()
    del image, pool["a"]
    arena.close()
