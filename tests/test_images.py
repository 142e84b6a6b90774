"""An image keeps what was copied into it, whatever pieces and chunks it lies in, grows without moving a byte, and is
read only once it is published."""

import contextlib
import gc
from array import array

import numpy as np
import pytest

import reference
import strata_copy as sc
from fixtures import CAPACITY, PAGES, SYNCED, after_copy, differences, small_layout, untouched
from strata_copy import host_runtime, runtime

KIB = 1 << 10
LAYOUTS = {format: small_layout(format, layers=6, draft=True) for format in PAGES}


@pytest.fixture(autouse=True)  # so that it ends behind the copier, which keeps the latest tickets
def arena():
    """Makes arenas; all are closed after the test, once the images that are left are discarded: the copier keeps the
    latest tickets."""
    made = []

    def make(budget=2 << 20, piece=2 << 20):
        made.append(sc.Arena(budget, piece=piece, pause=0.0, threads=1))
        return made[-1]

    yield make
    for image in [thing for thing in gc.get_objects() if isinstance(thing, sc.Image)]:
        with contextlib.suppress(sc.Refused):
            image.discard()
    for one in made:
        assert one.used == 0
        one.close()


def done(ticket):
    assert ticket.sync(timeout=60)
    return ticket


def park(copier, memory, image, upto, **how):
    ticket = done(copier.submit(memory.state, image, upto=upto, after=SYNCED, **how))
    assert image.publish()
    return ticket


def take(copier, image, memory, upto, **how):
    return done(copier.submit(image, memory.state, upto=upto, after=SYNCED, **how))


@pytest.mark.parametrize("chunk", [1, 5, 16, 128])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 64, 65, 96])
@pytest.mark.parametrize("format", ["k8v4", "fp16"])
def test_what_went_in_comes_out(copier, memory, arena, format, length, chunk):
    layout, upto = LAYOUTS[format], (length, length)
    source, target = memory(layout, 1), memory(layout, 2)
    image = sc.Image(arena(), layout, chunk=chunk)
    assert park(copier, source, image, upto).routes == {("out", 0)}
    take(copier, image, target, upto)
    assert differences(target, after_copy(source, target, upto)) == []
    assert untouched(source)


@pytest.mark.parametrize("case", range(6))
def test_it_grows_by_any_steps_over_any_pieces(copier, memory, arena, case):
    """Pieces of which none holds the whole image, taken by others in between: no chunk crosses one."""
    print(f"case {case}")
    random = np.random.default_rng(case)
    layout = LAYOUTS["int8"]
    source, target, other = memory(layout, 1), memory(layout, 2), memory(layout, 3)
    pool = arena(budget=64 * 64 * KIB, piece=64 * KIB)
    image, between = (sc.Image(pool, layout, chunk=int(random.choice([1, 4, 13]))) for _ in range(2))
    length = 0
    while length < CAPACITY:
        length = min(CAPACITY, length + int(random.integers(1, 20)))
        park(copier, source, image, (length, length))
        park(copier, other, between, (length, length))
        take(copier, image, target, (length, length))
        assert differences(target, after_copy(source, target, (length, length))) == []
    pieces = pool.pieces
    plan = copier.plan(source.state, image)
    for to, _, width, rows, pitch, _ in plan.extents((96, 96)):
        last = to + (rows - 1) * pitch + width
        assert any(base <= to and last <= base + size for base, size, _ in pieces)


def test_an_arena_is_closed_once_its_images_are_discarded_whoever_refers_to_them(copier, memory):
    layout = LAYOUTS["int8"]
    source, arena = memory(layout, 1), sc.Arena(2 << 20, piece=2 << 20)
    pool = sc.Pool(arena, layout, chunk=4)
    plan = copier.plan(source.state, pool.image("a", (20, 20)))
    ticket = done(plan.submit((20, 20), after=SYNCED))
    with pytest.raises(sc.Refused, match="bytes of the arena are used by images: discard them, or delete their keys"):
        arena.close()
    del pool["a"]
    arena.close()
    assert ticket.plan is plan


