"""Find, request and hand over states through the broker, for all ranks of an SGLang engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace
from threading import Event
from uuid import uuid4

import numpy as np

from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import MAX_ENDS, QUANTUM_TOKENS
from restow.agents.engines.common.prefix_sharing import PrefixOffers
from restow.agents.engines.common.registration import ConnectorSettings
from restow.agents.engines.sglang.tree import Tokens
from restow.broker.client import (
    BlockingDelivery,
    BlockingSession,
    HandoffEnded,
    Offer,
    Prefix,
    PrefixChain,
    PrefixHolder,
    chain_of,
)
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger

PATIENCE_S = 3.0
"""Time after which a state that nobody took is given up: no store, or no room in it."""
QUIET_S = 30.0
"""Time for which nothing is offered after that, so that SGLang's pages are not locked for it."""
LOOK_EVERY_S = 0.02
BlockLists = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state in the engine's pools, and the blocks that hold it from its beginning on."""

    prefix: Prefix
    blocks: BlockLists


def prefix_of(tokens: Tokens) -> Prefix:
    """Return the name of the state after all of the tokens."""
    count = len(tokens.ids)
    ends = [count] if count % QUANTUM_TOKENS else []
    chain = chain_of(tokens.ids, QUANTUM_TOKENS, salt=tokens.salt, ends_tokens=ends)
    return chain.prefix(count)


