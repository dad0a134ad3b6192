"""The stream to the broker: it comes back, and what was said on an old one counts no more."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from agent_harness.fake_broker import FakeBroker
from agent_harness.one_rank import MEMORY, REGIONS, agent_on, embedded, embedded_on, served
from agent_harness.relay import relayed
from agent_harness.waiting import WAIT_S, until
from forked.ports import free_port
from restow.agents.link.broker_link import Link
from restow.broker.client.connection.brokers import LAST_S, LONGEST_S
from restow.broker.client.connection.errors import BrokerCallError, BrokerUnreachableError
from restow.broker.core.common.limits import Limits
from restow.broker.errors import (
    AgentMismatchError,
    DirectoryFullError,
    EngineReplacedError,
    EngineUnknownError,
    MessageTooLargeError,
)
from restow.broker.rpc.sizes import MAX_BATCH_BYTES, MAX_TO_BROKER_BYTES, SEVERAL_EVERY_S
from restow.v1 import agent_link_pb2 as pb


async def test_hello_says_who_serves_what() -> None:
    async with served() as (_, agent, stream):
        hello = stream.hello
        assert (hello.engine.engine_id, hello.engine.incarnation, hello.rank) == ("E", "life-1", 3)
        assert hello.agent_name == agent.name
        assert hello.nixl_metadata
        assert hello.staging_bytes == 1 << 16
        (region,) = hello.regions
        assert region == pb.RegionMemory(
            name="r",
            base_address=MEMORY.ctypes.data,
            page_count=4,
            page_stride_bytes=1024,
            memory=pb.MEMORY_KIND_HOST,
            space=region.space,
            space_address=MEMORY.ctypes.data,
        )
        assert "/process " in region.space


async def test_two_lives_have_two_names() -> None:
    names = set()
    for _ in range(2):
        async with served() as (_, agent, _):
            names.add(agent.name)
    assert len(names) == 2


async def test_after_a_restart_of_the_broker_it_is_back_with_its_fences() -> None:
    async with served() as (fake, agent, stream):
        agent.fence("h1")
        assert (await stream.next()).handoff_id == "h1"
        await fake.stop()
        agent.fence("h2")
        async with FakeBroker("epoch-2", fake.address) as again:
            stream = await again.agent("E", 3)
            assert stream.hello.agent_name == agent.name
            assert [(await stream.next()).handoff_id for _ in range(2)] == ["h1", "h2"]


@pytest.mark.parametrize("code", ["CANCELLED", "INTERNAL", "UNKNOWN", "UNAVAILABLE"])
async def test_a_call_that_breaks_before_the_welcome_is_made_again(code: str) -> None:
    # The broker has said nothing: gRPC alone has, as it does when thousands begin at once.
    async with FakeBroker() as fake:
        fake.breaks = [grpc.StatusCode[code]] * 2
        await _started(fake.address, WAIT_S)
        assert not fake.breaks


async def test_an_idle_agent_comes_back_from_a_wire_that_died_without_a_word() -> None:
    # A client of several brokers pings often.
    async with FakeBroker() as fake, relayed(fake.address) as relay:
        agent = agent_on(f"{relay.address},127.0.0.1:{free_port()}")
        await agent.start(WAIT_S)
        try:
            old = await fake.agent("E", 3)
            await asyncio.sleep(3.5 * SEVERAL_EVERY_S)
            relay.swallow()
            await until(lambda: fake.streams["E", 3] is not old)
            async with asyncio.timeout(WAIT_S):
                await old.over.wait()
        finally:
            await agent.close()


async def test_programs_of_an_old_stream_are_forgotten() -> None:
    # The broker sends everything anew, so an order that names an old program is a mistake.
    async with served() as (fake, _, stream):
        stream.send(_program("p"))
        stream.send(pb.AgentOrder(execute=pb.Execute(handoff=1, program_id="p", grant_ms=1000)))
        assert (await stream.next()).reason == ""  # an empty program is done at once
        del fake.streams["E", 3]
        stream.end()
        stream = await fake.agent("E", 3)
        stream.send(pb.AgentOrder(execute=pb.Execute(handoff=2, program_id="p", grant_ms=1000)))
        settled = await stream.next()
        assert (settled.handoff, settled.reason) == (2, "ORDER_INVALID")


async def test_answers_of_an_old_epoch_are_not_said_to_a_new_broker() -> None:
    async with served() as (fake, agent, stream):
        stream.send(pb.AgentOrder(execute=pb.Execute(handoff=1, program_id="p", grant_ms=1000)))
        await stream.next()
        del fake.streams["E", 3]
        for handoff in range(100):
            order = pb.Execute(handoff=handoff, program_id="p", grant_ms=1000)
            stream.send(pb.AgentOrder(execute=order))
        stream.end()
        stream = await fake.agent("E", 3)
        agent.fence("h")
        assert (await stream.next()).handoff_id == "h"


async def test_what_an_old_stream_could_not_say_is_not_said_on_a_new_one() -> None:
    async with served() as (fake, agent, stream):
        late = pb.AgentMessage(settled=pb.Settled(handoff=1))
        agent._link._outbox.append(late)  # without a wake-up, so that it waits
        del fake.streams["E", 3]
        stream.end()
        stream = await fake.agent("E", 3)
        agent.fence("h")
        assert (await stream.next()).handoff_id == "h"


class _Listener:
    """Hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    async def hello(self) -> pb.Hello:
        return pb.Hello()

    def welcomed(self, broker_epoch: str) -> None:
        self.heard.append(broker_epoch)

    def take(self, order: pb.AgentOrder) -> None:
        self.heard.append(order.unstage.handoff)


