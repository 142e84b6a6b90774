"""What is refused is refused before anything happens: no byte written, nothing of the thread or the states changed,
and the text says what differs first."""

import ctypes
import dataclasses

import numpy as np
import pytest

import host_table
import strata_copy as sc
from fixtures import SCENE_LAYOUT as LAYOUT
from fixtures import SYNCED, allocate, read, release, small_layout, untouched, write
from strata_copy import runtime

CASES = {}


def case(reason, text, marks=()):
    """A function of the scene that is refused for `reason` with `text` in what is said; reason None: not by Refused,
    but as Python does."""

    def add(act):
        CASES[act.__name__.replace("_", " ")] = pytest.param(act, reason, text, marks=marks)
        return act

    return add


def to_other_layout(scene, layout, source=None):
    target = scene.make(layout, 3)
    source = scene.source if source is None else scene.make(source, 4)
    scene.copier.submit(source.state, target.state, upto=9, after=SYNCED)


def without(layout, drop):
    parts = [part for part in layout.parts if not drop(part)]
    kept = {(part.layer, part.name) for part in parts}
    patches = [patch for patch in layout.patches if (patch.layer, patch.part) in kept]
    return sc.Layout(parts, format=layout.format, patches=patches)


# ---- layouts


@case("layout", "format: 'k8v4', 'int8'")
def another_format(scene):
    to_other_layout(scene, small_layout("int8"))


@case("layout", "format: 'int8', 'int8-rotated'")
def another_rotation(scene):
    to_other_layout(scene, small_layout("int8-rotated"), small_layout("int8"))


@case("layout", "part 'k' of layer 3: only the first has it")
def another_set_of_layers(scene):
    to_other_layout(scene, without(LAYOUT, lambda part: part.layer == 3))


@case("layout", "part 'k_scale' of layer 1: only the first has it")
def a_part_is_missing(scene):
    to_other_layout(scene, without(LAYOUT, lambda part: part.name == "k_scale"))


@case("layout", "part 'recurrent' of layer 2: only the second has it")
def a_part_is_missing_in_the_source(scene):
    to_other_layout(scene, LAYOUT, without(LAYOUT, lambda part: (part.layer, part.name) == (2, "recurrent")))


@case("layout", "identity: none (0 bytes), 61646170746572 (7 bytes)")
def another_identity(scene):
    to_other_layout(scene, small_layout("k8v4", identity=b"adapter"))


@case("layout", "marks: ('tokens',), ('tokens', 'draft')")
def another_set_of_marks(scene):
    to_other_layout(scene, small_layout("k8v4", draft=True))


# ---- lengths


@case("capacity", "part 'k' of layer 1: 24 units needed, the target has 16")
def a_target_that_is_too_small(scene):
    target = scene.make(LAYOUT, 3, marks=(60,))
    scene.copier.submit(scene.source.state, target.state, upto=96, after=SYNCED)


@case("capacity", "part 'k' of layer 1: 24 units needed, the source has 16")
def a_source_that_is_too_small(scene):
    source = scene.make(LAYOUT, 3, marks=(60,))
    scene.copier.submit(source.state, scene.target.state, upto=96, after=SYNCED)


@case("capacity", "part 'k' of layer 1: 24 units needed, the target has 23")
def a_target_that_is_too_small_by_one_unit(scene):
    target = scene.make(LAYOUT, 3, marks=(88,))
    scene.copier.submit(scene.source.state, target.state, upto=96, after=SYNCED)


@case("capacity", "part 'k' of layer 1: 24 units needed, the source has 23")
def a_source_that_is_too_small_by_one_unit(scene):
    source = scene.make(LAYOUT, 3, marks=(88,))
    scene.copier.submit(source.state, scene.target.state, upto=96, after=SYNCED)


@case("mark", "mark 0: begin 0, upto -1")
def a_negative_mark(scene):
    scene.submit(upto=-1)


@case("mark", "0 <= begin <= upto < 2^62 is needed")
def a_mark_that_is_too_large(scene):
    scene.submit(upto=1 << 62)


@case("capacity", "units needed")
def a_mark_beyond_all_memory(scene):
    scene.submit(upto=(1 << 62) - 1)


@case(None, "")
def a_mark_beyond_64_bits(scene):
    scene.submit(upto=1 << 63)


@case("mark", "mark 0: begin 10, upto 9")
def begin_behind_the_end(scene):
    scene.submit(begin=10)


