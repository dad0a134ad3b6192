"""The router asks a broker who holds a prompt, and chooses by that; and never waits for it long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_harness.waiting import until
from broker.content.test_prefixes import FORM, heard
from broker.fakes import broker, engine
from forked.ports import free_port
from restow.broker.client import AsyncAdminClient, EngineSession, PrefixHolder, chain_of
from restow.broker.router.engines import Engines
from restow.broker.router.finding import FindSettings
from restow.broker.server.serve import RunningBroker
from restow.broker.trust.errors import TokenFileError
from router.fake_engine import House, house, never, says, well

TOKENS = list(range(1, 165))
SOON_S = 10.0
"""So long that no test that finds somebody depends on how fast it does."""


async def hold(
    running: RunningBroker, session: EngineSession, tokens: int = 160, **more: Any
) -> None:
    """Have an engine hold the state after so many of the prompt's tokens."""
    chain = chain_of(TOKENS, **more)
    count = tokens // FORM.quantum_tokens
    session.hold(FORM, "attention", chain.hashes[:count])
    session.hold(FORM, "state", [chain.hashes[count - 1]])
    await heard(running, session.ref.engine_id, 2)


@contextlib.asynccontextmanager
async def finding_house(
    patience_s: float = SOON_S, count: int = 3, others: str = "", **more: Any
) -> AsyncIterator[tuple[RunningBroker, House, dict[str, EngineSession]]]:
    """Three P and three D, known to a broker by their ids, and the router before them.

    ``others``: brokers that the router is given before that one.
    """
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(broker())
        sessions = {}
        for name in (f"{side}{number}" for side in "pd" for number in range(count)):
            sessions[name], _ = await stack.enter_async_context(
                engine(running.address, name, agents=False)
            )
        find = FindSettings(patience_s, f"{others}{running.address}")
        one = await stack.enter_async_context(
            house([well] * count, [well] * count, find=find, **more)
        )
        yield running, one, sessions


def asked(one: House) -> tuple[list[int], list[int]]:
    """How often each P and each D was asked."""
    p, d = ([len(engine.bodies) for engine in side] for side in (one.p, one.d))
    return p, d


async def test_the_p_and_the_d_that_hold_most_of_a_prompt_are_asked() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["p0"], 64)
        await hold(running, sessions["p1"], 160)
        await hold(running, sessions["d2"], 32)
        for _ in range(8):
            assert (await one.ask({"prompt": TOKENS}))[0] == 200
        assert asked(one) == ([0, 8, 0], [0, 0, 8])
        assert running.hub.directory.prefixes.found == 8
        assert not any(engine.tokenized for engine in (*one.p, *one.d))


async def test_of_several_brokers_the_one_is_found_that_knows_the_engines() -> None:
    async with broker() as other:
        others = f"127.0.0.1:{free_port()},{other.address},"
        async with finding_house(others=others) as (running, one, sessions):
            await hold(running, sessions["p1"], 160)
            for _ in range(4):
                assert (await one.ask({"prompt": TOKENS}))[0] == 200
            assert asked(one)[0] == [0, 4, 0]
            refused = other.hub.directory.ledger.statistics.refused_calls
            assert refused["ENGINE_UNKNOWN"] == 1, (
                "the broker that knew is asked first from then on"
            )


async def test_of_a_text_an_engine_says_the_token_ids() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["p1"])
        for engine_ in one.p:
            engine_.token_ids = TOKENS
        body = {"messages": [{"role": "user", "content": "who?"}], "temperature": 0.5, "tools": []}
        for _ in range(8):
            assert (await one.ask(body, "/v1/chat/completions"))[0] == 200
        assert asked(one)[0] == [0, 8, 0]
        said = [words for engine_ in one.p for words in engine_.tokenized]
        assert said == [body] * 8


async def test_a_salt_is_part_of_what_is_asked_for() -> None:
    async with finding_house() as (running, one, sessions):
        await hold(running, sessions["p0"])
        await hold(running, sessions["p1"], salt="mine")
        for _ in range(8):
            assert (await one.ask({"prompt": TOKENS, "cache_salt": "mine"}))[0] == 200
        assert asked(one)[0] == [0, 8, 0]


async def test_credentials_that_can_not_be_read_cost_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with finding_house() as (_, one, _):

        def unreadable(*_: object) -> None:
            raise TokenFileError("the file of the token is being written anew")

        monkeypatch.setattr(AsyncAdminClient, "_method", unreadable)
        assert (await one.ask({"prompt": TOKENS}))[0] == 200


async def test_a_holder_that_is_tried_or_not_well_or_drains_is_not_asked() -> None:
    async with finding_house(count=2) as (running, one, sessions):
        await hold(running, sessions["p1"])
        await hold(running, sessions["d1"])
        one.d[1].answer = says(500)
        assert (await one.ask({"prompt": TOKENS}))[0] == 200
        assert asked(one)[1] == [1, 1]
        one.p[1].healthy = False
        await one.sees(one.p[1])
        assert (await one.ask({"prompt": TOKENS}))[0] == 200
        one.p[1].healthy = True
        await one.sees(one.p[1])
        before = asked(one)[0]
        draining = asyncio.create_task(sessions["p1"].drain())
        engines = running.hub.directory.members.engines
        await until(lambda: any(each.draining for each in engines.values()))
        assert (await one.ask({"prompt": TOKENS}))[0] == 200
        assert asked(one)[0] == [before[0] + 1, before[1]]
        await draining


