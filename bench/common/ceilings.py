"""The ceilings of the device that is measured, and what they should be: strata_copy.probe measures them."""

from strata_copy import probe

WAYS = ("d2d", "h2d", "d2h", "two_way")
H200 = {"d2d": 2124.0, "h2d": 55.4, "d2h": 55.5}  # GB/s, measured on one that nobody else used
SOUND = 0.92  # of these; below it something else uses the machine, and no share of a ceiling means anything


class Ceilings:
    """The ways of device 0 in GB/s; `found` keeps the largest of each ever. `close` it.

    device_bytes: of the copy within the device. pinned_bytes: of one direction between it and pinned memory.
    """

    def __init__(self, device_bytes, pinned_bytes):
        self._probe = probe.Ceilings(device_bytes, pinned_bytes)
        self.found = dict.fromkeys(WAYS, 0.0)

    def measure(self):
        for way in WAYS:
            self.found[way] = max(self.found[way], self._probe.measure(way).best)

    def close(self):
        self._probe.close()


def void_ways(device_name, found):
    """The ceilings that are not what they should be, as text. Only of an H200 it is known what that is."""
    expected = H200 if "H200" in device_name else {}
    return [
        f"{way} is {found[way]:.1f} GB/s, at least {SOUND} of {rate} is expected"
        for way, rate in expected.items()
        if found[way] < SOUND * rate
    ]
