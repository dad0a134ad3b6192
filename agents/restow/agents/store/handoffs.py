"""The handoffs of a store: it requests states that engines report, and gives states to others."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from restow.agents.agent import Agent
from restow.agents.store.holdings import DiskThread, StoredStates
from restow.agents.store.kept import Pinned
from restow.agents.store.run_files import RunLostError
from restow.broker.client import (
    BlockingDelivery,
    BlockingSession,
    HandoffEnded,
    Offer,
    Prefix,
    SessionClosedError,
)
from restow.broker.client.engine.chains import Holders
from restow.broker.errors import ChainFormError, ChainInvalidError, RestowError
from restow.broker.logs import get_logger

MAX_HASHES = 1 << 18
"""Most hashes of all waiting states: about 20 MB. Fewer states of longer prompts may wait."""


class Waiting:
    """A queue of states to request, which drops the oldest if it is too long. Thread-safe."""

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        """Begin empty."""
        self.dropped = 0
        """Number of states that were dropped."""
        self._max_hashes = max_hashes
        self._hashes = 0
        self._prefixes: OrderedDict[Prefix, None] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of waiting states."""
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> None:
        """Add a state, unless it already waits."""
        with self._lock:
            if prefix in self._prefixes:
                return
            self._prefixes[prefix] = None
            self._hashes += _size(prefix)
            while self._hashes > self._max_hashes:
                dropped, _ = self._prefixes.popitem(last=False)
                self._hashes -= _size(dropped)
                self.dropped += 1

    def take(self) -> Prefix | None:
        """Take the state that has waited longest; None if none waits."""
        with self._lock:
            if not self._prefixes:
                return None
            prefix, _ = self._prefixes.popitem(last=False)
            self._hashes -= _size(prefix)
            return prefix


def _size(prefix: Prefix) -> int:
    return len(prefix.hashes) + 1


MOST_AT_ONCE = 4
"""Open requests, enough to have the next request granted while a state is read."""


class StateRequests:
    """Requests states, a few at a time. All methods but `hear` run on one thread."""

    def __init__(
        self,
        session: BlockingSession,
        holdings: StoredStates,
        run: Callable[[Callable[[], None]], None],
        arrived: Callable[[Prefix], None],
    ) -> None:
        """Begin; ``run`` does work on the thread, ``arrived`` is called with new states."""
        self.waiting = Waiting()
        self.asked = self.kept = 0
        """Requests made, and requests that brought their state."""
        self._session, self._holdings = session, holdings
        self._run, self._arrived = run, arrived
        self._open: set[Prefix] = set()
        self._called = False
        self._refused: str = ""
        self._log = get_logger("restow.store")

    def hear(self, prefix: Prefix) -> None:
        """Note that a state is worth keeping. Returns at once, on any thread."""
        self.waiting.add(prefix)
        if not self._called:
            self._called = True
            self._run(self._next)

    def _next(self) -> None:
        self._called = False
        while len(self._open) < MOST_AT_ONCE and (prefix := self.waiting.take()) is not None:
            if prefix not in self._open:
                self._consider(prefix)

    def _consider(self, prefix: Prefix) -> None:
        try:
            self._holdings.check(prefix)
            if self._holdings.holds(prefix):
                self._holdings.use(prefix)
                return
            answer = self._session.find([prefix.chain], limit=1)
        except RestowError as error:
            self._refuse(error)
            return
        self._open.add(prefix)
        answer.add_done_callback(lambda _: self._run(lambda: self._found(prefix, answer)))

    def _found(self, prefix: Prefix, answer: Future[Holders]) -> None:
        """Request the state if someone holds it: nothing is evicted for a state that is gone."""
        self._open.discard(prefix)
        try:
            (holders,) = answer.result()
            if any(holder.tokens == prefix.position_tokens for holder in holders):
                self._reserve(prefix)
        except RestowError as error:
            self._refuse(error)
        self._next()

    def _reserve(self, prefix: Prefix) -> None:
        pinned = self._holdings.reserve(prefix)
        if pinned is not None:
            self._ask(pinned)
        else:
            self._log.warning(
                "a state is not kept, because the memory has no room", tokens=prefix.position_tokens
            )

    def _ask(self, pinned: Pinned) -> None:
        prefix = pinned.prefix
        try:
            delivery = self._session.request(
                f"keep-{uuid.uuid4().hex}",
                pinned.blocks,
                held_tokens=pinned.held_tokens,
                prefix=prefix,
            )
        except RestowError:
            self._holdings.give_up(pinned)
            raise
        self.asked += 1
        self._open.add(prefix)
        delivery.add_done_callback(lambda _: self._run(lambda: self._ended(delivery, pinned)))

    def _ended(self, delivery: BlockingDelivery, pinned: Pinned) -> None:
        self._open.discard(pinned.prefix)
        error = delivery.exception()
        if error is None and delivery.result().done:
            try:
                self._holdings.commit(pinned)
            except ChainFormError as other:
                self._refuse(other)
            else:
                self.kept += 1
                self._arrived(pinned.prefix)
        else:
            self._log.info(
                "a state did not arrive",
                tokens=pinned.prefix.position_tokens,
                detail=str(error or delivery.result().reason),
            )
            delivery.pages_free.add_done_callback(
                lambda free: self._run(lambda: self._give_up_if(free, pinned))
            )
        self._next()

    def _give_up_if(self, free: Future[None], pinned: Pinned) -> None:
        """Release the pages, unless nobody can tell whether they are still written to."""
        if free.exception() is None:
            self._holdings.give_up(pinned)

    def _refuse(self, error: RestowError) -> None:
        """Log why a state is not kept, unless the last refusal was the same."""
        if error.message != self._refused:
            self._refused = error.message
            self._log.warning("a state is not kept", reason=error.reason, detail=error.message)


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
        pinned = self._holdings.reserve(offer.prefix)
        if pinned is None:
            self._run(lambda: self._decline(offer, "the memory has no room to read the state into"))
            return
        try:
            disk.load(pinned)
            self._holdings.commit(pinned)
        except RunLostError as error:
            self._holdings.give_up(pinned)
            why = error.message
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