def test_what_went_wrong_goes_before_what_the_arena_says():
    """The exception holds the image by its traceback: closing is not what failed."""
    made = []

    def ask_for_too_much():
        with sc.Arena(64 * KIB, piece=64 * KIB) as arena:
            made.extend([arena, sc.Image(arena, LAYOUTS["int8"])])
            made[1].reserve((1 << 20, 1 << 20))

    with pytest.raises(sc.Refused, match="bytes more are needed"):
        ask_for_too_much()
    arena, image = made
    assert arena.used == image.bytes > 0
    image.discard()
    arena.close()
    assert arena.registered == 0


def test_growing_moves_no_byte(copier, memory, arena):
    layout = LAYOUTS["int8"]
    source = memory(layout, 1)
    image = sc.Image(arena(), layout, chunk=4)
    plan = copier.plan(source.state, image)
    park(copier, source, image, (20, 20))
    before = {source_at: to for to, source_at, *_ in plan.extents((20, 20))}
    image.reserve((96, 96))
    assert {source_at: to for to, source_at, *_ in plan.extents((20, 20))} == before


def test_an_image_that_is_made_at_once_lies_in_one_run_for_each_part(copier, memory, arena):
    layout = LAYOUTS["int8"]
    source, image = memory(layout, 1), sc.Image(arena(), layout, chunk=4)
    image.reserve((96, 96))
    into_memory = copier.plan(source.state, memory(layout, 2, "pinned").state).extents((96, 96))
    assert len(copier.plan(source.state, image).extents((96, 96))) <= len(into_memory) + 8


