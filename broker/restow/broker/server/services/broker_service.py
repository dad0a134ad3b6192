"""`restow.v1.Broker`: what engines say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sized

from restow.broker.core import actions as act
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Chunk, Wish
from restow.broker.errors import RequestError, RestowError, SessionReplacedError
from restow.broker.layout.limits import MAX_GROUPS
from restow.broker.rpc.status import cut
from restow.broker.server.callers import Context, engine_key
from restow.broker.server.hub import EngineOutbox, Hub
from restow.broker.server.orders import STATE_NUMBERS
from restow.broker.server.outbox import Outbox
from restow.broker.server.services.checked_layouts import CheckedLayouts
from restow.broker.server.services.trace_context import known_trace
from restow.broker.trust.identity import Role
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

MIN_CONTENT_BYTES, MAX_CONTENT_BYTES = 16, 64
MAX_AT_ONCE = 512
"""Messages of one batch, after which others have their turn: a batch may hold millions."""


class BrokerService(broker_pb2_grpc.BrokerServicer):
    """Translates; the directory decides."""

    def __init__(self, hub: Hub) -> None:
        """Serve the hub's directory."""
        self._hub = hub
        self._layouts = CheckedLayouts()

    async def RegisterEngine(
        self, request: pb.RegisterEngineRequest, context: Context
    ) -> pb.RegisterEngineResponse:
        """Check a layout and take the engine in."""
        key = engine_key(context, Role.ENGINE, request.engine.engine_id)
        # Large layouts take long to read and to check: not on the loop.
        layout, layout_digest = await asyncio.to_thread(self._layouts.of, request.layout)
        hub = self._hub
        hub.perform(
            hub.directory.members.register(
                key, request.engine.incarnation, layout, layout_digest, hub.now_s()
            )
        )
        hub.expected.came(key)
        return pb.RegisterEngineResponse(layout_digest=layout_digest, broker_epoch=hub.epoch)

    async def UnregisterEngine(
        self, request: pb.UnregisterEngineRequest, context: Context
    ) -> pb.UnregisterEngineResponse:
        """Take an engine out."""
        engine = self._engine(request.engine, context)
        hub = self._hub
        hub.perform(hub.directory.members.unregister(engine, hub.now_s()))
        return pb.UnregisterEngineResponse()

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """An engine's stream."""
        hub = self._hub
        first = await anext(aiter(requests), None)
        if first is None:
            return
        engine = self._engine(first.engine, context)
        loop = asyncio.get_running_loop()

        def lose() -> None:
            """Close the session, once; a stream that nobody reads may end much later."""
            if hub.engines.get(engine.key) is outbox:
                del hub.engines[engine.key]
                hub.directory.members.session_closed(engine, hub.now_s())

        outbox: EngineOutbox = Outbox(
            pb.SessionResponse, hub.max_queue, on_full=lambda: loop.call_soon(lose)
        )
        old = hub.engines.get(engine.key)
        if old is not None:
            name = engine.key.engine_id
            old.close(SessionReplacedError(f"engine {name} opened another session", engine=name))
        hub.engines[engine.key] = outbox
        hub.directory.members.session_opened(engine)
        outbox.open().events.add().opened.broker_epoch = hub.epoch
        reader = asyncio.create_task(self._read(engine, outbox, first, requests))
        try:
            while (batch := await outbox.take()) is not None:
                yield batch
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            lose()

    async def _read(
        self,
        engine: EngineRecord,
        outbox: EngineOutbox,
        first: pb.SessionRequest,
        requests: AsyncIterator[pb.SessionRequest],
    ) -> None:
        try:
            await self._take(engine, outbox, first)
            async for request in requests:
                # One that ends is heard no more: who does not read it could write for ever.
                if outbox.closed:
                    return
                await self._take(engine, outbox, request)
        finally:
            outbox.close()

    async def _take(
        self, engine: EngineRecord, outbox: EngineOutbox, request: pb.SessionRequest
    ) -> None:
        hub = self._hub
        now_s = hub.now_s()
        for index, message in enumerate(request.messages, 1):
            if not index % MAX_AT_ONCE:
                await asyncio.sleep(0)
                now_s = hub.now_s()
            if outbox.closed:
                return
            try:
                actions = self._apply(engine, message, now_s)
                if actions:
                    hub.perform(actions)
            except RestowError as error:
                refused = _refused(message, error)
                if message.WhichOneof("body") in ("publish", "request"):
                    hub.refuse(engine, refused.handoff_id, error)
                outbox.open(len(refused.handoff_id)).events.add().refused.CopyFrom(refused)
                if message.WhichOneof("body") == "publish":
                    self._tell_refused(engine, message.publish.handoff_id, error)

    def _apply(
        self, engine: EngineRecord, message: pb.EngineMessage, now_s: float
    ) -> list[act.Action]:
        directory = self._hub.directory
        body = message.WhichOneof("body")
        if message.message_id < 0:
            raise RequestError(
                f"message_id {message.message_id} must not be negative", field="message_id"
            )
        if body == "publish":
            publication = message.publish
            return directory.publish(
                engine, publication.handoff_id, self._chunk(publication), now_s
            )
        if body == "request":
            demand = message.request
            wish = self._wish(demand, message.message_id)
            return directory.request(engine, demand.handoff_id, wish, now_s)
        if body == "renew":
            lease_s = self._lease_s(message.renew.lease_ms)
            return directory.renew(engine, message.renew.handoff_id, lease_s, now_s)
        if body == "cancel":
            cancel = message.cancel
            return directory.cancel(engine, cancel.handoff_id, cancel.detail, now_s, cancel.demand)
        if body == "decline":
            decline = message.decline
            return directory.decline(
                engine, decline.handoff_id, decline.detail, now_s, message.message_id
            )
        raise RequestError("a message without a body")

    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        """Publish one chunk outside of a session."""
        hub = self._hub
        engine = self._engine(request.engine, context)
        handoff_id = request.publication.handoff_id
        try:
            chunk = self._chunk(request.publication)
            hub.perform(hub.directory.publish(engine, handoff_id, chunk, hub.now_s()))
        except RestowError as error:
            hub.refuse(engine, handoff_id, error)
            self._tell_refused(engine, handoff_id, error)
            raise
        state = hub.directory.ledger.find(engine.key.tenant, handoff_id).state
        return pb.PublishResponse(state=STATE_NUMBERS[state])

    async def Request(self, request: pb.RequestRequest, context: Context) -> pb.RequestResponse:
        """Ask outside of a session, and wait for the end."""
        hub = self._hub
        engine = self._engine(request.engine, context)
        demand = request.demand
        number, end = hub.wait_for_end(engine.key, demand.handoff_id)
        try:
            try:
                wish = self._wish(demand, number)
                hub.perform(hub.directory.request(engine, demand.handoff_id, wish, hub.now_s()))
            except RestowError as error:
                hub.refuse(engine, demand.handoff_id, error)
                raise
            return pb.RequestResponse(ended=await end)
        finally:
            end.cancel()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Cancel outside of a session."""
        hub = self._hub
        engine = self._engine(request.engine, context)
        cancel = request.cancellation
        hub.perform(
            hub.directory.cancel(
                engine, cancel.handoff_id, cancel.detail, hub.now_s(), cancel.demand
            )
        )
        state = hub.directory.ledger.find(engine.key.tenant, cancel.handoff_id).state
        return pb.CancelResponse(state=STATE_NUMBERS[state])

    def _tell_refused(self, engine: EngineRecord, handoff_id: str, error: RestowError) -> None:
        """Let D know that what it waits for will not come."""
        hub = self._hub
        hub.perform(hub.directory.publication_refused(engine, handoff_id, error, hub.now_s()))

    def _engine(self, ref: pb.EngineRef, context: Context) -> EngineRecord:
        key = engine_key(context, Role.ENGINE, ref.engine_id)
        return self._hub.directory.members.engine(key, ref.incarnation)

    def _lease_s(self, lease_ms: int) -> float:
        limits = self._hub.directory.limits
        if not 0 <= lease_ms <= limits.max_lease_s * 1000:
            raise RequestError(
                f"lease_ms is {lease_ms}; it must be 0 to {int(limits.max_lease_s * 1000)}",
                field="lease_ms",
            )
        return lease_ms / 1000 if lease_ms else limits.lease_s

    def _chunk(self, publication: pb.Publication) -> Chunk:
        _check_lists(publication.blocks)
        return Chunk(
            tuple([(b.group, b.first_block, b.block_ids) for b in publication.blocks]),
            publication.position_tokens,
            publication.final,
            self._lease_s(publication.lease_ms),
            known_trace(publication.trace_parent),
            _content(publication.content),
            publication.repeated,
        )

    def _wish(self, demand: pb.Demand, number: int) -> Wish:
        limits = self._hub.directory.limits
        timeout_ms, held_tokens = demand.timeout_ms, demand.held_tokens
        if demand.position_tokens < 0:
            raise RequestError(
                f"position_tokens {demand.position_tokens} must not be negative",
                field="position_tokens",
            )
        if held_tokens < 0 or not 0 <= timeout_ms <= limits.max_lease_s * 1000:
            raise RequestError(
                f"timeout_ms {timeout_ms} and held_tokens {held_tokens} must not be negative, nor "
                f"a timeout above {int(limits.max_lease_s * 1000)}",
                field="timeout_ms",
            )
        if demand.content and not demand.position_tokens:
            raise RequestError(
                "a demand that names its content must say position_tokens, up to which it does",
                field="position_tokens",
            )
        _check_lists(demand.blocks)
        blocks = []
        for one in demand.blocks:
            if one.first_block:
                raise RequestError("a demand names all blocks from 0 on", field="first_block")
            blocks.append((one.group, one.block_ids))
        timeout_s = timeout_ms / 1000 if timeout_ms else limits.timeout_s
        return Wish(
            tuple(blocks),
            held_tokens,
            timeout_s,
            demand.position_tokens,
            demand.repeated,
            known_trace(demand.trace_parent),
            _content(demand.content),
            number,
        )


def _content(content: bytes) -> bytes:
    """What a side names. Raises `RequestError` for what can't be a hash."""
    if content and not MIN_CONTENT_BYTES <= len(content) <= MAX_CONTENT_BYTES:
        raise RequestError(
            f"content has {len(content)} bytes; a hash has {MIN_CONTENT_BYTES} to "
            f"{MAX_CONTENT_BYTES}",
            field="content",
        )
    return content


def _check_lists(lists: Sized) -> None:
    """Raise `RequestError` for more lists than an engine has groups."""
    if len(lists) > MAX_GROUPS:
        raise RequestError(
            f"{len(lists)} lists of blocks; an engine has at most {MAX_GROUPS} groups",
            field="blocks",
        )


def _refused(message: pb.EngineMessage, error: RestowError) -> pb.Refused:
    body = message.WhichOneof("body")
    return pb.Refused(
        message_id=message.message_id,
        handoff_id=getattr(message, body).handoff_id if body else "",
        status=error.status,
        reason=error.reason,
        detail=cut(error.message),
    )
