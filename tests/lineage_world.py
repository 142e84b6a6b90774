"""An engine with a main session, slots and images that does whatever comes to its mind, and remembers every byte that
each of them should hold."""

import numpy as np

import lineage_reference as rules
import strata_copy as sc
from fixtures import SYNCED, read
from strata_copy import host_runtime, runtime

CAPACITY = 64
BANKS = 3
MAIN, DRAFT = 0, 1

LAYOUT = sc.Layout(
    [
        sc.Part(name="window", layer=-1, unit_bytes=20, growth=sc.Growth.state()),
        sc.Part(name="recurrent", layer=0, unit_bytes=28, growth=sc.Growth.state()),
        sc.Part(name="k", layer=1, unit_bytes=16, growth=sc.Growth.linear(4, ceil=True)),
        sc.Part(name="v", layer=1, unit_bytes=4, growth=sc.Growth.linear()),
        sc.Part(name="grouped", layer=1, unit_bytes=4, growth=sc.Growth.linear(settle=8)),
        sc.Part(name="requantized", layer=1, unit_bytes=4, growth=sc.Growth.linear(settle=0)),
        sc.Part(name="pooled", layer=1, unit_bytes=8, growth=sc.Growth.linear(4, extra=1)),
        sc.Part(name="dead", layer=1, unit_bytes=8, growth=sc.Growth.const()),
        sc.Part(name="closed", layer=1, unit_bytes=4, growth=sc.Growth.linear(2, ceil=True)),
        sc.Part(name="mask", layer=1, unit_bytes=4, growth=sc.Growth.const()),
        sc.Part(name="ahead", layer=1, unit_bytes=12, growth=sc.Growth.linear(4, extra=1)),
        sc.Part(name="seed", layer=1, unit_bytes=12, growth=sc.Growth.state()),
        sc.Part(
            name="draft_k", layer=2, unit_bytes=16, growth=sc.Growth.linear(4, ceil=True, mark=DRAFT), group="draft"
        ),
        sc.Part(name="hidden", layer=2, unit_bytes=12, growth=sc.Growth.state(mark=DRAFT), group="draft"),
    ],
    marks=("tokens", "draft"),
    patches=[  # of spare rows, which the engine fills with anything, and of a last row, which may be full
        sc.Patch(layer=1, part="pooled", source="dead"),
        sc.Patch(layer=1, part="closed", source="mask"),
        sc.Patch(layer=1, part="ahead", source="seed"),
    ],
)
NUMBER = {part.name: i for i, part in enumerate(LAYOUT.parts)}
PATCHES = {NUMBER[patch.part]: NUMBER[patch.source] for patch in LAYOUT.patches}
STATES = [i for i, part in enumerate(LAYOUT.parts) if part.growth.rule == "state"]
CONSTANTS = [i for i, part in enumerate(LAYOUT.parts) if part.growth.rule == "const"]


def sizes():
    found = []
    for part in LAYOUT.parts:
        units = rules.units(part.growth, CAPACITY) + 1 if part.growth.rule == "linear" else 1
        banks = BANKS if part.growth.rule == "state" else 1
        found.append((units, banks, units * banks * part.unit_bytes))
    return found


SIZES = sizes()
OFFSETS = [sum(size for *_, size in SIZES[:i]) for i in range(len(SIZES))]
BYTES = sum(size for *_, size in SIZES)


