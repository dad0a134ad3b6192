"""Give a store's states to engines that request them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from restow.agents.agent import Agent
from restow.agents.store.holdings import DiskThread, StoredStates
from restow.agents.store.kept import Pinned
from restow.broker.client import (
    BlockingSession,
    HandoffEnded,
    Offer,
    SessionClosedError,
)
from restow.broker.errors import ChainFormError, ChainInvalidError, RestowError
from restow.broker.logs import get_logger

HOLD_MS = 60_000
"""Time for which a publication is held, while the requester waits for it."""


class Giving:
    """Answers the broker's offers. All methods but `hear` run on one thread."""

    def __init__(
        self,
        session: BlockingSession,
        agent: Agent,
        holdings: StoredStates,
        disk: DiskThread | None,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        """Answer nothing yet. ``run`` does work on the thread."""
        self.offered = self.given = self.declined = 0
        """Offers; offers whose D received the state; offers that were declined."""
        self._session, self._agent = session, agent
        self._holdings, self._disk = holdings, disk
        self._run = run
        self._log = get_logger("restow.store")

    def hear(self, offer: Offer) -> None:
        """Take an offer. Returns at once, on any thread."""
        until_s = time.monotonic() + offer.within_ms / 1000
        self._run(lambda: self._answer(offer, until_s))

    def _answer(self, offer: Offer, until_s: float) -> None:
        self.offered += 1
        try:
            self._holdings.check(offer.prefix)
        except (ChainFormError, ChainInvalidError) as error:
            self._decline(offer, error.message)
            return
        pinned = self._holdings.pin(offer.prefix)
        if pinned is not None:
            self._publish(offer, pinned)
        elif self._disk is not None and self._holdings.holds(offer.prefix):
            self._disk.read(partial(self._load, self._disk, offer, until_s))
        else:
            self._decline(offer, "the store no longer has the state")

    def _load(self, disk: DiskThread, offer: Offer, until_s: float) -> None:
        """Read a state from disk, keep it, and have it published. Runs on the disk's thread."""
        if time.monotonic() > until_s:
            self._run(lambda: self._decline(offer, "the disk was too slow"))
            return
        if why := disk.bring(offer.prefix):
            self._run(lambda: self._decline(offer, why))
            return
        lent = self._holdings.pin(offer.prefix)
        if lent is None:
            self._run(lambda: self._decline(offer, "the state was evicted at once"))
        else:
            self._run(lambda: self._publish(offer, lent))

    def _publish(self, offer: Offer, pinned: Pinned) -> None:
        try:
            end = self._session.publish(
                offer.handoff_id,
                pinned.blocks,
                offer.prefix.position_tokens,
                hold_ms=HOLD_MS,
                content=offer.content,
                revision=offer.prefix.revision,
            )
            self._agent.fence(offer.handoff_id)
        except RestowError as error:
            self._holdings.give_up(pinned)
            self._decline(offer, error.message)
            return
        end.add_done_callback(lambda _: self._run(lambda: self._ended(offer, end, pinned)))

    def _ended(self, offer: Offer, end: Future[HandoffEnded], pinned: Pinned) -> None:
        self._holdings.give_up(pinned)
        error = end.exception()
        if error is None and end.result().done:
            self.given += 1
            return
        self._log.info(
            "a state was not taken",
            handoff=offer.handoff_id,
            detail=str(error or end.result().reason),
        )

    def _decline(self, offer: Offer, why: str) -> None:
        self.declined += 1
        with contextlib.suppress(SessionClosedError):
            self._session.decline_offer(offer.handoff_id, why)
