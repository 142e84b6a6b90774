"""A pool keeps what was used last, under the arena's budget, and never gives away what is pinned or in flight."""

import contextlib
import gc
import threading

import numpy as np
import pytest

import strata_copy as sc
from fixtures import CAPACITY, SYNCED, after_copy, differences, small_layout
from hooks import Hook
from strata_copy import runtime

LAYOUT = small_layout("int8", layers=4)
UPTO = 40


@pytest.fixture(autouse=True)  # so that it ends behind the copier, which keeps the latest tickets
def pool():
    """Makes pools with an arena of their own; `room` says for how many images of UPTO tokens."""
    arenas = []

    def make(room, **how):
        probe = sc.Arena(4 << 20, piece=4 << 20, pause=0.0, threads=1)
        arenas.append(probe)
        image = sc.Image(probe, LAYOUT, **{"chunk": 4, **how})
        image.reserve(UPTO)
        size = image.bytes
        image.discard()
        arenas.append(sc.Arena(room * -(-size // 4096) * 4096, piece=1 << 30, pause=0.0, threads=1))
        return sc.Pool(arenas[-1], LAYOUT, **{"chunk": 4, **how})

    yield make
    for image in [thing for thing in gc.get_objects() if isinstance(thing, sc.Image)]:
        with contextlib.suppress(sc.Refused):
            image.discard()
    for arena in arenas:
        arena.close()


def park(copier, memory, pool, key, upto=UPTO, blob=None):
    image = pool.image(key, upto, blob=blob)
    assert copier.submit(memory.state, image, upto=upto, after=SYNCED).sync(timeout=60)
    assert image.publish()
    return image


def refused(act, reason):
    with pytest.raises(sc.Refused) as raised:
        act()
    assert raised.value.reason == reason
    return str(raised.value)


def test_images_are_found_by_their_keys(copier, memory, pool):
    kept = pool(3)
    for key, tag in (("a", 1), (b"b", 2), ("ä" * 32, 3)):
        park(copier, memory(LAYOUT, tag), kept, key, blob=b"ids of %d" % tag)
    assert kept.keys() == ["a", b"b", "ä" * 32]
    assert len(kept) == 3
    assert "a" in kept
    assert "c" not in kept
    assert list(kept) == kept.keys()
    assert kept["a"] is kept.image("a")
    assert kept["a"].blob == b"ids of 1"
    target = memory(LAYOUT, 9)
    assert copier.submit(kept["ä" * 32], target.state, upto=UPTO, after=SYNCED).sync(timeout=60)
    assert differences(target, after_copy(memory(LAYOUT, 3), target, UPTO)) == []
    with pytest.raises(KeyError):
        kept["c"]
    usage = kept.usage()
    assert usage == {
        "images": 3, "pinned": 0, "bytes": kept.arena.used, "free": kept.arena.pinned - kept.arena.used,
        "hits": 3, "misses": 1, "evictions": 0,
    }  # fmt: skip


def test_the_one_that_was_used_longest_ago_goes(copier, memory, pool):
    kept, source = pool(3), memory(LAYOUT, 1)
    for key in "abc":
        park(copier, source, kept, key)
    kept["a"]
    park(copier, source, kept, "d")
    assert kept.keys() == ["c", "a", "d"]
    assert kept.evicted() == ["b"]
    assert kept.evicted() == []
    park(copier, source, kept, "e")
    park(copier, source, kept, "f")
    assert kept.evicted() == ["c", "a"]
    assert kept.usage()["evictions"] == 3


def test_an_evicted_image_is_refused_and_its_memory_is_another_conversations(copier, memory, pool):
    kept = pool(1, scrub=True)
    first = park(copier, memory(LAYOUT, 1), kept, "a")
    plan = copier.plan(first, memory(LAYOUT, 8).state)
    target, second = memory(LAYOUT, 9), memory(LAYOUT, 2)
    park(copier, second, kept, "b")
    assert "discarded" in refused(lambda: plan.submit(UPTO, after=SYNCED), "closed")
    assert copier.submit(kept["b"], target.state, upto=UPTO, after=SYNCED).sync(timeout=60)
    assert differences(target, after_copy(second, target, UPTO)) == []
    again = kept.image("a")
    assert again is not first
    assert not again.published
    refused(lambda: copier.submit(again, target.state, upto=1, after=SYNCED), "invalid")


def test_what_is_pinned_stays(copier, memory, pool):
    kept, source = pool(2), memory(LAYOUT, 1)
    for key in "ab":
        park(copier, source, kept, key)
        kept.pin(key)
    kept.pin("a")
    assert "are needed" in refused(lambda: kept.image("c", UPTO), "capacity")
    refused(lambda: kept.__delitem__("a"), "busy")
    kept.unpin("a")
    refused(lambda: kept.image("c", UPTO), "capacity")
    kept.unpin("b")
    park(copier, source, kept, "c")
    assert "b" in kept.evicted()
    kept.unpin("a")
    with pytest.raises(KeyError):
        kept.unpin("a")
    with pytest.raises(KeyError):
        kept.pin("b")
    del kept["a"]
    with pytest.raises(KeyError):
        del kept["a"]


def test_what_is_pinned_may_be_discarded_but_not_deleted(copier, memory, pool):
    kept, source = pool(1), memory(LAYOUT, 1)
    image = park(copier, source, kept, "a")
    kept.pin("a")
    refused(lambda: kept.__delitem__("a"), "busy")
    assert kept["a"].published
    image.discard()
    assert "a" not in kept
    assert kept.evicted() == []


def test_what_is_in_flight_stays(copier, memory, pool, held):
    kept, source, target = pool(2), memory(LAYOUT, 1), memory(LAYOUT, 2)
    for key in "ab":
        park(copier, source, kept, key)
    reads = copier.submit(kept["a"], target.state, upto=UPTO, after=held.wait)
    writes = copier.submit(source.state, kept["b"], upto=UPTO, after=held.wait)
    refused(lambda: kept.image("c", UPTO), "capacity")
    refused(lambda: kept.__delitem__("a"), "busy")
    assert kept.evicted() == []
    held.open()
    assert reads.sync(timeout=60)
    assert writes.sync(timeout=60)
    park(copier, source, kept, "c")
    assert kept.evicted() == ["a"]
    assert differences(target, after_copy(source, target, UPTO)) == []


def test_an_image_that_grows_takes_from_the_others(copier, memory, pool):
    kept, source = pool(3), memory(LAYOUT, 1)
    for key in "abc":
        park(copier, source, kept, key, upto=UPTO)
    image = kept["a"]
    assert copier.submit(source.state, image, upto=2 * UPTO, after=SYNCED).sync(timeout=60)
    assert "a" in kept
    refused(lambda: image.reserve(100 * UPTO), "capacity")
    assert kept.evicted() == ["b"]
    assert kept.keys() == ["c", "a"]


def ages(pool):
    """What a call that did nothing leaves as it is."""
    return pool.keys(), pool.evicted(), {key: pool.usage()[key] for key in ("images", "bytes", "free", "evictions")}


def two_images_that_fill_the_arena(copier, memory, pool):
    kept, source = pool(2), memory(LAYOUT, 1)
    for key in "ab":
        park(copier, source, kept, key)
    return kept, source, ages(kept)


@pytest.mark.parametrize("key", ["b", "c"])
@pytest.mark.parametrize("upto", [8 * UPTO, (1 << 62) - 1])
def test_nobody_goes_for_what_all_of_them_could_not_give(copier, memory, pool, key, upto):
    kept, _, before = two_images_that_fill_the_arena(copier, memory, pool)
    assert "images that may go" in refused(lambda: kept.image(key, upto), "capacity")
    assert ages(kept) == before


def test_nobody_goes_for_an_image_that_cannot_be_made(copier, memory, pool):
    kept, _, before = two_images_that_fill_the_arena(copier, memory, pool)
    refused(lambda: kept.image("c", (UPTO, UPTO)), "mark")
    refused(lambda: kept.image("c", -1), "mark")
    with pytest.raises(TypeError):
        kept.image("c", UPTO, blob=7)
    assert ages(kept) == before
    kept.pin("a")
    kept.pin("b")
    refused(lambda: kept.image("c"), "capacity")
    assert ages(kept) == before


def test_a_first_image_that_gets_no_room_leaves_no_entry(pool):
    kept = pool(1)
    refused(lambda: kept.image("a", 8 * UPTO), "capacity")
    assert ages(kept) == ([], [], {"images": 0, "bytes": 0, "free": kept.arena.pinned, "evictions": 0})
    assert kept.image("a", UPTO).bytes > 0


def bad_submits(copier, source, image):
    """Submits that would need room, but for what is wrong with each."""
    return {
        "order": lambda: copier.submit(source.state, image, upto=2 * UPTO),
        "generation": lambda: copier.submit(source.state, image, upto=2 * UPTO, after=SYNCED, dst_generation=77),
        "mark": lambda: copier.submit(source.state, image, upto=2 * UPTO, begin=2 * UPTO + 1, after=SYNCED),
        "capacity": lambda: copier.submit(source.state, image, upto=CAPACITY + 8, after=SYNCED),
        "bank": lambda: copier.submit(source.state, image, upto=2 * UPTO, after=SYNCED, src_bank=3),
        "request": lambda: copier.submit(source.state, image, upto=2 * UPTO, after=sc.Event(0)),
    }


@pytest.mark.parametrize("reason", bad_submits(None, None, None))
def test_nobody_goes_for_a_submit_that_is_refused(copier, memory, pool, reason):
    kept, source, before = two_images_that_fill_the_arena(copier, memory, pool)
    image = kept["b"]
    refused(bad_submits(copier, source, image)[reason], reason)
    assert ages(kept) == before
    assert copier.submit(source.state, image, upto=2 * UPTO, after=SYNCED).sync(timeout=60)
    assert kept.evicted() == ["a"]


def test_nobody_goes_for_a_submit_without_a_ticket(memory, pool, held):
    with sc.Copier(tickets=1) as copier:
        kept, source, before = two_images_that_fill_the_arena(copier, memory, pool)
        image, other = kept["b"], memory(LAYOUT, 2)
        ticket = copier.submit(source.state, other.state, upto=UPTO, after=held.wait)
        assert copier.submit(source.state, image, upto=2 * UPTO, after=SYNCED) is None
        assert ages(kept) == before
        held.open()
        assert ticket.sync(timeout=60)
        assert copier.submit(source.state, image, upto=2 * UPTO, after=SYNCED).sync(timeout=60)
        assert kept.evicted() == ["a"]


def test_the_source_of_a_copy_stays(copier, memory, pool):
    kept, source, target = pool(3), memory(LAYOUT, 1), memory(LAYOUT, 2)
    for key in "abc":
        park(copier, source, kept, key)
    del kept["c"]
    parked, copy = kept["a"], kept.image("d")
    kept["b"]  # so that the source would be the first to go
    assert copier.submit(source.state, kept["b"], upto=UPTO + 20, after=SYNCED).sync(timeout=60)
    kept["b"]
    assert copier.submit(parked, copy, upto=UPTO, after=SYNCED).sync(timeout=60)
    assert kept.evicted() == ["b"]
    assert copy.publish()
    assert copier.submit(copy, target.state, upto=UPTO, after=SYNCED).sync(timeout=60)
    assert differences(target, after_copy(source, target, UPTO)) == []


def test_a_copy_for_which_only_its_source_could_go_is_refused(copier, memory, pool):
    kept, source, _ = two_images_that_fill_the_arena(copier, memory, pool)
    del kept["b"]
    copy = kept.image("c")
    park(copier, source, kept, "a", upto=UPTO + 8)
    before = ages(kept)
    refused(lambda: copier.submit(kept["a"], copy, upto=UPTO, after=SYNCED), "capacity")
    assert sorted(kept.keys()) == sorted(before[0])
    assert ages(kept)[1:] == before[1:]


@pytest.mark.parametrize("asked", ["found", "made", "made with room", "deleted", "pinned", "listed", "evicting"])
def test_an_image_that_was_discarded_is_gone_from_the_pool(copier, memory, pool, asked):
    kept, source, _ = two_images_that_fill_the_arena(copier, memory, pool)
    dead = kept["a"]
    kept["b"]
    dead.discard()
    if asked in ("found", "deleted", "pinned"):
        act = {"found": kept.__getitem__, "deleted": kept.__delitem__, "pinned": kept.pin}[asked]
        with pytest.raises(KeyError):
            act("a")
        assert kept.usage()["misses"] == (asked == "found")
    elif asked == "listed":
        assert "a" not in kept
        assert (len(kept), list(kept), kept.usage()["images"]) == (1, ["b"], 1)
    elif asked == "evicting":
        park(copier, source, kept, "c")
        assert kept.evicted() == []
        park(copier, source, kept, "d")
        assert kept.evicted() == ["b"]
    else:
        image = kept.image("a", UPTO if asked == "made with room" else None)
        assert image is not dead
        assert not image.published
        assert kept["a"] is image
        park(copier, source, kept, "a")
    assert kept.usage()["evictions"] == (asked == "evicting")
    park(copier, source, kept, "a")
    assert kept.keys()[-1] == "a"  # as it was given


def test_a_pool_keeps_nothing_of_images_that_were_discarded(pool):
    kept = pool(1)
    for turn in range(1000):
        kept.image(str(turn), UPTO).discard()
    gc.collect()
    assert sum(isinstance(thing, sc.Image) for thing in gc.get_objects()) < 100
    assert kept.evicted() == []


POOL_CALLS = {
    "image": lambda pool: pool.image("c", UPTO),
    "pool[key]": lambda pool: pool["a"],
    "del pool[key]": lambda pool: pool.__delitem__("a"),
    "pin": lambda pool: pool.pin("a"),
    "unpin": lambda pool: pool.unpin("a"),
    "evicted": lambda pool: pool.evicted(),
    "keys": lambda pool: pool.keys(),
    "len": len,
    "iter": list,
    "in": lambda pool: "a" in pool,
    "usage": lambda pool: pool.usage(),
}


def test_a_hook_may_not_use_a_pool(copier, memory, pool):
    """A copier's lock is held around a hook, and who uses a pool may need it."""
    kept, source, before = two_images_that_fill_the_arena(copier, memory, pool)
    image, target, told = kept["b"], memory(LAYOUT, 2), []

    def act(layer, device, stream):
        for name, call in {**POOL_CALLS, "reserve": lambda _: image.reserve(2 * UPTO)}.items():
            told.append((name, refused(lambda call=call: call(kept), "hook")))
        assert "2 images" in repr(kept)

    hook = Hook(act)
    assert copier.submit(source.state, target.state, upto=UPTO, after=SYNCED, **hook.how).sync(timeout=60)
    assert hook.errors == []
    assert len(told) == (len(POOL_CALLS) + 1) * LAYOUT.layers
    assert ages(kept) == before


@pytest.mark.parametrize("call", POOL_CALLS)
def test_a_pool_whose_init_did_not_run_is_refused(call):
    with pytest.raises(TypeError, match="__init__ did not run"):
        POOL_CALLS[call](sc.Pool.__new__(sc.Pool))
    assert "0 images" in repr(sc.Pool.__new__(sc.Pool))


@pytest.mark.parametrize("key", ["", b"", "x" * 65, "ä" * 33, "\udc80", 7, None])
def test_keys_that_cannot_be_are_refused(pool, key):
    """And are not there."""
    kept = pool(1)
    for act in (kept.image, kept.__getitem__, kept.__delitem__, kept.pin, kept.unpin):
        with pytest.raises(ValueError if isinstance(key, (str, bytes)) else TypeError, match=r"key|surrogates"):
            act(key)
    assert key not in kept
    assert kept.usage()["misses"] == 0


def test_the_longest_key_is_found(pool):
    kept = pool(1)
    image = kept.image("ä" * 32)
    assert kept["ä" * 32] is image
    assert ("ä" * 32).encode() in kept


def test_random_use_against_a_model(copier, memory, pool):
    kept, random = pool(4), np.random.default_rng(8)
    sources = [memory(LAYOUT, tag) for tag in range(3)]
    target, model = memory(LAYOUT, 9), []
    for _ in range(200):
        key, source = str(random.integers(8)), int(random.integers(3))
        if random.random() < 0.5 and key in dict(model):
            model = [entry for entry in model if entry[0] != key] + [(key, dict(model)[key])]
            assert copier.submit(kept[key], target.state, upto=UPTO, after=SYNCED).sync(timeout=60)
            whose = sources[dict(model)[key]]
            assert differences(target, after_copy(whose, target, UPTO)) == []
        else:
            park(copier, sources[source], kept, key)
            model = [entry for entry in model if entry[0] != key] + [(key, source)]
            gone, model = model[:-4], model[-4:]
            assert kept.evicted() == [key for key, _ in gone]
        assert kept.keys() == [key for key, _ in model]


def test_a_pool_that_is_gone_leaves_the_images_that_somebody_has(copier, memory, pool):
    kept, source, target = pool(3), memory(LAYOUT, 1), memory(LAYOUT, 2)
    arena, image = kept.arena, park(copier, source, kept, "a")
    kept.image("b", UPTO)
    del kept
    gc.collect()
    assert arena.used == image.bytes
    assert copier.submit(image, target.state, upto=UPTO, after=SYNCED).sync(timeout=60)
    assert differences(target, after_copy(source, target, UPTO)) == []


def test_many_threads_share_a_pool(copier, memory, pool):
    kept, failed = pool(4), []
    sources = [memory(LAYOUT, tag) for tag in range(4)]

    def use(tag):
        try:
            for turn in range(30):
                key = f"{tag} {turn % 3}"
                image = kept.image(key)
                with contextlib.suppress(KeyError, sc.Refused):
                    kept.pin(key)
                    try:
                        park(copier, sources[tag], kept, key)
                        assert image.marks == (UPTO,)
                    finally:
                        kept.unpin(key)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert kept.arena.used == kept.usage()["bytes"]
    assert runtime.peek_last_error() == 0
