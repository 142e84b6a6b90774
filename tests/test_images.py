"""An image keeps what was copied into it, whatever pieces and chunks it lies in, grows without moving a byte, and is
read only once it is published."""

import contextlib
import ctypes
import gc
import threading
from array import array

import numpy as np
import pytest

import reference
import strata_copy as sc
from fixtures import (
    CAPACITY,
    GUARD,
    PAGES,
    SYNCED,
    after_copy,
    differences,
    run_python,
    small_layout,
    untouched,
)
from hooks import Hook, address
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


def test_what_is_printed_of_an_image_says_what_may_be_read(copier, memory, arena, held):
    layout = LAYOUTS["k8v4"]
    source, image = memory(layout, 1), sc.Image(arena(), layout, chunk=16)

    def said():
        assert repr(image).startswith(f"<Image of {layout!r}, generation {image.generation}, {image.bytes:,} bytes, ")
        return repr(image).rpartition(" bytes, ")[2]

    assert said() == "not published>"
    ticket = copier.submit(source.state, image, upto=(9, 5), after=held.wait)
    assert said() == "not published, busy>"
    held.open()
    ticket.sync()
    image.publish()
    assert said() == "published up to 9/5>"
    image.discard()
    assert said() == "discarded>"


def test_a_blob_goes_with_its_conversation(copier, memory, arena):
    """An empty one takes the place of another one, and a reset drops what was set and what was published."""
    layout = LAYOUTS["int8"]
    source, image = memory(layout, 1), sc.Image(arena(), layout, chunk=32)
    blobs = []
    for ids in (b"one", None, b"", b"two"):
        if ids is not None:
            image.blob = ids
        park(copier, source, image, (9, 9))
        blobs.append(image.blob)
    assert blobs == [b"one", b"one", b"", b"two"]
    image.blob = b"never published"
    image.reset()
    assert image.blob == b""
    park(copier, source, image, (9, 9))
    assert image.blob == b""
    image.blob = b"three"
    park(copier, source, image, (9, 9))
    copier.finished()
    image.discard()
    assert image.blob == b""


def test_a_blob_is_read_whole_while_another_thread_publishes_another(copier, memory, arena):
    """It waits for a submit whose hook sleeps, without the GIL, and goes on while the blob of before is read."""
    layout, size = LAYOUTS["int8"], 64 << 20
    source, target, image = memory(layout, 1), memory(layout, 2), sc.Image(arena(), layout, chunk=32)
    plan = copier.plan(source.state, target.state)
    how = {"hook": address(ctypes.CDLL(None).usleep), "hook_arg": 20000, "feed": False}
    park(copier, source, image, (9, 9))
    for number in range(3):
        image.blob = bytes([number]) * size
        assert image.publish()
        image.blob = bytes([number + 1]) * size
        others = [
            threading.Thread(target=lambda: plan.submit((9, 9), after=SYNCED, **how).sync()),
            threading.Thread(target=image.publish),
        ]
        for one in others:
            one.start()
        while others[1].is_alive():
            blob = np.frombuffer(image.blob, np.uint8)
            assert blob.size == size
            assert blob[0] in (number, number + 1)
            assert (blob == blob[0]).all()
        for one in others:
            one.join()
        assert image.blob[-1] == number + 1


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
    assert (image.valid, image.published, image.marks) == (False, False, None)
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


# Two groups on one mark, of which one has running state as well.
SHARED = sc.Layout(
    [
        sc.Part(name="k", layer=0, unit_bytes=48, growth=sc.Growth.linear(), group="kv"),
        sc.Part(name="state", layer=0, unit_bytes=100, growth=sc.Growth.state(), group="kv"),
        sc.Part(name="v", layer=1, unit_bytes=40, growth=sc.Growth.linear(), group="kv"),
        sc.Part(name="draft", layer=1, unit_bytes=32, growth=sc.Growth.linear(), group="draft"),
    ]
)


