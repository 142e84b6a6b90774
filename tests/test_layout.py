"""Layouts: growth against plain integers, identity, the encoding, and what is refused."""

import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
import strata_copy as sc
from fixtures import needed_by, small_layout
from strata_copy import presets

LINEAR = sc.Growth.linear()
K = sc.Part(name="k", layer=0, unit_bytes=16, growth=LINEAR)
CONST = dataclasses.replace(K, name="c", growth=sc.Growth.const())


def linear(**fields):
    return sc.Growth(rule="linear", **fields)


def with_growth(growth, marks=("tokens",)):
    return sc.Layout([dataclasses.replace(K, growth=growth)], marks=marks)


linears = st.builds(
    linear,
    q=st.integers(1, 300),
    ceil=st.booleans(),
    extra=st.integers(0, 3),
    shift=st.integers(-40, 40),
    settle=st.integers(0, 9),
).flatmap(
    lambda growth: st.integers(1, 8).flatmap(
        lambda size: st.builds(
            lambda rank, run: dataclasses.replace(growth, cp_size=size, cp_rank=rank, cp_interleave=run),
            st.integers(0, size - 1),
            st.integers(1, 64),
        )
    )
)
lengths = st.integers(0, 5000) | st.integers(0, 1 << 40)


@given(growth=linears, length=lengths)
@settings(max_examples=500, deadline=None, print_blob=True)
def test_units_are_those_of_the_formulas(growth, length):
    layout = with_growth(growth)
    assert layout.units(0, [length]) == reference.units_at(growth, [length])
    assert layout.bytes_at([length]) == 16 * reference.units_at(growth, [length])


@given(growth=linears, length=st.integers(0, 2000))
@settings(max_examples=200, deadline=None, print_blob=True)
def test_the_ranks_of_a_split_context_hold_every_token_once(growth, length):
    plain = dataclasses.replace(growth, q=1, extra=0, ceil=False)
    ranks = [dataclasses.replace(plain, cp_rank=rank) for rank in range(growth.cp_size)]
    held = sum(with_growth(rank).units(0, [length]) for rank in ranks)
    assert held == max(0, length + growth.shift)


def test_a_part_follows_the_mark_that_it_names():
    layout = sc.Layout(
        [K, dataclasses.replace(K, name="d", growth=linear(mark=1, q=4, ceil=True))], marks=("tokens", "draft")
    )
    assert [layout.units(i, [10, 9]) for i in range(2)] == [10, 3]
    assert layout.bytes_at([10, 9]) == 13 * 16


def test_constants_and_running_state_have_one_unit_at_any_length():
    layout = sc.Layout([dataclasses.replace(K, name=rule, growth=sc.Growth(rule=rule)) for rule in ("const", "state")])
    assert [layout.units(i, [length]) for i in range(2) for length in (0, 7)] == [1, 1, 1, 1]


def test_one_mark_may_be_given_as_a_number():
    layout = with_growth(linear(q=4))
    assert layout.units(0, 1000) == layout.units(0, [1000]) == layout.units(0, np.int64(1000)) == 250
    assert layout.bytes_at(1000) == layout.bytes_at(np.array([1000])) == 250 * 16
    with pytest.raises(ValueError, match="1 marks; the layout has 2: tokens, draft"):
        with_growth(LINEAR, marks=("tokens", "draft")).bytes_at(1000)
    for wrong in (True, 1.5, None):
        with pytest.raises(TypeError):
            layout.units(0, wrong)


# ---- identity

FINGERPRINTS = {
    "k8v4": "80b1c848f774206658f16dfa1cad3c01fc549b42b054019f971bc3fd0348db55",
    "int8": "1a8e2394918578ea4d177579889c8cce5989c5249777e6166b49da9dfa4b7aa1",
    "int8-rotated": "f9932d18b1a5da8bd1d9b42d911df2fec8fef2bff95064086db325d7c146c6ef",
}


@pytest.mark.parametrize("format", FINGERPRINTS)
def test_the_fingerprint_of_a_model_is_the_same_in_every_release(format):
    assert presets.qwen3_8_flash_next(format).fingerprint.hex() == FINGERPRINTS[format]


def test_the_fingerprint_is_the_same_in_another_process():
    code = "import sys; from strata_copy import presets; print(presets.qwen3_8_flash_next('int8').fingerprint.hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == FINGERPRINTS["int8"]


