"""An arena pins memory piece by piece: within its budget at every call, as much as it is given, and never in the way of
others."""

import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import strata_copy as sc
from fixtures import HOST, SYNCED, Mapped, run_python
from strata_copy import host_runtime, runtime

MIB = 1 << 20
PIECE = 4 * MIB
INVALID_VALUE, MEMORY_ALLOCATION, ALREADY_REGISTERED, NOT_SUPPORTED, ILLEGAL_ADDRESS = 1, 2, 712, 801, 700


def opened(pieces, **how):
    return sc.Arena(pieces * PIECE, **{"piece": PIECE, "pause": 0.0, "threads": 2, **how})


def test_pieces_are_registered_one_by_one_up_to_the_budget():
    with sc.Arena(3 * PIECE + 3 * 4096 + 100, piece=PIECE, pause=0.0) as arena:
        sizes = [size for _, size, _ in arena.pieces]
        assert sorted(sizes) == [3 * 4096, PIECE, PIECE, PIECE]
        assert arena.pinned == arena.registered == sum(sizes) == arena.budget
        assert (arena.used, arena.growing, arena.refusal) == (0, False, "")
        for base, size, kind in arena.pieces:
            assert kind == "made"
            assert runtime.pointer_range(base) == (base, size)
            assert not runtime.view(base, size).any()
        if HOST:
            assert host_runtime.registered() == (arena.budget, arena.budget)
    assert arena.pinned == arena.registered == 0
    assert arena.pieces == []
    if HOST:
        assert host_runtime.live()["registrations"] == 0
    arena.close()


def test_an_arena_without_a_budget_asks_cuda_for_nothing():
    with sc.Arena(0) as arena:
        assert arena.pieces == []
        if HOST:
            assert host_runtime.calls()["cudaHostRegister"] == 0


@pytest.mark.parametrize(
    "wrong", [{"budget": -1}, {"budget": 1.5}, {"piece": 0}, {"pause": "x"}, {"threads": -1}, {"device": -1}]
)
def test_numbers_without_a_meaning_are_refused(wrong):
    with pytest.raises((ValueError, TypeError)):
        sc.Arena(**{"budget": PIECE, "piece": PIECE, **wrong})


def test_the_callers_thread_makes_no_cuda_call_that_changes_it():
    before = runtime.get_device(), runtime.capture_mode(1)
    with opened(2):
        pass
    assert (runtime.get_device(), runtime.capture_mode(before[1])) == (before[0], 1)
    assert runtime.peek_last_error() == 0


def test_a_global_capture_beside_it_stays_valid():
    stream = runtime.stream_create()
    runtime.stream_begin_capture(stream, 0)
    with opened(4) as arena:
        assert arena.pinned == 4 * PIECE
    with sc.Arena(2 * PIECE, piece=PIECE) as arena:
        assert arena.pinned == 2 * PIECE
    assert runtime.stream_is_capturing(stream) == 1
    runtime.stream_end_capture(stream)
    runtime.stream_destroy(stream)


def test_it_can_be_used_from_the_first_piece_while_it_grows():
    with opened(40, background=True, pause=0.02) as arena:
        assert 0 < arena.pinned < arena.budget
        assert arena.growing
        assert not arena.wait(timeout=0.0)
        assert arena.wait(3 * PIECE, timeout=60)
        assert arena.pinned >= 3 * PIECE
    assert arena.registered == 0


def test_closing_ends_the_growth():
    arena = opened(10**4, background=True, pause=0.01)
    arena.close()
    assert not arena.growing
    assert arena.pieces == []


def test_others_get_through_between_two_pieces():
    """With no pause a copy loop beside it waits for the end of all pieces: so there is one."""
    began = time.monotonic()
    with opened(5, pause=0.05):
        assert time.monotonic() - began >= 4 * 0.05


# ---- several threads


