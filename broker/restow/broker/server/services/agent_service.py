"""The service `restow.v1.AgentLink`, which agents call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from itertools import islice

from restow.broker.core.common import actions as act
from restow.broker.core.common.events import Failure, Probed, Settlement, StagedRun
from restow.broker.core.common.keys import AgentKey, State
from restow.broker.core.engines.agent import AgentRecord, RegionMemory
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import AgentReleaseError, RequestError, RestowError
from restow.broker.planner import CopyCosts, ReadCosts
from restow.broker.rpc.status import MAX_SUBJECT_BYTES, cut
from restow.broker.rpc.wire_program import PROGRAM_FORM
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.logging import tell_agent
from restow.broker.server.base.outbox import AGENT_FREE_BYTES, AgentOutbox, Outbox
from restow.broker.server.base.standing import Stand
from restow.broker.server.gate.callers import Context, engine_key, unreached_of
from restow.broker.server.services.checked_messages import failure_of, version_of
from restow.broker.server.services.stream_messages import batches_to_say, hear_stream
from restow.broker.trust.identity import Role
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import agent_link_pb2_grpc

CALL_COPIES = 2
"""Copies of a waiting agent's first message: bytes, and the message."""
_MEMORY_KINDS = frozenset(pb.MemoryKind.values())