@pytest.mark.parametrize("rep", [2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_units_of_several_runs(copier, memory, arena, rep, chunk):
    layout = sc.Layout(
        [
            sc.Part(name=name, layer=layer, unit_bytes=48, rep=rep, growth=sc.Growth.linear(4, ceil=True))
            for layer in range(2)
            for name in ("k", "v")
        ]
        + [sc.Part(name="state", layer=0, unit_bytes=100, rep=rep, growth=sc.Growth.state())]
    )
    source, target, image = memory(layout, 1), memory(layout, 2), sc.Image(arena(), layout, chunk=chunk)
    for length in (7, 50, 96):
        park(copier, source, image, length)
        take(copier, image, target, length)
        assert differences(target, after_copy(source, target, length)) == []


def test_running_state_is_kept_in_banks(copier, memory, arena):
    layout = small_layout("int8")

    def where(i, part):
        return {"banks": 3 if part.growth.rule == "state" else 1}

    source, target, image = (
        memory(layout, 1, where),
        memory(layout, 2, where),
        sc.Image(arena(), layout, banks=3, chunk=32),
    )
    for bank in range(3):
        park(copier, source, image, 21, src_bank=bank, dst_bank=bank)
    take(copier, image, target, 21, src_bank=2, dst_bank=1)
    assert differences(target, after_copy(source, target, 21, src_bank=2, dst_bank=1)) == []


def test_images_can_be_copied_to_images(copier, memory, arena):
    layout, pool = LAYOUTS["k8v4"], arena()
    source, target = memory(layout, 1), memory(layout, 2)
    first, second = sc.Image(pool, layout, chunk=4), sc.Image(pool, layout, chunk=7)
    park(copier, source, first, (65, 50))
    done(copier.submit(first, second, upto=(65, 50), after=SYNCED))
    assert second.publish()
    take(copier, second, target, (65, 50))
    assert differences(target, after_copy(source, target, (65, 50))) == []


# ---- publishing


def refused(act, reason):
    with pytest.raises(sc.Refused) as raised:
        act()
    assert raised.value.reason == reason
    return str(raised.value)


def test_an_image_is_invisible_until_it_is_published(copier, memory, arena, held):
    layout = LAYOUTS["k8v4"]
    source, target, image = memory(layout, 1), memory(layout, 2), sc.Image(arena(), layout, chunk=32)
    image.blob = b"ids"

    assert "nothing was copied" in refused(image.publish, "invalid")

    def read(upto=(9, 9)):
        return copier.submit(image, target.state, upto=upto, after=SYNCED)

    assert (image.published, image.marks, image.blob) == (False, None, b"")
    refused(read, "invalid")
    ticket = copier.submit(source.state, image, upto=(9, 9), after=held.wait)
    refused(read, "invalid")
    assert not image.publish()  # it has not landed
    held.open()
    done(ticket)
    refused(read, "invalid")
    assert image.publish(image.generation)
    assert (image.published, image.marks, image.blob) == (True, (9, 9), b"ids")
    done(read())
    assert "published up to 9" in refused(lambda: read((10, 9)), "mark")
    image.blob = b"more ids"
    ticket = copier.submit(source.state, image, upto=(12, 12), after=SYNCED)
    refused(read, "invalid")
    assert image.blob == b"ids"
    done(ticket)
    assert image.publish()
    assert (image.marks, image.blob) == ((12, 12), b"more ids")
    refused(lambda: image.publish(image.generation + 1), "generation")


@pytest.mark.parametrize(
    "ids", [b"", array("i", [1, -2]), memoryview(b"abcdef")[::2]], ids=["none", "numbers", "every 2nd"]
)
def test_a_blob_is_the_bytes_of_what_it_was_set_to(copier, memory, arena, ids):
    layout = LAYOUTS["int8"]
    source, image = memory(layout, 1), sc.Image(arena(), layout, chunk=32)
    image.blob = ids
    park(copier, source, image, (9, 9))
    assert image.blob == memoryview(ids).tobytes()
    for wrong in ("ids", [1, 2], 3):
        with pytest.raises(TypeError):
            image.blob = wrong


@pytest.mark.host
def test_an_image_whose_copy_failed_is_not_published(copier, memory, arena):
    layout = LAYOUTS["k8v4"]
    source, image = memory(layout, 1), sc.Image(arena(), layout, chunk=32)
    park(copier, source, image, (9, 9))
    source.state.advanced((20, 20))
    host_runtime.fail("cudaMemcpyBatchAsync", 1, 2)
    with pytest.raises(sc.Failed):
        copier.submit(source.state, image, upto=(20, 20), after=SYNCED)
    host_runtime.clear_faults()
    refused(image.publish, "invalid")
    image.reset()
    assert not image.published
    assert "nothing was copied" in refused(image.publish, "invalid")
    park(copier, source, image, (20, 20))


# ---- memory


def test_what_was_never_copied_into_an_image_is_not_read(copier, memory, arena):
    """It is what other conversations left there."""
    layout, pool = LAYOUTS["int8"], arena()

    def where(i, part):
        return {"banks": 3 if part.growth.rule == "state" else 1}

    source, target = memory(layout, 1, where), memory(layout, 2, where)
    image = sc.Image(pool, layout, banks=3, chunk=32)
    park(copier, source, image, (20, 20), groups=["main"])
    take(copier, image, target, (20, 0), groups=["main"])
    refused(lambda: copier.submit(image, target.state, upto=(20, 0), after=SYNCED), "bank")
    refused(lambda: copier.submit(image, target.state, upto=(20, 0), groups=["main"], src_bank=2, after=SYNCED), "bank")
    refused(lambda: copier.submit(source.state, image, upto=(20, 20), begin=(10, 10), after=SYNCED), "mark")
    park(copier, source, image, (20, 20), begin=(20, 0))
    take(copier, image, target, (20, 20))
    before = after_copy(source, target, (20, 20))
    assert differences(target, before) == []
    image.reset()
    park(copier, source, image, (9, 9), groups=["main"])
    assert image.marks == (9, 0)
    refused(lambda: copier.submit(image, target.state, upto=(9, 0), after=SYNCED), "bank")


def test_an_arena_that_is_full_refuses_and_keeps_what_is_there(copier, memory, arena):
    layout = LAYOUTS["int8"]
    source, target, pool = memory(layout, 1), memory(layout, 2), arena(budget=96 * KIB, piece=96 * KIB)
    image = sc.Image(pool, layout, chunk=4)
    park(copier, source, image, (8, 8))
    text = refused(lambda: copier.submit(source.state, image, upto=(96, 96), after=SYNCED), "capacity")
    assert "free of 98304" in text
    assert image.published
    take(copier, image, target, (8, 8))
    assert differences(target, after_copy(source, target, (8, 8))) == []
    refused(lambda: sc.Image(arena(budget=8192, piece=8192), layout), "capacity")


def test_memory_comes_back_whole_in_any_order(copier, memory, arena):
    layout, pool = LAYOUTS["int8"], arena(budget=16 * 256 * KIB, piece=256 * KIB)
    random = np.random.default_rng(4)
    images = []
    for _ in range(120):
        if images and random.random() < 0.45:
            images.pop(int(random.integers(len(images))))
        else:
            with contextlib.suppress(sc.Refused):  # where the arena is full
                images.append(sc.Image(pool, layout, chunk=int(random.choice([4, 8, 32]))))
                images[-1].reserve((int(random.integers(0, 97)), int(random.integers(0, 97))))
        assert pool.used == sum(image.bytes for image in images)
    images.clear()
    assert pool.used == 0
    whole = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=256 * KIB, growth=sc.Growth.linear())])
    image = sc.Image(pool, whole, chunk=1)
    image.reserve(16)  # all pieces are free from end to end