@case("mark", "mark 0: begin -3, upto 9")
def a_negative_begin(scene):
    scene.submit(begin=-3)


@case("mark", "2 marks given, the layout has 1")
def too_many_marks(scene):
    scene.submit(upto=(9, 9))


@case(None, "0 marks; the layout has 1: tokens")
def no_marks(scene):
    scene.submit(upto=())


@case(None, "begin and upto have different numbers of marks")
def a_begin_of_other_marks(scene):
    scene.submit(begin=(1, 2))


@case(None, "mark 0 is 9.0; a whole number is needed")
def a_mark_that_is_no_int(scene):
    scene.submit(upto=(9.0,))


@case(None, "mark 0 is True; a whole number is needed")
def a_mark_that_is_a_bool(scene):
    scene.submit(upto=True)


# ---- states


@case("same state", "source 0 is the target")
def a_state_onto_itself(scene):
    scene.copier.submit(scene.source.state, scene.source.state, upto=9, after=SYNCED)


@case("overlap", " shares bytes with ")
def two_states_on_one_memory(scene):
    other = sc.State(LAYOUT, scene.source.places)
    scene.copier.submit(scene.source.state, other, upto=9, after=SYNCED)


@case("overlap", "part 'idx_block_pos' of layer 3 shares bytes with 'idx_block_pos' of layer 3")
def states_that_share_one_byte(scene):
    i = LAYOUT.index(3, "idx_block_pos")
    moved = dataclasses.replace(scene.target.places[i], base=scene.source.places[i].base + 3, kind="device")
    other = sc.State(LAYOUT, [*scene.target.places[:i], moved, *scene.target.places[i + 1 :]])
    scene.copier.submit(scene.source.state, other, upto=9, after=SYNCED)


@case("generation", "the source has generation 1, 7 was named")
def another_generation_of_the_source(scene):
    scene.submit(src_generation=7)


@case("generation", "the target has generation 1, 7 was named")
def another_generation_of_the_target(scene):
    scene.submit(dst_generation=7)


# ---- groups and banks


@case(None, "src_generation is -1")
def a_negative_generation(scene):
    scene.submit(src_generation=-1)


@case(None, "dst_generation is 1.0; a whole number is needed")
def a_generation_that_is_no_int(scene):
    scene.submit(dst_generation=1.0)


@case(None, "group 'draft' is none of ('main',)")
def an_unknown_group(scene):
    scene.submit(groups=["draft"])


@case(None, "no group is named")
def no_group(scene):
    scene.submit(groups=[])


@case(None, "sources for ['draft', 'main']")
def a_source_for_an_unknown_group(scene):
    scene.copier.plan({"main": scene.source.state, "draft": scene.source.state}, scene.target.state)


@case("bank", "part 'window' of layer -1: source bank 1 asked, the place has 1")
def a_bank_that_the_source_has_not(scene):
    scene.submit(src_bank=1)


@case("bank", "target bank -1 asked")
def a_negative_bank(scene):
    scene.submit(dst_bank=-1)


@case("bank", "target bank 1 asked of group 1, in which no part has banks")
def a_bank_of_a_group_that_has_none(scene):
    layout = small_layout(draft=True)
    source, target = scene.make(layout, 3), scene.make(layout, 4)
    scene.copier.submit(source.state, target.state, upto=(9, 9), after=SYNCED, dst_bank={"draft": 1})


@case("bank", "source bank 1 asked of group 1, in which no part has banks")
def a_bank_of_a_group_without_banks(scene):
    layout = small_layout("k8v4", draft=True)
    source, target = scene.make(layout, 3), scene.make(layout, 4)
    scene.copier.submit(source.state, target.state, upto=(9, 9), src_bank={"draft": 1}, after=SYNCED)


@case(None, "nope")
def a_bank_of_an_unknown_group(scene):
    scene.submit(src_bank={"nope": 1})


# ---- what to wait for


@case("order", "nothing to wait for was named")
def nothing_to_wait_for(scene):
    scene.submit(after=None)


@case("order", "nothing to wait for was named")
def an_empty_list_to_wait_for(scene):
    scene.submit(after=[])


@case("stream", "stream 0 is a default stream")
def the_default_stream(scene):
    scene.submit(after=sc.Stream(0))


@case("stream", "stream 1 is a default stream")
def the_legacy_stream(scene):
    scene.submit(after=[sc.Stream(1)])


