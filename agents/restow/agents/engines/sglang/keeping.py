"""Find, request and hand over states through the broker, for all ranks of an SGLang engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from restow.agents.engines.common.blocks import Group
from restow.agents.engines.common.chains import MAX_ENDS, QUANTUM_TOKENS
from restow.agents.engines.common.prefix_sharing import PATIENCE_MS, PrefixGiver, PrefixOffers
from restow.agents.engines.common.registration import ConnectorSettings
from restow.broker.client import (
    BlockingDelivery,
    BlockingSession,
    HashForm,
    Prefix,
    PrefixChain,
    PrefixHolder,
    chain_of,
)
from restow.broker.client.engine.chains import CONTENT_FORM
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger

FORM = HashForm(CONTENT_FORM, QUANTUM_TOKENS)
PATIENCE_S = 3.0
"""Time after which a state that nobody took is given up: no store, or no room in it."""
QUIET_S = 30.0
"""Time for which nothing is offered after that, so that SGLang's pages are not locked for it."""
LOOK_EVERY_S = 0.02
Blocks = Mapping[str, Sequence[int]]


class Tokens(NamedTuple):
    """Tokens from a prompt's beginning, and the salt that keeps equal tokens apart."""

    ids: Sequence[int]
    salt: str

    @property
    def state(self) -> Prefix:
        """Return the name of the state after all tokens."""
        count = len(self.ids)
        ends = [count] if count % QUANTUM_TOKENS else []
        return chain_of(self.ids, salt=self.salt, ends_tokens=ends).prefix(count)


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


@dataclass(slots=True, eq=False)
class _Kept:
    """The state that SGLang offloads now: all of `PrefixCache` that a `PrefixGiver` calls.

    SGLang's tree has locked its blocks. It is its own pin, as often as it is given.
    """

    prefix: Prefix | None = None
    blocks: Blocks = field(default_factory=dict)
    readers: int = 0

    def holds(self, asked: Prefix) -> bool:
        """Return whether the state is what is asked for."""
        return asked == self.prefix

    def pin_state(self, asked: Prefix) -> _Kept | None:
        """Return the state if it is what is asked for."""
        self.readers += asked == self.prefix
        return self if asked == self.prefix else None

    def let_go(self, _: _Kept) -> None:
        """Note that a reader has ended."""
        self.readers -= 1


class StateSharing:
    """Speaks with the broker for an engine. `find` and `request` may run beside `keep`."""

    def __init__(
        self, groups: Sequence[Group], stop_tokens: Sequence[int], settings: ConnectorSettings
    ) -> None:
        """Prepare; replies end with one of ``stop_tokens``. `begin` gives the session."""
        self._woken = Event()
        self.offers = PrefixOffers(self._woken.set)
        self._groups, self._settings, self._stop_tokens = groups, settings, list(stop_tokens)
        self._page_tokens = groups[0].block_tokens
        self._sparse = any(group.is_state or group.window_tokens for group in groups)
        self._kept = _Kept()
        self._quiet_until_s = 0.0
        self._failed = ""

    def begin(self, session: BlockingSession, engine_id: str) -> None:
        """Speak on a session."""
        self._session, self._engine_id, kept = session, engine_id, self._kept
        self._log = get_logger("restow.sglang").bind(engine=engine_id)
        cached: Any = kept  # what a scheduler of another engine calls besides is not called here
        lease_ms, hold_ms = self._settings.lease_ms, self._settings.hold_ms
        self._giver = PrefixGiver(session, self.offers, cached, FORM, lease_ms, hold_ms)

    def find(self, tokens: Tokens, here_tokens: int) -> list[int]:
        """Return after how many tokens others hold a state that all pools can restore.

        Of attention alone, a state may end behind every page up to the last one that is held. Of
        snapshots and windows these are the states of each holder that end behind a page.
        """
        size = self._page_tokens
        held = [holder.tokens for holder in self._holders(self._chain(tokens))]
        if not self._sparse:
            return list(range(here_tokens + size, max(held, default=0) + 1, size))
        return sorted({count for count in held if count > here_tokens and count % size == 0})

    def _chain(self, tokens: Tokens) -> PrefixChain:
        """Return the chain of a prompt, with the ends of replies in it, and its own end."""
        count = len(tokens.ids)
        before = np.flatnonzero(np.isin(np.asarray(tokens.ids), self._stop_tokens))
        ends = np.unique([*before, *(before + 1), count]).astype(np.int64)
        ends = ends[(ends % QUANTUM_TOKENS > 0) & (ends % self._page_tokens == 0)][-MAX_ENDS:]
        made = chain_of(tokens.ids, salt=tokens.salt, ends_tokens=ends.tolist())
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
        return [holder for holder in holders if holder.engine_id != self._engine_id]

    def request(self, prefix: Prefix, blocks: Blocks, held_tokens: int) -> BlockingDelivery:
        """Ask for a state, into blocks of which the first hold ``held_tokens`` already."""
        return self._session.request(
            uuid4().hex, blocks, held_tokens=held_tokens, timeout_ms=PATIENCE_MS, prefix=prefix
        )

    def keep(
        self, prefix: Prefix, blocks: Blocks, fence: Callable[[str], None], stopping: Event
    ) -> bool:
        """Return whether another engine holds a state in the end; its blocks are free then.

        A store is told that it is worth keeping, and asks for it. ``fence`` has every rank fence a
        handoff. Nothing new begins once ``stopping`` is set.
        """
        if self._is_elsewhere(prefix):
            return True
        if stopping.is_set() or time.monotonic() < self._quiet_until_s:
            return False
        names = {group.name: names_of(prefix, group) for group in self._groups}
        self._kept.prefix, self._kept.blocks = prefix, blocks
        try:
            for group, hashes in names.items():
                self._session.hold(FORM, group, hashes)
            self._session.keep(prefix)
            return self._await_taken(prefix, fence, stopping)
        finally:
            self._kept.prefix = None
            for group, hashes in names.items():
                self._session.evict(FORM, group, hashes)
            while self._kept.readers:  # a lease ends in any case
                self._step(fence)

    def _await_taken(self, prefix: Prefix, fence: Callable[[str], None], stopping: Event) -> bool:
        until_s = time.monotonic() + PATIENCE_S
        while not stopping.is_set():
            self._step(fence)
            if self._is_elsewhere(prefix):
                return True
            if not self._kept.readers and time.monotonic() > until_s:
                self._quiet_until_s = time.monotonic() + QUIET_S
                self._log.warning("no store takes states", tries_again_in_s=QUIET_S)
                return False
        return False

    def _step(self, fence: Callable[[str], None]) -> None:
        self._woken.wait(LOOK_EVERY_S)
        self._woken.clear()
        for handoff_id in self._giver.step():
            fence(handoff_id)

    def _is_elsewhere(self, prefix: Prefix) -> bool:
        count = prefix.position_tokens
        return any(holder.tokens == count for holder in self._holders(prefix.chain))