class Kept:
    """What an image of SHARED should hold: of each group that was copied, whose bytes each row is, and the state's."""

    def __init__(self):
        self.rows, self.state = {}, None

    @property
    def marks(self):
        return (min(map(len, self.rows.values())),)

    def may_write(self, groups, begin):
        return all(begin <= len(self.rows.get(group, ())) for group in groups)

    def write(self, whose, groups, begin, upto):
        for group in groups:
            self.rows[group] = self.rows.get(group, [])[:begin] + [whose] * (upto - begin)
            self.state = whose if group == "kv" else self.state

    def may_read(self, groups, upto):
        return all(group in self.rows and upto <= len(self.rows[group]) for group in groups)

    def differs(self, found, sources, groups, upto):
        """The parts whose bytes are not those that `whose` had there."""
        wrong = []
        for part, i in ((part, i) for i, part in enumerate(SHARED.parts) if part.group in groups):
            owners = [self.state] if part.growth.rule == "state" else self.rows[part.group][:upto]
            for row, whose in enumerate(owners):
                at = slice(GUARD + row * part.unit_bytes, GUARD + (row + 1) * part.unit_bytes)
                if (found[i][at] != sources[whose][i][at]).any():
                    wrong.append((part.name, row))
        return wrong


@pytest.mark.parametrize("case", range(12))
def test_groups_that_share_a_mark_are_kept_apart(copier, memory, arena, case):
    """Whatever groups are copied how far, nothing is read but what was copied, and all of that is."""
    print(f"case {case}")
    random = np.random.default_rng(case)
    memories, target = [memory(SHARED, tag) for tag in (1, 2)], memory(SHARED, 3)
    sources = [one.pattern() for one in memories]
    pool = arena(64 * KIB, 64 * KIB)
    another = sc.Image(pool, SHARED, chunk=8)
    park(copier, memory(SHARED, 4), another, CAPACITY)
    another.discard()
    image, kept = sc.Image(pool, SHARED, chunk=8), Kept()
    some = (["kv"], ["draft"], ["kv", "draft"])
    reads = [(groups, upto) for groups in some for upto in (0, 7, 16, 33, 64, CAPACITY)]
    for _ in range(12):
        if random.random() < 0.15:
            image.reset()
            kept = Kept()
        groups, whose = some[random.integers(3)], int(random.integers(2))
        begin, upto = sorted(int(n) for n in random.choice([0, 7, 16, 33, 64, CAPACITY], 2))
        how = {"groups": groups, "begin": begin}
        if not kept.may_write(groups, begin):
            refused(lambda how=how, upto=upto, whose=whose: park(copier, memories[whose], image, upto, **how), "mark")
            continue
        park(copier, memories[whose], image, upto, **how)
        kept.write(whose, groups, begin, upto)
        assert image.marks == kept.marks
        for groups, upto in reads:
            if kept.may_read(groups, upto):
                take(copier, image, target, upto, groups=groups)
                assert kept.differs(target.bytes(), sources, groups, upto) == []
            else:
                with pytest.raises(sc.Refused) as raised:
                    take(copier, image, target, upto, groups=groups)
                assert raised.value.reason in ("mark", "bank")
        if len(kept.rows) == 2:
            take(copier, image, target, image.marks)