def changed_parts():
    """(what, a layout that differs in it alone, what `difference` says)"""
    growth_fields = {"q": 2, "ceil": True, "extra": 1, "shift": -1, "settle": 4, "mark": 1}
    for name, value in growth_fields.items():
        yield name, {"parts": [dataclasses.replace(K, growth=dataclasses.replace(LINEAR, **{name: value}))]}, f"{name} "
    split = dataclasses.replace(LINEAR, cp_size=2)
    yield "cp_size", {"parts": [dataclasses.replace(K, growth=split)]}, "cp_size 1, 2"
    part_fields = {
        "unit_bytes": 32,
        "group": "other",
        "order": 1,
        "rep": 2,
        "needed_by": 1,
        "shard": (0, 1, 2),
        "replica": (1, 2),
    }
    for name, value in part_fields.items():
        groups = {"groups": ("main", "other")}
        yield name, {"parts": [dataclasses.replace(K, **{name: value})], **groups}, f"{name} "
    yield "name", {"parts": [dataclasses.replace(K, name="v")]}, "part 'k' of layer 0: only the first has it"
    yield "layer", {"parts": [dataclasses.replace(K, layer=1)]}, "part 'k' of layer 0: only the first has it"
    yield "more", {"parts": [K, dataclasses.replace(K, name="v")]}, "part 'v' of layer 0: only the second has it"
    yield "format", {"format": "int8"}, "format: '', 'int8'"
    yield "marks", {"marks": ("cells", "draft")}, "marks: "
    yield "groups", {"groups": ("main", "b")}, "groups: "
    yield "identity", {"identity": b"adapter"}, "identity: none (0 bytes), 61646170746572 (7 bytes)"


@pytest.mark.parametrize(("what", "fields", "says"), list(changed_parts()))
def test_what_differs_makes_another_layout_and_is_named(what, fields, says):
    same = {"groups": fields["groups"]} if fields.get("groups") == ("main", "other") else {}
    base = {"parts": [K], "marks": ("tokens", "draft"), **same}
    one, other = sc.Layout(**base), sc.Layout(**{**base, **fields})
    assert one != other
    assert one.fingerprint != other.fingerprint
    assert says in one.difference(other)


def test_patches_and_order_belong_to_the_identity():
    parts = [dataclasses.replace(K, name=name) for name in "ab"] + [CONST]
    plain = sc.Layout(parts)
    patched = sc.Layout(parts, patches=[sc.Patch(layer=0, part="a", source="c")])
    assert plain.difference(patched) == "the patches differ in order or number"
    assert plain.difference(sc.Layout(parts[::-1])) == "the parts differ in order or number"