async def test_an_agent_that_broke_on_a_fault_of_its_own_comes_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Nobody awaits the agent's stream, and peers read its memory through it.
    async with served() as (fake, agent, stream):
        faults, came = [ValueError("odd"), KeyError("odder")], asyncio.Event()
        right = agent.welcomed

        def welcomed(broker_epoch: str) -> None:
            if faults:
                raise faults.pop()
            right(broker_epoch)
            came.set()

        monkeypatch.setattr(agent, "welcomed", welcomed)
        stream.end()
        await until(came.is_set)
        agent.fence("h")
        await until(lambda: not fake.streams["E", 3].silent)
        assert (await fake.streams["E", 3].next()).handoff_id == "h"
    assert "odder" in caplog.text


async def test_orders_before_the_welcome_are_dropped() -> None:
    listener = _Listener()
    link = Link("127.0.0.1:1", listener)
    orders = [pb.AgentOrder(unstage=pb.Unstage(handoff=number)) for number in (1, 2)]
    welcome = pb.AgentOrder(welcome=pb.Welcome(broker_epoch="epoch-1"))
    link.hear(pb.ConnectResponse(orders=[orders[0], welcome, orders[1]]))
    assert listener.heard == ["epoch-1", 2]


async def test_an_order_that_is_worked_on_is_not_begun_again() -> None:
    async with served() as (_, agent, stream):
        order = pb.AgentOrder(execute=pb.Execute(handoff=1, program_id="p", grant_ms=1000))
        stream.send(order, order, order)
        assert (await stream.next()).handoff == 1
        agent.fence("h")
        assert (await stream.next()).handoff_id == "h"


async def test_a_refusal_carries_the_brokers_reason() -> None:
    async with FakeBroker() as fake:
        fake.refusal = AgentMismatchError("rank 3: region r is not there", rank=3)
        with pytest.raises(BrokerCallError, match="region r is not there") as caught:
            await _started(fake.address, WAIT_S)
        assert caught.value.reason == "AGENT_REGIONS_MISMATCH"
        assert caught.value.subject == {"rank": "3"}


