"""Copies between a slot and pinned memory, queued whole by the caller and fed by the worker in windows."""

from common.setting import Case, Setting
from copies.measure import PINNED, Bench

WINDOWS = (2, 4, 8, 16)  # chunks of 32 MiB


def measure(setting: Setting, bench: Bench) -> None:
    both_ways(setting, bench, "whole", False)
    for window in WINDOWS:
        with setting.copier_with(window=window):
            both_ways(setting, bench, f"fed, window {window}", True)


def both_ways(setting: Setting, bench: Bench, how: str, feed: bool) -> None:
    tokens = setting.tokens["middle"]
    ends = ("device", "source"), ("device", "target"), ("pinned", "source"), ("pinned", "target")
    slot, other, pinned, image = setting.sessions("int8", "middle", *ends)
    bench.measure(
        f"slot -> pinned, int8, {tokens} tokens, {how}", [Case(setting, slot, image, tokens)], "d2h", PINNED, feed=feed
    )
    bench.measure(
        f"pinned -> slot, int8, {tokens} tokens, {how}",
        [Case(setting, pinned, other, tokens)],
        "h2d",
        PINNED,
        feed=feed,
    )
