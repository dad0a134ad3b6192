"""`restow.v1.AgentLink`: what agents say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from restow.broker.core import actions as act
from restow.broker.core.directory import Settlement
from restow.broker.core.handoff import Failure
from restow.broker.core.roster import AgentRecord, EngineRecord, RegionMemory
from restow.broker.errors import RequestError, RestowError
from restow.broker.server.broker_service import tenant_of
from restow.broker.server.hub import AgentOutbox, Hub
from restow.broker.server.outbox import Outbox
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import agent_link_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class AgentLinkService(agent_link_pb2_grpc.AgentLinkServicer):
    """Translates; the directory decides."""

    def __init__(self, hub: Hub) -> None:
        """Serve the hub's directory."""
        self._hub = hub

    async def Connect(
        self, requests: AsyncIterator[pb.ConnectRequest], context: Context
    ) -> AsyncIterator[pb.ConnectResponse]:
        """An agent's stream."""
        hub = self._hub
        first = await anext(aiter(requests), None)
        if first is None:
            return
        if not first.messages or first.messages[0].WhichOneof("body") != "hello":
            raise RequestError("the first message of an agent must be Hello")
        hello = first.messages[0].hello
        engine, agent = self._admit(hello, tenant_of(context))
        outbox: AgentOutbox = Outbox(pb.ConnectResponse, hub.max_queue)
        hub.agents[agent.key] = outbox
        outbox.open().orders.add().welcome.broker_epoch = hub.epoch
        reader = asyncio.create_task(self._read(engine, agent, outbox, first, requests))
        try:
            while (batch := await outbox.take()) is not None:
                yield batch
        finally:
            reader.cancel()
            if hub.agents.get(agent.key) is outbox:
                del hub.agents[agent.key]
            hub.perform(hub.directory.remove_agent(engine, agent, hub.now_s()))

    def _admit(self, hello: pb.Hello, tenant: str) -> tuple[EngineRecord, AgentRecord]:
        hub = self._hub
        key = act.EngineKey(tenant, hello.engine.engine_id)
        engine = hub.directory.engine(key, hello.engine.incarnation)
        old = engine.agents.get(hello.rank)
        if old is not None:
            replaced = hub.agents.pop(old.key, None)
            if replaced is not None:
                replaced.close(RequestError(f"rank {hello.rank} connected anew"))
            hub.perform(hub.directory.remove_agent(engine, old, hub.now_s()))
        regions = [
            RegionMemory(r.name, r.base_address, r.page_count, r.memory, r.device_id)
            for r in hello.regions
        ]
        agent = engine.admit(
            hello.rank, hello.agent_name, hello.nixl_metadata, regions, hello.staging_bytes
        )
        return engine, agent

    async def _read(
        self,
        engine: EngineRecord,
        agent: AgentRecord,
        outbox: AgentOutbox,
        first: pb.ConnectRequest,
        requests: AsyncIterator[pb.ConnectRequest],
    ) -> None:
        try:
            self._take(engine, agent, first.messages[1:])
            async for request in requests:
                self._take(engine, agent, request.messages)
            outbox.close()
        except RestowError as error:
            outbox.close(error)

    def _take(self, engine: EngineRecord, agent: AgentRecord, messages: Any) -> None:
        hub = self._hub
        now_s = hub.now_s()
        for message in messages:
            hub.perform(self._apply(engine, agent, message, now_s))

    def _apply(
        self, engine: EngineRecord, agent: AgentRecord, message: pb.AgentMessage, now_s: float
    ) -> list[act.Action]:
        directory, rank = self._hub.directory, agent.key.rank
        body = message.WhichOneof("body")
        if body == "fenced":
            return directory.fence(engine, rank, message.fenced.handoff_id, now_s)
        if body == "settled":
            settled = message.settled
            settlement = Settlement(
                settled.handoff, settled.bytes, settled.elapsed_us, settled.reason, settled.detail
            )
            return directory.settled(engine, rank, settlement, now_s)
        if body == "staged":
            staged = message.staged
            failure = (
                Failure(act.State.FAILED, staged.reason, f"rank {rank}: {staged.detail}")
                if staged.reason
                else None
            )
            run = (staged.address, staged.bytes)
            return directory.staged(
                engine, rank, staged.handoff, staged.dst_rank, run, failure, now_s
            )
        raise RequestError(f"an agent may not send {body or 'a message without a body'} here")