async def test_an_engine_that_is_registered_a_little_later_is_waited_for() -> None:
    async with FakeBroker() as fake:
        fake.refusal = EngineUnknownError("no engine E")
        agent = agent_on(fake.address)
        starting = asyncio.create_task(agent.start(WAIT_S))
        await until(lambda: fake.refusals >= 2)
        assert not starting.done()
        fake.refusal = None
        await starting
        await agent.close()


async def test_waiting_for_an_engine_makes_later_pauses_no_longer() -> None:
    # An agent does not avoid a broker that answers: after a break, it is back at once.
    async with FakeBroker() as fake:
        fake.refusal = EngineUnknownError("no engine E")
        agent = agent_on(fake.address)
        agent.begin()
        await until(lambda: fake.refusals >= 6)
        fake.refusal = DirectoryFullError("just now")
        await until(lambda: agent.refusal is not None and agent.refusal.reason != "ENGINE_UNKNOWN")
        fake.refusal = None
        began_s = asyncio.get_running_loop().time()
        await until(lambda: agent.refusal is None)
        assert asyncio.get_running_loop().time() - began_s < LAST_S / 2
        await agent.close()


def test_the_broker_waits_longer_than_agents_pause() -> None:
    assert Limits().agent_wait_s > LONGEST_S


async def test_the_last_refusal_is_told_when_time_is_up() -> None:
    async with FakeBroker() as fake:
        fake.refusal = EngineUnknownError("no engine E")
        with pytest.raises(BrokerCallError, match="no engine E"):
            await _started(fake.address, 0.5)


async def test_no_broker_is_a_typed_error() -> None:
    async with FakeBroker() as fake:
        address = fake.address
    with pytest.raises(BrokerUnreachableError):
        await _started(address, 0.5)


async def _started(address: str, timeout_s: float) -> None:
    agent = agent_on(address)
    try:
        await agent.start(timeout_s)
    finally:
        await agent.close()


async def test_a_replaced_engine_does_not_come_back() -> None:
    async with served() as (fake, agent, stream):
        fake.refusal = EngineReplacedError("a newer incarnation of E registered")
        del fake.streams["E", 3]
        stream.end()
        runner = agent._link._runner
        assert runner is not None
        await asyncio.wait_for(asyncio.shield(runner), WAIT_S)
        assert not fake.streams


async def test_the_embedded_agent_raises_where_it_is_started() -> None:
    async with FakeBroker() as fake:
        fake.refusal = AgentMismatchError("no")
        agent = embedded_on(fake.address)
        with pytest.raises(BrokerCallError):
            await asyncio.to_thread(agent.start)
        assert agent.name == ""


def _program(program_id: str) -> pb.AgentOrder:
    order = pb.AgentOrder()
    order.program.program_id = program_id
    return order


# -- what no stream carries ends none: a caller hears of it, or it is said in parts ---------------


async def test_a_fence_that_can_not_be_sent_is_refused_to_its_caller() -> None:
    async with embedded() as (agent, stream):
        with pytest.raises(MessageTooLargeError, match="the id of a handoff takes"):
            agent.fence("x" * MAX_TO_BROKER_BYTES)
        agent.fence("next")
        assert (await stream.next()).handoff_id == "next"
        assert not stream.over.is_set()


async def test_fences_that_are_too_large_together_are_sent_apart() -> None:
    async with embedded() as (agent, stream):
        names = [f"{number} " + "x" * (MAX_BATCH_BYTES // 4) for number in range(40)]
        for name in names:
            agent.fence(name)
        assert [(await stream.next()).handoff_id for _ in names] == names
        assert not stream.over.is_set()


async def test_an_introduction_that_can_not_be_sent_is_told_where_the_agent_is_started() -> None:
    regions = [replace(REGIONS[0], name="r" * MAX_TO_BROKER_BYTES)]
    async with FakeBroker() as fake:
        with pytest.raises(MessageTooLargeError, match="the introduction takes"):
            await asyncio.to_thread(embedded_on(fake.address, regions).start, WAIT_S)
