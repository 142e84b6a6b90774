"""How a copy is spread over streams: chunks that leave gaps, layers dealt by bytes, and the order within."""

from collections import Counter
from itertools import accumulate, groupby, pairwise

import pytest

import strata_copy as sc
from fixtures import SYNCED, after_copy, differences, needed_by, small_layout
from strata_copy import host_runtime, runtime

pytestmark = pytest.mark.host
LAYOUT = small_layout("fp16")
UPTO = 77


def executed(plan, *marks, feed=None):
    """(stream, bytes) of each copy of submits in the order in which they were executed, without the words that tell
    the end: those have a stream of their own."""
    before = len(host_runtime.log())
    tickets = [plan.submit(upto, after=SYNCED, feed=feed) for upto in marks]
    assert all(ticket.sync() for ticket in tickets)
    copies = [(stream, size) for _, stream, size in host_runtime.log()[before:]]
    others = {stream for stream, size in copies if size != 8}
    return [copy for copy in copies if copy[0] in others]


@pytest.mark.parametrize("chunk", [100, 1000, 4096, 50000])
@pytest.mark.parametrize("kinds", [("device", "pinned"), ("pinned", "device")], ids="-".join)
def test_a_long_copy_changes_streams_after_every_chunk_and_stays_in_order(memory, kinds, chunk, seed):
    source, target = memory(LAYOUT, 1, kinds[0], together=False), memory(LAYOUT, 2, kinds[1], together=False)
    with sc.Copier(tickets=2, layer_events=24, chunk=chunk, window=1000) as copier:
        plan = copier.plan(source.state, target.state)
        copies = executed(plan, UPTO)
    runs = [(stream, sum(size for _, size in run)) for stream, run in groupby(copies, key=lambda copy: copy[0])]
    assert [size for _, size in runs[:-1]] == [chunk] * (len(runs) - 1)
    assert 0 < runs[-1][1] <= chunk
    assert len({stream for stream, _ in runs}) == min(2, len(runs))
    # Pieces of extents, which no chunk but the last can hold more of. Those of one call have no order among themselves.
    ends = list(accumulate(width * rows for _, _, width, rows, _, _ in plan.extents(UPTO)))
    gaps = range(chunk, ends[-1], chunk)
    cuts = sorted({0, *ends, *gaps})
    pieces = [[end - start for start, end in pairwise(cuts) if start // chunk == n] for n in range(len(runs))]
    found = [sorted(size for _, size in run) for _, run in groupby(copies, key=lambda copy: copy[0])]
    assert found == [sorted(run) for run in pieces]
    assert differences(target, after_copy(source, target, UPTO)) == []


@pytest.mark.parametrize("kinds", [("device", "pinned"), ("pinned", "device")], ids="-".join)
def test_long_rows_are_cut_on_boundaries_and_fed_as_they_are_queued_whole(memory, kinds, seed):
    """Chunks are a little longer then, which windows do not count: the rest of one would be a copy by itself."""
    chunk, boundary, odd, long = 70_000, 512, 100, 2_000_000
    parts = {"odd": odd, "long": long}.items()
    state = sc.Growth.state()
    layout = sc.Layout([sc.Part(name=name, layer=0, unit_bytes=size, growth=state) for name, size in parts])
    source, target = memory(layout, 1, kinds[0], together=False), memory(layout, 2, kinds[1], together=False)
    counts = []
    for feed in (False, True):
        with sc.Copier(tickets=2, layer_events=24, chunk=chunk, window=3) as copier:
            plan = copier.plan(source.state, target.state)
            (base,) = [address for address, _, width, *_ in plan.extents(1) if width == long]
            copies, later = executed(plan, 1, feed=feed), executed(plan, 1, feed=feed)
        assert len(later) <= len(copies) + 3  # it begins within a chunk, which steps that follow do not cut again
        pieces = [size for _, size in copies if size != odd]
        assert sum(pieces) == long
        assert len(copies) == len(pieces) + 1
        assert {(base + end) % boundary for end in accumulate(pieces[:-1])} == {0}
        runs = [sum(size for _, size in run) for _, run in groupby(copies, key=lambda copy: copy[0])]
        assert all(chunk <= run < chunk + boundary for run in runs[:-1])
        counts.append(len(copies))
    assert counts[0] == counts[1] == long // chunk + 2
    assert differences(target, after_copy(source, target, 1)) == []


LONG_ROW, WIDE_ROWS = (2_000_000, 1), (30_000, 64)  # bytes, and how many of them
WINDOWS = [
    # rows, chunk, bytes_ahead (0: a window of 3 chunks), bytes in flight at least and at most
    (LONG_ROW, 70_000, 0, 3 * 70_000, 3 * 70_511),
    (LONG_ROW, 70_000, 200_000, 140_000, 200_000 + 3 * 511),
    (LONG_ROW, 32_000, 63_000, 48_000, 63_000),
    (LONG_ROW, 32_000, 48_000, 32_000, 48_000),
    (LONG_ROW, 32_000, 20_000, 16_000, 20_000),
    (LONG_ROW, 32_000, 1024, 1000, 1024),
    (WIDE_ROWS, 32_000, 0, 3 * 30_000, 4 * 30_000),
    (WIDE_ROWS, 32_000, 1024, 30_000, 30_000),
    (WIDE_ROWS, 32_000, 200_000, 180_000, 210_000),
]


@pytest.mark.parametrize(("rows", "chunk", "ahead", "least", "most"), WINDOWS)
def test_a_window_is_kept_full_and_not_left(memory, seed, rows, chunk, ahead, least, most):
    """Rows that stay whole, and chunks that end on boundaries, are a little more than was asked for."""
    width, n = rows
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=width, growth=sc.Growth.linear())])
    source = memory(layout, 1, lambda i, part: {"stride": width + 512}, marks=(n,))
    target = memory(layout, 2, "pinned", marks=(n,), together=False)
    with sc.Copier(tickets=2, layer_events=24, chunk=chunk, window=3) as copier:
        how = {"bytes_ahead": ahead} if ahead else {"feed": True}
        ticket = copier.submit(source.state, target.state, upto=n, after=SYNCED, **how)
        while not (landed := ticket.poll().bytes):
            runtime.get_device()  # the worker has a turn
        assert ticket.cancel()
        with pytest.raises(sc.Cancelled) as told:
            ticket.sync()
    assert least <= told.value.found - landed <= most


