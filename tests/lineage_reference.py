"""The rules of lineage, said again in plain Python: what an engine's words make of a state, and which units a copy may
leave out.

Nothing here is shared with the library. Every rule can be broken (`broken`), to show that the tests would find it.
"""

import itertools

RULES = (
    "an append is a new epoch",
    "an append makes running state another",
    "an append makes the tail another",
    "a rewind cuts",
    "a rewind makes running state another",
    "a rewind makes the tail another",
    "rows after a cut are a new epoch",
    "dirty rows are cut",
    "dirty is rounded down to whole units",
    "dirty makes running state another",
    "a dirty bank is another",
    "a dirty constant is another",
    "a reset forgets",
    "equal is the common prefix",
    "equal is no more than is asked",
    "equal ends where the shorter ends",
    "the unit that is being filled moves again",
    "a tail is the target's where it ends",
    "a spare row is the engine's until a patch sets it",
    "a spare row is the engine's once it says something",
    "a patch of another bank is another",
    "a patch over a full row makes it the target's own",
    "a patch over the same patch changes nothing",
    "a copy hands on the source's segments",
    "a copy hands on no more than it moved",
    "a copy hands on running state of the bank",
    "a group that did not move keeps its lineage",
    "what nobody spoke of is the source's own",
    "a source that was told nothing hands on nothing",
)


class Lineage:
    """What is known of one state."""

    epochs = itertools.count(1)
    broken = ""

    def __init__(self, layout):
        self.parts = layout.parts
        self.patches = {
            layout.index(patch.layer, patch.part): layout.index(patch.layer, patch.source) for patch in layout.patches
        }
        self.tracks = {(part.group, part.growth.mark): [] for part in self.parts}
        self.forget()

    def holds(self, rule):
        assert rule in RULES
        return rule != self.broken

    def forget(self):
        self.tracks = {track: [] for track in self.tracks}
        self.tails, self.was_cut = dict.fromkeys(self.tracks), dict.fromkeys(self.tracks, False)
        self.stamps, self.last, self.told = {}, {}, False  # last: the value of a patch in a last unit

    def end(self, track):
        return self.tracks[track][-1][2] if self.tracks[track] else 0

    def renew(self, word):
        self.told = True
        new = next(self.epochs)
        if self.holds("a spare row is the engine's once it says something"):
            self.last = {}
        if word == "dirty" or self.holds(f"{'an append' if word == 'advanced' else 'a rewind'} makes the tail another"):
            self.tails = dict.fromkeys(self.tracks, new)
        rule = {"advanced": "an append", "rewound": "a rewind", "dirty": "dirty"}[word] + " makes running state another"
        if self.holds(rule):
            for i, part in enumerate(self.parts):
                if part.growth.rule == "state":
                    self.stamps[i, 0] = new

    def cut(self, track, mark):
        self.was_cut[track] = self.end(track) > mark
        self.tracks[track] = [(epoch, a, min(b, mark)) for epoch, a, b in self.tracks[track] if a < mark]

    def append(self, track, mark):
        """A state may go on with its own epoch only where nobody else can have other rows of it: it never does here."""
        end = self.end(track)
        rule = "rows after a cut are a new epoch" if self.was_cut[track] else "an append is a new epoch"
        if mark > end and not self.holds(rule) and self.tracks[track]:
            epoch, a, _ = self.tracks[track][-1]
            self.tracks[track][-1] = (epoch, a, mark)
        elif mark > end:
            self.tracks[track].append((next(self.epochs), end, mark))

    def advanced(self, marks):
        for track in self.tracks:
            self.cut(track, marks[track[1]])
        for i, part in enumerate(self.parts):  # constants are written with the first row
            track = part.group, part.growth.mark
            if part.growth.rule == "const" and self.end(track) == 0 and marks[track[1]]:
                self.stamps[i, 0] = next(self.epochs)
        for track in self.tracks:
            self.append(track, marks[track[1]])
        self.renew("advanced")

    def rewound(self, marks):
        if self.holds("a rewind cuts"):
            for track in self.tracks:
                self.cut(track, marks[track[1]])
        self.renew("rewound")

    def dirty(self, i, first, n):
        part = self.parts[i]
        if part.growth.rule == "const" and self.holds("a dirty constant is another"):
            self.stamps[i, 0] = next(self.epochs)
        elif part.growth.rule == "state" and self.holds("a dirty bank is another"):
            for bank in range(first, first + n):
                self.stamps[i, bank] = next(self.epochs)
        elif part.growth.rule == "linear" and self.holds("dirty rows are cut"):
            track = part.group, part.growth.mark
            end = self.end(track)
            if self.holds("dirty is rounded down to whole units"):
                at = before_unit(part.growth, first, end)
            else:
                at = (first + 1) * part.growth.q
            self.cut(track, min(at, end))
            self.append(track, end)
        self.renew("dirty")

    def reset(self):
        if self.holds("a reset forgets"):
            self.forget()


