"""What engines hold of prefixes: told, found, forgotten and told again, through a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_harness.waiting import until
from broker.certificates import Authority
from broker.content.holders import FORM, MODEL, PROMPT, found, heard, hold
from broker.fakes import P_BLOCKS, POSITION, broker, engine, model_layout
from broker.guarded import guarded, of_tenant, operator, refusal
from restow.broker.client import (
    AsyncAdminClient,
    BlockingSession,
    EngineSession,
    HashForm,
    PrefixChain,
    PrefixHolder,
    chain_of,
)
from restow.broker.client.engine.chains import form_to_proto
from restow.broker.core.common.actions import TellHoldings
from restow.broker.core.common.keys import EngineKey
from restow.broker.errors import ChainFormError, ChainInvalidError
from restow.broker.layout.values import ModelIdentity
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

SAID_FORM = form_to_proto(FORM)


@contextlib.asynccontextmanager
async def holding(running: RunningBroker, **more: Any) -> AsyncIterator[EngineSession]:
    """Run an engine that has told the broker what it holds."""
    async with engine(running.address, "e", **more) as (session, _):
        hold(session)
        await heard(running, "e", 2)
        yield session


async def test_the_longest_state_that_all_groups_hold_is_found(running: RunningBroker) -> None:
    async with holding(running) as session:
        assert await found(running) == {"e": 160}
        # A state must stand before the prompt's last token.
        shorter = PrefixChain(FORM, PROMPT.hashes, below_tokens=160)
        assert await found(running, shorter) == {"e": 64}
        async with AsyncAdminClient(running.address) as client:
            told = await client.find([PROMPT, chain_of(range(99, 200)), shorter], engine_id="e")
        digest = session.layout_digest
        assert told == [
            [PrefixHolder("e", 160, digest, 0, False)],
            [],
            [PrefixHolder("e", 64, digest, 0, False)],
        ]
        # A hole in the attention ends it there, whatever is held behind.
        session.evict(FORM, "attention", [PROMPT.hashes[6]])
        await heard(running, "e", 3)
        assert await found(running) == {"e": 64}
        session.evict(FORM, "state", [PROMPT.hashes[3], b"\1" * 32])
        await heard(running, "e", 4)
        assert await found(running) == {}


async def test_a_state_is_found_at_the_very_token_where_a_reply_ended(
    running: RunningBroker,
) -> None:
    turn = chain_of(range(1, 165), ends_tokens=[70, 75, 161])
    ended = dict(turn.ends)
    async with engine(running.address, "e") as (session, _):
        hold(session, 4, [2, 4])
        session.hold(FORM, "attention", [ended[70], ended[75]])
        session.hold(FORM, "state", [ended[75], ended[161]])
        await heard(running, "e", 4)
        assert await found(running) == {"e": 64}
        assert await found(running, turn) == {"e": 75}
        assert await found(running, replace(turn, below_tokens=75)) == {"e": 64}
        session.evict(FORM, "attention", PROMPT.hashes[2:3])
        await heard(running, "e", 5)
        assert await found(running, turn) == {"e": 32}


async def test_of_holders_of_as_much_the_less_busy_comes_first(running: RunningBroker) -> None:
    async with (
        engine(running.address, "a") as (busy, _),
        engine(running.address, "b") as (idle, _),
        engine(running.address, "c") as (longest, _),
    ):
        hold(busy, 4, [4])
        hold(idle, 4, [4])
        hold(longest)
        busy.publish("h", P_BLOCKS, POSITION)
        for name in "abc":
            await heard(running, name, 2)
        await until(lambda: bool(running.hub.directory.ledger.live))
        assert list((await found(running)).items()) == [("c", 160), ("b", 64), ("a", 64)]
        assert list(await found(running, limit=2)) == ["c", "b"]
        async with AsyncAdminClient(running.address) as client:
            (holders,) = await client.find([PROMPT], model=MODEL)
        assert [one.open for one in holders] == [0, 0, 1]


async def test_what_an_engine_held_is_forgotten_with_its_session(running: RunningBroker) -> None:
    async with holding(running):
        assert await found(running) == {"e": 160}
    prefixes = running.hub.directory.prefixes
    assert await found(running) == {}
    await until(lambda: not prefixes.holders)
    assert prefixes.size_bytes == 0


async def test_a_broker_that_starts_anew_is_told_everything_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'b'}"
    async with contextlib.AsyncExitStack() as stack:
        async with broker(address) as running:
            session, _ = await stack.enter_async_context(engine(address, "e", agents=False))
            hold(session)
            await heard(running, "e", 2)
            session.evict(FORM, "state", PROMPT.hashes[9:10])
            await heard(running, "e", 3)
        # What changes while nobody is there counts too.
        await until(lambda: not session.is_open)
        session.hold(FORM, "state", PROMPT.hashes[7:8])
        async with broker(address) as running:
            await heard(running, "e", 2)
            assert await found(running) == {"e": 128}
            session.evict(FORM, "state", PROMPT.hashes[7:8])
            await heard(running, "e", 3)
            assert await found(running) == {"e": 64}
            await session.close()


async def test_a_batch_that_is_lost_has_everything_told_again(running: RunningBroker) -> None:
    async with raw_session(running, "e") as (write, events):
        await write(batch(1, "attention", 0, 10), batch(2, "state", 9, 10))
        await heard(running, "e", 2)
        assert await found(running) == {"e": 160}
        await write(batch(4, "state", 3, 4), batch(5, "state", 4, 5))
        assert (await anext(events)).WhichOneof("body") == "tell_holdings"
        assert await found(running) == {}
        # Nothing counts until batch 1 comes, and nobody is asked twice.
        await write(batch(6, "state", 3, 4), batch(1, "attention", 0, 5), batch(2, "state", 3, 4))
        await heard(running, "e", 2)
        assert await found(running) == {"e": 64}
        await write(batch(2, "state", 3, 4))
        assert (await anext(events)).WhichOneof("body") == "tell_holdings"
        assert running.hub.directory.prefixes.told_again == 2


async def test_a_session_that_is_asked_tells_everything_again(running: RunningBroker) -> None:
    async with holding(running):
        running.hub.directory.prefixes.forget(EngineKey("default", "e"))
        assert await found(running) == {}
        running.hub.perform([TellHoldings(EngineKey("default", "e"))])
        await heard(running, "e", 2)
        assert await found(running) == {"e": 160}


async def test_another_tenants_chain_is_a_miss_like_any_other(authority: Authority) -> None:
    mine, theirs = of_tenant(authority, "a"), of_tenant(authority, "b")
    async with (
        guarded(authority) as running,
        engine(running.address, "e", credentials=mine) as (session, _),
        engine(running.address, "e", credentials=theirs) as (others, _),
        AsyncAdminClient(running.address, credentials=theirs) as client,
        AsyncAdminClient(running.address, credentials=operator(authority, "b")) as operates,
    ):
        hold(session)
        session.hold(FORM, "attention", chain_of(range(300, 400)).hashes)
        await heard(running, "e", 3, "a")
        others.hold(FORM, "attention", chain_of(range(70, 90)).hashes)
        await heard(running, "e", 1, "b")
        never = chain_of(range(5, 169))
        index = running.hub.directory.prefixes.holders["a"].index
        before = list(index._segments)
        for one in (client, operates):
            assert await one.find([PROMPT, never], engine_id="e") == [[], []]
        # Not looked at: so it takes as long as any miss, and a forgets nothing sooner or later.
        assert list(index._segments) == before
        told = await operates.holdings()
        assert [one.tenant for one in told.engines] == ["b"]
        assert [one.tenant for one in told.tenants] == ["b"]
        session.hold(FORM, "attention", chain_of(range(500, 600)).hashes)
        await heard(running, "e", 4, "a")
        assert (await operates.holdings()).tenants == told.tenants
        other_form = [PrefixChain(HashForm("theirs", 32), PROMPT.hashes)]
        name, _ = await refusal(client.find(other_form, engine_id="e"))
        assert name == "FAILED_PRECONDITION"  # of its own engine's form: nothing of a's is in it


async def test_other_models_and_salts_never_meet(running: RunningBroker) -> None:
    async with engine(running.address, "e") as (session, _):
        hold(session)
        session.hold(FORM, "attention", PROMPT.hashes[:4], salt="s")
        session.hold(FORM, "state", PROMPT.hashes[3:4], salt="s")
        await heard(running, "e", 4)
        assert await found(running, PrefixChain(FORM, PROMPT.hashes, salt="s")) == {"e": 64}
        assert await found(running, PrefixChain(FORM, PROMPT.hashes, salt="t")) == {}
        async with AsyncAdminClient(running.address) as client:
            for other in (ModelIdentity("m", "v2"), ModelIdentity("m", "v1", "adapter")):
                assert await client.find([PROMPT], model=other) == [[]]


async def test_threads_tell_and_an_operator_sees_how_much(running: RunningBroker) -> None:

    def tell() -> BlockingSession:
        session = BlockingSession("e", "1", model_layout(), running.address)
        session.start()
        hold(session)
        with pytest.raises(ChainFormError):
            session.hold(HashForm("other", 16), "state", [b"1" * 32])
        for hashes, salt in (([b"1"], ""), ([b"1" * 32], "s" * 257)):
            with pytest.raises(ChainInvalidError):
                session.evict(FORM, "state", hashes, salt=salt)
        return session

    session = await asyncio.to_thread(tell)
    await heard(running, "e", 2)
    async with AsyncAdminClient(running.address) as client:
        told = await client.holdings()
    (one,), (tenant,) = told.engines, told.tenants
    assert (one.engine_id, one.batches, one.form) == ("e", 2, form_to_proto(FORM))
    groups = {group.group: (group.count, group.block_tokens) for group in one.groups}
    assert groups == {"attention": (10, 16), "state": (2, 0)}
    assert (tenant.tenant, tenant.hashes, tenant.forgotten) == ("default", 10, 0)
    assert 0 < tenant.bytes < tenant.limit_bytes
    await asyncio.to_thread(session.close)


BAD_BATCHES: dict[str, list[dict[str, Any]]] = {
    "HOLDINGS_INVALID": [
        {"number": 0},
        {"number": -1},
        {"held": [pb.HeldRun(group="nobody's", hashes=PROMPT.hashes[0])]},
        {"held": [pb.HeldRun(group="state", hashes=b"x" * 32 * 4097)]},
    ],
    "CHAIN_INVALID": [
        {"form": pb.HashForm(algorithm="", quantum_tokens=16, hash_bytes=32)},
        {"form": pb.HashForm(algorithm="x\n", quantum_tokens=16, hash_bytes=32)},
        {"form": pb.HashForm(algorithm="x", quantum_tokens=0, hash_bytes=32)},
        {"form": pb.HashForm(algorithm="x", quantum_tokens=16_385, hash_bytes=32)},
        {"form": pb.HashForm(algorithm="x", quantum_tokens=16, hash_bytes=12)},
        {"form": pb.HashForm(algorithm="x", quantum_tokens=16, hash_bytes=0)},
        {"salt": "x" * 257},
        {"held": [pb.HeldRun(group="state", hashes=b"x" * 33)]},
        {"held": [pb.HeldRun(group="state", hashes=b"x" * 32, parent=b"x")]},
    ],
    "CHAIN_FORM_DIFFERS": [
        # One that does not divide a block of 16 tokens, and one that is not that of batch 1.
        {"number": 1, "form": pb.HashForm(algorithm="x", quantum_tokens=3, hash_bytes=32)},
        {"form": pb.HashForm(algorithm="other", quantum_tokens=16, hash_bytes=32)},
    ],
}


async def test_a_bad_batch_is_refused_and_the_session_goes_on(running: RunningBroker) -> None:
    cases = [(reason, one) for reason, all_ in BAD_BATCHES.items() for one in all_]
    for case, (reason, wrong) in enumerate(cases):
        name, good = f"e{case}", batch(2, "state", 0, 1).holdings
        bad = pb.Holdings(number=2, form=good.form, held=good.held)
        for field, value in wrong.items():
            bad.ClearField(field)  # type: ignore[arg-type]
            bad.MergeFrom(pb.Holdings(**{field: value}))
        async with raw_session(running, name) as (write, events):
            await write(batch(1, "attention", 0, 10), pb.EngineMessage(message_id=7, holdings=bad))
            refused = (await anext(events)).refused
            assert (refused.message_id, refused.reason) == (7, reason), refused.detail
            assert name not in await found(running)
            if bad.number == 2:  # it was heard: nobody is to tell it again, for ever
                await write(batch(3, "state", 9, 10))
                await heard(running, name, 3)
                assert (await found(running))[name] == 160
            await write(batch(1, "attention", 0, 10), batch(2, "state", 3, 4))
            await heard(running, name, 2)
            assert (await found(running))[name] == 64


BAD_QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "CHAIN_INVALID": [
        {"chains": [pb.PrefixChain(hashes=b"x" * 31)]},
        {"chains": [pb.PrefixChain(hashes=b"x" * 32, below_tokens=-1)]},
        {"chains": [pb.PrefixChain()] * 65},
        *(
            {"chains": [pb.PrefixChain(ends=[pb.ChainEnd(**end) for end in ends])]}
            for ends in (
                [{"position_tokens": 20, "hash": b"x" * 32}] * 2,
                [{"position_tokens": at, "hash": b"x" * 32} for at in (20, 19)],
                [{"position_tokens": -20, "hash": b"x" * 32}],
                [{"position_tokens": 32, "hash": b"x" * 32}],
                [{"position_tokens": 20, "hash": b"x" * 31}],
                [{"position_tokens": at, "hash": b"x" * 32} for at in range(80) if at % 16],
            )
        ),
        {"chains": [pb.PrefixChain(hashes=b"x" * 32 * 40_000)] * 2},
        {"form": pb.HashForm(algorithm="x", quantum_tokens=16, hash_bytes=72)},
    ],
    "CHAIN_FORM_DIFFERS": [
        {"form": pb.HashForm(algorithm="other", quantum_tokens=16, hash_bytes=32)},
        {"form": pb.HashForm(algorithm=FORM.algorithm, quantum_tokens=8, hash_bytes=32)},
    ],
    "ARGUMENT_INVALID": [{"limit": 101}, {"limit": -1}, {"model": pb.ModelName()}],
    "ENGINE_UNKNOWN": [{"engine_id": ""}, {"engine_id": "nobody"}],
}


async def test_bad_questions_are_refused_by_a_stable_reason(running: RunningBroker) -> None:
    async with holding(running):
        async with grpc_stub(running) as stub:
            for reason, questions in BAD_QUESTIONS.items():
                for wrong in questions:
                    chain = pb.PrefixChain(hashes=PROMPT.hashes[0])
                    asked: Any = pb.FindRequest(engine_id="e", form=SAID_FORM, chains=[chain])
                    for name, value in wrong.items():
                        asked.ClearField(name)
                        asked.MergeFrom(pb.FindRequest(**{name: value}))
                    _, said = await refusal(stub.Find(asked))
                    assert said == reason, wrong
        assert await found(running) == {"e": 160}


def batch(number: int, group: str, first: int, stop: int) -> pb.EngineMessage:
    """Hold some of the prompt's blocks."""
    run = pb.HeldRun(group=group, hashes=b"".join(PROMPT.hashes[first:stop]))
    return pb.EngineMessage(holdings=pb.Holdings(number=number, form=SAID_FORM, held=[run]))


@contextlib.asynccontextmanager
async def grpc_stub(running: RunningBroker) -> AsyncIterator[Any]:
    import grpc

    async with grpc.aio.insecure_channel(running.address) as channel:
        yield broker_pb2_grpc.BrokerStub(channel)


@contextlib.asynccontextmanager
async def raw_session(running: RunningBroker, name: str) -> AsyncIterator[tuple[Any, Any]]:
    """Open a session whose messages the test writes; yield how to write, and the events."""
    layout = model_layout()
    async with grpc_stub(running) as stub:
        message = EngineSession(name, "1", layout, running.address)._stream.message
        await stub.RegisterEngine(message)
        call = stub.Session()
        await call.write(pb.SessionRequest(engine=message.engine))

        async def events() -> AsyncIterator[pb.EngineEvent]:
            async for response in call:
                for event in response.events:
                    yield event

        async def write(*messages: pb.EngineMessage) -> None:
            await call.write(pb.SessionRequest(messages=messages))

        told = events()
        assert (await anext(told)).HasField("opened")
        yield write, told
        call.cancel()
