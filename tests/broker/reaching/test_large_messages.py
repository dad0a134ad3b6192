"""What no broker takes is not sent: its caller hears why, and what is said next goes on its way."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from broker.fakes import POSITION, Pair, model_layout
from restow.broker.block_ids import ID_BYTES, MAX_BLOCKS
from restow.broker.client import BrokerCallError, EngineSession
from restow.broker.core.common.pair import PairRefused
from restow.broker.core.handoffs.publication import MAX_PUBLICATION_BYTES
from restow.broker.errors import MessageTooLargeError, RestowError
from restow.broker.planner import Strategy
from restow.broker.rpc.sizes import MAX_SAID_BYTES, MAX_TO_BROKER_BYTES
from restow.broker.server.base import planning
from restow.broker.server.serve import RunningBroker

WAIT_S = 20.0
MANY = np.arange(MAX_BLOCKS)
TOO_MUCH = {f"g{number}": MANY for number in range(5)}
"""20 MiB of ids."""
Words = Callable[[Pair], Awaitable[object]]


async def publish(both: Pair) -> object:
    return await both.p.publish("large", TOO_MUCH, POSITION)


async def ask(both: Pair) -> object:
    return await both.d.request("large", TOO_MUCH)


async def publish_a_name(both: Pair) -> object:
    return await both.p.publish("x" * MAX_TO_BROKER_BYTES, {}, POSITION)


async def decline_a_name(both: Pair) -> object:
    return await both.d.decline("x" * MAX_TO_BROKER_BYTES)


@pytest.mark.parametrize("say", [publish, ask, publish_a_name, decline_a_name])
async def test_what_is_too_large_is_refused_to_its_caller_and_to_nobody_else(
    both: Pair, say: Words
) -> None:
    with pytest.raises(MessageTooLargeError, match=f"at most {MAX_SAID_BYTES}"):
        await asyncio.wait_for(say(both), WAIT_S)
    await asyncio.wait_for(both.hand_over("next"), WAIT_S)


async def test_messages_that_are_too_large_together_are_sent_apart(both: Pair) -> None:
    first = both.p.publish("first", {"g": MANY[: MAX_BLOCKS * 9 // 10]}, POSITION)
    lists = {f"g{number}": MANY for number in range(3)}
    second = both.p.publish("second", {**lists, "g": MANY[: MAX_BLOCKS // 2]}, POSITION)
    for said in (first, second):
        with pytest.raises(BrokerCallError, match="has no group"):
            await asyncio.wait_for(said, WAIT_S)
    await asyncio.wait_for(both.hand_over("next"), WAIT_S)


async def test_details_are_cut(both: Pair) -> None:
    words = "why " * (MAX_TO_BROKER_BYTES // 4)
    held = both.p.publish("given up", {}, 0, final=False)
    both.p.cancel("given up", words)
    ended = await asyncio.wait_for(held, WAIT_S)
    assert (ended.reason, ended.detail[:24]) == ("CANCELLED", "engine p cancelled: why ")
    declined = await asyncio.wait_for(both.d.decline("not wanted", words), WAIT_S)
    assert declined.reason == "DECLINED"
    await asyncio.wait_for(both.hand_over("next"), WAIT_S)


async def test_a_layout_that_no_broker_takes_is_not_sent(running: RunningBroker) -> None:
    layout = model_layout(name="x" * MAX_TO_BROKER_BYTES)
    session = EngineSession("large", secrets.token_hex(4), layout, running.address)
    with pytest.raises(MessageTooLargeError, match="the layout takes"):
        await session.start(WAIT_S)


async def test_a_publication_that_no_order_could_name_is_refused(
    running: RunningBroker, both: Pair
) -> None:
    # The publication comes in chunks, each of which fits into a message.
    engine = next(iter(running.hub.directory.members.engines.values()))
    engine.block_tokens.update({f"g{n}": 16 for n in range(8)})
    engine.block_limits.update({f"g{n}": 2**31 for n in range(8)})
    fit = MAX_PUBLICATION_BYTES // (ID_BYTES * MAX_BLOCKS)
    said = [both.p.publish("h", {f"g{number}": MANY}, 0, final=False) for number in range(fit + 1)]
    with pytest.raises(RestowError, match="the limit for a handoff is 4194304") as caught:
        await asyncio.wait_for(said[-1], WAIT_S)
    assert caught.value.reason == "PAGE_COUNT"


def test_a_program_that_no_agent_could_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_PROGRAM_BYTES", 100)
    outcome = planning.plan_pair(model_layout(1), model_layout(2), Strategy.SLICES)
    assert isinstance(outcome, PairRefused)
    assert outcome.error.reason == "TOO_MANY_PIECES"
