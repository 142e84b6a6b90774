"""Parked conversations: images in a pool of strata_copy, written in the background while other slots decode.

This is the Python side of strata_copy: parks are few, and nobody waits for them. What is taken out of the pool goes the
way of `direct.pyx`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import strata_copy as sc
from engine_loop.session import Failed, Refused

AHEAD = 64 << 20  # bytes of a park that may be queued and not landed: so far is a copy behind that overtakes it


class Park(NamedTuple):
    """A park in flight. `turn`: the session's, to see whether it still holds what is parked. `first`: nothing is
    published of the key."""

    key: str
    session: Any
    turn: int
    image: sc.Image
    ticket: sc.Ticket
    draft: bool
    first: bool


class Parks:
    """The conversations of a pool, and those on their way into it.

    A park reads its session, as a copy does: what the session's engine writes next comes behind (`Session.reads`).
    Raises what the loop raises: Refused and Failed.
    """

    def __init__(self, pool: sc.Pool, copier: sc.Copier, layout: sc.Layout) -> None:
        difference = layout.difference(pool.layout)
        if difference:
            raise Refused(f"the pool's images and the sessions differ in {difference}")
        self.pool, self.copier = pool, copier
        self.in_flight: dict[str, Park] = {}
        self._plans: dict[tuple[Any, str, bool], tuple[sc.Image, sc.Plan]] = {}

    def begin(self, session: Any, key: str, draft: bool) -> None:
        """Queues what the image of `key` lacks of a session, behind all that the session's streams have queued, at low
        priority."""
        if key in self.in_flight:
            self.land(key)
        draft = draft and session.draft_mode is not None
        marks = (session.tokens, session.draft_tokens if draft else 0)
        try:
            image = self.pool.image(key, marks, blob=np.append(session.ids, np.int32(draft)).tobytes())
            first = not image.published
            ticket = self.plan(session, key, image, out=True).submit(
                marks,
                after=[sc.Stream(stream, device) for stream, device in session.streams],
                groups=None if draft else ["kv", "running"],
                priority=-1,
                bytes_ahead=AHEAD,
            )
        except sc.Refused as refused:
            raise Refused(refused.text) from refused
        except sc.CopyError as failure:
            self.drop(key)
            raise Failed(failure.text) from failure
        if ticket is None:
            raise Refused("every ticket is in flight")
        session.reads.append(ticket)
        self.in_flight[key] = Park(key, session, session.turn, image, ticket, draft, first)

    def ended(self) -> list[str]:
        """The keys of parks that are not in flight any more and were not shown yet."""
        return [key for key, park in self.in_flight.items() if park.ticket.done]

    def land(self, key: str) -> Park:
        """Waits for a park and shows its image."""
        park = self._take_out(key)
        try:
            park.ticket.sync()
            if not park.image.publish():
                raise Refused(f"the image of {key} is in use")
        except sc.CopyError as failure:
            self.drop(key)
            raise Failed(f"{key} was not parked: {failure.text}") from failure
        return park

    def still_there(self, session: Any, key: str) -> bool:
        """Whether a session holds the conversation whose park is in flight, as it was."""
        park = self.in_flight.get(key)
        return park is not None and park.session is session and park.turn == session.turn

    def stop(self, key: str) -> bool:
        """Cancels a park that is not needed any more: True. False where it goes on: it only brings an image up to date,
        and what is parked already would be lost with it, or it is queued to its end."""
        park = self.in_flight[key]
        if not park.first or not park.ticket.cancel():
            return False
        self._take_out(key)
        try:
            park.ticket.sync()
        except sc.Cancelled:
            self.drop(key)
        return True

    def drop(self, key: str) -> None:
        """A half-written image is nobody's."""
        self._plans = {names: made for names, made in self._plans.items() if names[1] != key}
        del self.pool[key]

    def image(self, key: str) -> tuple[sc.Image, np.ndarray, bool]:
        """The image of a conversation, its token ids, and whether the draft's rows are in it."""
        try:
            image = self.pool[key]
        except KeyError:
            raise Refused(f"no conversation is parked as {key}") from None
        blob = np.frombuffer(image.blob, np.int32)
        return image, blob[:-1], bool(blob[-1])

    def _take_out(self, key: str) -> Park:
        park = self.in_flight.pop(key)
        if park.ticket in park.session.reads:
            park.session.reads.remove(park.ticket)
        return park

    def evicted(self) -> list[str]:
        """The keys that went for others since the last call."""
        gone = self.pool.evicted()
        self._plans = {names: made for names, made in self._plans.items() if names[1] not in gone}
        return gone

    def plan(self, session: Any, key: str, image: sc.Image, *, out: bool) -> sc.Plan:
        """Made once for each session and image."""
        made = self._plans.get((session, key, out))
        if made is None or made[0] is not image:
            sides = (session.state, image) if out else (image, session.state)
            made = self._plans[session, key, out] = image, self.copier.plan(*sides)
        return made[1]

    def close(self) -> None:
        """Waits for what is in flight."""
        for key in list(self.in_flight):
            self.land(key)
        self._plans.clear()
