"""The router asks the broker who holds a prompt and chooses by that, without waiting long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_harness.waiting import until
from broker.content.holders import FORM, heard
from broker.fakes import broker, engine
from restow.broker.client import AsyncAdminClient, EngineSession, PrefixHolder, chain_of
from restow.broker.router.routing import BUSY_TOKENS, RoutedEngine, choose
from restow.broker.server.serve import RunningBroker
from router.fake_engine import CHAT, House, fails, house, never, well

TOKENS = list(range(1, 165))
SOON_S = 10.0
"""So long that no test that finds somebody depends on how fast it does."""


async def hold(
    running: RunningBroker, session: EngineSession, tokens: int = 160, **more: Any
) -> None:
    """Have an engine hold the state after the first tokens of the prompt."""
    chain = chain_of(TOKENS, **more)
    count = tokens // FORM.quantum_tokens
    session.hold(FORM, "attention", chain.hashes[:count])
    session.hold(FORM, "state", [chain.hashes[count - 1]])
    await heard(running, session.ref.engine_id, 2)


@contextlib.asynccontextmanager
async def finding_house(
    count: int = 2,
) -> AsyncIterator[tuple[RunningBroker, House, dict[str, EngineSession]]]:
    """Run as many P as D, known to a broker by their ids, and the router before them."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(broker())
        sessions = {}
        for name in (f"{side}{number}" for side in "pd" for number in range(count)):
            sessions[name], _ = await stack.enter_async_context(
                engine(running.address, name, agents=False)
            )
        client = await stack.enter_async_context(AsyncAdminClient(running.address))
        one = await stack.enter_async_context(
            house([well] * count, [well] * count, broker=client, find_s=SOON_S)
        )
        yield running, one, sessions


def asked(one: House) -> tuple[list[int], list[int]]:
    """Return how often each P and each D was asked."""
    p, d = ([len(engine.bodies) for engine in side] for side in (one.p, one.d))
    return p, d


async def test_the_p_and_the_d_that_hold_most_of_a_prompt_are_asked() -> None:
    async with finding_house(3) as (running, one, sessions):
        await hold(running, sessions["p0"], 64)
        await hold(running, sessions["p1"], 160)
        await hold(running, sessions["d2"], 32)
        for _ in range(8):
            assert (await one.ask({"prompt": TOKENS}))[0] == 200
        assert asked(one) == ([0, 8, 0], [0, 0, 8])
        assert not any(engine.tokenized for engine in (*one.p, *one.d))


async def test_p_tells_the_token_ids_of_a_text_or_a_chat() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["p1"])
        for p in one.p:
            p.token_ids = TOKENS
        body = {"messages": [{"role": "user", "content": "who?"}], "temperature": 0.5}
        for _ in range(8):
            assert (await one.ask(body, CHAT))[0] == 200
            assert (await one.ask({"prompt": "who?"}))[0] == 200
        assert asked(one)[0] == [0, 16]
        said = [told for p in one.p for told in p.tokenized]
        assert said.count(body) == said.count({"prompt": "who?"}) == 8


async def test_a_salt_is_part_of_what_is_asked_for() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["p0"])
        await hold(running, sessions["p1"], salt="mine")
        for _ in range(8):
            assert (await one.ask({"prompt": TOKENS, "cache_salt": "mine"}))[0] == 200
        assert asked(one)[0] == [0, 8]


async def test_a_holder_that_failed_or_drains_is_asked_last() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["p1"])
        await hold(running, sessions["d1"])
        one.d[1].answer = fails(500)
        assert (await one.ask({"prompt": TOKENS}))[0] == 200
        assert asked(one)[1] == [1, 1]
        before = asked(one)[0]
        draining = asyncio.create_task(sessions["p1"].drain())
        engines = running.hub.directory.members.engines
        await until(lambda: any(each.draining for each in engines.values()))
        assert (await one.ask({"prompt": TOKENS}))[0] == 200
        assert asked(one)[0] == [before[0] + 1, before[1]]
        await draining


async def test_a_busy_holder_is_left_when_it_holds_too_little() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["d1"])
        one.d[1].answer = never
        waiting = asyncio.create_task(one.ask({"prompt": TOKENS}))
        await until(one.d[1].came.is_set)
        assert (await asyncio.wait_for(one.ask({"prompt": TOKENS}), SOON_S))[0] == 200
        assert asked(one)[1] == [1, 1]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("held_tokens", "open_there", "in_flight_here", "chosen"),
    [
        (900, 0, 0, {"a"}),  # what it holds is computed by nobody
        (900, 1, 0, {"b"}),  # another router keeps it busy
        (1100, 1, 0, {"a"}),
        (2100, 2, 0, {"a"}),
        (2100, 3, 0, {"b"}),
        (0, 0, 0, {"a", "b"}),
        (900, 0, 1, {"a"}),
        (900, 1, 1, {"a"}),  # the other is as busy
    ],
)
def test_tokens_held_are_weighed_against_requests_in_flight(
    held_tokens: int, open_there: int, in_flight_here: int, chosen: set[str]
) -> None:
    assert BUSY_TOKENS == 1000
    engines = [RoutedEngine("http://a", "a"), RoutedEngine("http://b", "b", in_flight_here)]
    held = {"a": PrefixHolder("a", held_tokens, "", open_there, False)}
    assert {choose(engines, held).engine_id for _ in range(40)} == chosen


async def test_where_nobody_is_found_the_choice_is_as_without() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["p1"])
        bodies: tuple[dict[str, Any], ...] = (
            {"prompt": TOKENS[1:]},
            {"prompt": TOKENS[:7]},
            {"prompt": "a text that nobody tokenizes"},
            {"prompt": [TOKENS, TOKENS]},
            {"prompt": ["two", "texts"]},
            {"prompt": TOKENS, "cache_salt": 5},
            {"prompt": [1 << 80, *TOKENS]},
            {"prompt": None},
            {},
        )
        for body in bodies:
            for _ in range(8):
                assert (await one.ask(body))[0] == 200
        for p in one.p:
            p.token_ids = ["a"]
        assert (await one.ask({"prompt": "who?"}))[0] == 200
        assert all(count > 15 for side in asked(one) for count in side)


async def test_nobody_waits_long_for_a_broker() -> None:
    # The broker is gone, or takes connections and is silent, or does not know the engines.
    connections: list[asyncio.StreamWriter] = []

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    silent = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with broker() as other:
        for address in ("127.0.0.1:1", silent, other.address):
            async with (
                AsyncAdminClient(address) as client,
                house([well], [well], broker=client, find_s=0.5) as one,
            ):
                for _ in range(2):
                    assert (await asyncio.wait_for(one.ask({"prompt": TOKENS}), 20))[0] == 200
    server.close()
    for writer in connections:
        writer.close()
