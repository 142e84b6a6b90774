"""Layouts. The C side is declared in layout.pxd; the formulas are docs/layouts.md's, under the same names."""

import dataclasses
import hashlib
import json
from pathlib import Path

from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, strdup

from strata_copy.abi cimport CONST, LO_LAST, LO_MARK, STATE, WINDOW, Growth
from strata_copy.atomics cimport add_i64

from strata_copy.parts import LOWS, RULES, Part, Patch
from strata_copy.parts import Growth as GrowthValue
from strata_copy.places import whole

ENCODING = 1


cdef class Layout:
    """What the bytes of a state are: no address, no capacity, no device. Immutable.

    parts: Part values. marks: names of the lengths that parts grow by, the first is the tokens. format, identity: what else must
        be equal for two states to hold the same thing (K/V format; the engine's own bytes: weights, adapters, rope, scales).
    patches: Patch values. groups: names of the groups in the order of a request's bits; by default as the parts name them.

    Two layouts are equal or they are not: `fingerprint`, 32 bytes, decides. Raises ValueError where a part says something that has
    no meaning, naming the part, the value and what it may be.
    """

    def __init__(self, parts, *, marks=("tokens",), format="", identity=b"", patches=(), groups=None):
        self.parts = _parts(parts)
        if self.data != NULL:
            raise TypeError("a Layout is made once")
        if isinstance(marks, str) or not isinstance(identity, (bytes, bytearray, memoryview)):
            raise TypeError(f"marks {marks!r} must be a list of names, identity {type(identity).__name__} must be bytes")
        self.marks = tuple(marks)
        self.format = format
        self.identity = bytes(identity)
        self.patches = tuple(patches)
        self.groups = tuple(groups) if groups is not None else tuple(dict.fromkeys(part.group for part in self.parts))
        _check(self)
        self._encoded = _encode(self)
        self.data = _build(self)

    def __dealloc__(self):
        layout_drop(self.data)

    @property
    def layers(self):
        """How many layers a copy counts: wait_layer takes 0 to layers - 1."""
        return layout_data(self).n_layers

    @property
    def fingerprint(self):
        """32 bytes: BLAKE2b-256 of the canonical encoding, the same in every process and release of one encoding."""
        return (<char *>layout_data(self).fingerprint)[:32]

    def to_bytes(self):
        """The canonical encoding: JSON in UTF-8 with sorted keys. from_bytes reads it."""
        return self._encoded

    @classmethod
    def from_bytes(cls, encoded):
        """The layout that to_bytes wrote. Raises ValueError for another encoding."""
        return cls(**_decoded(json.loads(encoded)))

    @classmethod
    def load(cls, path, *, identity=b""):
        """Reads a layout from a TOML file (docs/layouts.md shows one); `identity` is appended to the file's own."""
        try:
            import tomllib
        except ModuleNotFoundError:     # Python 3.10
            import tomli as tomllib
        fields = _decoded(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        return cls(**{**fields, "identity": fields["identity"] + bytes(identity)})

    def index(self, layer, name):
        """The place in `parts` of the part `name` of `layer`. Raises KeyError."""
        for i, part in enumerate(self.parts):
            if part.layer == layer and part.name == name:
                return i
        raise KeyError(f"layer {layer} has no part {name!r}")

    def units(self, part, marks):
        """Units that part number `part` has at `marks`, or at one mark."""
        cdef int64_t values[MAX_MARKS]
        _marks(self, marks, values)
        part = whole("part", part, 0, self.data.n_parts - 1)
        return units_at(&self.data.parts[<int32_t>part].growth, values)

    def bytes_at(self, marks):
        """Bytes of a whole copy at `marks`, or at one mark."""
        cdef int64_t values[MAX_MARKS]
        _marks(self, marks, values)
        return sum(_moved_at(&self.data.parts[<int32_t>i].growth, values) * part.unit_bytes * part.rep
                   for i, part in enumerate(self.parts))

    def difference(self, Layout other not None):
        """What differs first between two layouts, in words, or "" where they are equal."""
        return _difference(self, other)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        layout_data(self)
        return type(self).from_bytes, (self._encoded,)

    def __eq__(self, other):
        return isinstance(other, Layout) and self.fingerprint == (<Layout>other).fingerprint

    def __hash__(self):
        return hash(self.fingerprint)

    def __repr__(self):
        return (f"<Layout {self.format or 'plain'}: {len(self.parts)} parts, {self.layers} layers, "
                f"marks {'/'.join(self.marks)}, {self.fingerprint.hex()[:12]}>")


cdef LayoutData *layout_data(Layout layout) except NULL:
    if layout is None or layout.data == NULL:
        raise TypeError(f"a Layout is needed, not {None if layout is None else 'one whose __init__ did not run'}")
    return layout.data


cdef void layout_hold(LayoutData *layout) noexcept nogil:
    add_i64(&layout.references, 1)


cdef void layout_drop(LayoutData *layout) noexcept nogil:
    cdef int32_t i
    if layout == NULL or add_i64(&layout.references, -1) > 1:
        return
    if layout.parts != NULL:
        for i in range(layout.n_parts):
            free(<void *>layout.parts[i].name)
    free(layout.parts)
    free(layout.patches)
    free(layout.patch_of)
    free(layout.order)
    free(layout.first)
    free(layout)


cdef inline int64_t tokens_seen(const Growth *g, const int64_t *marks) noexcept nogil:
    cdef int64_t t = marks[g.mark] + g.shift
    return t if t > 0 else 0


cdef inline int64_t local_tokens(const Growth *g, int64_t t) noexcept nogil:
    """The tokens, of the first t, that this rank holds."""
    cdef int64_t round_, rest
    if g.cp_size == 1:
        return t
    round_ = <int64_t>g.cp_interleave * g.cp_size
    rest = t % round_ - <int64_t>g.cp_rank * g.cp_interleave
    return t // round_ * g.cp_interleave + (0 if rest < 0 else g.cp_interleave if rest > g.cp_interleave else rest)


cdef int64_t units_at(const Growth *g, const int64_t *marks) noexcept nogil:
    cdef int64_t t, local
    if g.rule == CONST or g.rule == STATE:
        return 1
    t = tokens_seen(g, marks)
    local = local_tokens(g, t)
    return (local + g.q - 1 if g.ceil else local) // g.q + (g.extra if t > 0 else 0)


cdef int64_t settled_at(const Growth *g, const int64_t *marks) noexcept nogil:
    """Units that no append after `marks` can change: whole units only, and never the extra ones."""
    if g.settle == 0:
        return 0
    return local_tokens(g, tokens_seen(g, marks)) // g.q // g.settle * g.settle


cdef int64_t live_at(const Growth *g, const int64_t *marks) noexcept nogil:
    cdef int64_t t, local
    if g.rule != WINDOW:
        return 0
    t = tokens_seen(g, marks)
    if g.lo == LO_MARK:
        return min(marks[g.lo_mark], t) // g.q
    local = local_tokens(g, t)
    return (max(local - g.window, 0) if g.lo == LO_LAST else local // g.window * g.window) // g.q


cdef int64_t _moved_at(const Growth *g, const int64_t *marks) noexcept nogil:
    """Units of a whole copy."""
    cdef int64_t end = units_at(g, marks), sinks = min(<int64_t>g.sinks, end)
    return end - max(live_at(g, marks), sinks) + sinks if live_at(g, marks) < end else sinks


cdef int _marks(Layout layout, marks, int64_t *values) except -1:
    layout_data(layout)
    marks = (marks,) if hasattr(marks, "__index__") and not hasattr(marks, "__len__") else tuple(marks)
    if len(marks) != len(layout.marks):
        raise ValueError(f"{len(marks)} marks; the layout has {len(layout.marks)}: {', '.join(layout.marks)}")
    for i, mark in enumerate(marks):
        values[<int32_t>i] = whole(f"mark {layout.marks[i]}", mark, 0, (1 << 62) - 1)
    return 0


def _refuse(part, text):
    where = "the session" if type(part.layer) is int and part.layer < 0 else f"layer {part.layer!r}"
    raise ValueError(f"part {part.name!r} of {where}: {text}")


def _parts(parts):
    parts = tuple(parts)
    for part in parts:
        if not isinstance(part, Part) or not isinstance(part.growth, GrowthValue):
            raise TypeError(f"{part!r} is no Part with a Growth")
    return parts


def _check(layout):
    """Besides, whatever two layouts that are equal say is of one type: 1 and True are written differently."""
    if not layout.parts:
        raise ValueError("a layout has at least one part")
    _check_types(layout)
    if not 1 <= len(layout.marks) <= MAX_MARKS or len(set(layout.marks)) != len(layout.marks):
        raise ValueError(f"{len(layout.marks)} marks; a layout has 1 to {MAX_MARKS}, each once: {layout.marks}")
    if len(layout.groups) > MAX_GROUPS or len(set(layout.groups)) != len(layout.groups):
        raise ValueError(f"groups {layout.groups}: at most {MAX_GROUPS}, each once")
    seen = set()
    for part in layout.parts:
        _check_part(layout, part)
        if (part.layer, part.name) in seen:
            _refuse(part, "stands twice")
        seen.add((part.layer, part.name))
    patched = set()
    for patch in layout.patches:
        part = layout.parts[_part_index(layout, patch, patch.part)]
        source = layout.parts[_part_index(layout, patch, patch.source)]
        if part.growth.rule != "linear":
            _refuse(part, "a patch sets the last unit of a linear part")
        if source.growth.rule not in ("const", "state"):
            _refuse(source, "the source of a patch is one unit: a constant or running state")
        if (part.unit_bytes, part.rep) != (source.unit_bytes, source.rep):
            _refuse(part, f"a patch needs units of one size: {part.unit_bytes} x {part.rep} and {source.unit_bytes} x {source.rep}")
        if part.needed_by != source.needed_by or part.group != source.group:
            _refuse(part, f"patch source {source.name!r} must share its group and needed_by")
        if (patch.layer, patch.part) in patched:
            _refuse(part, "is patched twice")
        patched.add((patch.layer, patch.part))


def _check_types(layout):
    for names in (layout.marks, layout.groups, (layout.format,)):
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"marks, groups and format are strings, not {names!r}")
    for patch in layout.patches:
        if not isinstance(patch, Patch):
            raise TypeError(f"{patch!r} is no Patch")
        if type(patch.layer) is not int:
            raise ValueError(f"a patch of layer {patch.layer!r}; an int is needed")


def _part_index(layout, patch, name):
    for i, part in enumerate(layout.parts):
        if part.layer == patch.layer and part.name == name:
            return i
    raise ValueError(f"a patch of layer {patch.layer} names {name!r}, which is no part of it")


def _check_part(layout, part):
    g = part.growth
    if not isinstance(part.name, str) or not part.name or not part.name.isprintable():
        _refuse(part, "has no name of printable characters")
    if g.rule not in RULES or g.lo not in LOWS:
        _refuse(part, f"growth {g.rule!r}, lo {g.lo!r}; may be {', '.join(RULES)} and {', '.join(LOWS)}")
    if g.rule == "window" and g.lo == "zero":
        _refuse(part, "a window begins at the last tokens, at a chunk or at a mark: lo is 'last', 'chunk' or 'mark'")
    if g.rule != "window" and (g.window, g.sinks, g.lo, g.lo_mark) != (0, 0, "zero", 0):
        _refuse(part, "window, sinks, lo and lo_mark belong to window growth")
    if type(g.ceil) is not bool:
        _refuse(part, f"ceil is {g.ceil!r}; may be True or False")
    for name, value, low, high in _ranges(layout, part):
        if type(value) is not int or not low <= value <= high:
            _refuse(part, f"{name} is {value!r}; may be {low} to {high}")
    if part.group not in layout.groups:
        _refuse(part, f"group {part.group!r} is none of {layout.groups}")


def _ranges(layout, part):
    """(name, value, lowest, highest) of each number. Those that the range of another one is made of come before it."""
    g = part.growth
    tokens = g.lo in ("last", "chunk")
    axis, index, count = _numbers(part, "shard", ("axis", "index", "count"))
    copy, copies = _numbers(part, "replica", ("index", "count"))
    yield from (
        ("layer", part.layer, -1, MAX_LAYERS - 1), ("unit_bytes", part.unit_bytes, 1, 1 << 40), ("rep", part.rep, 1, 1 << 24),
        ("order", part.order, -INT32_MAX, INT32_MAX), ("mark", g.mark, 0, len(layout.marks) - 1), ("q", g.q, 1, INT32_MAX),
        ("extra", g.extra, 0, INT32_MAX), ("shift", g.shift, -INT32_MAX, INT32_MAX), ("settle", g.settle, 0, INT32_MAX),
        ("cp_size", g.cp_size, 1, 1 << 15), ("cp_interleave", g.cp_interleave, 1, 1 << 15),
        ("window", g.window, 1 if tokens else 0, INT32_MAX if tokens else 0), ("sinks", g.sinks, 0, INT32_MAX),
        ("lo_mark", g.lo_mark, 0, len(layout.marks) - 1 if g.lo == "mark" else 0),
        ("shard axis", axis, 0, INT32_MAX), ("shard count", count, 1, INT32_MAX), ("replica count", copies, 1, INT32_MAX),
    )
    yield "needed_by", _needed_by(part), 0, MAX_LAYERS - 1
    yield "cp_rank", g.cp_rank, 0, g.cp_size - 1
    yield "shard index", index, 0, count - 1
    yield "replica index", copy, 0, copies - 1


def _numbers(part, field, names):
    value = getattr(part, field)
    if not isinstance(value, tuple) or len(value) != len(names):
        _refuse(part, f"{field} is {value!r}; a tuple ({', '.join(names)}) is needed")
    return value


def _needed_by(part):
    if part.needed_by is not None:
        return part.needed_by
    return max(part.layer, 0)


def _encode(layout):
    fields = {
        "encoding": ENCODING,
        "format": layout.format,
        "identity": layout.identity.hex(),
        "marks": layout.marks,
        "groups": layout.groups,
        "parts": [dataclasses.asdict(dataclasses.replace(part, needed_by=_needed_by(part))) for part in layout.parts],
        "patches": [dataclasses.asdict(patch) for patch in layout.patches],
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _decoded(fields):
    """The arguments of Layout from the fields of an encoding or a TOML file."""
    _check_table("the layout", fields)
    encoding = fields.get("encoding", ENCODING)
    if encoding != ENCODING:
        raise ValueError(f"layout encoding {encoding}; this release reads {ENCODING}")
    _check_keys("the layout", fields, ("encoding", "parts", "marks", "format", "identity", "patches", "groups"))
    for name in ("parts", "marks", "patches", "groups"):
        if not isinstance(fields.get(name, []), list):
            raise ValueError(f"{name} is {fields[name]!r}; a list is needed")
    try:
        identity = bytes.fromhex(fields.get("identity", ""))
    except (ValueError, TypeError):
        raise ValueError(f"identity is {fields['identity']!r}; hexadecimal digits are needed") from None
    return {
        "parts": [_part_of_fields(i, part) for i, part in enumerate(fields.get("parts", ()))],
        "marks": tuple(fields.get("marks", ("tokens",))),
        "format": fields.get("format", ""),
        "identity": identity,
        "patches": [_of_fields(Patch, f"patch {i}", patch) for i, patch in enumerate(fields.get("patches", ()))],
        "groups": tuple(fields["groups"]) if "groups" in fields else None,
    }


def _part_of_fields(i, fields):
    _check_table(f"part {i}", fields)
    where = f"part {fields.get('name', i)!r} of layer {fields.get('layer', '?')}"
    pairs = {pair: tuple(fields[pair]) for pair in ("shard", "replica") if isinstance(fields.get(pair), list)}
    growth = _of_fields(GrowthValue, f"the growth of {where}", fields.get("growth", {}))
    return _of_fields(Part, where, {**fields, **pairs, "growth": growth})


def _of_fields(kind, where, fields):
    _check_table(where, fields)
    _check_keys(where, fields, [field.name for field in dataclasses.fields(kind)])
    missing = [field.name for field in dataclasses.fields(kind)
               if field.default is field.default_factory is dataclasses.MISSING and field.name not in fields]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    return kind(**fields)


def _check_table(where, fields):
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is {fields!r}; a table of named values is needed")


def _check_keys(where, fields, allowed):
    unknown = sorted(set(fields) - set(allowed))
    if unknown:
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}; it may have {', '.join(allowed)}")


def _difference(a, b):
    if a == b:
        return ""
    for name in ("format", "marks", "groups"):
        if getattr(a, name) != getattr(b, name):
            return f"{name}: {getattr(a, name)!r}, {getattr(b, name)!r}"
    ours, theirs = ({(part.layer, part.name): part for part in layout.parts} for layout in (a, b))
    for key in [*ours, *theirs]:
        where = f"part {key[1]!r} of layer {key[0]}"
        if key not in theirs or key not in ours:
            return f"{where}: only the {'first' if key in ours else 'second'} has it"
        if ours[key] != theirs[key]:
            return f"{where}: {_field_difference(ours[key], theirs[key])}"
    for name in ("parts", "patches"):
        if getattr(a, name) != getattr(b, name):
            return f"the {name} differ in order or number"
    return f"identity: {_short(a.identity)}, {_short(b.identity)}"


def _field_difference(a, b):
    for field in dataclasses.fields(a):
        ours, theirs = getattr(a, field.name), getattr(b, field.name)
        if ours != theirs:
            if field.name == "growth":
                return _field_difference(ours, theirs)
            return f"{field.name} {ours!r}, {theirs!r}"
    return "needed_by"


def _short(identity):
    return f"{identity[:8].hex() or 'none'} ({len(identity)} bytes)"


cdef LayoutData *_build(Layout layout) except NULL:
    cdef int32_t n = len(layout.parts), n_layers = 1 + max(max(part.layer, _needed_by(part)) for part in layout.parts)
    cdef LayoutData *data = <LayoutData *>calloc(1, sizeof(LayoutData))
    if data == NULL:
        raise MemoryError
    data.references = 1
    data.n_parts = n
    data.n_marks = len(layout.marks)
    data.n_groups = len(layout.groups)
    data.n_patches = len(layout.patches)
    data.n_layers = n_layers
    data.parts = <PartSpec *>calloc(n, sizeof(PartSpec))
    data.patches = <PatchData *>calloc(data.n_patches + 1, sizeof(PatchData))
    data.patch_of = <int32_t *>calloc(n, sizeof(int32_t))
    data.order = <int32_t *>calloc(n, sizeof(int32_t))
    data.first = <int32_t *>calloc(data.n_layers + 1, sizeof(int32_t))
    if data.parts == NULL or data.patches == NULL or data.patch_of == NULL or data.order == NULL or data.first == NULL:
        layout_drop(data)
        raise MemoryError
    try:
        _fill(layout, data)
    except BaseException:
        layout_drop(data)
        raise
    return data


cdef int _fill(Layout layout, LayoutData *data) except -1:
    cdef int32_t i, layer
    for i, part in enumerate(layout.parts):
        _build_part(layout, part, &data.parts[i])
        data.patch_of[i] = -1
    for i, patch in enumerate(layout.patches):
        data.patches[i].part = _part_index(layout, patch, patch.part)
        data.patches[i].source_part = _part_index(layout, patch, patch.source)
        data.patch_of[data.patches[i].part] = i

    # Layer by layer; in a layer the session's parts that it needs, then by `order`, then as they were listed.
    order = sorted(range(data.n_parts), key=lambda i: (_needed_by(layout.parts[i]), layout.parts[i].layer, layout.parts[i].order, i))
    for i, part_index in enumerate(order):
        data.order[i] = part_index
        data.first[<int32_t>_needed_by(layout.parts[part_index]) + 1] += 1
    for layer in range(data.n_layers):
        data.first[layer + 1] += data.first[layer]

    digest = hashlib.blake2b(layout._encoded, digest_size=32).digest()
    memcpy(data.fingerprint, <char *>digest, 32)
    return 0


cdef int _build_part(Layout layout, part, PartSpec *spec) except -1:
    g = part.growth
    name = part.name.encode()
    spec.name = strdup(name)
    if spec.name == NULL:
        raise MemoryError
    spec.layer, spec.needed_by = part.layer, _needed_by(part)
    spec.group, spec.order = layout.groups.index(part.group), part.order
    spec.shard_axis, spec.shard_index, spec.shard_count = part.shard
    spec.replica_index, spec.replica_count = part.replica
    spec.rep = part.rep
    spec.growth.rule = RULES.index(g.rule)
    spec.growth.mark, spec.growth.ceil, spec.growth.q = g.mark, g.ceil, g.q
    spec.growth.shift, spec.growth.extra, spec.growth.settle = g.shift, g.extra, g.settle
    spec.growth.window, spec.growth.sinks = g.window, g.sinks
    spec.growth.lo, spec.growth.lo_mark = LOWS.index(g.lo), g.lo_mark
    spec.growth.cp_size, spec.growth.cp_rank, spec.growth.cp_interleave = g.cp_size, g.cp_rank, g.cp_interleave
    spec.growth.unit_bytes = part.unit_bytes
    return 0
