"""Commands over a real broker: waiting for an end, lost answers, and messages that say too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agent_harness.waiting import until
from broker.fakes import broker as fake_broker
from broker.fakes import model_layout
from restow.broker.client import AsyncAdminClient, BrokerCallError, EngineSession, chain_of
from restow.broker.client.engine.commands import StateOrder
from restow.broker.server.serve import RunningBroker
from restow.broker.state_commands import Answer, Outcome, Verb
from restow.v1 import broker_pb2 as pb

PREFIX = chain_of(range(65)).prefix(64)
DONE = Answer(Outcome.DONE, 64, left_s=60.0)


class Fake:
    """A store that answers when it is told to."""

    def __init__(self, address: str) -> None:
        self.orders: list[StateOrder] = []
        self.session = EngineSession(
            "store",
            "one",
            model_layout(),
            address,
            on_keep=lambda _: None,
            on_command=self.orders.append,
        )

    async def ordered(self, count: int) -> None:
        await until(lambda: len(self.orders) >= count)


@pytest_asyncio.fixture
async def running() -> AsyncIterator[RunningBroker]:
    async with fake_broker() as running:
        yield running


async def test_a_call_waits_for_the_end_and_answers_at_once_if_asked_to(
    running: RunningBroker,
) -> None:
    store = Fake(running.address)
    async with store.session, AsyncAdminClient(running.address) as admin:
        given = await admin.command("c", Verb.PIN, PREFIX, "store", for_s=60.0)
        assert (given.outcome, given.ended, given.left_s) == (Outcome.ACCEPTED, False, 0)
        short = await admin.command("c", Verb.PIN, PREFIX, "store", for_s=60.0, wait_s=0.05)
        assert short.outcome is Outcome.ACCEPTED
        waits = [
            asyncio.ensure_future(
                admin.command("c", Verb.PIN, PREFIX, "store", for_s=60.0, wait_s=30.0)
            )
            for _ in range(3)
        ]
        await store.ordered(1)
        assert store.orders[0].for_s == 60
        await asyncio.sleep(0.1)
        store.session.answer_command("c", DONE)
        ended = [await wait for wait in waits]
        assert {(one.outcome, one.tokens) for one in ended} == {(Outcome.DONE, 64)}
        assert 59 < (await admin.command_status("c")).left_s <= 60
        assert [one.command_id for one in store.orders] == ["c"]
        assert running.hub.commanded == {}


async def test_a_store_whose_stream_broke_hears_a_command_again(running: RunningBroker) -> None:
    store = Fake(running.address)
    async with store.session, AsyncAdminClient(running.address) as admin:
        waiting = asyncio.ensure_future(
            admin.command("c", Verb.EVICT, PREFIX, "store", wait_s=30.0)
        )
        await store.ordered(1)
        (outbox,) = running.hub.engines.values()
        outbox.close()
        await store.ordered(2)
        assert store.orders[0] == store.orders[1]
        store.session.answer_command("c", DONE)
        assert (await waiting).outcome is Outcome.DONE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command_id", ""),
        ("command_id", "x" * 257),
        ("engine_id", "a\nb"),
        ("timeout_ms", -1),
        ("timeout_ms", 600_001),
        ("position_tokens", 63),
        ("pin.for_ms", 0),
        ("pin.for_ms", 86_400_001),
        ("move.to_engine_id", "x" * 300),
    ],
)
async def test_a_command_that_says_too_much_or_too_little_is_refused(
    running: RunningBroker, field: str, value: object
) -> None:
    async with AsyncAdminClient(running.address) as admin:
        stub = admin._opened(running.address).broker
        message = pb.StateCommand(command_id="c", engine_id="s", position_tokens=64)
        message.prefix.form.algorithm = "a"
        message.prefix.form.quantum_tokens, message.prefix.form.hash_bytes = 64, 8
        message.prefix.hashes = b"12345678"
        message.evict.SetInParent()
        target, *rest = field.split(".")
        if rest:
            getattr(message, target).SetInParent()
            setattr(getattr(message, target), rest[0], value)
        else:
            setattr(message, target, value)
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            await stub.Command(pb.CommandRequest(command=message))
        with pytest.raises(BrokerCallError) as refusal:
            await admin.command_status("c")
        assert refusal.value.reason == "COMMAND_UNKNOWN"
