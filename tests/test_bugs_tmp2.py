import pytest, threading
import strata_copy as sc
from strata_copy import host_runtime as hr, runtime as rt
from fixtures import *
SY = sc.CALLER_SYNCED
def test_error_device(memory):
    w = lambda i, p: dict(device=int(p.name[1]))
    S = sc.Growth.state()
    lay = sc.Layout([sc.Part(name="s1", layer=0, unit_bytes=8, growth=S, order=1), sc.Part(name="s0", layer=0, unit_bytes=8, growth=S, order=2),sc.Part(name="s0", layer=1, unit_bytes=8, growth=S)])
    a, b = memory(lay, 1, w), memory(lay, 2, "pinned")
    with sc.Copier((0,1), tickets=2, layer_events=8) as c:
        p = c.plan(a.state, b.state)
        hr.fail("cudaMemcpyAsync", 3, 1)
        with pytest.raises((sc.Failed, sc.Refused)) as e: p.submit(4, after=SY)
        print(e.value.fields)
        assert e.value.device == 0
def test_zero_bytes(memory, copier):
    import ctypes
    lay = sc.Layout([sc.Part(name="s1", layer=l, unit_bytes=8, growth=sc.Growth.linear()) for l in range(3)])
    a, b = memory(lay, 1), memory(lay, 2, "pinned")
    p = copier.plan(a.state, b.state)
    t = p.submit(4, after=SY); t.sync()
    t2 = p.submit(0, after=SY)
    print(t2, t2.poll())
    assert t2.sync() and t2.done
    assert b.state.generation == 2, b.state.generation
