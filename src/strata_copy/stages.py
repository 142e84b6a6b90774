"""A conversation on several devices: which part of it is where, and the save path over all of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from strata_copy import runtime, save_path
from strata_copy.parts import Part

# Of each pair of devices, source and target, what strata_copy.save_path takes: rig.runs_by_devices.
Runs = Mapping[tuple[int, int], np.ndarray]


class Stages:
    """Layers on devices 0, 1, ...: each stage has those from its first layer to the next one's.

    starts: the first layers of all stages behind the first. What belongs to no layer is on device 0; what comes behind
    the last layer, as a draft does, is on the last device.
    """

    def __init__(self, starts: Sequence[int] = ()) -> None:
        self.starts = tuple(starts)
        self.devices = range(len(self.starts) + 1)

    @classmethod
    def even(cls, devices: int, layers: int) -> Stages:
        return cls([layers * k // devices for k in range(1, devices)])

    def device(self, part: Part) -> int:
        return bisect_right(self.starts, part.layer)


class SaveStreams:
    """The save path as engines take it over several devices: stage after stage, on a private stream of each. `close`
    it."""

    def __init__(self, devices: Iterable[int]) -> None:
        self.streams: dict[int, int] = {}
        for device in devices:
            with runtime.on_device(device):
                self.streams[device] = runtime.stream_create()

    def save_and_restore(self, runs: Runs) -> None:
        for (source, target), some in runs.items():
            if source == target:
                with runtime.on_device(source):
                    save_path.save_and_restore(some, self.streams[source])
            else:
                pair = {(source, target): some}
                self.restore(self.save(pair), pair)

    def save(self, runs: Runs) -> list[save_path.Saved]:
        kept = []
        for (source, _), some in runs.items():
            with runtime.on_device(source):
                kept.append(save_path.save(some, self.streams[source]))
        return kept

    def restore(self, kept: list[save_path.Saved], runs: Runs) -> None:
        for saved, ((_, target), some) in zip(kept, runs.items(), strict=True):
            with runtime.on_device(target):
                save_path.restore(saved, some, self.streams[target])

    def close(self) -> None:
        for stream in self.streams.values():
            runtime.stream_destroy(stream)
        self.streams = {}