class AgentLinkService(agent_link_pb2_grpc.AgentLinkServicer):
    """Translates calls; the directory decides."""

    def __init__(self, hub: Hub) -> None:
        """Serve the hub's directory."""
        self._hub = hub

    async def Connect(
        self, requests: AsyncIterator[pb.ConnectRequest], context: Context
    ) -> AsyncIterator[pb.ConnectResponse]:
        """Serve an agent's stream."""
        hub = self._hub
        first = await anext(aiter(requests), None)
        if first is None:
            return
        if not first.messages or first.messages[0].WhichOneof("body") != "hello":
            raise RequestError("the first message of an agent must be Hello")
        hello = first.messages[0].hello
        key = engine_key(context, Role.AGENT, hello.engine.engine_id)
        account = hub.directory.ledger.tenants.account(key.tenant)
        waiting_bytes = CALL_COPIES * first.ByteSize()
        standing = hub.standing
        standing.name_epoch(hello.epoch)
        await standing.lead(unreached_of(context))
        engine = await hub.expected.engine(
            key, hello.engine.incarnation, account, waiting_bytes, standing.check
        )
        await standing.sure()
        standing.check()
        stand = Stand.of(hub.standing)
        agent = self._admit(engine, hello)
        rest = first.messages[1:]
        del first, hello  # metadata may be large, and the stream lasts long
        loop = asyncio.get_running_loop()

        def lose() -> None:
            """Remove the agent, once; a stream that nobody reads may end much later."""
            if hub.agents.get(agent.key) is outbox:
                tell_agent(hub.said, "agent disconnected", agent.key, agent=agent.agent_name)
                del hub.agents[agent.key]
            hub.perform(hub.directory.connections.break_off(engine, agent, hub.now_s()))

        outbox: AgentOutbox = Outbox(
            pb.ConnectResponse,
            hub.max_queue,
            on_full=lambda: loop.call_soon(lose),
            account=account,
            free_bytes=AGENT_FREE_BYTES,
        )
        hub.agents[agent.key] = outbox
        more = {"agent": agent.agent_name, "host": agent.host}
        tell_agent(hub.said, "agent connected", agent.key, **more)
        welcome = outbox.open().orders.add().welcome
        welcome.broker_epoch, welcome.fleet = hub.epoch, hub.standing.fleet
        hub.perform(hub.directory.granting.resume(engine, hub.now_s()))
        hub.directory.ahead.expect(engine)
        hear = partial(self._hear, engine, agent)
        reader = asyncio.create_task(hear_stream(rest, requests, outbox, hear, hub.now_s, stand))
        try:
            async for batch in batches_to_say(outbox, stand):
                yield batch
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            lose()
            outbox.drop()

    def _admit(self, engine: EngineRecord, hello: pb.Hello) -> AgentRecord:
        if hello.program_form != PROGRAM_FORM:
            engine_id = engine.key.engine_id
            raise AgentReleaseError(
                f"the agent of engine {engine_id}, rank {hello.rank} reads programs of form "
                f"{hello.program_form}, but this broker writes form {PROGRAM_FORM}: run one "
                f"version of Restow on the broker and on all hosts",
                engine=engine_id,
                rank=hello.rank,
            )
        hub = self._hub
        # A single region too many is enough to refuse the agent.
        most = len(engine.rank_layout(hello.rank).regions) + 1
        regions = tuple(
            RegionMemory(
                r.name,
                r.base_address,
                r.page_count,
                r.page_stride_bytes,
                r.memory,
                r.device_id,
                cut(r.space, MAX_SUBJECT_BYTES),
                r.space_address,
            )
            for r in islice(hello.regions, most)
        )
        for region in regions:
            if region.memory not in _MEMORY_KINDS:
                raise RequestError(
                    f"region {region.name}: {region.memory} is not a kind of memory", field="memory"
                )
        agent = AgentRecord(
            AgentKey(engine.key, hello.rank),
            hello.agent_name,
            hello.nixl_metadata,
            regions,
            hello.staging_bytes,
            hello.host,
            hello.host_memory,
            version_of(hello.version),
        )
        hub.perform(hub.directory.connections.admit(engine, agent, hub.now_s()))
        return agent

    def _hear(
        self, engine: EngineRecord, agent: AgentRecord, message: pb.AgentMessage, now_s: float
    ) -> None:
        reports, rank = self._hub.directory.reports, agent.key.rank
        body = message.WhichOneof("body")
        if body == "fenced":
            fenced = message.fenced
            try:
                actions = reports.fence(engine, agent, fenced.handoff_id, now_s, fenced.tokens)
            except RestowError as error:
                actions = self._refuse_fence(engine, agent, fenced.handoff_id, error)
        elif body == "settled":
            settled = message.settled
            reason = detail = ""
            if settled.reason:
                reason, detail = failure_of(settled.reason, settled.detail)
            settlement = Settlement(
                settled.handoff, settled.bytes, settled.elapsed_us, reason, detail, settled.compared
            )
            actions = reports.settled(engine, agent, settlement, now_s)
        elif body == "staged":
            staged, failure = message.staged, None
            if staged.reason:
                reason, detail = failure_of(staged.reason, staged.detail)
                failure = Failure(State.FAILED, reason, f"rank {rank}: {detail}")
            run = StagedRun(staged.address, staged.bytes, staged.digest)
            actions = reports.staged(
                engine, agent, staged.handoff, staged.dst_rank, run, failure, now_s
            )
        elif body == "probed":
            actions = reports.probed(agent, probed_from_proto(message.probed), now_s)
        else:
            raise RequestError(f"an agent may not send {body or 'a message without a body'} here")
        if actions:
            self._hub.perform(actions)

    def _refuse_fence(
        self, engine: EngineRecord, agent: AgentRecord, handoff_id: str, error: RestowError
    ) -> list[act.Action]:
        """Have a refused fence forgotten; it concerns its handoff, and must not end the stream."""
        statistics = self._hub.directory.ledger.statistics
        statistics.refuse(error.reason)
        statistics.count_quota(error)
        self._hub.said.warning(
            "word refused",
            tenant=engine.key.tenant,
            engine=engine.key.engine_id,
            rank=agent.key.rank,
            word="fence",
            handoff=cut(handoff_id, MAX_SUBJECT_BYTES),
            reason=error.reason,
            detail=error.message,
        )
        return [act.SendUnfence(agent.key, handoff_id)]


def probed_from_proto(message: pb.Probed) -> Probed:
    """Return what an agent measured."""
    copying, reading = message.copying, message.reading
    return Probed(
        message.number,
        message.address,
        message.bytes,
        CopyCosts(
            copying.seconds_per_launch,
            copying.seconds_per_copy,
            copying.seconds_per_element,
            copying.copy_bytes_per_second,
        ),
        ReadCosts(reading.seconds_per_descriptor, reading.read_bytes_per_second)
        if message.HasField("reading")
        else None,
        message.elapsed_us,
        *failure_of(message.reason, message.detail),
        cut(message.transport),
        cut(message.method),
    )