def at_once(*calls):
    """The outcome of each call, made by a thread of its own at the same time: None, or the reason of a refusal."""
    barrier, outcomes = threading.Barrier(len(calls)), [None] * len(calls)

    def make(i, call):
        barrier.wait()
        try:
            call()
        except sc.Refused as refused:
            outcomes[i] = refused.reason

    threads = [threading.Thread(target=make, args=(i, call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("background", [False, True])
def test_threads_that_close_at_once_give_everything_back_once(background):
    """What is unregistered and unmapped twice may be somebody else's by then."""
    for _ in range(20):
        arena = sc.Arena(64 * 4096, piece=4096, pause=0.0, threads=1, background=background)
        left = []

        def close(arena=arena, left=left):
            arena.close()
            left.append((arena.registered, arena.pinned, arena.pieces, arena.growing))

        assert at_once(close, close, close) == [None] * 3
        assert left == [(0, 0, [], False)] * 3  # whichever closes: after `close` it is closed
    if HOST:
        assert host_runtime.live()["registrations"] == 0


@pytest.mark.host
def test_threads_that_close_an_arena_which_images_use_are_all_refused():
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=64, growth=sc.Growth.linear())])
    with opened(1) as arena:
        image = sc.Image(arena, layout)
        image.reserve(8)
        assert arena.used > 0
        assert at_once(*[arena.close] * 3) == ["busy"] * 3
        image.discard()


@pytest.mark.parametrize("what", ["attach", "register", "foreign"])
def test_memory_is_given_to_an_arena_before_it_closes_or_not_at_all(what):
    for _ in range(20):
        mapped = Mapped(4 * 4096)
        arena = sc.Arena(64 * 4096, piece=4096, pause=10.0, threads=1, background=True)
        if what == "foreign":
            runtime.host_register(mapped.base, mapped.size)
        add = arena.register if what == "register" else arena.attach
        outcomes = at_once(arena.close, lambda add=add, mapped=mapped: add(mapped.base, mapped.size))
        assert outcomes in ([None, None], [None, "closed"])
        assert (arena.registered, arena.pinned, arena.pieces) == (0, 0, [])
        if what == "foreign":
            assert runtime.pointer_range(mapped.base) == (mapped.base, mapped.size)
            runtime.host_unregister(mapped.base)
        else:
            with pytest.raises(runtime.CudaError):
                runtime.pointer_range(mapped.base)


def test_threads_that_take_the_same_memory_do_it_once():
    for _ in range(20):
        mapped = Mapped(4 * 4096)
        with sc.Arena(64 * 4096, piece=4096, pause=10.0, threads=1, background=True) as arena:
            before = arena.registered
            outcomes = at_once(*[lambda arena=arena, mapped=mapped: arena.attach(mapped.base, mapped.size)] * 3)
            assert sorted(outcomes, key=str) == [None, "overlap", "overlap"]
            assert arena.registered == before + mapped.size
            in_place = Mapped(4096)
            arena.register(in_place.base, in_place.size)
            outcomes = at_once(*[lambda arena=arena, memory=in_place: arena.unregister(memory.base)] * 3)
            assert sorted(outcomes, key=str) == [None, "place", "place"]
            assert arena.registered == before + mapped.size


def test_a_closed_arena_takes_no_memory():
    mapped = Mapped(2 * PIECE)
    arena = opened(2, background=True, pause=10.0)
    arena.close()
    runtime.host_register(mapped.base, PIECE)
    for base in (mapped.base, mapped.base + PIECE):  # somebody else's, and nobody's
        for add in (arena.attach, arena.register):
            with pytest.raises(sc.Refused, match="the arena is closed") as refused:
                add(base, PIECE)
            assert refused.value.reason == "closed"
    assert (arena.registered, arena.pinned, arena.pieces) == (0, 0, [])
    assert arena.wait(timeout=0)
    runtime.host_unregister(mapped.base)


# ---- refusals


ARENA = {
    "close": lambda arena: arena.close(),
    "wait": lambda arena: arena.wait(),
    "attach": lambda arena: arena.attach(4096, 4096),
    "register": lambda arena: arena.register(4096, 4096),
    "unregister": lambda arena: arena.unregister(4096),
    "repr": repr,
    **{
        name: lambda arena, name=name: getattr(arena, name)
        for name in ("budget", "pinned", "registered", "used", "growing", "refusal", "node", "pieces")
    },
}


@pytest.mark.parametrize("what", ARENA)
def test_an_arena_whose_init_did_not_run_is_refused(what):
    assert {name for name in vars(sc.Arena) if not name.startswith("_")} == set(ARENA) - {"repr"}
    with pytest.raises(TypeError, match="an Arena is needed"):
        ARENA[what](sc.Arena.__new__(sc.Arena))