@case("stream", "stream 2 is a default stream")
def the_per_thread_stream(scene):
    scene.submit(after=[sc.Stream(2)])


@case("stream", "a stream of device 5, which the copier has not open")
def a_stream_of_a_device_that_is_not_open(scene):
    scene.submit(after=sc.Stream(runtime.stream_create(), 5))


@case("request", "wait 0: kind 0, handle")
def an_event_that_is_none(scene):
    scene.submit(after=sc.Event(0))


@case(None, "40 waits; at most 32")
def too_many_waits(scene):
    scene.submit(after=[sc.Event(runtime.event_create())] * 40)


@case(None, "handle is -1")
def a_stream_that_is_a_negative_number(scene):
    scene.submit(after=sc.Stream(-1))


@case(None, "a stream or event is an int handle or an object that has one, not str")
def an_event_that_is_a_text(scene):
    scene.submit(after=sc.Event("event"))


@case(None, "handle is True")
def a_stream_that_is_a_bool(scene):
    scene.submit(after=sc.Stream(True))


@case(None, "after is made of Event and Stream values, not int")
def a_wait_that_is_a_number(scene):
    scene.submit(after=[7])


# ---- places


def with_place(scene, layer, name, **fields):
    """A state over the source's memory with one place that is said otherwise."""
    i = LAYOUT.index(layer, name)
    places = list(scene.source.places)
    places[i] = dataclasses.replace(places[i], **fields)
    sc.State(LAYOUT, places)


@case(None, "ring is 1180591620717411303424; may be")
def a_ring_beyond_64_bits(scene):
    with_place(scene, 1, "v", ring=1 << 70)


@case(None, "page_group is True; a whole number is needed")
def a_page_group_that_is_a_bool(scene):
    with_place(scene, 1, "v", page_group=True)


@case("place", "should be pinned memory of device 0, CUDA says device memory of device 0")
def device_memory_said_to_be_pinned(scene):
    with_place(scene, 1, "v", kind="pinned")


@case("place", "should be pageable memory of device 0, CUDA says device memory of device 0")
def device_memory_said_to_be_pageable(scene):
    with_place(scene, 1, "v", kind="pageable")


@case("place", "should be device memory of device 0, CUDA says pinned memory")
def pinned_memory_said_to_be_the_devices(scene):
    with_place(scene, 1, "v", base=scene.target.address(1, "v"))


@case("place", "should be pinned memory of device 0, CUDA says pageable memory")
def pageable_memory_said_to_be_pinned(scene):
    with_place(scene, 0, "recurrent", base=np.zeros(1192, np.uint8), kind="pinned")


@case("place", "should be device memory of device 1, CUDA says device memory of device 0")
def memory_of_another_device(scene):
    with_place(scene, 1, "v", device=1)


@case("place", "part 'v' of layer 1: no memory at 0")
def no_address(scene):
    with_place(scene, 1, "v", base=0)


@case("place", "part 'v' of layer 1: no memory at 0xffffffffffffff00")
def an_address_that_wraps(scene):
    with_place(scene, 1, "v", base=2**64 - 256)


@case("place", "part 'v' of layer 1: units 25, stride 1151")
def a_stride_below_the_unit(scene):
    with_place(scene, 1, "v", stride=1151)


@case(None, "part 'v' of layer 1: stride is -1152")
def a_negative_stride(scene):
    with_place(scene, 1, "v", stride=-1152)


@case(None, "part 'v' of layer 1: units is -1")
def a_negative_capacity(scene):
    with_place(scene, 1, "v", units=-1)


@case(None, "part 'v' of layer 1: banks is 0")
def no_bank(scene):
    with_place(scene, 1, "v", banks=0)


@case("place", "banks 2, bank_stride 1")
def banks_that_overlap(scene):
    with_place(scene, 1, "v", banks=2, bank_stride=1)


@case(None, "part 'v' of layer 1: units * stride is ")
def a_capacity_that_overflows(scene):
    with_place(scene, 1, "v", units=2**63 - 1)


@case(None, "kind 'managed'; may be device, pinned, pageable")
def an_unknown_kind(scene):
    with_place(scene, 1, "v", kind="managed")


# With CUDA freed memory may stay mapped, and what lies behind an allocation may be another one.
HOST_ONLY = pytest.mark.host