def test_equal_layouts_are_equal():
    one, other = (presets.qwen3_8_flash_next("k8v4", identity=b"x") for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one.difference(other) == ""
    assert one != "a layout"


def test_what_stands_for_a_default_is_the_same_as_the_default():
    assert sc.Layout([K]) == sc.Layout([dataclasses.replace(K, needed_by=0)], marks=("tokens",), groups=("main",))


# ---- encoding

LAYOUTS = [small_layout(format, draft=True, identity=b"\x00\xff") for format in ("fp16", "k8v4")] + [
    sc.Layout([dataclasses.replace(K, layer=-1, needed_by=3, shard=(1, 0, 2), replica=(0, 2), name="häufig")])
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_encoding_reads_back_as_the_same_layout(layout):
    again = sc.Layout.from_bytes(layout.to_bytes())
    assert again == layout
    assert again.to_bytes() == layout.to_bytes()
    assert (again.parts, again.patches, again.groups, again.marks) == (
        tuple(dataclasses.replace(part, needed_by=needed_by(part)) for part in layout.parts),
        layout.patches,
        layout.groups,
        layout.marks,
    )


class Named(sc.Layout):
    pass


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_survives_copying_and_pickling(layout):
    assert copy.copy(layout) is layout  # it never changes
    assert copy.deepcopy([layout])[0] is layout
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(layout, protocol))
        assert again == layout
        assert (again.fingerprint, again.to_bytes()) == (layout.fingerprint, layout.to_bytes())
    assert type(pickle.loads(pickle.dumps(Named([K])))) is Named
    with pytest.raises(TypeError, match="__init__ did not run"):
        pickle.dumps(sc.Layout.__new__(sc.Layout))


def test_another_encoding_is_refused():
    fields = json.loads(LAYOUTS[0].to_bytes())
    with pytest.raises(ValueError, match="layout encoding 99; this release reads 1"):
        sc.Layout.from_bytes(json.dumps({**fields, "encoding": 99}).encode())


PART = 'name = "k"\nlayer = 0\nunit_bytes = 8\n'
GROWTH = 'growth = { rule = "linear" }\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'mraks = ["a"]\n[[parts]]\n{PART}{GROWTH}', "the layout has 'mraks'; it may have .*marks"),
        (f"[[parts]]\n{PART}", "the growth of part 'k' of layer 0 has no rule"),
        (f"[[parts]]\n{PART}{GROWTH}bytes = 1\n", "part 'k' of layer 0 has 'bytes'; it may have .*unit_bytes"),
        (f'[[parts]]\nname = "k"\nlayer = 3\n{GROWTH}', "part 'k' of layer 3 has no unit_bytes"),
        (f'[[parts]]\n{PART}growth = {{ rule = "linear", every = 2 }}\n', "growth of part 'k' of layer 0 has 'every'"),
        (f'[[parts]]\n{PART}{GROWTH}[[patches]]\nlayer = 0\npart = "k"\n', "patch 0 has no source"),
        ('parts = ["k"]', "part 0 is 'k'; a table"),
        ("parts = 1", "parts is 1; a list"),
        (
            'parts = [{ name = "k", layer = 0, unit_bytes = 8, growth = "linear" }]',
            "growth of part 'k' .* is 'linear'",
        ),
        (f'marks = "tokens"\n[[parts]]\n{PART}{GROWTH}', "marks is 'tokens'; a list"),
        (f"[[parts]]\n{PART}{GROWTH}shard = 1\n", "part 'k' of layer 0: shard is 1; a tuple"),
        (f"[[parts]]\n{PART}{GROWTH}shard = [0, 1]\n", r"part 'k' of layer 0: shard is \(0, 1\); a tuple"),
        (f"identity = 5\n[[parts]]\n{PART}{GROWTH}", "identity is 5; hexadecimal digits"),
        (f'identity = "qwen"\n[[parts]]\n{PART}{GROWTH}', "identity is 'qwen'; hexadecimal digits"),
    ],
)
def test_a_file_in_which_something_is_misspelt_is_no_layout(tmp_path, text, said):
    """A word that is not known may be the one that tells two models apart."""
    file = tmp_path / "model.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        sc.Layout.load(file)


def test_the_files_of_the_docs_are_layouts(tmp_path):
    """The first one alone, and with the lines that are shown to go behind it."""
    text = (Path(__file__).parents[1] / "docs" / "layouts.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", text, re.S)
    file = tmp_path / "model.toml"
    names = []
    for n in range(len(blocks)):
        file.write_text("\n".join(blocks[: n + 1]))
        layout = sc.Layout.load(file)
        names.append(([part.name for part in layout.parts], [patch.source for patch in layout.patches]))
    assert names == [(["k", "v"], []), (["k", "v", "spare"], ["spare"])]


def test_a_file_says_the_same_as_the_code(tmp_path):
    file = tmp_path / "model.toml"
    file.write_text(
        textwrap.dedent("""
            format = "int8"
            identity = "0aff"
            marks = ["tokens", "draft"]

            [[parts]]
            name = "k"
            layer = 0
            unit_bytes = 2048
            growth = { rule = "linear", q = 4, ceil = true }

            [[parts]]
            name = "dead"
            layer = 0
            unit_bytes = 2048
            growth = { rule = "const" }
            shard = [0, 1, 2]

            [[patches]]
            layer = 0
            part = "k"
            source = "dead"
        """)
    )
    written = sc.Layout(
        [
            sc.Part(name="k", layer=0, unit_bytes=2048, growth=sc.Growth.linear(4, ceil=True)),
            sc.Part(name="dead", layer=0, unit_bytes=2048, growth=sc.Growth.const(), shard=(0, 1, 2)),
        ],
        marks=("tokens", "draft"),
        format="int8",
        identity=b"\x0a\xffrope",
        patches=[sc.Patch(layer=0, part="k", source="dead")],
    )
    assert sc.Layout.load(file, identity=b"rope") == written


# ---- what has no meaning


