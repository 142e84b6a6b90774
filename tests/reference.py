"""What a copy has to move, said again in plain Python integers: the growth formulas of docs/layouts.md and the bytes
behind them.

Nothing here is shared with the library. The tests compare it with what the library does.
"""

import dataclasses


def clamp(value, low, high):
    return max(low, min(value, high))


def local_tokens(growth, marks):
    """Tokens of a part at `marks` that its rank holds."""
    t = max(0, marks[growth.mark] + growth.shift)
    if growth.cp_size == 1:
        return t
    run = growth.cp_interleave
    whole, rest = divmod(t, run * growth.cp_size)
    return whole * run + clamp(rest - growth.cp_rank * run, 0, run)


def units_at(growth, marks):
    """hi(m): units that exist."""
    if growth.rule in ("const", "state"):
        return 1
    tokens = local_tokens(growth, marks)
    units = -(-tokens // growth.q) if growth.ceil else tokens // growth.q
    return units + (growth.extra if marks[growth.mark] + growth.shift > 0 else 0)


def live_units(growth, marks):
    """The units that are there at `marks`: all of them, but of a window its sinks and what it has not lost."""
    units = range(units_at(growth, marks))
    if growth.rule != "window":
        return list(units)
    seen = max(0, marks[growth.mark] + growth.shift)
    if growth.lo == "mark":
        first = min(marks[growth.lo_mark], seen) // growth.q
    elif growth.lo == "last":
        first = max(0, local_tokens(growth, marks) - growth.window) // growth.q
    else:
        tokens = local_tokens(growth, marks)
        first = (tokens - tokens % growth.window) // growth.q
    return [unit for unit in units if unit < growth.sinks or unit >= first]


def settled_at(growth, marks):
    """settled(b): units that no append after `marks` can change. Partly filled and extra units are never among them."""
    if growth.settle == 0:
        return 0
    whole = local_tokens(growth, marks) // growth.q
    return whole - whole % growth.settle


def first_unit(growth, begin, end):
    """The first unit that moves, where the target has everything up to `begin` already."""
    if begin is None or growth.rule in ("state", "window"):
        return 0
    if growth.rule == "const":
        return 1 if begin[growth.mark] > 0 else 0
    return min(settled_at(growth, begin), end)


def moved_units(layout, upto, begin=None, groups=None, rings=()):
    """(target part, target unit, source part, source unit) of every unit that a copy moves. rings: numbers of the parts
    that the target keeps in a ring, where nothing is known of the rows before `begin`."""
    patches = {(patch.layer, patch.part): patch.source for patch in layout.patches}
    numbers = {(part.layer, part.name): i for i, part in enumerate(layout.parts)}
    moved = []
    for i, part in enumerate(layout.parts):
        if groups is not None and part.group not in groups:
            continue
        end = units_at(part.growth, upto)
        first = 0 if i in rings else first_unit(part.growth, begin, end)
        for unit in (unit for unit in live_units(part.growth, upto) if unit >= first):
            source = patches.get((part.layer, part.name))
            if source is not None and unit == end - 1:
                moved.append((i, unit, numbers[part.layer, source], 0))
            else:
                moved.append((i, unit, i, unit))
    return moved


def run_offset(place, part, bank, unit, run):
    """Where a run of a unit begins, in bytes from the place's base."""
    stride = place.stride or part.unit_bytes
    rep_stride = place.rep_stride or place.units * stride
    bank_stride = place.bank_stride or part.rep * rep_stride
    return bank * bank_stride + index_of(place, part.growth, unit) * stride + run * rep_stride


def index_of(place, growth, unit):
    """Where a unit lies among those of its place."""
    if place.ring == 0 or unit < growth.sinks:
        return unit
    return growth.sinks + (unit - growth.sinks) % place.ring


def bank_of(place, part, banks):
    """The bank of a place that a request names. Rows that grow are kept once, whatever bank of running state is
    named."""
    if banks is None or (part.growth.rule != "state" and place.banks == 1):
        return 0
    return banks.get(part.group, 0) if isinstance(banks, dict) else banks


def span(place, part):
    """Bytes from the first to behind the last of a place."""
    if place.units == 0:
        return 0
    last = dataclasses.replace(place, ring=0)
    return run_offset(last, part, place.banks - 1, place.units - 1, part.rep - 1) + part.unit_bytes


def moved_runs(layout, source, target, upto, begin=None, groups=None, src_bank=None, dst_bank=None):
    """(target part, offset in its place, source part, offset in its place, bytes) of every run of bytes that a copy
    moves.

    source, target: the places of both sides.
    """
    runs = []
    rings = [i for i, place in enumerate(target) if place.ring]
    for i, unit, j, source_unit in moved_units(layout, upto, begin, groups, rings):
        part, from_ = layout.parts[i], layout.parts[j]
        for run in range(part.rep):
            to_offset = run_offset(target[i], part, bank_of(target[i], part, dst_bank), unit, run)
            from_offset = run_offset(source[j], from_, bank_of(source[j], from_, src_bank), source_unit, run)
            runs.append((i, to_offset, j, from_offset, part.unit_bytes))
    return runs
