"""Where a state keeps a part, and the one place that turns an object into an address or a stream."""

from __future__ import annotations

import math
import numbers
import operator
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

KINDS = ("device", "pinned", "pageable")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one state keeps one part.

    base: address for the device: an int, or anything with __cuda_array_interface__, __array_interface__ or data_ptr().
    An array that says how long it is, as the first two do, must hold the whole place.
    units: capacity that may be touched. kind: "device", "pinned" or "pageable". device: of device memory; of host
    memory the device whose lanes carry it where both sides are host memory.
    stride: bytes from unit to unit, 0 for unit_bytes. rep_stride: bytes from run to run of a unit, 0 for units *
    stride.
    banks, bank_stride: snapshots of the part and the bytes between them, 0 for all of one bank.
    host_base: address for the CPU where it differs from base. ring: C units of a ring, in which unit i of a part
    (behind its sinks, which stand before the ring) lies at i mod C; 0 for none. page_group, page_units, page_stride:
    for pages.
    """

    base: Any
    units: int = 1
    kind: str = "device"
    device: int = 0
    stride: int = 0
    rep_stride: int = 0
    banks: int = 1
    bank_stride: int = 0
    host_base: Any = None
    ring: int = 0
    page_group: int = -1
    page_units: int = 0
    page_stride: int = 0


class Event(NamedTuple):
    """A recorded event to wait for: its handle, and the device that it belongs to."""

    handle: Any
    device: int = 0


class Stream(NamedTuple):
    """A stream to wait for, as it is at the call: its handle, and the device that it belongs to."""

    handle: Any
    device: int = 0


class CallerSynced:
    """The type of CALLER_SYNCED."""

    def __repr__(self) -> str:
        return "CALLER_SYNCED"

    def __reduce__(self) -> str:
        return "CALLER_SYNCED"  # the one of this module: a copy would not be known as it


# In the place of what a copy waits for: the source is written and the target is unread already.
CALLER_SYNCED = CallerSynced()


def whole(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int from `low` to `high`. Raises TypeError for a float or bool, ValueError outside, both with the
    name."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}; a whole number is needed")
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}; may be {low} to {high}")
    return number


def nanoseconds(name: str, seconds: float | None, none: str = "for as long as it takes") -> int:
    """Seconds as a C timeout: -1 where `seconds` is None or infinite, which means `none`. Raises TypeError for what is
    no number, ValueError below 0, for nan and above 136 years, both with the name."""
    if seconds is None or seconds == math.inf:
        return -1
    if not isinstance(seconds, numbers.Real):
        raise TypeError(f"{name} is {seconds!r}; a number of seconds is needed, or None {none}")
    if not 0 <= seconds < 1 << 32:
        raise ValueError(f"{name} is {seconds}; may be 0 to 2^32 seconds, or None {none}")
    return int(float(seconds) * 1e9)


def address(thing: Any) -> int:
    """The address behind an int, an array or a tensor. Raises TypeError for anything else, ValueError for one that
    does not fit."""
    if isinstance(thing, numbers.Integral):
        return whole("address", thing, 0, (1 << 64) - 1)
    found = array_interface(thing)
    if found is not None:
        if found.get("strides") is not None:
            raise ValueError(f"{type(thing).__name__} is not contiguous; give its address and strides as numbers")
        if found["data"][1]:
            raise ValueError(f"{type(thing).__name__} is read-only")
        return int(found["data"][0])
    if hasattr(thing, "data_ptr"):
        return int(thing.data_ptr())
    if hasattr(thing, "__index__"):  # last: tensors and arrays have it too, for the number that is in them
        return whole("address", thing, 0, (1 << 64) - 1)
    raise TypeError(f"an address is an int or an array, not {type(thing).__name__}")


def array_interface(thing: Any) -> dict[str, Any] | None:
    """What an array says of its memory; None where it says nothing, and for a number of NumPy's, whose own memory is
    not meant."""
    if isinstance(thing, numbers.Number):
        return None
    for interface in ("__cuda_array_interface__", "__array_interface__"):
        try:
            found = getattr(thing, interface, None)
        except Exception:  # a tensor of PyTorch's has none where NumPy does not know its type, and raises KeyError
            found = None
        if found is not None:
            return dict(found)
    return None


def array_bytes(thing: Any) -> int | None:
    """The bytes of an array that says its shape and the size of its items; None for anything else."""
    found = array_interface(thing) or {}
    item = re.match(r"[<>=|]([a-zA-Z])(\d+)", str(found.get("typestr")))
    if item is None or found.get("shape") is None:
        return None
    # Of NumPy's text the number is that of characters, of 4 bytes.
    return int(math.prod(found["shape"])) * int(item[2]) * (4 if item[1] == "U" else 1)


def memory(thing: Any, size: Any) -> tuple[int, int]:
    """The address behind a thing and a number of bytes there. Raises ValueError for an array that has fewer."""
    number, found = whole("bytes", size, 1, (1 << 63) - 1), array_bytes(thing)
    if found is not None and found < number:
        raise ValueError(f"the array has {found:,} bytes, {number:,} are asked")
    return address(thing), number


def handle(thing: Any) -> int:
    """The handle of a stream or event: an int, or an object with __cuda_stream__, cuda_stream, cuda_event or ptr."""
    if hasattr(thing, "__index__"):
        return whole("handle", thing, 0, (1 << 64) - 1)
    if hasattr(thing, "__cuda_stream__"):
        return int(thing.__cuda_stream__()[1])
    for name in ("cuda_stream", "cuda_event", "ptr"):
        if hasattr(thing, name):
            return int(getattr(thing, name))
    raise TypeError(f"a stream or event is an int handle or an object that has one, not {type(thing).__name__}")