def refused_parts():
    yield {"name": ""}, "printable characters"
    yield {"name": "k\0"}, "printable characters"
    yield {"layer": -2}, "layer is -2; may be -1 to"
    yield {"unit_bytes": 0}, "unit_bytes is 0; may be 1 to"
    yield {"unit_bytes": (1 << 40) + 1}, "unit_bytes is 1099511627777"
    yield {"unit_bytes": 1.5}, "unit_bytes is 1.5"
    yield {"unit_bytes": True}, "unit_bytes is True"
    yield {"rep": 0}, "rep is 0; may be 1 to"
    yield {"needed_by": -1}, "needed_by is -1; may be 0 to"
    yield {"group": "draft"}, "group 'draft' is none of ('main',)"
    yield {"growth": linear(q=0)}, "q is 0; may be 1 to"
    yield {"growth": linear(extra=-1)}, "extra is -1"
    yield {"growth": linear(settle=-1)}, "settle is -1"
    yield {"growth": linear(mark=1)}, "mark is 1; may be 0 to 0"
    yield {"growth": linear(cp_size=0)}, "cp_size is 0"
    yield {"growth": linear(cp_size=2, cp_rank=2)}, "cp_rank is 2; may be 0 to 1"
    yield {"growth": linear(cp_interleave=0)}, "cp_interleave is 0"
    yield {"growth": linear(window=8)}, "window, sinks, lo and lo_mark belong to window growth"
    yield {"growth": sc.Growth(rule="window", window=8)}, "lo is 'last', 'chunk' or 'mark'"
    yield {"growth": sc.Growth.last(0)}, "window is 0; may be 1 to"
    yield {"growth": sc.Growth.last(8, sinks=-1)}, "sinks is -1"
    yield {"growth": sc.Growth(rule="window", window=8, lo="mark")}, "window is 8; may be 0 to 0"
    yield {"growth": sc.Growth(rule="window", lo="mark", lo_mark=1)}, "lo_mark is 1; may be 0 to 0"
    yield {"growth": sc.Growth(rule="log")}, "growth 'log'"
    for pair in ((), (0,), (0, 0), (0, 0, 1, 1), [0, 0, 1], "001", 5, None):
        yield {"shard": pair}, f"shard is {pair!r}; a tuple (axis, index, count) is needed"
    for pair in ((), (0,), (0, 1, 1), [0, 1], "01", 5, None):
        yield {"replica": pair}, f"replica is {pair!r}; a tuple (index, count) is needed"
    yield {"shard": (0, 1, 1)}, "shard index is 1; may be 0 to 0"
    yield {"shard": (0, 0, "2")}, "shard count is '2'"
    yield {"replica": (2, 2)}, "replica index is 2; may be 0 to 1"
    yield {"replica": (0, None)}, "replica count is None"
    for ceil in (-1, 0, 1, 2, 1.0, None, "", np.True_):
        yield {"growth": linear(ceil=ceil)}, f"ceil is {ceil!r}; may be True or False"
    yield {"growth": linear(cp_size="2")}, "cp_size is '2'"
    yield {"name": 5}, "printable characters"
    yield {"layer": "0"}, "layer is '0'; may be -1 to"


# Equal to a whole number, but not written as one.
UNLIKE = {"bool": bool, "float": float, "numpy": np.int64}
NUMBERS = [("part", name) for name in ("layer", "unit_bytes", "rep", "order", "needed_by")] + [
    ("growth", name)
    for name in ("mark", "q", "extra", "shift", "settle", "window", "sinks", "lo_mark", "cp_size", "cp_rank")
    + ("cp_interleave",)
]  # fmt: skip


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize(("of", "name"), NUMBERS)
def test_what_is_equal_is_written_alike_or_refused(of, name, unlike):
    """Else two layouts of equal values would have two fingerprints."""
    value = getattr(K if of == "part" else LINEAR, name) or 0
    other = UNLIKE[unlike](value)
    fields = {name: other} if of == "part" else {"growth": dataclasses.replace(LINEAR, **{name: other})}
    part = dataclasses.replace(K, **fields)
    if unlike == "bool" and other != value:
        return
    with pytest.raises(ValueError, match=f"{name} is "):
        sc.Layout([part])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"marks": (1,)}, "marks, groups and format are strings"),
        ({"groups": ("main", 1)}, "marks, groups and format are strings"),
        ({"format": None}, "marks, groups and format are strings"),
        ({"parts": ["k"]}, "'k' is no Part with a Growth"),
        ({"parts": [dataclasses.replace(K, growth="linear")]}, "is no Part with a Growth"),
        ({"patches": ["k"]}, "'k' is no Patch"),
    ],
)
def test_values_of_another_type_are_refused(fields, says):
    with pytest.raises(TypeError, match=says):
        sc.Layout(**{"parts": [K], **fields})