def test_chunks_go_on_from_ticket_to_ticket(memory, seed):
    """Small copies, one after the other, leave their gaps too."""
    source, target = memory(LAYOUT, 1, together=False), memory(LAYOUT, 2, "pinned", together=False)
    total = LAYOUT.bytes_at([5])
    with sc.Copier(tickets=4, layer_events=24, chunk=total * 3 // 2, window=1000) as copier:
        plan = copier.plan(source.state, target.state)
        copies = executed(plan, 5, 5, 5, 5)
    runs = [sum(size for _, size in run) for _, run in groupby(copies, key=lambda copy: copy[0])]
    assert runs == [total * 3 // 2, total * 3 // 2, total * 4 - total * 3 // 2 * 2]


def test_rows_of_a_strided_copy_are_chunked_whole(memory, seed):
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=100, growth=sc.Growth.linear())])
    source, target = memory(layout, 1, lambda i, part: {"stride": 160}), memory(layout, 2, "pinned", together=False)
    with sc.Copier(tickets=2, layer_events=4, chunk=250, window=1000) as copier:
        copies = executed(copier.plan(source.state, target.state), 9)
    runs = [sum(size for _, size in run) for _, run in groupby(copies, key=lambda copy: copy[0])]
    assert sum(runs) == 900
    assert all(size % 100 == 0 and size <= 300 for size in runs)
    assert differences(target, after_copy(source, target, 9)) == []


def test_rows_of_more_than_a_chunk_leave_gaps_too(memory, seed):
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=100, rep=3, growth=sc.Growth.linear())])
    source, target = memory(layout, 1), memory(layout, 2, "pinned")
    with sc.Copier(tickets=2, layer_events=4, chunk=250) as copier:
        copies = executed(copier.plan(source.state, target.state), 9)
    runs = [(stream, sum(size for _, size in run)) for stream, run in groupby(copies, key=lambda copy: copy[0])]
    assert [size for _, size in runs] == [250] * 10 + [200]
    assert differences(target, after_copy(source, target, 9)) == []


def test_layers_within_a_device_are_dealt_to_lanes_by_bytes(memory):
    """Every layer on one lane: the one with the fewest bytes so far."""
    sizes = [100 + 7 * layer + (5000 if layer % 4 == 3 else 0) for layer in range(24)]
    layout = sc.Layout(
        [sc.Part(name="s", layer=layer, unit_bytes=size, growth=sc.Growth.state()) for layer, size in enumerate(sizes)]
    )
    source, target = memory(layout, 1, together=False), memory(layout, 2, together=False)
    with sc.Copier(tickets=2, layer_events=24) as copier:
        copies = executed(copier.plan(source.state, target.state), 1)
    streams = {stream for stream, _ in copies}
    assert 4 <= len(streams) <= 16
    lanes = [[] for _ in streams]
    for size in sizes:
        min(lanes, key=sum).append(size)
    found = sorted([size for on, size in copies if on == stream] for stream in streams)
    assert found == sorted(lanes)


