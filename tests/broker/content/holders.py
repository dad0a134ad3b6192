"""Engines that hold a prompt's state, and tell the broker so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from agent_harness.waiting import until
from broker.fakes import FakeAgent, engine, model_layout
from restow.broker.client import (
    AsyncAdminClient,
    EngineSession,
    HandoffEnded,
    Offer,
    Prefix,
    PrefixChain,
    chain_of,
)
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.prefix.prefixes import Announcements
from restow.broker.server.serve import RunningBroker

PROMPT = chain_of(range(1, 165))
"""Ten blocks of 16 tokens, and four more."""
FORM = PROMPT.form
MODEL = model_layout().model.identity
HELD_TOKENS = 64
STATE = PROMPT.prefix(HELD_TOKENS)
P_STATE = {"attention": [1, 2, 3, 5], "state": [4]}
D_STATE = {"attention": [11, 12, 13, 15], "state": [14]}


def hold(session: Any, attention: int = 10, snapshots: Iterable[int] = (4, 10)) -> None:
    """Tell that an engine holds the prompt's first blocks, and snapshots after some of them."""
    session.hold(FORM, "attention", PROMPT.hashes[:attention])
    session.hold(FORM, "state", [PROMPT.hashes[after - 1] for after in snapshots])


def teller(running: RunningBroker, name: str, tenant: str = "default") -> Announcements | None:
    return running.hub.directory.prefixes.teller(EngineKey(tenant, name))


async def heard(running: RunningBroker, name: str, batches: int, tenant: str = "default") -> None:
    """Wait until the broker has heard this number of batches."""

    def is_heard() -> bool:
        known = teller(running, name, tenant)
        return (known.heard if known else 0) == batches

    await until(is_heard)


async def found(running: RunningBroker, chain: PrefixChain = PROMPT, **more: Any) -> dict[str, int]:
    """Return how many tokens each engine holds."""
    async with AsyncAdminClient(running.address) as client:
        (holders,) = await client.find([chain], model=MODEL, **more)
    return {one.engine_id: one.tokens for one in holders}


class Holder:
    """An engine that holds the state, and answers offers as the test has it."""

    def __init__(
        self,
        session: EngineSession,
        agents: list[FakeAgent],
        blocks: dict[str, list[int]] = P_STATE,
    ) -> None:
        self.session, self.agents, self.blocks = session, agents, blocks
        self.offers: list[Offer] = []
        self.released: list[asyncio.Future[HandoffEnded]] = []
        self.fences: list[asyncio.Future[None]] = []
        self.answer: Callable[[Offer], None] = self.publish

    def hear(self, offer: Offer) -> None:
        self.offers.append(offer)
        self.answer(offer)

    def publish(self, offer: Offer) -> None:
        self.released.append(
            self.session.publish(
                offer.handoff_id,
                self.blocks,
                offer.prefix.position_tokens,
                content=offer.content,
            )
        )
        for agent in self.agents:
            self.fences.append(asyncio.ensure_future(agent.fence(offer.handoff_id)))

    def decline(self, offer: Offer) -> None:
        self.session.decline_offer(offer.handoff_id, "evicted")

    def be_silent(self, offer: Offer) -> None:
        """Answer no offer."""


@contextlib.asynccontextmanager
async def holder(running: RunningBroker, name: str) -> AsyncIterator[Holder]:
    """Run an engine that has told the broker what it holds."""
    heard_offers: list[Offer] = []
    made: list[Holder] = []

    def on_offer(offer: Offer) -> None:
        made[0].hear(offer) if made else heard_offers.append(offer)

    async with engine(running.address, name, on_offer=on_offer) as (session, agents):
        made.append(Holder(session, agents))
        hold(session, 4, [4])
        await heard(running, name, 2)
        yield made[0]
    assert not heard_offers


async def ask(d: EngineSession, name: str = "d-1", prefix: Prefix = STATE) -> HandoffEnded:
    return await d.request(name, D_STATE, prefix=prefix)
