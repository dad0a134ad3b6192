"""How a handoff ends for one side; for D, a delivery, also when its pages are its own again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from restow.v1 import broker_pb2 as pb

_STATES = {number: name.removeprefix("HANDOFF_STATE_") for name, number in pb.HandoffState.items()}
"""By number: a newer broker may know more of them."""


def state_name(state: pb.HandoffState.ValueType) -> str:
    """The word for a state."""
    return _STATES.get(state, _STATES[pb.HANDOFF_STATE_UNSPECIFIED])


@dataclass(frozen=True, slots=True)
class HandoffEnded:
    """Says how a handoff ended. D may use its pages only if ``done``; P's are free either way."""

    handoff_id: str
    """As the router gave it to both sides."""
    state: str
    """DONE, FAILED, EXPIRED or CANCELLED."""
    reason: str
    """Why, as a stable upper-case word (docs/runbook.md has all). Empty: DONE."""
    detail: str
    """The reason in words. Empty: DONE."""
    bytes: int
    """How many D's ranks read."""
    transfer_us: int
    """Microseconds from the grant to the last rank's report. 0: never granted, or P of several."""
    delivered: int = 0
    """How many D's have the state; to D, 1 of DONE."""
    position_tokens: int = 0
    """Tokens that P's state has absorbed: D goes on from there. 0: P had not published it whole."""
    content_compared: bool = False
    """Whether P and D both named the content (`content_of`), and the broker compared it. False:
    nobody knows whether the state is that of D's prompt."""

    @classmethod
    def of(cls, ended: pb.Ended) -> HandoffEnded:
        """Take over what the broker told by ``ended``."""
        told = (ended.handoff_id, state_name(ended.state), ended.reason, ended.detail)
        counts = (ended.bytes, ended.transfer_us, ended.delivered)
        return cls(*told, *counts, ended.position_tokens, ended.content_compared)

    @property
    def done(self) -> bool:
        """Whether D holds the state, whole."""
        return self.state == "DONE"


class HandoffFuture(asyncio.Future[HandoffEnded]):
    """How a handoff ends for one side; await it. Nobody need look at it."""

    def __init__(self) -> None:
        """Belong to the running loop."""
        super().__init__(loop=asyncio.get_running_loop())
        self.add_done_callback(_looked_at)

    def tell(self, ended: HandoffEnded) -> None:
        """Tell that it ``ended``, unless that was told or nobody waits. The session calls it."""
        if not self.done():
            self.set_result(ended)

    def fail(self, error: Exception) -> None:
        """Tell by an ``error`` why there is no end. The session calls it."""
        if not self.done():
            self.set_exception(error)


class Delivery(HandoffFuture):
    """Tells how a demand ends: await it. Giving it up gives the demand up; its pages come later.

    So ``asyncio.wait_for(session.request(...), 0.1)`` cancels the demand. The pages are D's again
    when `pages_free` is done without an error, and not before: until then a rank may write to them.
    """

    def __init__(self, give_up: Callable[[Delivery], None]) -> None:
        """Call ``give_up`` with it once, if it is cancelled. Sessions make it."""
        super().__init__()
        self._give_up = give_up
        self.pages_free: asyncio.Future[None] = self.get_loop().create_future()
        """Done when no rank writes to D's pages any more; raises `PagesNotFreeError` if a closed
        session can't say."""
        self.pages_free.add_done_callback(_looked_at)
        self.sampled: asyncio.Future[int] = self.get_loop().create_future()
        """The token that P sampled, for a demand that takes it: told before the end. Cancelled
        where the end comes without."""
        self.add_done_callback(lambda _: self.sampled.cancel())

    def sample(self, token: int) -> None:
        """Tell the ``token`` that P sampled, unless that was told or nobody waits.

        The session calls it.
        """
        if not self.sampled.done():
            self.sampled.set_result(token)

    def cancel(self, msg: object = None) -> bool:
        """Give the demand up, and return True; False: it has ended. Its pages are not free yet.

        ``msg`` goes with the `CancelledError`, as asyncio has it.
        """
        cancelled = super().cancel(msg)
        if cancelled:
            self._give_up(self)
        return cancelled

    def free(self, error: Exception | None = None) -> None:
        """Tell that no rank writes to the pages any more; or, by ``error``, that nobody can say.

        The session calls it.
        """
        if self.pages_free.done():
            return
        if error is None:
            self.pages_free.set_result(None)
        else:
            self.pages_free.set_exception(error)


def _looked_at(done: asyncio.Future[Any]) -> None:
    """An error that nobody takes is not logged."""
    if not done.cancelled():
        done.exception()