@pytest.mark.parametrize("kinds", [("device", "device"), ("device", "pinned")], ids="-".join)
def test_all_bytes_of_a_layer_go_on_one_lane(memory, copier, kinds):
    source, target = memory(LAYOUT, 1, kinds[0], together=False), memory(LAYOUT, 2, kinds[1], together=False)
    plan = copier.plan(source.state, target.state)
    copies = executed(plan, UPTO)
    extents = plan.extents(UPTO)
    assert len(copies) == len(extents)
    layers = Counter(parts_in_order(LAYOUT, [extent], target)[0].layer for extent in extents)
    by_stream = Counter(stream for stream, _ in copies)
    if kinds[1] == "device":  # as many lanes as layers, and so one for each
        assert sorted(by_stream.values()) == sorted([layers[-1] + layers[0], layers[1], layers[2], layers[3]])
    else:
        assert len(by_stream) == 1


def parts_in_order(layout, extents, target):
    order = []
    for address, *_ in extents:
        i = next(i for i, (_, base, size) in enumerate(target.blocks) if base <= address < base + size)
        if not order or order[-1] != i:
            order.append(i)
    return [layout.parts[i] for i in order]


def test_parts_move_layer_by_layer_the_sessions_before_the_first_layer_that_needs_them(memory, copier):
    state = sc.Growth.state()
    fields = [
        ("late", 2, None, 0), ("row", 0, None, 0), ("k", 1, None, 0), ("window", -1, None, 0), ("extra", 1, None, -1),
        ("table", -1, 2, 5), ("early", 2, 0, 0),
    ]  # fmt: skip
    layout = sc.Layout(
        [
            sc.Part(name=name, layer=layer, needed_by=needed, order=order, unit_bytes=16 + n, growth=state)
            for n, (name, layer, needed, order) in enumerate(fields)
        ]
    )
    source, target = memory(layout, 1, together=False), memory(layout, 2, "pinned", together=False)
    extents = copier.plan(source.state, target.state).extents(1)
    parts = parts_in_order(layout, extents, target)
    assert [part.name for part in parts] == ["window", "row", "early", "extra", "k", "table", "late"]
    assert [needed_by(part) for part in parts] == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("kinds", [("device", "device"), ("device", "pinned")], ids="-".join)