@case("place", "should be device memory of device 0, CUDA says pageable memory", HOST_ONLY)
def device_memory_that_was_freed(scene):
    freed = allocate("device", 0, 1 << 20)
    runtime.free(freed)
    with_place(scene, 1, "v", base=freed)


@case("place", "part 'v' of layer 1: byte 28799 should be device memory of device 0, CUDA says pageable", HOST_ONLY)
def device_memory_that_ends_too_early(scene):
    short = allocate("device", 0, 4096)
    try:
        with_place(scene, 1, "v", base=short)
    finally:
        runtime.free(short)


@case("place", "should be pageable memory of device 0, CUDA says pinned memory")
def pageable_memory_whose_end_is_pinned(scene):
    raw = np.zeros(4 * 4096, np.uint8)
    page = -(-raw.ctypes.data // 4096) * 4096
    runtime.host_register(page + 4096, 4096)
    try:
        with_place(scene, 1, "v", base=page, units=6, kind="pageable")
    finally:
        runtime.host_unregister(page + 4096)


@case("place", "stride 9223372036854775807")
def strides_that_overflow(scene):
    with_place(scene, 1, "v", units=3, stride=2**63 - 1, rep_stride=1)


@case("place", "bank_stride 4611686018427387904")
def banks_that_overflow(scene):
    with_place(scene, 1, "v", banks=3, bank_stride=1 << 62)


@case(None, "part 'v' of layer 1: ndarray is read-only")
def memory_that_may_not_be_written(scene):
    array = np.zeros(25 * 1152, np.uint8)
    array.flags.writeable = False
    with_place(scene, 1, "v", base=array, kind="pageable")


@case(None, "part 'v' of layer 1: ndarray is not contiguous")
def an_array_with_gaps(scene):
    with_place(scene, 1, "v", base=np.zeros((25, 2304), np.uint8)[:, ::2], kind="pageable")


class DeviceArray:
    """What a framework's array on a device says of itself."""

    def __init__(self, address, shape, typestr="|u1"):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": shape, "typestr": typestr, "strides": None, "version": 3,
        }  # fmt: skip


# A part of (unit_bytes, rep), its place, and what is said of an array that is a byte too short.
SHORT_ARRAYS = {
    "dense": ((256, 1), {"units": 64}, "64 units of 256 need 16,384"),
    "strided": ((256, 1), {"units": 4, "stride": 512}, "4 units of 256, 512 apart, need 1,792"),
    "runs": ((256, 3), {"units": 4}, "4 units of 256 in 3 runs need 3,072"),
    "runs, strided": (
        (256, 2), {"units": 4, "stride": 300, "rep_stride": 2000}, "4 units of 256, 300 apart, in 2 runs need 3,156",
    ),
    "banks": ((256, 1), {"units": 1, "banks": 3}, "1 units of 256 in 3 banks need 768"),
    "banks, strided": ((256, 1), {"units": 1, "banks": 3, "bank_stride": 1000}, "1 units of 256 in 3 banks need 2,256"),
    "ring": ((256, 1), {"units": 10, "ring": 8}, "10 units of 256 need 2,560"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["pageable", "pinned", "device"])
@pytest.mark.parametrize("shape", SHORT_ARRAYS)
def test_an_array_that_is_shorter_than_its_place_is_refused(memory, shape, kind):
    """Also where the memory behind it is of the same kind; one that is just long enough is a place."""
    (unit_bytes, rep), fields, said = SHORT_ARRAYS[shape]
    growth = sc.Growth.linear() if "banks" not in fields else sc.Growth.state()
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=unit_bytes, rep=rep, growth=growth)])
    needed = int(said.split()[-1].replace(",", ""))
    base = allocate(kind, 0, 1 << 16)

    def state(size, **more):
        if kind == "device":
            array = DeviceArray(base, (size,))
        else:
            array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
        return sc.State(layout, [sc.Place(**{"base": array, "kind": kind, **fields, **more})])

    try:
        state(needed)
        state(1, base=base)  # an address says nothing of its length
        text = f"part 'k' of layer 0: the array has {needed - 1:,} bytes, {said}"
        with pytest.raises(ValueError, match=f"^{text}$"):
            state(needed - 1)
        if kind == "pinned":
            array = np.zeros(needed - 1, np.uint8)
            with pytest.raises(ValueError, match="part 'k' of layer 0: the array has"):
                state(needed, host_base=array)
    finally:
        release(kind, base)


