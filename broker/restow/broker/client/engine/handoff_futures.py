"""How a handoff ends, and the futures on which callers wait for it.

A caller waits on a `HandoffFuture`. The future of a demand is a `Delivery`, which also tells when
D's pages are free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from restow.v1 import broker_pb2 as pb

_STATES = {number: name.removeprefix("HANDOFF_STATE_") for name, number in pb.HandoffState.items()}
"""Names by number; a newer broker may know more states."""


def state_name(state: pb.HandoffState.ValueType) -> str:
    """Return the name of a state."""
    return _STATES.get(state, _STATES[pb.HANDOFF_STATE_UNSPECIFIED])


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """The end of a handoff. D may use its pages only if ``done``; P's pages are free anyway."""

    handoff_id: str
    """The id that the router gave both sides."""
    state: str
    """DONE, FAILED, EXPIRED or CANCELLED."""
    reason: str
    """The reason, a stable upper-case word (docs/runbook.md lists all). Empty if DONE."""
    detail: str
    """The reason in words. Empty if DONE."""
    bytes: int
    """Bytes that D's ranks read."""
    transfer_us: int
    """Microseconds from grant to last report. 0: not granted, or for P with several readers."""
    delivered: int = 0
    """Number of D's that have the state; for D, 1 if DONE."""
    position_tokens: int = 0
    """Tokens that P's state includes; D continues after them. 0: P had not published completely."""
    content_compared: bool = False
    """Whether P and D both named the content (`content_of`), and the broker compared it.

    If False, nobody knows whether the state belongs to D's prompt.
    """

    @classmethod
    def of(cls, ended: pb.Ended) -> HandoffEnded:
        """Convert the broker's message ``ended``."""
        told = (ended.handoff_id, state_name(ended.state), ended.reason, ended.detail)
        counts = (ended.bytes, ended.transfer_us, ended.delivered)
        return cls(*told, *counts, ended.position_tokens, ended.content_compared)

    @property
    def done(self) -> bool:
        """Whether D holds the complete state."""
        return self.state == "DONE"


class HandoffFuture(asyncio.Future[HandoffEnded]):
    """The end of a handoff for one side, to be awaited; an error may stay unretrieved."""

    def __init__(self) -> None:
        """Belong to the running loop."""
        super().__init__(loop=asyncio.get_running_loop())
        self.add_done_callback(_retrieve_error)

    def tell(self, ended: HandoffEnded) -> None:
        """Set the end to ``ended``, unless it is set or nobody waits. The session calls it."""
        if not self.done():
            self.set_result(ended)

    def fail(self, error: Exception) -> None:
        """Set an ``error`` instead of an end. The session calls it."""
        if not self.done():
            self.set_exception(error)


class Delivery(HandoffFuture):
    """The end of a demand, to be awaited. Cancelling it gives the demand up.

    So ``asyncio.wait_for(session.request(...), 0.1)`` cancels the demand after a timeout. The pages
    are D's again only when `pages_free` is done without an error: until then a rank may write to
    them.
    """

    def __init__(self, give_up: Callable[[Delivery], None]) -> None:
        """Call ``give_up`` with this delivery once, if it is cancelled. Sessions create it."""
        super().__init__()
        self._give_up = give_up
        self.pages_free: asyncio.Future[None] = self.get_loop().create_future()
        """Done when no rank writes to D's pages any more.

        Raises `PagesNotFreeError` if a closed session cannot tell.
        """
        self.pages_free.add_done_callback(_retrieve_error)
        self.sampled: asyncio.Future[int] = self.get_loop().create_future()
        """The token that P sampled, for a demand that takes it, told before the end.

        Cancelled if the end comes without it.
        """
        self.add_done_callback(lambda _: self.sampled.cancel())

    def cancel(self, msg: object = None) -> bool:
        """Give the demand up, and return True; return False if it has ended.

        Its pages are not free yet. ``msg`` is passed to the `CancelledError`, as in asyncio.
        """
        cancelled = super().cancel(msg)
        if cancelled:
            self._give_up(self)
        return cancelled

    def free(self, error: Exception | None = None) -> None:
        """Set that no rank writes to the pages any more, or an ``error`` if nobody can tell.

        The session calls it.
        """
        if self.pages_free.done():
            return
        if error is None:
            self.pages_free.set_result(None)
        else:
            self.pages_free.set_exception(error)


def _retrieve_error(done: asyncio.Future[Any]) -> None:
    """Mark an error as retrieved, so that it is not logged."""
    if not done.cancelled():
        done.exception()
