"""The service `restow.v1.Broker`, which engines call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from restow.broker.core.common.keys import EngineKey
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import RestowError, SessionReplacedError
from restow.broker.rpc.status import cut
from restow.broker.rpc.wire import bytes_as_values
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.logging import tell_engine, tell_registered
from restow.broker.server.base.outbox import ENGINE_FREE_BYTES, STATE_NUMBERS, EngineOutbox, Outbox
from restow.broker.server.base.standing import LEADER_WAIT_S, Stand
from restow.broker.server.gate.callers import (
    Context,
    caller_of,
    engine_key,
    patience_s_of,
    tenant_of,
    unreached_of,
)
from restow.broker.server.services.checked_messages import (
    CheckedLayouts,
    chunk_of,
    version_of,
    wish_of,
)
from restow.broker.server.services.command_messages import (
    command_of,
    fill_status,
    wait_s_of,
)
from restow.broker.server.services.prefix_messages import (
    chains_of,
    fill_changes,
    fill_found,
    limit_of,
    model_of,
    revision_of,
)
from restow.broker.server.services.stream_messages import SessionWords, batches_to_say, hear_stream
from restow.broker.trust.identity import Role
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

CALL_COPIES = 2
"""Copies of the message of a waiting call: bytes, and the message."""


class BrokerService(broker_pb2_grpc.BrokerServicer):
    """Translates calls; the directory decides."""

    def __init__(self, hub: Hub) -> None:
        """Serve the hub's directory."""
        self._hub = hub
        self._words = SessionWords(hub)
        self._layouts = CheckedLayouts()

    async def RegisterEngine(
        self, request: pb.RegisterEngineRequest, context: Context
    ) -> pb.RegisterEngineResponse:
        """Check a layout, and register the engine."""
        key = engine_key(context, Role.ENGINE, request.engine.engine_id)
        version = version_of(request.version)
        revision = revision_of(request.revision)
        patience_s = patience_s_of(context, LEADER_WAIT_S)
        await self._hub.standing.lead(unreached_of(context), patience_s)
        # Large layouts take long to read and to check: not on the loop.
        hub, members = self._hub, self._hub.directory.members
        account = hub.directory.ledger.tenants.account(key.tenant)
        size_bytes = await asyncio.to_thread(bytes_as_values, request.layout)
        known = await asyncio.to_thread(self._layouts.find, request.layout)
        if known is None:
            # An engine that returns needs no room for a layout that is already there.
            with account.carrying(size_bytes):
                known = await asyncio.to_thread(self._layouts.of, request.layout)
        layout, layout_digest = known
        await hub.standing.sure()
        hub.standing.check()
        before = members.engines.get(key)
        incarnation, now_s = request.engine.incarnation, hub.now_s()
        sides = (request.publishes, request.asks)
        hub.perform(
            members.register(
                key,
                incarnation,
                layout,
                layout_digest,
                now_s,
                version,
                size_bytes,
                sides,
                request.keeps,
                revision,
            )
        )
        engine = members.engines[key]
        engine.digests = request.digests
        # An open session says its revision itself, and this call may be a late call of an earlier
        # process of the same incarnation.
        if revision and revision != engine.revision and not engine.has_session:
            hub.perform(self._words.revise(engine, revision, now_s))
        if engine is not before:
            tell_registered(hub.said, engine, caller_of(context))
        hub.expected.came(key)
        hub.planner.expect(layout)
        return pb.RegisterEngineResponse(layout_digest=layout_digest, broker_epoch=hub.epoch)

    async def UnregisterEngine(
        self, request: pb.UnregisterEngineRequest, context: Context
    ) -> pb.UnregisterEngineResponse:
        """Unregister an engine."""
        engine = await self._engine(request.engine, context)
        hub = self._hub
        hub.perform(hub.directory.members.unregister(engine, hub.now_s()))
        return pb.UnregisterEngineResponse()

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Serve an engine's stream."""
        hub = self._hub
        first = await anext(aiter(requests), None)
        if first is None:
            return
        hub.standing.name_epoch(first.epoch)
        engine = await self._engine(first.engine, context)
        loop = asyncio.get_running_loop()

        def lose() -> None:
            """Close the session, once; a stream that nobody reads may end much later."""
            if hub.engines.get(engine.key) is outbox:
                tell_engine(hub.said, "session closed", engine.key)
                del hub.engines[engine.key]
                hub.directory.members.session_closed(engine, hub.now_s())

        stand = Stand.of(hub.standing)
        outbox: EngineOutbox = Outbox(
            pb.SessionResponse,
            hub.max_queue,
            on_full=lambda: loop.call_soon(lose),
            account=engine.account,
            free_bytes=ENGINE_FREE_BYTES,
        )
        old = hub.engines.get(engine.key)
        if old is not None:
            name = engine.key.engine_id
            old.close(SessionReplacedError(f"engine {name} opened another session", engine=name))
        hub.engines[engine.key] = outbox
        hub.perform(hub.directory.members.session_opened(engine, hub.now_s()))
        tell_engine(hub.said, "session opened", engine.key)
        opened = outbox.open().events.add().opened
        opened.broker_epoch, opened.fleet = hub.epoch, hub.standing.fleet
        hub.perform(hub.directory.commands.session_opened(engine))
        hear = partial(self._words.hear, engine, outbox)
        reader = asyncio.create_task(
            hear_stream(first.messages, requests, outbox, hear, hub.now_s, stand)
        )
        try:
            async for batch in batches_to_say(outbox, stand):
                yield batch
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            lose()
            outbox.drop()

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        """Publish a chunk outside of a session."""
        hub = self._hub
        engine = await self._engine(request.engine, context)
        handoff_id = request.publication.handoff_id
        try:
            chunk = chunk_of(request.publication, hub.directory.limits)
            hub.perform(hub.directory.publish(engine, handoff_id, chunk, hub.now_s()))
        except RestowError as error:
            hub.refuse(engine, handoff_id, error)
            self._words.tell_refused(engine, handoff_id, error)
            raise
        state = hub.directory.ledger.find(engine.key.tenant, handoff_id).state
        return pb.PublishResponse(state=STATE_NUMBERS[state])

    async def Request(self, request: pb.RequestRequest, context: Context) -> pb.RequestResponse:
        """Make a demand outside of a session, and wait for its end."""
        hub = self._hub
        engine = await self._engine(request.engine, context)
        demand = request.demand
        number, end = hub.waiting.begin(engine.key, demand.handoff_id)
        # The call's message stays in memory for as long as the call waits.
        waiting_bytes = CALL_COPIES * request.ByteSize()
        carried = False
        try:
            try:
                engine.account.carry(waiting_bytes)
                carried = True
                wish = wish_of(demand, number, hub.directory.limits)
                hub.perform(hub.directory.request(engine, demand.handoff_id, wish, hub.now_s()))
            except RestowError as error:
                hub.refuse(engine, demand.handoff_id, error)
                raise
            ended = await end
            hub.standing.check()
            return pb.RequestResponse(ended=ended)
        finally:
            engine.account.deliver(waiting_bytes * carried)
            end.cancel()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Cancel outside of a session."""
        hub = self._hub
        engine = await self._engine(request.engine, context)
        cancel = request.cancellation
        hub.perform(
            hub.directory.cancel(
                engine, cancel.handoff_id, cut(cancel.detail), hub.now_s(), cancel.demand
            )
        )
        state = hub.directory.ledger.find_of(engine, cancel.handoff_id, hub.now_s()).state
        return pb.CancelResponse(state=STATE_NUMBERS[state])

    async def Find(self, request: pb.FindRequest, context: Context) -> pb.FindResponse:
        """Return which engines of the tenant hold how much of each chain."""
        hub, tenant = self._hub, tenant_of(context)
        members, prefixes = hub.directory.members, hub.directory.prefixes
        if request.HasField("model"):
            model = model_of(request.model)
            await hub.standing.lead(within_s=patience_s_of(context, LEADER_WAIT_S))
        else:
            model = members.find(EngineKey(tenant, request.engine_id)).identity()
        limit = limit_of(request.limit)
        response = pb.FindResponse()
        for chain in chains_of(request, model):
            held = [
                (members.engines[holder.engine], holder.tokens)
                for holder in prefixes.find(tenant, chain)
            ]
            fill_found(response.found.add(), held, limit)
            await asyncio.sleep(0)  # a chain may be long, so let others have their turn
        return response

    async def Watch(
        self, request: pb.WatchRequest, context: Context
    ) -> AsyncIterator[pb.WatchResponse]:
        """Tell what the tenant's engines hold, and every change."""
        hub, tenant = self._hub, tenant_of(context)
        await hub.standing.lead(within_s=LEADER_WAIT_S)
        stand = Stand.of(hub.standing)
        with hub.watchers.watching(tenant) as watcher:
            while not hub.watchers.closed:
                part = await watcher.next()
                if not await stand.holds():
                    break
                if part is not None:
                    response = pb.WatchResponse(
                        begins=part.begins, current=part.current, epoch=hub.standing.epoch
                    )
                    fill_changes(response, part.changes)
                    yield response
        hub.standing.check()

    async def Command(self, request: pb.CommandRequest, context: Context) -> pb.CommandResponse:
        """Give a store a command, and wait for its end for as long as the caller wants."""
        hub, tenant = self._hub, tenant_of(context)
        wait_s = wait_s_of(request.wait_ms)
        await hub.standing.lead(within_s=patience_s_of(context, LEADER_WAIT_S))
        command = command_of(request.command, tenant)
        given, actions = hub.directory.commands.give(command, hub.now_s())
        key = tenant, command.command_id
        ended = hub.commanded.setdefault(key, asyncio.Event()) if given.open else None
        hub.perform(actions)
        if ended is not None and given.open and wait_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), wait_s)
            hub.standing.check()
        response = pb.CommandResponse()
        fill_status(response.status, given, hub.now_s())
        return response

    async def GetCommand(
        self, request: pb.GetCommandRequest, context: Context
    ) -> pb.GetCommandResponse:
        """Return how a command stands."""
        hub, tenant = self._hub, tenant_of(context)
        await hub.standing.lead(within_s=patience_s_of(context, LEADER_WAIT_S))
        response = pb.GetCommandResponse()
        given = hub.directory.commands.find(tenant, request.command_id)
        fill_status(response.status, given, hub.now_s())
        return response

    async def _engine(self, ref: pb.EngineRef, context: Context) -> EngineRecord:
        key = engine_key(context, Role.ENGINE, ref.engine_id)
        await self._hub.standing.sure()
        engine = self._hub.directory.members.engine(key, ref.incarnation)
        # A leader that leaves still has its engines, but may no longer act for them.
        self._hub.standing.check()
        engine.last_seen_s = self._hub.now_s()
        return engine