@pytest.mark.parametrize("scrub", [True, False])
def test_scrub_zeroes_what_the_arena_gets_back(copier, memory, arena, scrub):
    layout, pool = LAYOUTS["int8"], arena()
    image = sc.Image(pool, layout, chunk=32, scrub=scrub)
    park(copier, memory(layout, 1), image, (60, 60))
    ((base, size, _),) = pool.pieces
    assert runtime.view(base, size).any()
    image.discard()
    assert runtime.view(base, size).any() != scrub
    assert pool.used == 0


def test_a_discarded_image_is_refused_and_one_in_use_is_not_discarded(copier, memory, arena, held):
    layout, pool = LAYOUTS["int8"], arena()
    source, image = memory(layout, 1), sc.Image(pool, layout, chunk=32)
    plan, back = copier.plan(source.state, image), copier.plan(image, source.state)
    ticket = plan.submit((9, 9), after=held.wait)
    refused(image.discard, "busy")
    assert pool.used > 0
    held.open()
    done(ticket)
    image.discard()
    assert pool.used == image.bytes == 0
    for act in (
        lambda: plan.submit((9, 9), after=SYNCED),
        lambda: back.submit((9, 9), after=SYNCED),
        image.discard,
        image.publish,
        lambda: image.reserve((9, 9)),
    ):
        assert "discarded" in refused(act, "closed")


def test_an_arena_with_images_does_not_close(arena):
    pool = arena()
    image = sc.Image(pool, LAYOUTS["int8"])
    refused(pool.close, "busy")
    image.discard()
    pool.close()


def test_an_image_keeps_its_arena(copier, memory):
    layout = LAYOUTS["int8"]
    image = sc.Image(sc.Arena(1 << 20, piece=1 << 20), layout, chunk=32)
    source, target = memory(layout, 1), memory(layout, 2)
    park(copier, source, image, (9, 9))
    take(copier, image, target, (9, 9))
    assert differences(target, after_copy(source, target, (9, 9))) == []
    assert image.owner.used > 0
    image.discard()
    image.owner.close()


@pytest.mark.parametrize("wrong", [{"banks": 0}, {"chunk": 0}, {"banks": 1.5}, {"chunk": "4"}])
def test_numbers_without_a_meaning_are_refused(arena, wrong):
    with pytest.raises((ValueError, TypeError)):
        sc.Image(arena(), LAYOUTS["int8"], **wrong)


def test_marks_without_a_meaning_are_refused(arena):
    image = sc.Image(arena(), LAYOUTS["int8"])
    for marks in ((1,), (1, -1), (1, 1 << 62), (1 << 61, 1)):
        with pytest.raises((sc.Refused, ValueError)):
            image.reserve(marks)


def test_what_moves_is_what_the_reference_says(copier, memory, arena):
    layout = LAYOUTS["k8v4"]
    source, image = memory(layout, 1), sc.Image(arena(), layout, chunk=4)
    ticket = park(copier, source, image, (50, 33))
    moved = reference.moved_units(layout, (50, 33))
    assert ticket.bytes == sum(layout.parts[i].unit_bytes for i, *_ in moved)