@pytest.mark.parametrize("layer", [False, 0.0])
def test_the_layer_of_a_patch_is_an_int(layer):
    with pytest.raises(ValueError, match=f"a patch of layer {layer}; an int is needed"):
        sc.Layout([K, CONST], patches=[sc.Patch(layer=layer, part="k", source="c")])


@pytest.mark.parametrize(("fields", "says"), list(refused_parts()))
def test_a_part_without_meaning_is_refused_by_name(fields, says):
    part = dataclasses.replace(dataclasses.replace(K, layer=7), **fields)
    where = "the session" if part.layer in (-1, -2) else f"layer {part.layer!r}"
    with pytest.raises(ValueError, match=re.escape(f"part {part.name!r} of {where}: ") + ".*" + re.escape(says)):
        sc.Layout([part], groups=("main",))


@pytest.mark.parametrize(
    ("parts", "fields", "says"),
    [
        ([], {}, "at least one part"),
        ([K, K], {}, "part 'k' of layer 0: stands twice"),
        ([K], {"marks": ()}, "a layout has 1 to 16"),
        ([K], {"marks": [f"m{i}" for i in range(17)]}, "a layout has 1 to 16"),
        ([K], {"groups": ("main", "main")}, "each once"),
        ([K], {"groups": ["main"] + [f"g{i}" for i in range(64)]}, "at most 64"),
        (
            [K],
            {"patches": [sc.Patch(layer=0, part="k", source="x")]},
            "a patch of layer 0 names 'x', which is no part of it",
        ),
        ([K], {"patches": [sc.Patch(layer=1, part="k", source="k")]}, "a patch of layer 1 names 'k'"),
        (
            [K, CONST],
            {"patches": [sc.Patch(layer=0, part="c", source="k")]},
            "part 'c' of layer 0: a patch sets the last unit",
        ),
        (
            [K, dataclasses.replace(K, name="v")],
            {"patches": [sc.Patch(layer=0, part="k", source="v")]},
            "part 'v' of layer 0: the source of a patch is one unit",
        ),
        (
            [K, CONST],
            {"patches": 2 * [sc.Patch(layer=0, part="k", source="c")]},
            "part 'k' of layer 0: is patched twice",
        ),
        (
            [K, dataclasses.replace(CONST, unit_bytes=8)],
            {"patches": [sc.Patch(layer=0, part="k", source="c")]},
            "part 'k' of layer 0: a patch needs units of one size",
        ),
        (
            [K, dataclasses.replace(CONST, needed_by=1)],
            {"patches": [sc.Patch(layer=0, part="k", source="c")]},
            "patch source 'c' must share its group and needed_by",
        ),
    ],
)
def test_a_layout_without_meaning_is_refused_by_name(parts, fields, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        sc.Layout(parts, **fields)


@pytest.mark.parametrize(
    ("marks", "says"), [([], "0 marks; the layout has 1: tokens"), ([-1], "mark tokens is -1"), ([1, 2], "2 marks")]
)
def test_marks_that_a_layout_has_not_are_refused(marks, says):
    with pytest.raises(ValueError, match=says):
        sc.Layout([K]).units(0, marks)


@pytest.mark.parametrize("part", [-1, 1])
def test_a_part_number_that_a_layout_has_not_is_refused(part):
    with pytest.raises(ValueError, match=r"part is .*; may be 0 to 0"):
        sc.Layout([K]).units(part, [1])
    with pytest.raises(KeyError):
        sc.Layout([K]).index(0, "v")


@pytest.mark.parametrize("error", [sc.Refused, sc.Failed, sc.Cancelled, sc.Poisoned])
def test_errors_survive_pickling(error):
    thrown = error("text", {"reason": "layout", "device": 1, "wanted": 5})
    again = pickle.loads(pickle.dumps(thrown))
    assert type(again) is error
    assert (str(again), again.fields, again.reason, again.wanted) == ("text", thrown.fields, "layout", 5)
    with pytest.raises(AttributeError):
        _ = again.colour
