"""A state that is asked for by its content: offered, published, declined; by a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_harness.waiting import WAIT_S, until
from broker.certificates import Authority
from broker.content.test_prefixes import FORM, PROMPT, heard, hold
from broker.fakes import D_BLOCKS, FakeAgent, broker, engine, model_layout
from broker.guarded import guarded, of_tenant
from restow.broker.client import (
    BlockingSession,
    EngineSession,
    HandoffEnded,
    Offer,
    Prefix,
    chain_of,
)
from restow.broker.client.engine.chains import prefix_to_proto
from restow.broker.core.common.events import NamedPrefix, Wish
from restow.broker.core.common.keys import EngineKey
from restow.broker.errors import ChainInvalidError, RequestError
from restow.broker.server.base.orders import LAGS_AT
from restow.broker.server.serve import RunningBroker
from restow.broker.server.services.prefix_messages import named_of

HELD_TOKENS = 64
STATE = PROMPT.prefix(HELD_TOKENS)
P_STATE = {"attention": [1, 2, 3, 5], "state": [4]}
D_STATE = {"attention": [11, 12, 13, 15], "state": [14]}


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


async def test_who_holds_a_state_is_offered_the_demand_and_hands_it_over() -> None:
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "d", 2) as (d, _),
    ):
        ((found,),) = await d.find([PROMPT], timeout_s=WAIT_S)
        ended = await ask(d, prefix=PROMPT.prefix(found.tokens))
        assert (ended.state, ended.bytes) == ("DONE", 200)
        (offer,) = p.offers
        assert (offer.handoff_id, offer.prefix) == ("d-1", STATE)
        assert (await p.released[0]).delivered == 1
        assert not running.hub.directory.offering.open


async def test_what_nobody_holds_is_not_held_at_once() -> None:
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "d") as (d, _),
    ):
        asked_for = (
            PROMPT.prefix(48),  # no snapshot stands there
            PROMPT.prefix(160),  # a part of that is held
            chain_of(range(99, 200)).prefix(64),
            replace(STATE, salt="another"),
            replace(STATE, form=replace(FORM, algorithm="another")),
        )
        for number, prefix in enumerate(asked_for):
            ended = await ask(d, f"d-{number}", prefix)
            assert (ended.state, ended.reason) == ("CANCELLED", "NOT_HELD")
        assert not p.offers


async def test_who_declines_is_followed_by_the_next_and_the_last_by_not_held() -> None:
    async with (
        broker() as running,
        holder(running, "a") as a,
        holder(running, "b") as b,
        engine(running.address, "d") as (d, _),
    ):
        a.answer = a.decline
        assert (await ask(d, "one")).state == "DONE"
        assert [len(one.offers) for one in (a, b)] == [1, 1]
        b.answer = b.decline
        ended = await ask(d, "two")
        assert (ended.state, ended.reason) == ("CANCELLED", "NOT_HELD")
        assert "declined it (2)" in ended.detail
        offering = running.hub.directory.offering
        assert (offering.offered, offering.declined, offering.open) == (4, 3, {})


async def test_an_engine_that_answers_no_offers_declines_them_by_itself() -> None:
    async with (
        broker() as running,
        engine(running.address, "p") as (p, _),
        engine(running.address, "d") as (d, _),
    ):
        hold(p, 4, [4])
        await heard(running, "p", 2)
        assert (await ask(d)).reason == "NOT_HELD"


async def test_who_does_not_answer_or_is_gone_is_followed_by_the_next() -> None:
    async with (
        broker(offer_s=0.2) as running,
        holder(running, "c") as last,
        engine(running.address, "d") as (d, _),
    ):
        async with holder(running, "a") as a:
            a.answer = a.be_silent
            assert (await ask(d, "one")).state == "DONE"
            assert [len(one.offers) for one in (a, last)] == [1, 1]
            # Too late: another has given it.
            late = a.session.publish("one", P_STATE, HELD_TOKENS, content=a.offers[0].content)
            with pytest.raises(Exception, match="one"):
                await late
            a.session.decline_offer("one")
            a.session.decline_offer("never heard of")
        async with holder(running, "b") as b:

            def die(offer: Offer) -> None:
                if b.session._stream._runner is not None:
                    b.session._stream._runner.cancel()

            b.answer = die
            assert (await ask(d, "two")).state == "DONE"
            assert len(last.offers) == 2


async def test_a_decline_that_comes_just_after_the_end_means_nothing() -> None:
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "d") as (d, _),
    ):
        p.answer = p.be_silent
        asked = d.request("one", D_STATE, prefix=STATE)
        await until(lambda: bool(p.offers))
        hub, directory = running.hub, running.hub.directory
        source, destination = (
            directory.members.engines[EngineKey("default", name)] for name in ("p", "d")
        )
        hub.perform(directory.cancel(destination, "one", "", hub.now_s()))
        assert directory.offering.decline(source, "one", "evicted", hub.now_s()) == []
        assert (await asked).reason == "CANCELLED"
        assert directory.offering.not_held == 0
        p.answer = p.publish
        assert (await ask(d, "two")).state == "DONE"


async def test_a_refused_publication_is_followed_by_the_next() -> None:
    async with (
        broker() as running,
        holder(running, "a") as a,
        holder(running, "b") as b,
        engine(running.address, "d") as (d, _),
    ):

        def answer(offer: Offer) -> None:
            wrong = {"attention": [1, 1, 2, 3], "state": [4]}
            a.released.append(a.session.publish(offer.handoff_id, wrong, HELD_TOKENS))

        a.answer = answer
        assert (await ask(d)).state == "DONE"
        with pytest.raises(Exception, match="more than once"):
            await a.released[0]
        assert len(b.offers) == 1


@pytest.mark.parametrize("content", [b"", b"\1" * 16])
async def test_what_is_published_must_be_what_was_offered(content: bytes) -> None:
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "d") as (d, _),
    ):
        p.answer = lambda offer: p.publish(replace(offer, content=content))
        asked = asyncio.ensure_future(ask(d))
        assert (await asked).reason == "CONTENT_MISMATCH"


async def test_an_engine_that_drains_still_answers_and_comes_last() -> None:
    async with (
        broker() as running,
        holder(running, "a") as a,
        engine(running.address, "d") as (d, _),
    ):
        draining = asyncio.create_task(a.session.drain())
        engines = running.hub.directory.members.engines
        await until(lambda: any(one.draining for one in engines.values()))
        async with holder(running, "b") as b:
            assert (await ask(d, "one")).state == "DONE"
            assert [len(one.offers) for one in (a, b)] == [0, 1]
        assert (await ask(d, "two")).state == "DONE"
        assert len(a.offers) == 1
        assert await draining


async def test_nobody_is_offered_what_another_tenant_asks_for(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with guarded(authority) as running:
        credentials = [of_tenant(authority, one) for one in ("a", "b")]
        async with (
            engine(running.address, "p", credentials=credentials[0]) as (p, _),
            engine(running.address, "d", credentials=credentials[1]) as (d, _),
        ):
            hold(p, 4, [4])
            await heard(running, "p", 2, "a")
            assert (await ask(d)).reason == "NOT_HELD"


async def test_a_demand_for_a_prefix_is_checked_before_it_is_sent() -> None:
    async with broker() as running, engine(running.address, "d") as (d, _):
        wrong_beside: list[dict[str, Any]]
        wrong_beside = [{"position_tokens": 64}, {"content": b"\1" * 32}, {"readers": 2}]
        for beside in wrong_beside:
            with pytest.raises(RequestError):
                d.request("h", D_STATE, prefix=STATE, **beside)
        with pytest.raises(ChainInvalidError):
            PROMPT.prefix(70)
        for wrong in (
            replace(STATE, position_tokens=63),
            replace(STATE, position_tokens=65),
            replace(STATE, end_hash=b"\1" * 32),
        ):
            with pytest.raises(Exception, match="needs a hash for each"):
                await d.request("h", D_STATE, prefix=wrong)


async def test_a_state_between_two_quanta_is_asked_for_by_its_own_hash() -> None:
    turn = chain_of(range(1, 165), ends_tokens=[57])
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "d") as (d, _),
    ):
        for group in ("attention", "state"):
            p.session.hold(FORM, group, [dict(turn.ends)[57]])
        await heard(running, "p", 4)
        ended = await ask(d, prefix=turn.prefix(57))
        assert ended.state == "DONE"
        assert p.offers[0].prefix.position_tokens == 57


async def test_a_store_is_told_of_what_others_hold_and_of_several_always_one() -> None:
    told: dict[str, list[Prefix]] = {"one": [], "two": []}
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "one", on_keep=told["one"].append),
        engine(running.address, "two", on_keep=told["two"].append),
    ):
        longer = PROMPT.prefix(160)
        for _ in range(3):
            p.session.keep(STATE)
        p.session.keep(longer)
        await until(lambda: sum(map(len, told.values())) == 4)
        assert sorted(map(len, told.values())) == [0, 4]
        named = [replace(one, revision="v1") for one in (*[STATE] * 3, longer)]
        assert told["one"] + told["two"] == named
        for first in range(30):
            p.session.keep(chain_of(range(first, first + 32)).prefix(32))
        await until(lambda: sum(map(len, told.values())) == 34)
        assert all(told.values())


async def test_a_store_that_drains_is_told_of_nothing_and_none_of_its_own() -> None:
    told: dict[str, list[Prefix]] = {"one": [], "two": []}
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "one", on_keep=told["one"].append) as (one, _),
        engine(running.address, "two", on_keep=told["two"].append) as (two, _),
    ):
        states = [chain_of(range(first, first + 32)).prefix(32) for first in range(30)]
        for state in states:
            one.keep(state)
        await until(lambda: len(told["two"]) == 30)
        await two.drain()
        record = running.hub.directory.members.engines[EngineKey("default", "two")]
        await until(lambda: record.draining)
        for state in states:
            p.session.keep(state)
        await until(lambda: len(told["one"]) == 30)
        assert [len(some) for some in told.values()] == [30, 30]


def test_threads_find_ask_and_answer() -> None:
    """Check finding, asking and answering with sessions for threads."""

    async def serve(threads: Callable[[RunningBroker], None]) -> None:
        async with broker() as running, holder(running, "p"):
            await asyncio.to_thread(threads, running)

    def threads(running: RunningBroker) -> None:
        with BlockingSession("d", "life", model_layout(1), running.address) as d:
            ((found,),) = d.find([PROMPT], timeout_s=WAIT_S).result(WAIT_S)
            assert (found.engine_id, found.tokens) == ("p", HELD_TOKENS)
            asked = d.request("h", D_BLOCKS, prefix=chain_of(range(5, 69)).prefix(64))
            assert asked.result(10).reason == "NOT_HELD"
            d.keep(STATE)
            d.decline_offer("h")

    asyncio.run(serve(threads))


async def test_who_reads_slowly_is_offered_nothing_and_keeps_its_stream() -> None:
    async with (
        broker() as running,
        holder(running, "p") as p,
        engine(running.address, "store", on_keep=lambda _: None) as (store, _),
        engine(running.address, "d") as (d, _),
    ):
        hub = running.hub
        for name in ("p", "store"):
            outbox = hub.engines[EngineKey("default", name)]
            for _ in range(LAGS_AT + 1):  # written at once: the loop has no turn in between
                outbox.open()
        engines, prefix = hub.directory.members.engines, named(STATE)
        asking = engines[EngineKey("default", "d")]
        wish = Wish((), 0, 10.0, HELD_TOKENS, demand=1, prefix=prefix)
        hub.perform(hub.directory.request(asking, "slow", wish, hub.now_s()))
        hub.perform(hub.directory.offering.keep(engines[EngineKey("default", "p")], prefix))
        (handoff,) = hub.directory.ledger.ended.values()
        assert handoff.failure is not None
        assert handoff.failure.reason == "NOT_HELD"
        assert (await ask(d, "later")).state == "DONE"
        assert p.session.is_open
        assert store.is_open
        assert [one.handoff_id for one in p.offers] == ["later"]


def named(prefix: Prefix) -> NamedPrefix:
    return named_of(prefix_to_proto(prefix), prefix.position_tokens)