class Held:
    """One state: its memory, what should be in it, how long it is, and what is known of it."""

    def __init__(self, name, kind, random):
        self.name = name
        self.base = runtime.malloc(BYTES) if kind == "device" else runtime.host_alloc(BYTES)
        places = [
            sc.Place(base=self.base + OFFSETS[i], units=units, banks=banks, kind=kind)
            for i, (units, banks, _) in enumerate(SIZES)
        ]
        self.state = sc.State(LAYOUT, places)
        self.random, self.view = random, runtime.view(self.base, BYTES)
        self.bytes = np.zeros(BYTES, np.uint8)
        self.lineage = rules.Lineage(LAYOUT)
        self.tickets = []
        self.start()

    def start(self):
        """As if it were new: other bytes, and nothing known."""
        self.wait()
        self.state.reset()
        self.lineage.reset()
        self.marks = [0, 0]
        self.write(0, BYTES)

    def wait(self):
        for ticket in self.tickets:
            assert ticket.sync(timeout=60)
        self.tickets = []

    def write(self, at, size, values=None):
        """The engine's kernels, which wait for the copies that read or write these bytes."""
        self.wait()
        self.bytes[at : at + size] = self.random.integers(0, 256, size, np.uint8) if values is None else values
        host_runtime.host_write(self.base + at, size)
        self.view[at : at + size] = self.bytes[at : at + size]

    def unit(self, name, unit, bank=0):
        i = NUMBER[name]
        return OFFSETS[i] + (bank * SIZES[i][0] + unit) * LAYOUT.parts[i].unit_bytes

    def write_units(self, name, first, end, values=None):
        if end > first:
            self.write(self.unit(name, first), self.unit(name, end) - self.unit(name, first), values)

    # ---- what its engine does

    def append(self, counts, say=True):
        first, end = list(self.marks), [mark + n for mark, n in zip(self.marks, counts, strict=True)]
        if first[MAIN] == 0 and end[MAIN]:
            self.write_units("dead", 0, 1)
            self.write_units("mask", 0, 1)
        if say:
            self.state.advanced(end)
            self.lineage.advanced(end)
        n, m = first[MAIN], end[MAIN]
        self.write(self.unit("k", 0) + 4 * n, 4 * (m - n))
        self.write_units("v", n, m)
        self.write_units("grouped", n - n % 8, m)
        self.write_units("requantized", 0, m)
        self.write_units("pooled", n // 4, m // 4)
        self.write_units("closed", n // 2, -(-m // 2) if m > n else n // 2)
        self.write_units("ahead", n // 4, m // 4)
        self.write(self.unit("draft_k", 0) + 4 * first[DRAFT], 4 * (end[DRAFT] - first[DRAFT]))
        self.marks = end
        self.live()

    def live(self):
        """Running state and the spare rows, as after any step."""
        for i in STATES:
            self.write(OFFSETS[i], LAYOUT.parts[i].unit_bytes)
        if self.marks[MAIN]:
            for name in ("pooled", "ahead"):
                self.write_units(name, self.marks[MAIN] // 4, self.marks[MAIN] // 4 + 1)

    def rewind(self, marks):
        self.state.rewound(marks)  # copies may be in flight: it is said before they are waited for
        self.lineage.rewound(marks)
        self.marks = list(marks)
        self.live()

    def spoil(self, name, first, n):
        self.state.dirty(NUMBER[name], first, n)
        self.lineage.dirty(NUMBER[name], first, n)
        if NUMBER[name] in STATES:
            size = LAYOUT.parts[NUMBER[name]].unit_bytes
            for bank in range(first, first + n):
                self.write(OFFSETS[NUMBER[name]] + bank * size, size)
        else:
            self.write_units(name, first, first + n)

    def snapshot(self, bank):
        """Running state as it is goes into a bank."""
        for i in STATES:
            self.state.dirty(i, bank, 1)
            self.lineage.dirty(i, bank, 1)
            size = LAYOUT.parts[i].unit_bytes
            self.write(OFFSETS[i] + bank * size, size, self.bytes[OFFSETS[i] : OFFSETS[i] + size])


class Parked(Held):
    """An image in a pool. Its memory is where the pool wants it, and is looked at through a copy."""

    def __init__(self, name, pool):
        self.name, self.pool, self.tickets = name, pool, []
        self.bytes = np.zeros(BYTES, np.uint8)
        self.lineage = rules.Lineage(LAYOUT)
        self.start()

    def start(self):
        """Out of the pool, and in again: as where it was evicted meanwhile."""
        self.wait()
        if self.name in self.pool:
            del self.pool[self.name]
        self.state, self.written = self.pool.image(self.name), set()
        self.lineage.reset()
        self.marks = [0, 0]

    def readable(self, groups=None, bank=0):
        """Only what was copied into it."""
        return all((group, bank) in self.written for group in groups or LAYOUT.groups)

    def wait(self):
        landed = bool(self.tickets)
        super().wait()
        if landed and not self.state.published:
            assert self.state.publish()


class World:
    """kinds: of the states' memory, by their names; "pool": an image. random: decides everything."""

    def __init__(self, copier, random, kinds, arena=None):
        self.copier, self.random = copier, random
        pool = sc.Pool(arena, LAYOUT, banks=BANKS, chunk=8) if arena is not None else None
        self.states = [
            Parked(name, pool) if kind == "pool" else Held(name, kind, random) for name, kind in kinds.items()
        ]
        self.probe = Held("probe", "device", random) if pool is not None else None
        self.plans = {}

    def start(self, random):
        self.random = random
        for held in self.states:
            held.random = random
            held.start()
            held.lineage.forget()
            self.forget_plans(held)
        if self.probe is not None:
            self.probe.random = random

    def forget_plans(self, held):
        """It may be another state now."""
        if isinstance(held, Parked):
            self.plans = {key: plan for key, plan in self.plans.items() if held.name not in key}

    def plan(self, source, target):
        key = source.name, target.name
        if key not in self.plans:
            self.plans[key] = self.copier.plan(source.state, target.state)
        return self.plans[key]

    def copy(self, source, target, upto=None, *, banks=(0, 0), begin=None, groups=None, sync=False):
        """Submits, and changes what the target should hold as save and restore would. Returns bytes that move and that
        should, and the units."""
        upto = list(source.marks if upto is None else upto)
        if isinstance(source, Parked):
            source.wait()  # it is read only once it is published
        units = rules.first_units(source.lineage, target.lineage, upto, banks, begin, groups)
        how = {"begin": begin, "groups": groups, "after": SYNCED}
        if self.random.random() < 0.3:
            how["feed"] = True  # the worker queues it, and what comes later behind it
        if banks[0]:
            how["src_bank"] = banks[0]
        if banks[1]:
            how["dst_bank"] = banks[1]
        ticket = self.plan(source, target).submit(upto, **how)
        assert ticket is not None
        if isinstance(target, Parked):
            target.written |= {(group, banks[1]) for group in groups or LAYOUT.groups}
        rules.hand_on(source.lineage, target.lineage, upto, banks, begin, groups)
        source.tickets.append(ticket)
        target.tickets.append(ticket)
        if sync:
            target.wait()
        self.restore(source, target, upto, banks, begin, groups)
        expected = sum((end - first) * LAYOUT.parts[i].unit_bytes for i, (first, end) in units.items())
        return ticket.bytes, expected, units

    def restore(self, source, target, upto, banks, begin, groups):
        for i, part in enumerate(LAYOUT.parts):
            if groups is not None and part.group not in groups:
                continue
            end = rules.units(part.growth, upto[part.growth.mark])
            state = part.growth.rule == "state"
            a = OFFSETS[i] + (banks[0] * part.unit_bytes if state else 0)
            b = OFFSETS[i] + (banks[1] * part.unit_bytes if state else 0)
            target.bytes[b : b + end * part.unit_bytes] = source.bytes[a : a + end * part.unit_bytes]
            if i in PATCHES and rules.is_patched(part, upto, begin):
                by = LAYOUT.parts[PATCHES[i]]
                at = source.unit(by.name, 0, banks[0] if by.growth.rule == "state" else 0)
                last = target.unit(part.name, end - 1)
                target.bytes[last : last + part.unit_bytes] = source.bytes[at : at + part.unit_bytes]
        for mark, group in ((MAIN, "main"), (DRAFT, "draft")):
            if groups is None or group in groups:
                target.marks[mark] = upto[mark]

    def wrong(self):
        """What is not as it should be, once all copies have ended."""
        for held in self.states:
            held.wait()
        return [held.name for held in self.states if not self.right(held)]

    def right(self, held):
        if not isinstance(held, Parked):
            return np.array_equal(read(held.base, BYTES), held.bytes)
        groups = [group for group in LAYOUT.groups if held.readable([group])]
        if not groups:
            return True  # nobody can look
        self.probe.start()
        self.copy(held, self.probe, groups=groups, sync=True)
        return np.array_equal(read(self.probe.base, BYTES), self.probe.bytes)
