"""From Python's values to C's. Declared in values.pxd."""

from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, int32_t, int64_t, uint32_t, uint64_t

from strata_copy.abi cimport (
    CALLER_SYNCED, DEVICE, FEED, QUEUE_ALL, WAIT_EVENT, WAIT_STREAM, Hook, PartSpec, PlaceSpec, Wait, request_new,
)
from strata_copy.layout cimport MAX_MARKS, Layout
from strata_copy.states cimport place_span

from strata_copy.places import CALLER_SYNCED as CALLER_SYNCED_VALUE
from strata_copy.places import KINDS, Event, Stream, address, array_bytes, handle, whole


cdef int fill_place(place, const PartSpec *part, PlaceSpec *spec) except -1:
    """The Place as C has it, with the strides that 0 stands for."""
    if place.kind not in KINDS:
        raise ValueError(f"kind {place.kind!r}; may be {', '.join(KINDS)}")
    spec.base = <void *><size_t>address(place.base)
    spec.host_base = <void *><size_t>address(place.base if place.host_base is None else place.host_base)
    spec.kind = KINDS.index(place.kind)
    spec.device = whole("device", place.device, -1, INT32_MAX)
    if spec.kind == DEVICE:
        spec.host_base = NULL
    spec.units = whole("units", place.units, 0, INT64_MAX)
    spec.stride = whole("stride", place.stride, 0, INT64_MAX) or part.growth.unit_bytes
    spec.rep_stride = whole("rep_stride", place.rep_stride, 0, INT64_MAX) or product(spec.units, spec.stride)
    spec.banks = whole("banks", place.banks, 1, INT64_MAX)
    spec.bank_stride = whole("bank_stride", place.bank_stride, 0, INT64_MAX) or product(part.rep, spec.rep_stride)
    spec.ring = whole("ring", place.ring, INT64_MIN, INT64_MAX)
    spec.page_group = whole("page_group", place.page_group, INT32_MIN, INT32_MAX)
    spec.page_units = whole("page_units", place.page_units, INT64_MIN, INT64_MAX)
    spec.page_stride = whole("page_stride", place.page_stride, INT64_MIN, INT64_MAX)
    check_length(place.base, part, spec)
    if spec.host_base != NULL and place.host_base is not None:
        check_length(place.host_base, part, spec)
    return 0


cdef int check_length(array, const PartSpec *part, const PlaceSpec *spec) except -1:
    """Behind an array that is too short lies memory of somebody else, of which CUDA may say that it fits. Numbers that fit nothing are
    left to the library's checks."""
    cdef int64_t needed = place_span(spec, part)
    found = array_bytes(array)
    if found is None or found >= needed:
        return 0
    stride = f", {spec.stride:,} apart," if spec.stride != part.growth.unit_bytes else ""
    counts = "".join(f" in {n:,} {what}" for n, what in ((part.rep, "runs"), (spec.banks, "banks")) if n > 1)
    raise ValueError(f"the array has {found:,} bytes, {spec.units:,} units of {part.growth.unit_bytes:,}{stride}{counts} need {needed:,}")


cdef int64_t product(int64_t a, int64_t b) except -1:
    return whole("units * stride", <object>a * <object>b, 0, INT64_MAX)


cdef int fill_request(RequestValues *values, Layout layout, upto, after, begin, groups, src_bank, dst_bank) except -1:
    values.request = request_new(values.upto, fill_marks(layout, upto, values.upto))
    if begin is not None:
        if fill_marks(layout, begin, values.begin) != values.request.n_marks:
            raise ValueError("begin and upto have different numbers of marks")
        values.request.begin = values.begin
    if after is CALLER_SYNCED_VALUE:
        values.request.flags = CALLER_SYNCED
    elif after is not None:
        values.request.n_after = fill_waits(after, values.waits)
        values.request.after = values.waits
    values.request.groups = group_bits(layout, groups)
    if src_bank is not None:
        fill_banks(layout, src_bank, values.src_banks)
        values.request.src_bank = values.src_banks
    if dst_bank is not None:
        fill_banks(layout, dst_bank, values.dst_banks)
        values.request.dst_bank = values.dst_banks
    return 0


cdef int fill_way(RequestValues *values, src_generation, dst_generation, priority, bytes_ahead, feed, hook, hook_arg) except -1:
    """What does not say which bytes move, but when and how."""
    values.request.src_generation = whole("src_generation", src_generation, 0, (1 << 64) - 1)
    values.request.dst_generation = whole("dst_generation", dst_generation, 0, (1 << 64) - 1)
    values.request.priority = whole("priority", priority, -1, 0)
    values.request.bytes_ahead = whole("bytes_ahead", bytes_ahead, 0, INT64_MAX)
    if feed is not None:
        values.request.flags |= <uint32_t>FEED if feed else <uint32_t>QUEUE_ALL
    if callable(hook):
        raise TypeError(f"hook is a {type(hook).__name__}; the address of a C function, strata_hook in strata_copy.h, is needed")
    values.request.hook = <Hook><size_t>address(hook)
    values.request.hook_arg = <void *><size_t>address(hook_arg)
    return 0


cdef uint32_t fill_marks(Layout layout, marks, int64_t *values) except 0:
    """The values of a request's marks; fewer or more than the layout has are left to the check of the request."""
    marks = (marks,) if hasattr(marks, "__index__") and not hasattr(marks, "__len__") else tuple(marks)
    if not 1 <= len(marks) <= MAX_MARKS:
        raise ValueError(f"{len(marks)} marks; the layout has {len(layout.marks)}: {', '.join(layout.marks)}")
    for i, mark in enumerate(marks):
        values[<int32_t>i] = whole(f"mark {i}", mark, INT64_MIN, INT64_MAX)
    return len(marks)


cdef int fill_waits(after, Wait *waits) except -1:
    if isinstance(after, (Event, Stream)):
        after = (after,)
    if not isinstance(after, (tuple, list)):
        raise TypeError(f"after is {after!r}; Event and Stream values, or CALLER_SYNCED, are needed")
    if len(after) > MAX_AFTER:
        raise ValueError(f"{len(after)} waits; at most {MAX_AFTER}")
    for i, wait in enumerate(after):
        if not isinstance(wait, (Event, Stream)):
            raise TypeError(f"after is made of Event and Stream values, not {type(wait).__name__}")
        waits[<int32_t>i].handle = <void *><size_t>handle(wait.handle)
        waits[<int32_t>i].device = whole("device", wait.device, 0, INT32_MAX)
        waits[<int32_t>i].kind = WAIT_EVENT if isinstance(wait, Event) else WAIT_STREAM
    return len(after)


cdef uint64_t group_bits(Layout layout, groups) except? 0:
    cdef uint64_t bits = 0
    if groups is None:
        return 0
    groups = (groups,) if isinstance(groups, str) else tuple(groups)
    for group in groups:
        if group not in layout.groups:
            raise ValueError(f"group {group!r} is none of {layout.groups}")
        bits |= <uint64_t>1 << <int>layout.groups.index(group)
    if bits == 0:
        raise ValueError("no group is named; None is for all")
    return bits


cdef int fill_banks(Layout layout, banks, int64_t *values) except -1:
    if isinstance(banks, dict) and not set(banks) <= set(layout.groups):
        raise ValueError(f"banks of groups {sorted(banks)}; the layout's are {layout.groups}")
    for g, group in enumerate(layout.groups):
        bank = banks.get(group, 0) if isinstance(banks, dict) else banks
        values[<int32_t>g] = whole("bank", bank, INT64_MIN, INT64_MAX)
    return 0
