"""`Answering` publishes what other engines ask for of the cache, or declines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from restow.agents.engines.common.handoff_ends import HandoffEnds
from restow.agents.engines.vllm.prefix.chain import Chain
from restow.broker.client import BlockingSession, HashForm, Offer
from restow.broker.errors import RestowError

if TYPE_CHECKING:
    from restow.agents.engines.vllm.prefix.cached_prefixes import CachedPrefixes
    from restow.agents.engines.vllm.prefix.pins import Pin


class Offers:
    """Brings offers from the session's thread to the scheduler's, and wakes that."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` has the engine take a step, if it has nothing else to do."""
        self.wake = wake
        self._queue: SimpleQueue[tuple[Offer, float]] = SimpleQueue()

    def hear(self, offer: Offer) -> None:
        """Take an offer, in the session's thread."""
        self._queue.put((offer, time.monotonic() + offer.within_ms / 1e3))
        self.wake()

    @property
    def empty(self) -> bool:
        """Whether none waits."""
        return self._queue.empty()

    def take(self) -> Iterator[Offer]:
        """All that have come since, but those that the broker has made to the next by now."""
        while True:
            try:
                offer, until_s = self._queue.get_nowait()
            except Empty:
                return
            if time.monotonic() < until_s:
                yield offer


class Answering:
    """Keeps blocks in place while others read them. Belongs to the scheduler's thread.

    What is cached when a step was scheduled is complete when that step is: workers fence it then.
    """

    def __init__(
        self,
        session: BlockingSession,
        offers: Offers,
        cached: CachedPrefixes,
        form: HashForm,
        lease_ms: int,
        hold_ms: int,
    ) -> None:
        """Answer ``offers`` of ``form`` with what is cached."""
        self._session, self._offers, self._cached, self._form = session, offers, cached, form
        self._lease_ms, self._hold_ms = lease_ms, hold_ms
        self._ends = HandoffEnds()
        self._pins: dict[str, Pin] = {}
        """By handoff that is published."""

    @property
    def pending(self) -> bool:
        """Whether a step has something to do here."""
        return not (self._offers.empty and self._ends.empty)

    def step(self) -> list[str]:
        """Answer all offers, let go what was read; return the handoffs that workers fence."""
        for end in self._ends.take():
            self._cached.let_go(self._pins.pop(end.handoff_id))
            if end.failed:
                end.tell("a prefix was not handed over")
        return [offer.handoff_id for offer in self._offers.take() if self._publish(offer)]

    def decline_all(self) -> None:
        """Answer all offers with no: nobody knows which weights have computed what is cached."""
        for offer in self._offers.take():
            self._session.decline_offer(offer.handoff_id, "its weights were replaced")

    def _publish(self, offer: Offer) -> bool:
        """Return whether it was; else it was declined."""
        handoff_id, prefix = offer.handoff_id, offer.prefix
        tokens = prefix.position_tokens
        pin = None
        if prefix.form == self._form and not prefix.salt and handoff_id not in self._pins:
            chain = Chain(self._form.quantum_tokens, prefix.hashes)
            name = prefix.end_hash or b"".join(prefix.hashes[-1:])
            pin = self._cached.pin_state(chain, tokens, name)
        if pin is None:
            self._session.decline_offer(handoff_id, "it is not cached any more")
            return False
        try:
            future = self._session.publish(
                handoff_id,
                pin.blocks,
                tokens,
                lease_ms=self._lease_ms,
                hold_ms=self._hold_ms,
                content=offer.content,
            )
        except RestowError as error:
            self._cached.let_go(pin)
            self._session.decline_offer(handoff_id, error.message)
            return False
        self._pins[handoff_id] = pin
        self._ends.watch(handoff_id, handoff_id, future)
        future.add_done_callback(lambda _: self._offers.wake())
        return True
