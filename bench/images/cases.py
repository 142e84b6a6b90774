"""A park that is timed: from a session into an image, whose bytes are compared without a copy of the library's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from common.extents import Extents

from common.setting import Setting
from strata_copy import Image, runtime
from strata_copy.rig import PIECE, Session


class Park:
    """Like common.setting.Case. The session has its memory in one allocation, and keeps its content."""

    def __init__(self, setting: Setting, source: Session, image: Image, upto: int) -> None:
        self.source, self.image, self.upto = source, image, upto
        image.reserve(upto)
        self.plan = setting.copier.plan(source.state, image)
        self.extents = Extents(self.plan, upto)
        self.bytes = self.extents.bytes
        self._setting = setting

    def spoil(self) -> None:
        """Makes the image wrong wherever the copy must write."""
        self.extents.spoil(self._setting.stream_on)

    def wrong(self) -> list[str]:
        """Where the image has not the bytes of the session. It is published then, if a copy has landed in it."""
        with ThreadPoolExecutor() as threads:
            lines = [line for line in threads.map(self._difference, self._pieces()) if line]
        if not self.image.publish():
            lines.append("the image is in use behind its last copy")
        return lines[:8]

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        """(address in the image, offset in the session, bytes) of what is copied."""
        first = self.source.address(0)
        for target, source, width, rows, target_pitch, source_pitch in self.plan.extents(self.upto):
            for row in range(rows):
                for start in range(0, width, PIECE):
                    yield (
                        target + row * target_pitch + start,
                        source + row * source_pitch - first + start,
                        min(PIECE, width - start),
                    )

    def _difference(self, piece: tuple[int, int, int]) -> str:
        address, offset, n = piece
        found, wanted = runtime.view(address, n), self.source.read(offset, n)
        if np.array_equal(found, wanted):
            return ""
        at = int(np.flatnonzero(found != wanted)[0])
        return f"image, from offset {offset + at} of the session: wanted {wanted[at]:#04x}, found {found[at]:#04x}"