def test_an_image_is_asked_only_for_the_groups_that_it_is_the_source_of(copier, memory, arena):
    layout = sc.Layout(
        [
            sc.Part(name="k", layer=0, unit_bytes=48, growth=sc.Growth.linear(), group="kv"),
            sc.Part(name="d", layer=0, unit_bytes=32, growth=sc.Growth.linear(mark=1), group="draft"),
        ],
        marks=("tokens", "draft"),
    )
    slot, draft, target = (memory(layout, tag) for tag in (1, 2, 3))
    image = sc.Image(arena(), layout, chunk=8)
    park(copier, slot, image, (64, 0), groups=["kv"])
    assert image.marks == (64, 0)
    plan = copier.plan({"kv": image, "draft": draft.state}, target.state)
    done(plan.submit((64, 32), after=SYNCED))
    wanted = after_copy(slot, target, (64, 32), groups=["kv"])
    wanted = after_copy(draft, target, (64, 32), before=wanted, groups=["draft"])
    assert differences(target, wanted) == []
    done(plan.submit((90, 32), groups=["draft"], after=SYNCED))
    take(copier, image, target, (64, 32), groups=["kv"])
    refused(lambda: plan.submit((65, 32), after=SYNCED), "mark")
    refused(lambda: copier.submit(image, target.state, upto=(64, 32), after=SYNCED), "bank")


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
        lambda: plan.extents((9, 9)),
        lambda: back.extents((9, 9)),
        image.discard,
        image.publish,
        image.reset,
        lambda: image.reserve((9, 9)),
        lambda: setattr(image, "blob", b"ids"),
    ):
        assert "discarded" in refused(act, "closed")


def test_what_a_discarded_image_had_is_never_written_by_it_again(copier, memory, arena):
    layout, pool = LAYOUTS["int8"], arena()
    first, second, target = (memory(layout, tag) for tag in (1, 2, 3))
    old = sc.Image(pool, layout, chunk=32)
    park(copier, first, old, (60, 60))
    old.discard()
    new = sc.Image(pool, layout, chunk=32)
    park(copier, second, new, (60, 60))
    for act in (old.reset, lambda: park(copier, first, old, (60, 60))):
        refused(act, "closed")
    take(copier, new, target, (60, 60))
    assert differences(target, after_copy(second, target, (60, 60))) == []
    assert (old.published, old.marks, old.bytes, pool.used) == (False, None, 0, new.bytes)


def test_extents_are_refused_where_a_submit_is(copier, memory, arena):
    layout = LAYOUTS["int8"]
    source, target, image = memory(layout, 1), memory(layout, 2), sc.Image(arena(), layout, chunk=32)
    image.reserve((20, 20))
    into, back = copier.plan(source.state, image), copier.plan(image, target.state)
    refused(lambda: back.extents((9, 9)), "invalid")
    refused(lambda: into.extents((9, 9), begin=(5, 5)), "mark")
    park(copier, source, image, (9, 9))
    assert back.extents((9, 9))
    assert into.extents((9, 9), begin=(5, 5))
    refused(lambda: back.extents((10, 9)), "mark")


@pytest.mark.host
def test_calls_that_change_an_image_are_refused_in_a_hook(copier, memory, arena):
    """And what is published may be read there."""
    layout, pool = LAYOUTS["int8"], arena()
    source, target, image = memory(layout, 1), memory(layout, 2), sc.Image(pool, layout, chunk=32)
    image.blob = b"ids"
    park(copier, source, image, (9, 9))
    back, told = copier.plan(image, target.state), []
    calls = {
        "publish": image.publish,
        "discard": image.discard,
        "reset": image.reset,
        "reserve": lambda: image.reserve((9, 9)),
        "blob": lambda: setattr(image, "blob", b"others"),
        "image": lambda: sc.Image(pool, layout),
    }

    def act(layer, device, stream):
        for name, call in calls.items():
            assert refused(call, "hook").startswith(name)
            told.append(name)
        assert (image.published, image.marks, image.blob) == (True, (9, 9), b"ids")
        assert back.extents((9, 9))

    hook = Hook(act)
    done(copier.submit(source.state, target.state, upto=(9, 9), after=SYNCED, **hook.how))
    assert hook.errors == []
    assert told == list(calls) * layout.layers
    image.discard()