async def test_one_that_is_busy_is_left_when_it_holds_no_more_than_that_is_worth() -> None:
    async with finding_house(count=2) as (running, one, sessions):
        await hold(running, sessions["d1"])
        one.d[1].answer = never
        waiting = asyncio.create_task(one.ask({"prompt": TOKENS}))
        await until(one.d[1].came.is_set)
        assert (await asyncio.wait_for(one.ask({"prompt": TOKENS}), 10))[0] == 200
        assert asked(one)[1] == [1, 1]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("held_tokens", "open_there", "in_flight_here", "chosen"),
    [
        (900, 0, 0, "a"),  # what it holds is computed by nobody
        (900, 1, 0, "b"),  # another router keeps it busy
        (1100, 1, 0, "a"),
        (2100, 2, 0, "a"),
        (2100, 3, 0, "b"),
        (0, 0, 0, "a"),
        (900, 0, 1, "a"),
        (900, 1, 1, "a"),  # the other is as busy
    ],
)
def test_tokens_held_are_weighed_against_requests_under_way(
    held_tokens: int, open_there: int, in_flight_here: int, chosen: str
) -> None:
    engines = Engines(["a=http://a", "b=http://b"], busy_tokens=1000)
    engines.engines[1].in_flight = in_flight_here
    held = {"a": PrefixHolder("a", held_tokens, "", open_there, False)}
    found = {one.engine_id for _ in range(40) if (one := engines.choose({}, held))}
    assert chosen in found
    assert len(found) == 1 or (held_tokens, open_there, in_flight_here) == (0, 0, 0)


async def test_of_what_nobody_holds_the_choice_is_as_without() -> None:
    async with finding_house(count=2) as (running, one, sessions):
        await hold(running, sessions["p1"])
        bodies: tuple[dict[str, Any], ...] = (
            {"prompt": TOKENS[1:]},
            {"prompt": TOKENS[:7]},
            {"prompt": "a text that nobody tokenizes"},
            {"prompt": [TOKENS, TOKENS]},
            {"prompt": ["two", "texts"]},
            {"prompt": TOKENS, "cache_salt": 5},
            {"prompt": [-1, *TOKENS]},
            {"prompt": [1 << 80, *TOKENS]},
            {"prompt": [True, *TOKENS]},
            {"prompt": []},
            {"prompt": None},
            {},
        )
        for body in bodies:
            for _ in range(8):
                assert (await one.ask(body))[0] == 200
        assert all(count > 20 for side in asked(one) for count in side)


@pytest.mark.parametrize("token_ids", [["a"], [], [1.5], [-1]])
async def test_odd_token_ids_of_an_engine_are_none(token_ids: list[Any]) -> None:
    async with finding_house(count=1) as (running, one, _):
        one.p[0].token_ids = token_ids
        assert (await one.ask({"prompt": "who?"}))[0] == 200
        assert len(one.p[0].tokenized) == 1
        assert not running.hub.directory.prefixes.asked


async def test_an_engine_that_the_broker_does_not_know_is_asked_for_once() -> None:
    """The router's other engines are of the same model: the next request names one of them."""
    async with (
        broker() as running,
        engine(running.address, "p1", agents=False) as (p1, _),
        house(
            [well, well], [well], find=FindSettings(SOON_S, running.address), aside_s=60.0
        ) as one,
    ):
        await hold(running, p1)
        for _ in range(3):  # asked by d0, p0 and p1
            assert (await one.ask({"prompt": TOKENS}))[0] == 200
        before = asked(one)[0]
        for _ in range(6):
            assert (await one.ask({"prompt": TOKENS}))[0] == 200
        assert asked(one)[0] == [before[0], before[1] + 6]


async def test_a_broker_that_is_gone_costs_no_request_and_is_left_alone() -> None:
    async with house([well], [well], find=FindSettings(SOON_S, "127.0.0.1:1")) as one:
        for _ in range(4):
            assert (await asyncio.wait_for(one.ask({"prompt": TOKENS}), 20))[0] == 200
        assert asked(one) == ([4], [4])


async def test_a_broker_that_does_not_answer_is_not_waited_for_again() -> None:
    """It takes connections and says nothing."""
    connections: list[asyncio.StreamWriter] = []

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read()

    server = await asyncio.start_server(be_silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with house([well], [well], find=FindSettings(1.0, f"127.0.0.1:{port}")) as one:
            assert (await asyncio.wait_for(one.ask({"prompt": TOKENS}), 20))[0] == 200
            one.p[0].token_ids = TOKENS
            for _ in range(4):
                assert (await asyncio.wait_for(one.ask({"prompt": "who?"}), 20))[0] == 200
            # Nobody is asked for token ids while the broker is left alone.
            assert not one.p[0].tokenized
    finally:
        server.close()
        for writer in connections:
            writer.close()


async def test_an_engine_that_says_no_token_ids_is_not_waited_for() -> None:
    async with finding_house(0.05, count=1) as (running, one, _):

        async def be_silent(request: Any) -> Any:
            await asyncio.Event().wait()

        one.p[0].tokenize = be_silent
        for _ in range(2):
            assert (await asyncio.wait_for(one.ask({"prompt": "who?"}), 20))[0] == 200
        assert not running.hub.directory.prefixes.asked