def settled(growth, mark):
    if growth.settle == 0:
        return 0
    whole = mark // growth.q
    return whole - whole % growth.settle


def before_unit(growth, unit, end):
    """The last mark up to `end` at which a unit is not settled."""
    return next((mark - 1 for mark in range(end + 2) if settled(growth, mark) > unit), end)


def units(growth, mark):
    if growth.rule != "linear":
        return 1
    return (-(-mark // growth.q) if growth.ceil else mark // growth.q) + (growth.extra if mark else 0)


def common(a, b, holds):
    """The longest common prefix of two lists of segments."""
    known = 0
    for (epoch, begin, end), (other, other_begin, other_end) in zip(a, b, strict=False):
        if begin != other_begin or (epoch != other and holds("equal is the common prefix")):
            break
        known = min(end, other_end) if holds("equal ends where the shorter ends") else max(end, other_end)
        if end != other_end:
            break
    return known


def equal_to(source, target, track, upto):
    known = common(source.tracks[track], target.tracks[track], source.holds)
    return min(known, upto) if source.holds("equal is no more than is asked") else known


def first_units(source, target, upto, banks=(0, 0), begin=None, groups=None):
    """The first unit that has to move, and how many there are: {part: (first, end)}. banks: of source and target."""
    found = {}
    for i, part in enumerate(source.parts):
        if groups is not None and part.group not in groups:
            continue
        growth, track = part.growth, (part.group, part.growth.mark)
        mark, end = upto[growth.mark], units(part.growth, upto[growth.mark])
        known = equal_to(source, target, track, mark) if begin is None else begin[growth.mark]
        if growth.rule == "state":
            spoken = source.told and (banks[0] != 0 or not unsaid(source, upto, groups))
            a, b = source.stamps.get((i, banks[0])), target.stamps.get((i, banks[1]))
            found[i] = (int(begin is None and spoken and a is not None and a == b), 1)
        elif growth.rule == "const":
            same = begin is not None or source.stamps.get((i, 0)) == target.stamps.get((i, 0))
            alike = begin is None and same_tail(source, target, track, mark)
            found[i] = (int((known > 0 or alike) and same), 1)
        elif begin is None and same_tail(source, target, track, mark):
            patched = i in source.patches and end > 0
            found[i] = (end - (patched and not same_patches(source, target, track, upto, banks, groups)), end)
        else:
            known = (
                known if source.holds("the unit that is being filled moves again") else -(-known // growth.q) * growth.q
            )
            patched = begin is None and i in source.patches and end > 0 and known > 0
            found[i] = (min(settled(growth, known), end - patched), end)
    return found


def same_tail(source, target, track, mark):
    """Whether both have the units of one state at one time, but for those that patches have set."""
    at_its_end = target.end(track) == mark or not source.holds("a tail is the target's where it ends")
    tail = source.tails[track]
    return source.end(track) >= mark and at_its_end and tail is not None and tail == target.tails[track]


def same_patches(source, target, track, upto, banks, groups):
    """Whether the patches of a track would set what the target has."""
    return all(
        has_patch(source, target, i, upto, banks, groups)
        for i, part in enumerate(source.parts)
        if i in source.patches and (part.group, part.growth.mark) == track
    )


def has_patch(source, target, i, upto, banks, groups):
    value = patch_value(source, i, banks)
    bank = banks[0] if source.parts[source.patches[i]].growth.rule == "state" else 0
    if i not in target.last and not source.holds("a spare row is the engine's until a patch sets it"):
        return True
    spoken = bank != 0 or not unsaid(source, upto, groups)
    return spoken and value is not None and value == target.last.get(i)


def patch_value(source, i, banks):
    by = source.patches[i]
    bank = banks[0] if source.parts[by].growth.rule == "state" else 0
    return source.stamps.get((by, bank if source.holds("a patch of another bank is another") else 0))


def is_patched(part, upto, begin):
    """Whether the patch of a part is written, or holds. A `begin` behind its last unit leaves that as it is."""
    mark = part.growth.mark
    end = units(part.growth, upto[mark])
    return end > 0 and (begin is None or settled(part.growth, begin[mark]) < end)


def full_rows(source, track, upto, banks, begin):
    """The mark up to which a target has the source's rows behind a copy, whose patches may have set units that are
    full."""
    mark = upto[track[1]]
    for i, part in enumerate(source.parts):
        if i not in source.patches or (part.group, part.growth.mark) != track or not is_patched(part, upto, begin):
            continue
        value, unit = patch_value(source, i, banks), units(part.growth, upto[track[1]]) - 1
        the_same = value is not None and source.last.get(i) == value and source.end(track) == upto[track[1]]
        if not (the_same and source.holds("a patch over the same patch changes nothing")):
            mark = min(mark, before_unit(part.growth, unit, upto[track[1]]))
    return mark if source.holds("a patch over a full row makes it the target's own") else upto[track[1]]


def unsaid(source, upto, groups):
    return source.told and any(
        upto[mark] > source.end((group, mark)) for group, mark in source.tracks if groups is None or group in groups
    )


def hand_on(source, target, upto, banks=(0, 0), begin=None, groups=None):
    """What a copy makes of both lineages."""
    moved = [track for track in source.tracks if groups is None or track[0] in groups]
    known = {track: equal_to(source, target, track, upto[track[1]]) for track in moved}
    if unsaid(source, upto, groups) and source.holds("what nobody spoke of is the source's own"):
        marks = [0] * (1 + max(mark for _, mark in source.tracks))
        for track in source.tracks:
            asked = upto[track[1]] if track in moved else 0
            marks[track[1]] = max(marks[track[1]], source.end(track), asked)
        source.advanced(marks)
    if not target.holds("a group that did not move keeps its lineage"):
        for track in target.tracks:
            target.tracks[track], target.tails[track] = list(source.tracks[track]), source.tails[track]
    told = source.told or not source.holds("a source that was told nothing hands on nothing")
    for track in moved:
        target.tails[track] = next(target.epochs)
        full = full_rows(source, track, upto, banks, begin)
        if not told:
            target.tracks[track] = []
        elif begin is not None and begin[track[1]] > known[track]:
            target.cut(track, min(known[track], full))
        elif source.holds("a copy hands on the source's segments"):
            target.tails[track] = source.tails[track]
            target.tracks[track] = list(source.tracks[track])
            if source.holds("a copy hands on no more than it moved"):
                target.cut(track, full)
                target.append(track, upto[track[1]])
    for i, part in enumerate(source.parts):
        if (groups is not None and part.group not in groups) or part.growth.rule == "linear":
            continue
        if part.growth.rule == "const":
            if not told:
                target.stamps[i, 0] = next(target.epochs)
            elif begin is None or begin[part.growth.mark] == 0:
                target.stamps[i, 0] = source.stamps.get((i, 0))
            continue
        bank = banks[0] if source.holds("a copy hands on running state of the bank") else 0
        if told and source.stamps.get((i, bank)) is None:
            source.stamps[i, bank] = next(source.epochs)
        target.stamps[i, banks[1]] = source.stamps.get((i, bank)) if told else None
    for i in source.patches:
        if groups is None or source.parts[i].group in groups:
            set_ = told and is_patched(source.parts[i], upto, begin)
            target.last[i] = patch_value(source, i, banks) if set_ else None
    target.told = target.told or source.told
