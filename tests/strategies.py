"""Layouts, places and requests of any shape, for hypothesis."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import reference
import strata_copy as sc

random_cases = settings(max_examples=150, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def growths(draw, marks):
    rule = draw(st.sampled_from(["const", "state", "state", "linear", "linear"]))
    mark = draw(st.integers(0, marks - 1))
    if rule == "const":
        return sc.Growth(rule="const", mark=mark)
    if rule == "state":
        return sc.Growth.state(mark)
    cp_size = draw(st.sampled_from([1, 1, 2, 3]))
    return sc.Growth(
        rule="linear",
        mark=mark,
        q=draw(st.integers(1, 6)),
        ceil=draw(st.booleans()),
        extra=draw(st.integers(0, 2)),
        shift=draw(st.integers(-3, 3)),
        settle=draw(st.integers(0, 3)),
        cp_size=cp_size,
        cp_rank=draw(st.integers(0, cp_size - 1)),
        cp_interleave=draw(st.integers(1, 5)),
    )


@st.composite
def layouts(draw):
    marks = draw(st.integers(1, 2))
    parts, patches = [], []
    for layer in range(-1, draw(st.integers(1, 3))):
        for n in range(draw(st.integers(1, 3))):
            parts.append(
                sc.Part(
                    name=f"p{n}",
                    layer=layer,
                    unit_bytes=draw(st.sampled_from([8, 8, 16]) | st.integers(1, 24)),  # often alike in several layers
                    growth=draw(growths(marks)),
                    group=draw(st.sampled_from(["a", "b"])),
                    needed_by=draw(st.integers(max(layer, 0), 3)),
                    order=draw(st.integers(-1, 1)),
                    rep=draw(st.integers(1, 3)),
                )
            )
        patched = parts[-1]
        if patched.growth.rule == "linear" and draw(st.booleans()):
            source = sc.Growth.const()
            fields = ("layer", "unit_bytes", "group", "needed_by", "rep")
            parts.append(sc.Part(name="q", growth=source, **{name: getattr(patched, name) for name in fields}))
            patches.append(sc.Patch(layer=layer, part=patched.name, source="q"))
    return sc.Layout(parts, marks=("tokens", "other")[:marks], patches=patches)


@st.composite
def places(draw, layout, upto):
    """Fields of each part's place: enough units, and gaps between units, runs and banks."""
    fields = []
    for part in layout.parts:
        units = reference.units_at(part.growth, upto) + draw(st.integers(0, 2))
        stride = part.unit_bytes + draw(st.sampled_from([0, 0, 1, 8]))
        if part.rep > 1 and draw(st.booleans()):  # the runs of a unit beside each other, the units further apart
            rep_stride = part.unit_bytes + draw(st.sampled_from([0, 3]))
            stride = part.rep * rep_stride + draw(st.sampled_from([0, 5]))
            bank_stride = max(units, 1) * stride
        else:
            rep_stride = max(units, 1) * stride + draw(st.sampled_from([0, 7]))
            bank_stride = part.rep * rep_stride
        banks = draw(st.integers(1, 3)) if part.growth.rule == "state" else 1
        fields.append(
            {"units": units, "stride": stride, "rep_stride": rep_stride, "banks": banks, "bank_stride": bank_stride}
        )
    return fields


@st.composite
def copies(draw):
    layout = draw(layouts())
    upto = tuple(draw(st.integers(0, 40)) for _ in layout.marks)
    begin = draw(st.none() | st.tuples(*(st.integers(0, mark) for mark in upto)))
    return layout, upto, begin, draw(places(layout, upto)), draw(places(layout, upto))