def test_a_forked_child_changes_no_image():
    """Its memory is the parent's; and a lock may be held there by a thread that the child has not."""
    code = """
        import os, sys, warnings
        sys.path.insert(0, sys.argv[2])
        import fixtures
        import strata_copy as sc
        from strata_copy import runtime
        runtime.open(sys.argv[1])
        layout = fixtures.small_layout()
        source, target = fixtures.Memory(layout, 1), fixtures.Memory(layout, 2)
        copier = sc.Copier(tickets=4, layer_events=16)
        arena = sc.Arena(1 << 20, piece=1 << 20, pause=0.0)
        image = sc.Image(arena, layout, chunk=32, scrub=True)
        image.blob = b"ids"
        copier.submit(source.state, image, upto=9, after=sc.CALLER_SYNCED).sync()
        image.publish()
        pool = sc.Pool(arena, layout, chunk=32)
        pool.image("a", 9)
        warnings.simplefilter("ignore", DeprecationWarning)     # of forking with threads
        child = os.fork()
        if child == 0:
            answers, acts = [], {
                "publish": image.publish, "discard": image.discard, "reset": image.reset,
                "reserve": lambda: image.reserve(40), "blob": lambda: setattr(image, "blob", b"others"),
                "image": lambda: sc.Image(arena, layout),
                "image of a pool": lambda: pool.image("b", 9), "its room": lambda: pool.image("a", 900),
                "del": lambda: pool.__delitem__("a"),
            }
            copier.finished()
            for name, act in acts.items():
                try:
                    act()
                    answers.append(name + " went on")
                except sc.Refused as error:
                    answers.append(error.reason)
            answers += [image.blob, image.marks, list(pool)]
            print(answers, flush=True)
            del act, acts, image
            os._exit(0)
        print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        copier.submit(image, target.state, upto=9, after=sc.CALLER_SYNCED).sync()
        print("parent", image.blob, fixtures.differences(target, fixtures.after_copy(source, target, 9)))
    """
    answers = ["closed"] * 9 + [b"ids", (9,), ["a"]]
    assert run_python(code).splitlines() == [str(answers), "child 0", "parent b'ids' []"]


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


LARGE = {
    "a chunk": ({"unit_bytes": 1 << 24}, {"chunk": 1 << 40}),
    "a chunk whose product is small in 64 bits": (
        {"unit_bytes": (1 << 24) + 256},
        {"chunk": -(-(1 << 64) // ((1 << 24) + 256))},
    ),
    "a unit of many runs": ({"unit_bytes": 1 << 40, "rep": 1 << 24}, {"chunk": 1}),
    "a unit that just fits": ({"unit_bytes": 1 << 39, "rep": 1 << 23}, {"chunk": 2}),
    "a constant": ({"unit_bytes": 1 << 40, "rep": 1 << 24, "growth": sc.Growth.const()}, {}),
    "banks": ({"unit_bytes": 1 << 40, "rep": 1 << 18, "growth": sc.Growth.state()}, {"banks": 32}),
}


@pytest.mark.parametrize("what", LARGE)
def test_what_does_not_fit_into_63_bits_is_refused_as_the_image_is_made(arena, what):
    fields, how = LARGE[what]
    part = sc.Part(**{"name": "k", "layer": 3, "growth": sc.Growth.linear(), **fields})
    pool = arena()
    text = refused(lambda: sc.Image(pool, sc.Layout([part]), **how), "place")
    assert text.startswith("part 'k' of layer 3:")
    assert pool.used == 0


def test_what_does_not_fit_together_is_refused_as_the_image_is_made(arena):
    parts = [
        sc.Part(name="c", layer=layer, unit_bytes=1 << 40, rep=1 << 22, growth=sc.Growth.const()) for layer in range(2)
    ]
    refused(lambda: sc.Image(arena(), sc.Layout(parts)), "place")
    refused(lambda: sc.Image(arena(), sc.Layout(parts[:1])), "capacity")


def test_a_large_chunk_that_fits_is_asked_of_the_arena(arena):
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=1 << 20, growth=sc.Growth.linear())])
    image = sc.Image(arena(), layout, chunk=1 << 40)
    refused(lambda: image.reserve(1), "capacity")
    assert image.bytes == 0


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