@pytest.mark.parametrize("call", ["attach", "register"])
@pytest.mark.parametrize(("base", "size"), [(2**64 - 4096, 4096), (2**64 - 4096, 8192), (4096, 2**64 - 4096)])
def test_memory_that_goes_on_beyond_the_last_address_is_refused(call, base, size):
    memory = Mapped(PIECE)
    with opened(2, background=True, pause=10.0) as arena:
        before = arena.registered, arena.pinned, arena.pieces
        with pytest.raises((sc.Refused, ValueError), match=r"beyond the last address|may be 1 to"):
            getattr(arena, call)(base, size)
        assert (arena.registered, arena.pinned, arena.pieces) == before
        arena.attach(memory.base, PIECE)  # the budget has it still


@pytest.mark.host
@pytest.mark.parametrize("code", [INVALID_VALUE, MEMORY_ALLOCATION, ALREADY_REGISTERED, NOT_SUPPORTED])
@pytest.mark.parametrize("nth", range(1, 6))
def test_a_registration_that_fails_once_is_tried_again(nth, code):
    host_runtime.fail("cudaHostRegister", nth, code)
    with opened(5) as arena:
        assert arena.pinned == 5 * PIECE
        assert arena.refusal == ""
        assert host_runtime.registered() == (5 * PIECE, 5 * PIECE)
    assert host_runtime.clear_faults() == 1
    assert host_runtime.live()["registrations"] == 0


@pytest.mark.host
@pytest.mark.parametrize("code", [INVALID_VALUE, MEMORY_ALLOCATION, NOT_SUPPORTED, ILLEGAL_ADDRESS])
@pytest.mark.parametrize("nth", range(2, 6))
def test_what_is_pinned_when_cuda_refuses_is_kept(nth, code):
    host_runtime.fail("cudaHostRegister", nth, code, forever=True)
    arena = opened(5)
    assert arena.pinned == arena.registered == (nth - 1) * PIECE
    assert "cudaHostRegister" in arena.refusal
    assert str(code) in arena.refusal
    assert not arena.growing
    assert host_runtime.registered()[1] == (nth - 1) * PIECE
    host_runtime.clear_faults()
    if code != ILLEGAL_ADDRESS:
        arena.close()
        assert host_runtime.live()["registrations"] == 0
    else:
        with pytest.raises(sc.CopyError):
            arena.close()


@pytest.mark.host
def test_memory_of_a_piece_that_is_not_registered_any_more_is_given_back():
    """The next piece is there before the one before it is registered."""

    def resident():
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * mmap.PAGESIZE

    piece = 128 * MIB
    host_runtime.fail("cudaHostRegister", 2, NOT_SUPPORTED, forever=True)
    before = resident()
    with sc.Arena(4 * piece, piece=piece, pause=0.0, threads=2) as arena:
        assert arena.pinned == piece
        assert resident() - before < 1.5 * piece
    assert resident() - before < piece / 2


@pytest.mark.host
def test_no_piece_at_all_is_an_error():
    host_runtime.fail("cudaHostRegister", 1, MEMORY_ALLOCATION, forever=True)
    with pytest.raises(sc.Refused, match="cudaHostRegister") as refused:
        opened(3)
    assert refused.value.cuda_code == MEMORY_ALLOCATION
    assert host_runtime.live()["registrations"] == 0
    assert host_runtime.registered()[1] == 0


