"""Copies of the host runtime: what is refused, what is reported, and who is held."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_table import (
    ANY_DIRECTION,
    BAD_DIRECTION,
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    HOST_TO_HOST,
    INVALID_PITCH,
    INVALID_VALUE,
    PAGE,
    both_modes,
    copy,
    cuda,
    malloc,
    ok,
    pages,
    pinned,
    stream,
    view,
    violations,
)
from strata_copy import host_runtime as host

pytestmark = pytest.mark.host


def test_a_copy_across_two_ranges_is_refused():
    s, target, block = stream(), malloc(4 * PAGE), pages(3)
    r = block.ctypes.data
    ok(cuda.cudaHostRegister(r, PAGE, 0))
    ok(cuda.cudaHostRegister(r + PAGE, PAGE, 0))
    across = [(r, 2 * PAGE), (r + PAGE, 2 * PAGE), (r + PAGE - 1, 2), (r - 8, 16), (r - 8, 4 * PAGE)]
    for first, size in across:
        assert cuda.cudaMemcpyAsync(target, first, size, ANY_DIRECTION, s) == INVALID_VALUE
        assert cuda.cudaMemcpyAsync(first, target, size, ANY_DIRECTION, s) == INVALID_VALUE
        assert cuda.cudaMemcpy(target, first, size, ANY_DIRECTION) == INVALID_VALUE
    copy(target, r + PAGE, PAGE, s)
    copy(target, r + 2 * PAGE, PAGE, s)
    assert cuda.cudaMemcpyAsync(target, r, PAGE, ANY_DIRECTION, s) == 0


def test_a_copy_past_the_end_of_device_memory_is_refused():
    s, source, target = stream(), pinned(2 * PAGE), malloc(PAGE)
    assert cuda.cudaMemcpyAsync(target, source, PAGE + 1, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemcpyAsync(target + 1, source, PAGE, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemsetAsync(target + 1, 0, PAGE, s) == INVALID_VALUE
    assert cuda.cudaMemcpy2DAsync(target, 64, source, 64, 64, 65, ANY_DIRECTION, s) == INVALID_VALUE
    ok(cuda.cudaMemcpy2DAsync(target, 64, source, 64, 64, 64, ANY_DIRECTION, s))


def test_directions_are_checked():
    s, p, q = stream(), malloc(64), pinned(64)
    fitting = {
        (p, q): HOST_TO_DEVICE,
        (q, p): DEVICE_TO_HOST,
        (malloc(64), p): DEVICE_TO_DEVICE,
        (pinned(64), q): HOST_TO_HOST,
    }
    for (target, source), fits in fitting.items():
        for kind in range(4):
            code = cuda.cudaMemcpyAsync(target, source, 64, kind, s)
            assert code == (0 if kind == fits else INVALID_VALUE)
    assert cuda.cudaMemcpyAsync(p, q, 64, 5, s) == BAD_DIRECTION


def test_empty_copies_do_nothing_and_null_needs_one():
    s, p, q = stream(), malloc(64), pinned(64)
    ok(cuda.cudaMemcpyAsync(0, 0, 0, ANY_DIRECTION, s))
    ok(cuda.cudaMemcpyAsync(p, q, 0, ANY_DIRECTION, s))
    ok(cuda.cudaMemcpy2DAsync(p, 8, q, 8, 8, 0, ANY_DIRECTION, s))
    ok(cuda.cudaMemsetAsync(p, 0, 0, s))
    assert cuda.cudaMemcpyAsync(0, q, 1, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemcpyAsync(p, 0, 1, ANY_DIRECTION, s) == INVALID_VALUE
    assert cuda.cudaMemcpy(0, q, 1, ANY_DIRECTION) == INVALID_VALUE
    ok(cuda.cudaStreamSynchronize(s))
    assert host.log() == []


@both_modes
def test_a_rectangle_moves_its_rows_and_nothing_between_them(schedule):
    host.configure(seed=schedule)
    s, source, target = stream(), pinned(10 * 32), malloc(10 * 48)
    view(source, 320)[:] = np.arange(320) % 251
    ok(cuda.cudaMemcpy2DAsync(target, 48, source, 32, 20, 10, ANY_DIRECTION, s))
    ok(cuda.cudaStreamSynchronize(s))
    got, sent = view(target, 480).reshape(10, 48), view(source, 320).reshape(10, 32)
    assert (got[:, :20] == sent[:, :20]).all()
    assert (got[:, 20:] == 0xA5).all()
    assert host.log() == [("cudaMemcpy2DAsync", s, 200)]


def test_a_rectangle_needs_pitches_that_hold_it():
    s, p, q = stream(), malloc(PAGE), pinned(PAGE)
    rectangle = cuda.cudaMemcpy2DAsync
    assert rectangle(p, 8, q, 16, 9, 2, ANY_DIRECTION, s) == INVALID_PITCH
    assert rectangle(p, 16, q, 8, 9, 2, ANY_DIRECTION, s) == INVALID_PITCH
    assert rectangle(p, 1 << 31, q, 16, 9, 2, ANY_DIRECTION, s) == INVALID_PITCH
    assert rectangle(p, 16, q, 16, 16, 1 << 61, ANY_DIRECTION, s) == INVALID_VALUE


def test_a_pitch_of_almost_two_gib_is_taken():
    p, q, s = malloc((1 << 31) + 64), malloc(PAGE), stream()
    ok(cuda.cudaMemcpy2DAsync(p, (1 << 31) - 1, q, 16, 16, 2, ANY_DIRECTION, s))
    ok(cuda.cudaStreamSynchronize(s))
    assert (view(p + (1 << 31) - 1, 16) == view(q, 16)).all()


def test_a_copy_onto_itself_is_reported():
    s, p = stream(), malloc(128)
    copy(p + 64, p, 64, s)
    assert host.violations() == []
    copy(p + 63, p, 64, s)
    assert "overlaps" in violations()[0]


rectangles = st.tuples(st.integers(0, 40), st.integers(0, 8))


@settings(max_examples=400, deadline=None)
@given(rectangles, rectangles, st.integers(1, 5), st.integers(1, 6))
def test_rectangles_overlap_where_a_byte_is_read_and_written(target, source, width, rows):
    host.configure(seed=0)
    s, p = stream(), malloc(512)

    def bytes_of(start, gap):
        return {start + row * (width + gap) + i for row in range(rows) for i in range(width)}

    (t, t_gap), (f, f_gap) = target, source
    ok(cuda.cudaMemcpy2DAsync(p + t, width + t_gap, p + f, width + f_gap, width, rows, ANY_DIRECTION, s))
    assert len(host.violations()) == bool(bytes_of(*target) & bytes_of(*source))
    host.configure()


@both_modes
def test_copies_of_pageable_memory_hold_their_caller(schedule):
    host.configure(seed=schedule)
    s, p, block = stream(), malloc(PAGE), pages(2)
    for value in range(1, 20):
        ok(cuda.cudaMemsetAsync(p, value, PAGE, s))
        copy(block.ctypes.data, p, PAGE, s)
        assert (block[:PAGE] == value).all()
        copy(block.ctypes.data + PAGE, block.ctypes.data, PAGE, s)
        assert (block[PAGE:] == value).all()
        block[:PAGE] = 100 + value
        copy(p, block.ctypes.data, PAGE, s)
        block[:PAGE] = 0
        assert (view(p, PAGE) == 100 + value).all()


def test_copies_between_pinned_ranges_hold_their_caller():
    host.configure(seed=1)
    s, p, q = stream(), pinned(64), pinned(64)
    view(p, 64)[:] = 3
    copy(q, p, 64, s)
    assert (view(q, 64) == 3).all()


def test_pageable_memory_is_no_target_of_memset():
    assert cuda.cudaMemsetAsync(pages(1).ctypes.data, 0, PAGE, stream()) == INVALID_VALUE


@both_modes
def test_the_blocking_copy_to_host_memory_is_done_when_it_returns(schedule):
    host.configure(devices=2, seed=schedule)
    a, b, block = malloc(PAGE), malloc(PAGE), pages(1)
    block[:] = 8
    ok(cuda.cudaMemcpy(a, block.ctypes.data, PAGE, HOST_TO_DEVICE))
    block[:] = 0
    ok(cuda.cudaMemcpy(b, a, PAGE, DEVICE_TO_DEVICE))
    ok(cuda.cudaMemcpy(block.ctypes.data, b, PAGE, DEVICE_TO_HOST))
    assert (block == 8).all()
    assert host.log() == [("cudaMemcpy", 0, PAGE)] * 3
    assert host.live()["streams"] == 0


def test_the_blocking_copy_from_pageable_memory_returns_before_its_bytes_have_landed():
    """It has read its source by then. A device synchronize is what waits for the bytes."""
    host.configure(devices=2, seed=1)
    p, block, s = malloc(PAGE), pages(1), stream()
    block[:] = 8
    ok(cuda.cudaMemcpy(p, block.ctypes.data, PAGE, HOST_TO_DEVICE))
    assert (host.pending(), host.log()) == (1, [])
    block[:] = 0
    ok(cuda.cudaDeviceSynchronize())
    assert (view(p, PAGE) == 8).all()
    ok(cuda.cudaMemsetAsync(p, 1, PAGE, s))
    ok(cuda.cudaStreamSynchronize(s))
    assert host.violations() == []
    ok(cuda.cudaMemcpy(p, block.ctypes.data, PAGE, HOST_TO_DEVICE))
    ok(cuda.cudaMemsetAsync(p, 2, PAGE, s))
    found = violations()
    assert len(found) == 1
    assert "behind cudaMemcpy call 2" in found[0]


def test_the_blocking_copy_between_devices_does_not_hold_its_caller():
    host.configure(devices=2, seed=1)
    a, b = malloc(PAGE), malloc(PAGE)
    ok(cuda.cudaMemcpy(b, a, PAGE, DEVICE_TO_DEVICE))
    assert (host.pending(), host.log()) == (1, [])
    s = stream()
    ok(cuda.cudaMemsetAsync(b, 1, PAGE, s))
    found = violations()
    assert len(found) == 1
    assert "race: cudaMemsetAsync" in found[0]
    assert "behind cudaMemcpy call 1" in found[0]
