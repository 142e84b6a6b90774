"""What Python code catches: one class for each outcome that is not OK."""

from __future__ import annotations

REASONS = (
    "none", "layout", "mark", "capacity", "overlap", "same state", "invalid", "busy", "order", "capture", "stream",
    "group", "bank", "generation", "place", "unsupported", "ticket", "request", "cuda", "closed", "memory", "hook",
)  # fmt: skip


class CopyError(Exception):
    """A call that did not end OK. The class says what to do, the fields are for the log.

    reason: one of REASONS. device, layer, part: -1 where they do not apply; part is an index of Layout.parts.
    cuda_code, call: the CUDA call that failed, 0 and "" if none did. pending_before: a CUDA error of other code that
    was pending on the thread.
    restored: False where the thread's capture mode could not be put back. wanted, found: the numbers of the text.
    """

    status = 0

    def __init__(self, text: str, fields: dict[str, object] | None = None):
        super().__init__(text)
        self.text = text
        self.fields = dict(fields or {})

    def __getattr__(self, name: str) -> object:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text, self.fields)


class Refused(CopyError):
    """Before the first write: target and source are as they were."""

    status = -1


class Failed(CopyError):
    """After the first write: the target is INVALID until it is reset, the source is untouched."""

    status = -2


class Cancelled(CopyError):
    """After the first write, because the caller asked for it: the target is INVALID until it is reset."""

    status = -3


class Poisoned(CopyError):
    """A CUDA error that ends the device for this process. Start a new process."""

    status = -4


BY_STATUS = {cls.status: cls for cls in (Refused, Failed, Cancelled, Poisoned)}