@pytest.mark.host
def test_smaller_pieces_are_taken_where_larger_ones_are_refused():
    """As where pinned memory is short."""
    host_runtime.configure(pinned=2 * PIECE + PIECE // 4 + PIECE // 8)
    with opened(5) as arena:
        assert [size for _, size, _ in sorted(arena.pieces, key=lambda piece: -piece[1])] == [
            PIECE, PIECE, PIECE // 4, PIECE // 8,
        ]  # fmt: skip
        assert "cudaHostRegister" in arena.refusal
        assert host_runtime.registered()[1] <= arena.budget
    assert host_runtime.live()["registrations"] == 0


@pytest.mark.host
@pytest.mark.parametrize("nth", range(1, 4))
def test_a_piece_that_cuda_does_not_take_back_stays_mapped_and_counted(nth):
    arena = opened(3)
    host_runtime.fail("cudaHostUnregister", nth, INVALID_VALUE, forever=False)
    with pytest.raises(sc.Refused, match="cudaHostUnregister"):
        arena.close()
    ((base, size, _),) = arena.pieces
    assert arena.registered == size == PIECE
    runtime.view(base, size)[:] = 1
    runtime.host_unregister(base)


@pytest.mark.host
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(sc.Refused, match="cudaSetDevice"):
        opened(1, device=7)


@pytest.mark.host
def test_a_fork_gives_nothing_back():
    out = run_python(
        """
        import os, sys
        import strata_copy as sc
        from strata_copy import host_runtime, runtime
        runtime.open("host")
        arena = sc.Arena(8 << 20, piece=4 << 20)
        pid = os.fork()
        if pid == 0:
            try:
                arena.close()
            except sc.Refused as refused:
                os._exit(7 if "fork" in str(refused) else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), host_runtime.live()["registrations"])
        arena.close()
        """
    )
    assert out.split() == ["7", "2"]


@pytest.mark.host
def test_a_process_may_end_while_an_arena_grows():
    out = run_python(
        """
        import strata_copy as sc
        from strata_copy import runtime
        runtime.open("host")
        arena = sc.Arena(1 << 34, piece=1 << 20, pause=0.001, background=True)
        print(arena.growing)
        """
    )
    assert out.split() == ["True"]


# ---- memory of the engine's


def test_attached_memory_is_registered_in_pieces_and_given_back():
    mapped = Mapped(3 * PIECE)
    with opened(4, piece=PIECE, background=True, pause=10.0) as arena:  # one piece is made, three are left
        arena.attach(mapped.base, 2 * PIECE)
        attached = [piece for piece in arena.pieces if piece[2] == "attached"]
        assert attached == [(mapped.base, PIECE, "attached"), (mapped.base + PIECE, PIECE, "attached")]
        assert arena.registered == 3 * PIECE
        with pytest.raises(sc.Refused, match="belongs to the arena already"):
            arena.attach(mapped.base + PIECE, 2 * PIECE)
        with pytest.raises(sc.Refused, match="budget") as refused:
            arena.attach(Mapped(2 * PIECE).base, 2 * PIECE)
        assert (refused.value.wanted, refused.value.found) == (2 * PIECE, PIECE)
    with pytest.raises(runtime.CudaError):
        runtime.pointer_range(mapped.base)


def test_registrations_of_others_are_used_and_left_alone():
    mapped = Mapped(2 * PIECE)
    runtime.host_register(mapped.base, 2 * PIECE)
    with opened(1) as arena:
        arena.attach(mapped.base + 4096, PIECE)
        assert arena.pieces[-1] == (mapped.base + 4096, PIECE, "foreign") or arena.pieces[0][2] == "foreign"
        assert arena.pinned == 2 * PIECE
        assert arena.registered == PIECE
        arena.register(mapped.base, PIECE)
        assert arena.registered == PIECE
    assert runtime.pointer_range(mapped.base) == (mapped.base, 2 * PIECE)
    runtime.host_unregister(mapped.base)


@pytest.mark.parametrize("registered", [(0, PIECE), (PIECE, PIECE)])
def test_memory_that_is_half_registered_by_others_is_refused(registered):
    mapped = Mapped(2 * PIECE)
    at, size = registered
    runtime.host_register(mapped.base + at, size)
    with sc.Arena(4 * PIECE, piece=PIECE, background=True, pause=10.0) as arena:
        pieces = arena.pieces
        with pytest.raises(sc.Refused, match="somebody has registered a part"):
            arena.attach(mapped.base, 2 * PIECE)
        assert arena.pieces == pieces
    runtime.host_unregister(mapped.base + at)


@pytest.mark.host
@pytest.mark.parametrize("nth", range(1, 4))
def test_attaching_is_whole_or_not_at_all(nth):
    mapped = Mapped(3 * PIECE)
    with opened(10, background=True, pause=10.0) as arena:
        before = arena.pieces, arena.registered, host_runtime.live()
        host_runtime.fail("cudaHostRegister", nth, MEMORY_ALLOCATION)
        with pytest.raises(sc.Refused, match="cudaHostRegister"):
            arena.attach(mapped.base, 3 * PIECE)
        assert (arena.pieces, arena.registered, host_runtime.live()) == before
        arena.attach(mapped.base, 3 * PIECE)


def test_memory_registered_in_place_is_pinned_until_it_is_unregistered():
    mapped = Mapped(PIECE)
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=64, growth=sc.Growth.linear())])
    place = sc.Place(base=mapped.base, units=100, kind="pinned")
    with opened(2, background=True, pause=10.0) as arena:
        pinned = arena.pinned
        with pytest.raises(sc.Refused, match="pageable memory"):
            sc.State(layout, [place])
        arena.register(mapped.base, PIECE)
        sc.State(layout, [place])
        assert arena.pinned == pinned  # the engine goes on using it
        assert arena.registered == 2 * PIECE
        for wrong in (mapped.base + 4096, arena.pieces[0][0], 4096):
            if wrong != mapped.base:
                with pytest.raises(sc.Refused, match="no memory that begins at"):
                    arena.unregister(wrong)
        arena.unregister(mapped.base)
        assert arena.registered == PIECE
        with pytest.raises(sc.Refused):
            arena.register(mapped.base + 1, PIECE - 1)
        with pytest.raises(sc.Refused):
            sc.State(layout, [place])