class Tensor:
    """As PyTorch's, which has an __index__ for the number in a tensor of one."""

    def __init__(self, address):
        self.data_ptr = lambda: address

    def __index__(self):
        raise TypeError("only integer tensors of a single element can be converted to an index")


class UntypedTensor(Tensor):
    """As PyTorch's of a type that NumPy does not know, bfloat16 for one."""

    @property
    def __cuda_array_interface__(self):
        raise KeyError("bfloat16")


class DeviceTensor(DeviceArray, Tensor):
    """As CuPy's: with an interface, and an __index__."""

    __init__ = DeviceArray.__init__


@pytest.mark.parametrize(
    "base_of",
    [int, np.uint64, np.int64, Tensor, UntypedTensor, lambda address: DeviceTensor(address, (256,))],
    ids=["int", "uint64", "int64", "tensor", "tensor without a type", "device tensor"],
)
def test_what_has_an_address_is_used_by_it(memory, copier, base_of):
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=256, growth=sc.Growth.state())])
    target = memory(layout, 2)
    address = allocate("device", 0, 256)
    write(address, values := np.arange(256).astype(np.uint8))
    try:
        source = sc.State(layout, [sc.Place(base=base_of(address))])
        assert copier.submit(source, target.state, upto=9, after=SYNCED).sync()
        assert (read(target.places[0].base, 256) == values).all()
    finally:
        release("device", address)


@pytest.mark.parametrize(
    ("typestr", "shape", "fits"),
    [
        ("<f2", (4, 32), True),
        ("<f2", (4, 31), False),
        ("<U1", (64,), True),
        ("<U1", (63,), False),
        ("<M8[ns]", (32,), True),
        ("|V256", (), True),
        ("|V256", (0,), False),
        ("?", (1,), True),  # not told
    ],
)
def test_the_length_of_an_array_is_counted_in_its_own_items(typestr, shape, fits):
    layout = sc.Layout([sc.Part(name="k", layer=0, unit_bytes=256, growth=sc.Growth.state())])
    base = allocate("device", 0, 256)
    try:
        place = sc.Place(base=DeviceArray(base, shape, typestr))
        if fits:
            sc.State(layout, [place])
        else:
            with pytest.raises(ValueError, match=r"the array has .* bytes, 1 units of 256 need 256"):
                sc.State(layout, [place])
    finally:
        release("device", base)


@case(None, "part 'v' of layer 1: an address is an int or an array, not str")
def an_address_that_is_a_text(scene):
    with_place(scene, 1, "v", base="0x1000")


@case(None, "part 'v' of layer 1: address is -4096")
def a_negative_address(scene):
    with_place(scene, 1, "v", base=-4096)


@case("overlap", " shares bytes with 'idx_tail' of layer 3")
def two_parts_on_one_memory(scene):
    with_place(scene, 3, "idx_tail", base=scene.source.address(3, "v"))