def test_a_patch_follows_the_rows_of_its_part_and_no_byte_is_written_twice(memory, copier, kinds):
    """So that copies of one call may have any order."""
    source, target = memory(LAYOUT, 1, kinds[0], together=False), memory(LAYOUT, 2, kinds[1], together=False)
    extents = copier.plan(source.state, target.state).extents(UPTO)
    for layer in (1, 3):
        rows = source.address(layer, "pooled"), target.address(layer, "pooled")
        patch = source.address(layer, "idx_dead"), rows[1] + (UPTO // 4) * 512
        order = [(source_, target_) for target_, source_, *_ in extents]
        assert order.index(patch) == order.index(rows) + 1
    written = Counter(
        base + byte
        for target_, _, width, rows, pitch, _ in extents
        for base in range(target_, target_ + rows * pitch, pitch)
        for byte in range(width)
    )
    assert max(written.values()) == 1


def test_a_mixed_plan_uses_a_lane_for_each_route(memory):
    layout = LAYOUT

    def where(side):
        kinds = [("device", "device"), ("device", "pinned"), ("pinned", "device"), ("pinned", "pinned")]
        return lambda i, part: {"kind": kinds[i % 4][side]}

    source, target = memory(layout, 1, where(0)), memory(layout, 2, where(1))
    with sc.Copier(tickets=2, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        assert plan.routes() == {("local", 0), ("out", 0), ("in", 0), ("ring", 0)}
        streams = {stream for stream, _ in executed(plan, UPTO)}
    assert len(streams) >= 4
    assert differences(target, after_copy(source, target, UPTO)) == []


def test_each_device_carries_its_own_parts(memory, second_device):
    layout = LAYOUT
    source = memory(layout, 1, lambda i, part: {"device": i % 2})
    target = memory(layout, 2, "pinned", together=False)
    with sc.Copier((0, second_device), tickets=2, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        assert plan.routes() == {("out", 0), ("out", second_device)}
        assert len({stream for stream, _ in executed(plan, UPTO)}) == 2
    assert differences(target, after_copy(source, target, UPTO)) == []


def peer_calls(plan):
    """(batches, single ones, rows) between devices that a submit makes."""
    names = ("cudaMemcpyBatchAsync", "cudaMemcpyPeerAsync", "cudaMemcpy3DPeerAsync")
    before = host_runtime.calls()
    assert plan.submit(UPTO, after=SYNCED).sync()
    after = host_runtime.calls()
    return tuple(after[name] - before[name] for name in names)


@pytest.fixture
def apart(memory):
    """The same conversation on device 0 and on device 1, other bytes in it."""
    host_runtime.configure(devices=2, seed=1)
    return memory(LAYOUT, 1, device=0, together=False), memory(LAYOUT, 2, device=1, together=False)


def test_copies_of_layers_that_share_an_event_go_to_another_device_in_one_call(apart):
    """All layers here are short: the first one has an event of its own, and the last."""
    source, target = apart
    with sc.Copier((0, 1), tickets=2, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        batches, single, rows = peer_calls(plan)
        extents = [extent[3] for extent in plan.extents(UPTO)]
    assert rows == sum(n > 1 for n in extents)
    assert 1 <= batches <= 3
    assert single <= 3
    assert batches + single < sum(n == 1 for n in extents)
    assert differences(target, after_copy(source, target, UPTO)) == []


@pytest.mark.parametrize("code", [1, 801])
def test_where_one_call_for_many_copies_is_refused_each_is_made_by_itself(apart, code):
    source, target = apart
    with sc.Copier((0, 1), tickets=2, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        host_runtime.fail("cudaMemcpyBatchAsync", 1, code)
        batches, single, _ = peer_calls(plan)
        assert batches == 1
        assert single == sum(extent[3] == 1 for extent in plan.extents(UPTO))
        assert runtime.peek_last_error() == 0
        assert differences(target, after_copy(source, target, UPTO)) == []
        target.fill()
        assert peer_calls(plan)[:2] == (0, single)
    assert differences(target, after_copy(source, target, UPTO)) == []


@pytest.mark.parametrize("chunk", [1 << 20, 5000], ids=["one chunk", "chunks"])
def test_a_lane_whose_one_call_was_refused_never_tries_it_again(memory, chunk):
    """Also where a chunk is full, and where the refusal comes in the middle of a layer."""
    state = sc.Growth.state()
    layout = sc.Layout([sc.Part(name=f"s{n}", layer=0, unit_bytes=256, growth=state) for n in range(80)])
    source, target = memory(layout, 1, together=False), memory(layout, 2, "pinned", together=False)
    with sc.Copier(tickets=2, layer_events=24, chunk=chunk, window=1000) as copier:
        plan = copier.plan(source.state, target.state)
        host_runtime.fail("cudaMemcpyBatchAsync", 1, 801, forever=True)
        before = host_runtime.calls()["cudaMemcpyBatchAsync"]
        for _ in range(3):
            assert plan.submit(1, after=SYNCED).sync()
        assert host_runtime.calls()["cudaMemcpyBatchAsync"] == before + 1
    assert differences(target, after_copy(source, target, 1)) == []


def test_the_one_call_for_many_copies_is_tried_again_after_a_copy_to_a_wrong_address(apart, memory):
    """It is refused for that, as the copies by themselves are: the next ones are none of these."""
    source, target = apart
    gone = memory(LAYOUT, 3, device=1, together=False)
    with sc.Copier((0, 1), tickets=2, layer_events=24) as copier:
        plan, wrong = (copier.plan(source.state, one.state) for one in (target, gone))
        host_runtime.fail("cudaMemcpyBatchAsync", 1, 1)
        host_runtime.fail("cudaMemcpyPeerAsync", 2, 1)
        with pytest.raises(sc.Failed):
            wrong.submit(UPTO, after=SYNCED)
        host_runtime.clear_faults()
        assert peer_calls(plan)[0] >= 1
    assert differences(target, after_copy(source, target, UPTO)) == []


def test_an_error_of_other_code_stays_pending_where_one_call_for_many_copies_would_be_refused(apart):
    source, target = apart
    with sc.Copier((0, 1), tickets=2, layer_events=24) as copier:
        plan = copier.plan(source.state, target.state)
        with pytest.raises(runtime.CudaError):
            runtime.set_device(99)
        host_runtime.fail("cudaMemcpyBatchAsync", 1, 801)
        assert plan.submit(UPTO, after=SYNCED).sync()
        host_runtime.clear_faults()
        assert runtime.get_last_error() == 101
        target.fill()
        assert peer_calls(plan)[0] >= 1
    assert differences(target, after_copy(source, target, UPTO)) == []