@pytest.mark.parametrize("call", ["attach", "register"])
def test_more_of_an_array_than_it_has_is_refused(call):
    values = np.zeros(1 << 20, np.uint8)
    with opened(2, background=True, pause=10.0) as arena:
        before = arena.registered
        with pytest.raises(ValueError, match="the array has 1,048,576 bytes, 1,048,577 are asked"):
            getattr(arena, call)(values, len(values) + 1)
        assert arena.registered == before


def test_many_threads_attach_within_one_budget():
    mapped = [Mapped(PIECE) for _ in range(8)]
    with opened(4, background=True, pause=10.0) as arena:
        refused = []

        def attach(memory):
            try:
                arena.attach(memory.base, PIECE)
            except sc.Refused as error:
                refused.append(error.reason)

        threads = [threading.Thread(target=attach, args=(memory,)) for memory in mapped]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refused == ["capacity"] * 5
        assert arena.registered == 4 * PIECE
        if HOST:
            assert host_runtime.registered()[1] == 4 * PIECE


def test_a_dropped_arena_says_so_and_gives_everything_back():
    arena = opened(2)
    with pytest.warns(ResourceWarning, match="without close"):
        del arena
    if HOST:
        assert host_runtime.live()["registrations"] == 0


def test_an_arena_that_is_dropped_under_a_copy_goes_with_its_ticket(held, copier):
    """Nobody else has the image, nor the arena. The copy still writes it."""
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=64, growth=sc.Growth.linear())])
    bases = runtime.malloc(6400), runtime.malloc(6400)
    source, other = (sc.State(layout, [sc.Place(base=base, units=100)]) for base in bases)
    arena = opened(1)
    ticket = copier.submit(source, sc.Image(arena, layout), upto=100, after=held.wait)
    del arena
    if HOST:
        assert host_runtime.live()["registrations"] == 1
    held.open()
    assert ticket.sync(timeout=60)
    del ticket
    with pytest.warns(ResourceWarning, match="without close"):
        copier.finished()
    assert copier.submit(source, other, upto=100, after=SYNCED).sync(timeout=60)
    if HOST:
        assert host_runtime.live()["registrations"] == 0
    for base in bases:
        runtime.free(base)


def test_memory_of_a_piece_can_be_copied_to(copier):
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=64, growth=sc.Growth.linear())])
    source, values = runtime.malloc(6400), np.arange(6400).astype(np.uint8)
    runtime.memcpy(source, values.ctypes.data, 6400)
    runtime.device_synchronize()
    with opened(1) as arena:
        base = arena.pieces[0][0]
        states = (
            sc.State(layout, [sc.Place(base=source, units=100)]),
            sc.State(layout, [sc.Place(base=base, units=100, kind="pinned")]),
        )
        assert copier.submit(*states, upto=100, after=SYNCED).sync(timeout=60)
        assert np.array_equal(runtime.view(base, 6400), values)
    runtime.free(source)