@case("place", "bytes of pinned memory, but the registration that holds them ends after 4096")
def two_registrations_under_one_place(scene):
    raw = np.zeros(4 * 4096, np.uint8)
    page = -(-raw.ctypes.data // 4096) * 4096
    for start in (page, page + 4096):
        runtime.host_register(start, 4096)
    try:
        with_place(scene, 1, "v", base=page, units=6, kind="pinned")
    finally:
        for start in (page, page + 4096):
            runtime.host_unregister(start)


@case("place", "part 'idx_block_pos' of layer 3: ")
def memory_that_ends_too_early(scene):
    short = allocate("pinned", 0, 4096)
    try:
        with_place(scene, 3, "idx_block_pos", base=short + 4094, kind="pinned")
    finally:
        runtime.host_free(short)


@case("unsupported", "part 'v' of layer 1: rolled rows and pages are not done by this release")
def rolled_rows(scene):
    with_place(scene, 1, "v", ring=-1)


@case("place", "part 'recurrent' of layer 0: a ring of 1 units")
def a_ring_of_running_state(scene):
    with_place(scene, 0, "recurrent", ring=1)


@case("place", "part 'v' of layer 1: a ring of 99 units behind 0 sinks; the place has ")
def a_ring_that_is_larger_than_its_place(scene):
    with_place(scene, 1, "v", ring=99)


@case("unsupported", "part 'v' of layer 1: rolled rows and pages are not done by this release")
def pages_of_units(scene):
    with_place(scene, 1, "v", page_group=0, page_units=4, page_stride=4608)


@case(None, "places for the")
def too_few_places(scene):
    sc.State(LAYOUT, scene.source.places[:-1])


# ---- the copier


@case("capacity", "layer events are needed")
def more_events_than_a_ticket_has(scene):
    layout = sc.Layout([sc.Part(name="s", layer=layer, unit_bytes=8, growth=sc.Growth.state()) for layer in range(25)])
    scene.copier.plan(scene.make(layout, 3).state, scene.make(layout, 4).state)


@case(None, "a copier is open in this process")
def a_second_copier(scene):
    sc.Copier()


def ids():
    return [name.replace(" ", "-") for name in CASES]


@pytest.mark.parametrize("pending", [0, 101], ids=["", "pending-error"])
@pytest.mark.parametrize(("act", "reason", "text"), CASES.values(), ids=ids())
def test_refused(scene, act, reason, text, pending):
    error = scene.refuses(lambda: act(scene), pending)
    assert text in str(error)
    assert (type(error) is sc.Refused) == (reason is not None)
    if reason is not None:
        assert error.reason == reason
        assert (error.call, error.cuda_code, error.restored) == ("", 0, True)
    # The same states still copy.
    assert scene.submit().sync()


@pytest.mark.host
@pytest.mark.parametrize("what", ["stream", "event"])
def test_a_handle_that_was_destroyed_is_refused(scene, what):
    """With CUDA its use is undefined."""
    if what == "stream":
        wait = sc.Stream(runtime.stream_create())
        runtime.stream_destroy(wait.handle)
    else:
        wait = sc.Event(runtime.event_create())
        runtime.event_destroy(wait.handle)
    with pytest.raises(sc.Refused) as refused:
        scene.submit(after=wait)
    assert (refused.value.reason, refused.value.cuda_code) == ("cuda", 400)
    assert all(untouched(one) for one in scene.memories)
    assert scene.submit().sync()


@pytest.mark.host
def test_a_submit_inside_a_host_function_is_refused(scene):
    """CUDA may not be called there."""
    refused, stream = [], runtime.stream_create()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def call(_):
        try:
            scene.submit()
        except sc.CopyError as error:
            refused.append(error)

    host_table.ok(host_table.cuda.cudaLaunchHostFunc(stream, ctypes.cast(call, ctypes.c_void_p).value, 0))
    runtime.stream_synchronize(stream)
    assert [type(error) for error in refused] == [sc.Refused]
    assert (refused[0].reason, refused[0].cuda_code) == ("cuda", 800)
    assert all(untouched(one) for one in scene.memories)
    assert set(host_table.host.violations()) >= {f"{refused[0].call}: called inside a host function"}
    scene.copier.close()
    host_table.host.configure()


# ---- what is said


def refusals_of(name, copier):
    """What is said of parts of this name: of a state, and of a plan."""
    linear = sc.Part(name=name, layer=1000, unit_bytes=16, growth=sc.Growth.linear())
    other = dataclasses.replace(linear, name=name + name, layer=1001)
    one, two = sc.Layout([linear]), sc.Layout([linear, other])
    base = runtime.malloc(4096)
    place = sc.Place(base=base, units=8)
    refused = []

    def said(call):
        with pytest.raises(sc.Refused) as caught:
            call()
        refused.append(str(caught.value))

    said(lambda: sc.State(one, [dataclasses.replace(place, base=0)]))
    said(lambda: sc.State(one, [dataclasses.replace(place, kind="pinned")]))
    said(lambda: sc.State(one, [dataclasses.replace(place, stride=8)]))
    said(lambda: sc.State(two, [place, place]))
    states = [sc.State(one, [dataclasses.replace(place, base=base + at)]) for at in (0, 1024)]
    said(lambda: copier.submit(*states, upto=9, after=SYNCED))
    said(lambda: copier.submit(*states, upto=8, src_bank=1, after=SYNCED))
    runtime.free(base)
    return [text.replace(hex(base), "base").replace(hex(base + 128), "end") for text in refused]


def test_what_is_wrong_is_said_of_a_part_with_a_long_name_too(copier):
    """There is room for 191 letters, of which the name may take 32."""
    usual, long_ = refusals_of("k" * 32, copier), refusals_of("k" * 3000, copier)
    assert len(set(usual)) == 6
    assert long_ == usual
