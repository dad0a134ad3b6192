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
    """How a handoff ended. D may use its pages only if ``done``; P's pages are free either way."""

    handoff_id: str
    state: str
    reason: str
    detail: str
    bytes: int
    transfer_us: int

    @classmethod
    def of(cls, ended: pb.Ended) -> HandoffEnded:
        """As the broker told it."""
        told = (ended.handoff_id, state_name(ended.state), ended.reason, ended.detail)
        return cls(*told, ended.bytes, ended.transfer_us)

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
        """Tell how it ended, unless that was told or nobody waits."""
        if not self.done():
            self.set_result(ended)

    def fail(self, error: Exception) -> None:
        """Tell why there is no end."""
        if not self.done():
            self.set_exception(error)


class Delivery(HandoffFuture):
    """How a demand ends; await it. Giving it up gives the demand up, and its pages come later.

    So ``asyncio.wait_for(session.request(...), 0.1)`` cancels the demand. The pages are D's again
    when `pages_free` is done without an error, and not before: until then a rank may write to them.
    """

    def __init__(self, give_up: Callable[[Delivery], None]) -> None:
        """``give_up`` is called with it once, if it is cancelled."""
        super().__init__()
        self._give_up = give_up
        self.pages_free: asyncio.Future[None] = self.get_loop().create_future()
        self.pages_free.add_done_callback(_looked_at)

    def cancel(self, msg: object = None) -> bool:
        """Give the demand up; its pages are not free yet."""
        cancelled = super().cancel(msg)
        if cancelled:
            self._give_up(self)
        return cancelled

    def free(self, error: Exception | None = None) -> None:
        """Tell that no rank writes to the pages any more; or, with an error, that none can say."""
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
