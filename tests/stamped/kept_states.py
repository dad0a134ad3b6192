"""States that an engine keeps by their content: told to the broker, evicted, offered and given."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from restow.broker.client import EngineSession, HashForm, Offer, Prefix
from restow.broker.errors import RestowError
from stamped.memory import Ids
from stamped.requests import Prompt, Requests

QUANTUM_TOKENS = 2
FORM = HashForm("stamped", QUANTUM_TOKENS, 16)
TOLD_LATE_S = (0.3, 8.0)
"""Within which an eviction is told: what is asked for in between is found, and not held."""
SILENT = 0.1
"""Of how many offers an engine does not answer."""
SILENT_S = 3.0


def prefix_of(prompt: Prompt) -> Prefix:
    """Return a prompt's whole state, by its content."""
    position_tokens = prompt.position_tokens
    hashes = tuple(
        _hash(prompt, at) for at in range(QUANTUM_TOKENS, position_tokens + 1, QUANTUM_TOKENS)
    )
    end_hash = _hash(prompt, position_tokens) if position_tokens % QUANTUM_TOKENS else b""
    return Prefix(FORM, position_tokens, hashes, end_hash)


def _hash(prompt: Prompt, at_tokens: int) -> bytes:
    named = f"{prompt.name} up to {at_tokens}".encode()
    return hashlib.sha256(named).digest()[: FORM.hash_bytes]


@dataclass(eq=False)
class Kept:
    """One state in its pages."""

    prompt: Prompt
    ids: Ids
    pins: int = 0
    evicted: bool = False
    given: bool = False


class KeptStates:
    """Those of one life of an engine."""

    def __init__(
        self,
        session: Callable[[], Awaitable[EngineSession]],
        requests: Requests,
        rng: Random,
        fence: Callable[[str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Take pages from ``requests``; ``spawn`` has the scheduler do something."""
        self._session, self._requests, self._rng = session, requests, rng
        self._fence, self._spawn = fence, spawn
        self._kept: dict[Prefix, Kept] = {}
        self._losses = 0
        """How often a rank has lost its memory."""
        self.false_offers = 0
        """Offers for what was told, and was not held any more."""
        self.silent = SILENT
        self.deaf = False
        """Whether it answers no offer at all."""
        self.for_stores = False
        """Whether what it computes is worth keeping."""

    async def compute(self, prompt: Prompt, computed: Callable[[str, int], None]) -> None:
        """Compute a state, and keep it."""
        if (ids := await self._requests.take(prompt)) is None:
            return
        revision = self._requests.revision
        await asyncio.sleep(prompt.compute_s)
        if self._requests.revision != revision:
            return self._requests.pages.give(ids)
        computed(prompt.name, self._write(ids))
        await self._keep(prompt, ids)
        if self.for_stores:
            (await self._session()).keep(prefix_of(prompt))

    async def ask(
        self,
        prompt: Prompt,
        computed: Callable[[str, int], None],
        received: Callable[[str, set[int]], None],
        name: str,
        keeps: bool,
    ) -> None:
        """Ask for a state by its content, as handoff ``name``; keep the state, if ``keeps``."""
        came = await self._requests.receive(replace(prompt, name=name), prefix_of(prompt))
        if came is None:
            return
        stamp = self._write(came.ids)
        if came.done:
            received(prompt.name, came.stamps)
        if came.done and keeps:
            computed(prompt.name, stamp)
            await self._keep(prompt, came.ids)
        else:
            self._requests.pages.give(came.ids)

    def _write(self, ids: Ids) -> int:
        """Fill pages with a state of the present weights; return its stamp."""
        stamp = self._requests.pages.write(ids)
        self._requests.stamps.revisions[stamp] = self._requests.revision
        return stamp

    def forget(self) -> None:
        """Forget all states, because the weights were replaced."""
        known, self._kept = self._kept, {}
        for kept in known.values():
            kept.evicted = True
            self._give_if_free(kept)

    async def _keep(self, prompt: Prompt, ids: Ids) -> None:
        computed_with = self._requests.revision, self._losses
        session, prefix = await self._session(), prefix_of(prompt)
        # It was computed twice, or weights or memory were replaced before there was a session.
        if prefix in self._kept or computed_with != (self._requests.revision, self._losses):
            return self._requests.pages.give(ids)
        self._kept[prefix] = Kept(prompt, ids)
        for group, hashes in self._told(prefix, ids).items():
            session.hold(FORM, group, hashes)

    def _told(self, prefix: Prefix, ids: Ids) -> dict[str, list[bytes]]:
        """Return the hashes that stand for the blocks and the snapshot of a state."""
        last = prefix.end_hash or prefix.hashes[-1]
        told = {}
        for group, tokens in self._requests.pages.memory.page_tokens.items():
            ends = range(tokens, prefix.position_tokens + 1, tokens) if tokens else ()
            hashes = [prefix.hashes[end // QUANTUM_TOKENS - 1] for end in ends]
            told[group] = hashes if hashes and hashes[-1] == last else [*hashes, last]
        return told

    async def evict(self, prompt: Prompt) -> None:
        """Forget a state, if it is there, and tell so a little later."""
        prefix = prefix_of(prompt)
        kept = self._kept.pop(prefix, None)
        if kept is None:
            return
        kept.evicted = True
        self._give_if_free(kept)
        session = await self._session()
        await asyncio.sleep(self._rng.uniform(0.0, self._rng.choice(TOLD_LATE_S)))
        if prefix not in self._kept:
            for group, hashes in self._told(prefix, kept.ids).items():
                session.evict(FORM, group, hashes)

    async def evict_all(self) -> None:
        """Evict all states."""
        for kept in list(self._kept.values()):
            await self.evict(kept.prompt)

    def lose(self) -> None:
        """Forget all states at once and tell so, after a rank has lost its memory."""
        self._losses += 1
        for kept in list(self._kept.values()):
            self._spawn(self.evict(kept.prompt))

    def offered(self, offer: Offer) -> None:
        """Answer an offer, or leave it unanswered."""
        self._spawn(self._answer(offer))

    async def _answer(self, offer: Offer) -> None:
        if self.deaf:
            return
        session = await self._session()
        if self._rng.random() < self.silent:
            await asyncio.sleep(self._rng.uniform(0.0, SILENT_S))
        kept = self._kept.get(offer.prefix)
        if kept is None:
            self.false_offers += 1
            session.decline_offer(offer.handoff_id, "evicted")
            return
        kept.pins += 1
        try:
            ended = session.publish(
                offer.handoff_id,
                kept.ids,
                offer.prefix.position_tokens,
                lease_ms=kept.prompt.lease_ms,
                hold_ms=kept.prompt.hold_ms,
                content=offer.content,
            )
            self._fence(offer.handoff_id)
            await ended
        except RestowError:
            pass  # another has given it
        finally:
            kept.pins -= 1
        self._give_if_free(kept)

    def _give_if_free(self, kept: Kept) -> None:
        if kept.evicted and not kept.pins and not kept.given:
            kept.given = True
            self._requests.pages.give(kept.ids)
