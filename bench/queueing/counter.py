"""A Python thread that counts, and what it still gets done beside something else."""

import threading
import time
from collections.abc import Callable


class Counter:
    """Counts from `with` on, in a thread of its own, as fast as it gets the GIL."""

    def __init__(self) -> None:
        self._count, self._stop = 0, False
        self._thread = threading.Thread(target=self._run, name="counter")

    def __enter__(self) -> "Counter":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop = True
        self._thread.join()

    def beside(self, work: Callable[[], object]) -> tuple[float, float]:
        """(counts a second while `work` ran, its seconds)."""
        count, start = self._count, time.monotonic()
        work()
        count, seconds = self._count - count, time.monotonic() - start
        return count / seconds, seconds

    def _run(self) -> None:
        while not self._stop:
            self._count += 1