def names_of(prefix: Prefix, group: Group) -> list[bytes]:
    """Return the hashes that name what a group holds of a state.

    A hash stands for a block, or for the blocks of a quantum where these are smaller.
    """
    count, step = prefix.position_tokens, max(group.block_tokens, QUANTUM_TOKENS)
    last = prefix.end_hash or prefix.hashes[-1]
    if group.is_state:
        return [last]
    first = group.first_token(count)
    ends = [end for end in range(step, count + 1, step) if end > first]
    names = [prefix.hashes[end // QUANTUM_TOKENS - 1] for end in ends]
    return names if count % step == 0 else [*names, last]


class StateSharing:
    """Speaks with the broker for an engine. `find` and `request` may run beside `keep`."""

    def __init__(
        self,
        groups: Sequence[Group],
        page_tokens: int,
        stop_tokens: Sequence[int],
        settings: ConnectorSettings,
    ) -> None:
        """Prepare; replies end with one of ``stop_tokens``. `begin` gives the session."""
        self.offers = PrefixOffers(self._wake)
        self._groups, self._page_tokens = groups, page_tokens
        self._stop_tokens, self._settings = list(stop_tokens), settings
        self._sparse = any(group.is_state or group.window_tokens for group in groups)
        self._woken = Event()
        self._kept: KeptState | None = None
        self._quiet_until_s = 0.0
        self._failed = ""

    def begin(self, session: BlockingSession, engine_id: str) -> None:
        """Speak on a session."""
        self._session, self._engine_id = session, engine_id
        self._log = get_logger("restow.sglang").bind(engine=engine_id)

    # -- finding ----------------------------------------------------------------------------------

    def find(self, tokens: Tokens, here_tokens: int) -> list[int]:
        """Return after how many tokens others hold a state that all pools can restore.

        Of attention alone, a state may end behind every page up to the last one that is held. Of
        snapshots and windows these are the states of each holder that end behind a page.
        """
        size = self._page_tokens
        most = [holder.tokens for holder in self._holders(self._chain(tokens)) if holder.tokens > 0]
        if not self._sparse:
            return list(range(here_tokens + size, max(most, default=0) + 1, size))
        return sorted({count for count in most if count > here_tokens and count % size == 0})

    def _chain(self, tokens: Tokens) -> PrefixChain:
        ids = np.asarray(tokens.ids)
        before = np.flatnonzero(np.isin(ids, self._stop_tokens)) if self._sparse else np.empty(0)
        ends = np.union1d(before, before + 1).astype(np.int64)
        between = (ends % QUANTUM_TOKENS != 0) & (ends % self._page_tokens == 0)
        ends = np.append(ends[between], len(ids) if len(ids) % QUANTUM_TOKENS else [])
        listed = np.unique(ends.astype(np.int64))[-MAX_ENDS:].tolist()
        made = chain_of(tokens.ids, QUANTUM_TOKENS, salt=tokens.salt, ends_tokens=listed)
        return replace(made, below_tokens=0)

    def _holders(self, chain: PrefixChain) -> list[PrefixHolder]:
        """Return the other engines that hold some of a chain; none if the broker does not say."""
        find_s = self._settings.find_ms / 1e3
        try:
            (holders,) = self._session.find([chain], timeout_s=find_s).result(find_s)
        except (RestowError, TimeoutError, CancelledError) as error:
            if str(error) != self._failed:
                self._failed = str(error)
                self._log.warning("who holds prefixes is not known", detail=repr(error))
            return []
        self._failed = ""
        return [holder for holder in holders if holder.engine_id != self._engine_id]

    def request(self, prefix: Prefix, blocks: BlockLists, held_tokens: int) -> BlockingDelivery:
        """Ask for a state, into blocks of which the first hold ``held_tokens`` already."""
        return self._session.request(
            uuid4().hex,
            blocks,
            held_tokens=held_tokens,
            timeout_ms=self._settings.request_timeout_ms,
            prefix=prefix,
        )

    # -- keeping ----------------------------------------------------------------------------------

    def keep(self, kept: KeptState, fence: Callable[[str], None], stopping: Event) -> bool:
        """Return whether another engine holds a state in the end; its blocks are free then.

        A store is told that it is worth keeping, and asks for it. ``fence`` has every rank fence a
        handoff. Nothing new begins once ``stopping`` is set.
        """
        if self._is_elsewhere(kept.prefix):
            return True
        if stopping.is_set() or time.monotonic() < self._quiet_until_s:
            return False
        form, given = kept.prefix.form, dict[str, Future[HandoffEnded]]()
        self._kept = kept
        try:
            for group in self._groups:
                self._session.hold(form, group.name, names_of(kept.prefix, group))
            self._session.keep(kept.prefix)
            return self._await_taken(kept, fence, stopping, given)
        finally:
            self._kept = None
            for group in self._groups:
                self._session.evict(form, group.name, names_of(kept.prefix, group))
            self._decline_all()
            self._end(given)

    def _await_taken(
        self,
        kept: KeptState,
        fence: Callable[[str], None],
        stopping: Event,
        given: dict[str, Future[HandoffEnded]],
    ) -> bool:
        until_s = time.monotonic() + PATIENCE_S
        while not stopping.is_set():
            self._woken.wait(LOOK_EVERY_S)
            self._woken.clear()
            for offer in self.offers.take():
                if self._publish(kept, offer, given):
                    fence(offer.handoff_id)
            if self._is_elsewhere(kept.prefix):
                return True
            if all(end.done() for end in given.values()) and time.monotonic() > until_s:
                self._quiet_until_s = time.monotonic() + QUIET_S
                self._log.warning("no store takes states", tries_again_in_s=QUIET_S)
                return False
        return False

    def _publish(
        self, kept: KeptState, offer: Offer, given: dict[str, Future[HandoffEnded]]
    ) -> bool:
        """Publish what is offered of the state; return False if it was declined."""
        asked, count = offer.prefix, offer.prefix.position_tokens
        whole = asked == kept.prefix
        begins = not asked.end_hash and asked.hashes == kept.prefix.hashes[: len(asked.hashes)]
        if not whole and (self._sparse or not begins or asked.form != kept.prefix.form):
            self._session.decline_offer(offer.handoff_id, "it is not held")
            return False
        size = self._page_tokens
        blocks = {
            group.name: kept.blocks[group.name][: 1 if group.is_state else -(-count // size)]
            for group in self._groups
        }
        settings = self._settings
        end = self._session.publish(
            offer.handoff_id,
            blocks,
            count,
            lease_ms=settings.lease_ms,
            hold_ms=settings.hold_ms,
            content=offer.content,
        )
        end.add_done_callback(lambda _: self._woken.set())
        given[offer.handoff_id] = end
        return True

    def _is_elsewhere(self, prefix: Prefix) -> bool:
        count = prefix.position_tokens
        return any(holder.tokens == count for holder in self._holders(prefix.chain))

    def _end(self, given: Mapping[str, Future[HandoffEnded]]) -> None:
        """Return when nobody reads the blocks any more."""
        wait(given.values(), PATIENCE_S)
        for handoff_id, end in given.items():
            if not end.done():
                self._session.take_back(handoff_id, "the engine needs its pages")
        wait(given.values())

    def _wake(self) -> None:
        self._woken.set()
        if self._kept is None:
            self._decline_all()

    def _decline_all(self) -> None:
        for offer in self.offers.take():
            self._session.decline_offer(offer.handoff_id, "it is not held any more")
