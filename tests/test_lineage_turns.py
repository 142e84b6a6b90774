"""What a turn of a long conversation costs: bytes with the real sizes, through main sessions, slots and images."""

import pytest

import strata_copy as sc
from fixtures import SYNCED
from strata_copy import host_runtime, presets, runtime

pytestmark = pytest.mark.host
TOKENS, NEW = 497_051, 383
FORMAT = {"k": 4 * 512, "v": 4 * 288, "k_scale": 4 * 16}  # bytes of a page of k8v4, which has 4 cells
RUNNING = 36 * 3_268_608 + 368_640 + 12 * (1536 + 4)  # recurrent rows, the window, tails and positions of 12 indexers
SPARE = 12 * 512


def rows(first, end):
    """Bytes of 12 layers: pages that hold cells [first, end), pooled rows of blocks finished there, the spare one."""
    pages, pooled = -(-end // 4) - first // 4, end // 4 + 1 - first // 4
    return 12 * (pages * sum(FORMAT.values()) + pooled * 512)


class Sessions:
    """Sessions with the real sizes and no bytes: copies are lost on their way."""

    def __init__(self, copier, names):
        layout = presets.qwen3_8_flash_next("k8v4", draft=False)
        self.copier, self.states = copier, {}
        for name in names:
            pinned = name.startswith("image")
            places = []
            for i, part in enumerate(layout.parts):
                units = layout.units(i, (600_000,))
                allocate = runtime.host_alloc if pinned else runtime.malloc
                places.append(
                    sc.Place(base=allocate(units * part.unit_bytes), units=units, kind="pinned" if pinned else "device")
                )
            self.states[name] = sc.State(layout, places)

    def __getitem__(self, name):
        return self.states[name]

    def copy(self, source, target, upto):
        for function in ("cudaMemcpyAsync", "cudaMemcpy2DAsync"):
            for nth in range(1, 600):
                host_runtime.skip(function, nth)
        ticket = self.copier.submit(self.states[source], self.states[target], upto=upto, after=SYNCED)
        host_runtime.clear_faults()
        extents = self.copier.plan(self.states[source], self.states[target]).extents(upto)
        assert extents == []  # the same again would move nothing
        assert ticket.sync(timeout=60)
        return ticket.bytes


@pytest.fixture
def sessions():
    host_runtime.configure(memory=1 << 40)
    with sc.Copier(tickets=8, layer_events=64) as copier:
        yield Sessions(copier, ["main", "slot", "other", "image", "image 2"])


def test_a_turn_of_383_tokens_in_497k_moves_what_changed(sessions):
    sessions["main"].advanced(TOKENS)
    whole = rows(0, TOKENS) + RUNNING + SPARE  # the constants of 12 indexers are as large as a spare row
    assert sessions.copy("main", "slot", TOKENS) == whole
    assert sessions.copy("slot", "image", TOKENS) == whole
    for turn in range(3):
        before, upto = TOKENS + turn * 2 * NEW, TOKENS + turn * 2 * NEW + NEW
        sessions["main"].advanced(upto)
        turn_bytes = rows(before, upto) + RUNNING
        assert turn_bytes < 123e6
        assert sessions.copy("main", "slot", upto) == turn_bytes
        sessions["slot"].advanced(upto + NEW)  # it decodes
        assert sessions.copy("slot", "image", upto + NEW) == rows(before, upto + NEW) + RUNNING  # park
        assert sessions.copy("slot", "main", upto + NEW) == rows(upto, upto + NEW) + RUNNING  # give back


def test_another_conversation_in_the_main_session_costs_nothing_more(sessions):
    sessions["main"].advanced(TOKENS)
    sessions.copy("main", "slot", TOKENS)
    sessions.copy("main", "image", TOKENS)
    sessions["main"].rewound(0)
    sessions["main"].advanced(9000)
    sessions.copy("main", "other", 9000)
    sessions["slot"].advanced(TOKENS + NEW)
    assert sessions.copy("slot", "image", TOKENS + NEW) == rows(TOKENS, TOKENS + NEW) + RUNNING
    sessions["slot"].advanced(TOKENS + NEW + 1)
    assert sessions.copy("slot", "image", TOKENS + NEW + 1) == rows(TOKENS + NEW, TOKENS + NEW + 1) + RUNNING


def test_a_take_after_a_park_without_decode_moves_nothing(sessions):
    sessions["slot"].advanced(TOKENS)
    sessions.copy("slot", "image", TOKENS)
    assert sessions.copy("image", "slot", TOKENS) == SPARE  # what the engine has there is its own
    assert sessions.copy("image", "slot", TOKENS) == 0
    assert sessions.copy("slot", "image", TOKENS) == 0
    assert sessions.copy("image", "other", TOKENS) > 5e9
    assert sessions.copy("other", "slot", TOKENS) == 0


def test_a_decode_that_no_submit_reads_is_undone_by_the_same_copy(sessions):
    """Running state and the units that are being filled are not what they were."""
    sessions["main"].advanced(TOKENS)
    sessions.copy("main", "slot", TOKENS)
    sessions["slot"].advanced(TOKENS + 60)
    assert sessions.copy("main", "slot", TOKENS) == rows(TOKENS, TOKENS) + RUNNING
    assert sessions.copy("main", "slot", TOKENS) == 0


def test_images_and_slots_hand_on_through_any_chain(sessions):
    sessions["main"].advanced(TOKENS)
    sessions.copy("main", "image", TOKENS)
    sessions.copy("image", "slot", TOKENS)
    sessions["slot"].advanced(TOKENS + 26)
    sessions.copy("slot", "main", TOKENS + 26)
    sessions["main"].advanced(TOKENS + NEW)
    assert sessions.copy("main", "image", TOKENS + NEW) == rows(TOKENS, TOKENS + NEW) + RUNNING
