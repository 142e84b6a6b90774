"""All that a process does which uses one device: opening, states, every route, fed and not, from several threads, a
hook, arenas, a pool, closing; and on which devices it then is."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import strata_copy as sc
from fixtures import SYNCED, Mapped, Memory, after_copy, differences, small_layout
from hooks import Hook
from strata_copy import runtime

LAYOUT = small_layout("int8", layers=4)
UPTO = 60
PIECE = 4 << 20


def use(device):
    """The calling thread stands on the device already. Nothing is left but the memories, which are returned."""
    kinds = ("device", "pinned", "pageable")
    memories = {(kind, side): Memory(LAYOUT, i, kind, device=device) for i, (kind, side) in enumerate(pairs(kinds))}
    with sc.Copier((device,), tickets=4, layer_events=24, chunk=4096) as copier:
        for source in kinds:
            for target in kinds:
                for feed in (False, True):
                    copy(copier, memories[source, 0], memories[target, 1], feed)
        with ThreadPoolExecutor(1, initializer=runtime.set_device, initargs=(device,)) as other:
            other.submit(copy, copier, memories["device", 0], memories["pinned", 1], True).result()
        park(copier, memories["device", 0], device)
    pin(device)
    return list(memories.values())


def contexts():
    """The devices on which this process has a context of CUDA's runtime, by the driver."""
    driver, found = ctypes.CDLL("libcuda.so.1"), []
    for ordinal in range(runtime.device_count()):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        if active.value:
            found.append(ordinal)
    return found


def pairs(kinds):
    return [(kind, side) for kind in kinds for side in (0, 1)]


def copy(copier, source, target, feed):
    """Each with a hook, which the worker calls where it feeds."""
    hook, stream = Hook(), runtime.stream_create()
    target.fill()
    ticket = copier.submit(source.state, target.state, upto=UPTO, begin=0, after=SYNCED, feed=feed, **hook.how)
    for layer in range(LAYOUT.layers):
        assert ticket.wait_layer(layer, stream, timeout=60)
    ticket.sync()
    runtime.stream_synchronize(stream)
    runtime.stream_destroy(stream)
    assert hook.errors == []
    assert differences(target, after_copy(source, target, UPTO)) == []


def park(copier, memory, device):
    arena = sc.Arena(2 * PIECE, piece=PIECE, device=device, pause=0.0)
    pool = sc.Pool(arena, LAYOUT, chunk=16)
    image = pool.image("a", UPTO)
    copier.submit(memory.state, image, upto=UPTO, after=SYNCED).sync()
    assert image.publish()
    del image, pool["a"]
    arena.close()


def pin(device):
    """Memory that an arena makes meanwhile, and memory of the engine's."""
    attached, in_place = Mapped(PIECE), Mapped(PIECE)
    with sc.Arena(4 * PIECE, piece=PIECE, device=device, background=True, pause=10.0) as arena:
        arena.attach(attached.base, attached.size)
        arena.register(in_place.base, in_place.size)
        arena.unregister(in_place.base)
        assert sorted(kind for _, _, kind in arena.pieces) == ["attached", "made"]
