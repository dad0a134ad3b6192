"""A state that is asked for by its content: offered, published, declined; by a real broker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from agent_harness.waiting import WAIT_S, until
from broker.certificates import Authority
from broker.content.holders import (
    D_STATE,
    FORM,
    HELD_TOKENS,
    P_STATE,
    PROMPT,
    STATE,
    Holder,
    ask,
    heard,
    hold,
    holder,
)
from broker.fakes import D_BLOCKS, broker, engine, model_layout
from broker.guarded import guarded, of_tenant
from restow.broker.client import (
    BlockingSession,
    EngineSession,
    Offer,
    Prefix,
    chain_of,
)
from restow.broker.client.engine.chains import prefix_to_proto
from restow.broker.core.common.events import NamedPrefix, Wish
from restow.broker.core.common.keys import EngineKey
from restow.broker.errors import ChainInvalidError, RequestError
from restow.broker.server.base.outbox import LAGS_AT
from restow.broker.server.serve import RunningBroker
from restow.broker.server.services.prefix_messages import named_of


async def test_who_holds_a_state_is_offered_the_demand_and_hands_it_over(
    running: RunningBroker, p: Holder
) -> None:
    async with engine(running.address, "d", 2) as (d, _):
        ((found,),) = await d.find([PROMPT], timeout_s=WAIT_S)
        ended = await ask(d, prefix=PROMPT.prefix(found.tokens))
        assert (ended.state, ended.bytes) == ("DONE", 200)
        (offer,) = p.offers
        assert (offer.handoff_id, offer.prefix) == ("d-1", STATE)
        assert (await p.released[0]).delivered == 1
        assert not running.hub.directory.offering.open


async def test_what_nobody_holds_is_not_held_at_once(p: Holder, d: EngineSession) -> None:
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


async def test_who_declines_is_followed_by_the_next_and_the_last_by_not_held(
    running: RunningBroker, d: EngineSession
) -> None:
    async with holder(running, "a") as a, holder(running, "b") as b:
        a.answer = a.decline
        assert (await ask(d, "one")).state == "DONE"
        assert [len(one.offers) for one in (a, b)] == [1, 1]
        b.answer = b.decline
        ended = await ask(d, "two")
        assert (ended.state, ended.reason) == ("CANCELLED", "NOT_HELD")
        assert "declined it (2)" in ended.detail
        offering = running.hub.directory.offering
        assert (offering.offered, offering.declined, offering.open) == (4, 3, {})


async def test_an_engine_that_answers_no_offers_declines_them_by_itself(
    running: RunningBroker, d: EngineSession
) -> None:
    async with engine(running.address, "p") as (p, _):
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


async def test_a_decline_that_comes_just_after_the_end_means_nothing(
    running: RunningBroker, p: Holder, d: EngineSession
) -> None:
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


async def test_a_refused_publication_is_followed_by_the_next(
    running: RunningBroker, d: EngineSession
) -> None:
    async with holder(running, "a") as a, holder(running, "b") as b:

        def answer(offer: Offer) -> None:
            wrong = {"attention": [1, 1, 2, 3], "state": [4]}
            a.released.append(a.session.publish(offer.handoff_id, wrong, HELD_TOKENS))

        a.answer = answer
        assert (await ask(d)).state == "DONE"
        with pytest.raises(Exception, match="more than once"):
            await a.released[0]
        assert len(b.offers) == 1


@pytest.mark.parametrize("content", [b"", b"\1" * 16])
async def test_what_is_published_must_be_what_was_offered(
    content: bytes, p: Holder, d: EngineSession
) -> None:
    p.answer = lambda offer: p.publish(replace(offer, content=content))
    asked = asyncio.ensure_future(ask(d))
    assert (await asked).reason == "CONTENT_MISMATCH"


async def test_an_engine_that_drains_still_answers_and_comes_last(
    running: RunningBroker, d: EngineSession
) -> None:
    async with holder(running, "a") as a:
        draining = asyncio.create_task(a.session.drain())
        engines = running.hub.directory.members.engines
        await until(lambda: any(one.draining for one in engines.values()))
        async with holder(running, "b") as b:
            assert (await ask(d, "one")).state == "DONE"
            assert [len(one.offers) for one in (a, b)] == [0, 1]
        assert (await ask(d, "two")).state == "DONE"
        assert len(a.offers) == 1
        assert await draining


async def test_nobody_is_offered_what_another_tenant_asks_for(authority: Authority) -> None:
    async with guarded(authority) as running:
        credentials = [of_tenant(authority, one) for one in ("a", "b")]
        async with (
            engine(running.address, "p", credentials=credentials[0]) as (p, _),
            engine(running.address, "d", credentials=credentials[1]) as (d, _),
        ):
            hold(p, 4, [4])
            await heard(running, "p", 2, "a")
            assert (await ask(d)).reason == "NOT_HELD"


async def test_a_demand_for_a_prefix_is_checked_before_it_is_sent(d: EngineSession) -> None:
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


async def test_a_state_between_two_quanta_is_asked_for_by_its_own_hash(
    running: RunningBroker, p: Holder, d: EngineSession
) -> None:
    turn = chain_of(range(1, 165), ends_tokens=[57])
    for group in ("attention", "state"):
        p.session.hold(FORM, group, [dict(turn.ends)[57]])
    await heard(running, "p", 4)
    ended = await ask(d, prefix=turn.prefix(57))
    assert ended.state == "DONE"
    assert p.offers[0].prefix.position_tokens == 57


async def test_a_store_is_told_of_what_others_hold_and_of_several_always_one(
    running: RunningBroker, p: Holder
) -> None:
    told: dict[str, list[Prefix]] = {"one": [], "two": []}
    async with (
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


async def test_a_store_that_drains_is_told_of_nothing_and_none_of_its_own(
    running: RunningBroker, p: Holder
) -> None:
    told: dict[str, list[Prefix]] = {"one": [], "two": []}
    async with (
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


async def test_threads_find_ask_and_answer(running: RunningBroker, p: Holder) -> None:
    def threads() -> None:
        with BlockingSession("d", "life", model_layout(1), running.address) as d:
            ((found,),) = d.find([PROMPT], timeout_s=WAIT_S).result(WAIT_S)
            assert (found.engine_id, found.tokens) == ("p", HELD_TOKENS)
            asked = d.request("h", D_BLOCKS, prefix=chain_of(range(5, 69)).prefix(64))
            assert asked.result(10).reason == "NOT_HELD"
            d.keep(STATE)
            d.decline_offer("h")

    await asyncio.to_thread(threads)
    assert not p.offers


async def test_who_reads_slowly_is_offered_nothing_and_keeps_its_stream(
    running: RunningBroker, p: Holder, d: EngineSession
) -> None:
    async with engine(running.address, "store", on_keep=lambda _: None) as (store, _):
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
