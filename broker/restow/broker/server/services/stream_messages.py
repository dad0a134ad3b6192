"""Handle the messages of streams in order, without letting one stream delay others for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from restow.broker.core.common import actions as act
from restow.broker.core.engines.engine import EngineRecord, pool_of
from restow.broker.errors import RequestError, RestowError
from restow.broker.rpc.status import MAX_SUBJECT_BYTES, cut
from restow.broker.rpc.wire import check_revision
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.logging import tell_engine
from restow.broker.server.base.outbox import EngineOutbox, Outbox
from restow.broker.server.base.standing import Stand
from restow.broker.server.services.checked_messages import (
    chunk_of,
    known_end_of,
    lease_s_of,
    readers_of,
    wish_of,
)
from restow.broker.server.services.command_messages import answer_of
from restow.broker.server.services.prefix_messages import batch_of, named_of, revision_of
from restow.v1 import agent_link_pb2
from restow.v1 import broker_pb2 as pb

Message = TypeVar("Message")
Batch = TypeVar("Batch", agent_link_pb2.ConnectResponse, pb.SessionResponse)

MAX_AT_ONCE = 512
"""Messages of a batch that are handled before others have a turn; a batch may hold millions."""


async def hear_stream(
    first: Iterable[Message],
    requests: AsyncIterator[Any],
    outbox: Outbox[Any],
    hear: Callable[[Message, float], bool | None],
    now_s: Callable[[], float],
    stand: Stand,
) -> None:
    """Handle the ``first`` messages and those of all ``requests``, until the stream ends.

    ``hear`` takes a message and the time, and returns whether that took long. A `RestowError`
    that it raises ends the stream, and so does the end of ``requests``. Once the outbox is
    closed nothing is read any more, or a peer that does not read could write for ever.
    """
    try:
        await hear_batch(first, outbox, hear, now_s, stand)
        async for request in requests:
            if outbox.closed:
                return
            await hear_batch(request.messages, outbox, hear, now_s, stand)
            del request  # the next request may take long to arrive
    except RestowError as error:
        outbox.close(error)
    finally:
        outbox.close()


async def hear_batch(
    messages: Iterable[Message],
    outbox: Outbox[Any],
    hear: Callable[[Message, float], bool | None],
    now_s: Callable[[], float],
    stand: Stand,
) -> None:
    """Handle a batch, as long as the broker may act."""
    at_s = now_s()
    standing = stand.standing
    long: bool | None = False
    for index, message in enumerate(messages, 1):
        if long or not index % MAX_AT_ONCE:
            await asyncio.sleep(0)
            at_s = now_s()
        if standing.among_others:  # a single broker is always sure
            if not standing.is_sure():
                await standing.sure()
                at_s = now_s()
            if not stand.holds_now:
                return
        if outbox.closed:
            return
        long = hear(message, at_s)


async def batches_to_say(outbox: Outbox[Batch], stand: Stand) -> AsyncIterator[Batch]:
    """Yield the batches to write on a stream; raises the error that the outbox was closed with.

    Batches that were decided in an epoch which has ended are left out. A leader that has raised its
    epoch says the new one at once.
    """
    while (batch := await outbox.take()) is not None:
        if await stand.holds():
            batch.epoch = stand.standing.epoch
            yield batch


class SessionWords:
    """Handles the messages of engines' sessions; translates them, and the directory decides."""

    def __init__(self, hub: Hub) -> None:
        """Serve the hub's directory."""
        self._hub = hub

    def hear(
        self, engine: EngineRecord, outbox: EngineOutbox, message: pb.EngineMessage, now_s: float
    ) -> bool:
        """Handle a message, and return whether that took long."""
        hub, body, number = self._hub, message.WhichOneof("body"), message.message_id
        directory = hub.directory
        try:
            if number < 0:
                raise RequestError(f"message_id {number} must not be negative", field="message_id")
            if body == "publish":
                publication = message.publish
                chunk = chunk_of(publication, directory.limits, number)
                actions = directory.publish(engine, publication.handoff_id, chunk, now_s)
            elif body == "request":
                demand = message.request
                wish = wish_of(demand, number, directory.limits)
                actions = directory.request(engine, demand.handoff_id, wish, now_s)
            else:
                actions = self._apply(engine, message, body, now_s)
            if actions:
                hub.perform(actions)
        except RestowError as error:
            self._refuse(engine, outbox, message, body, error)
        return body == "holdings" or (body == "request" and message.request.HasField("prefix"))

    def _refuse(
        self,
        engine: EngineRecord,
        outbox: EngineOutbox,
        message: pb.EngineMessage,
        body: str | None,
        error: RestowError,
    ) -> None:
        """Count, log and answer a refused message."""
        hub = self._hub
        handoff_id = getattr(getattr(message, body), "handoff_id", "") if body else ""
        statistics = hub.directory.ledger.statistics
        statistics.count_quota(error)
        if body in ("publish", "request"):
            hub.refuse(engine, handoff_id, error)
        else:
            statistics.refuse(error.reason)
        hub.said.warning(
            "word refused",
            tenant=engine.key.tenant,
            engine=engine.key.engine_id,
            word=body,
            handoff=cut(handoff_id, MAX_SUBJECT_BYTES),
            reason=error.reason,
            detail=error.message,
        )
        refused = outbox.open(len(handoff_id.encode())).events.add().refused
        refused.message_id = message.message_id
        refused.handoff_id = handoff_id
        refused.status = error.status
        refused.reason = error.reason
        refused.detail = cut(error.message)
        if body == "publish":
            self.tell_refused(engine, handoff_id, error)

    def _apply(
        self, engine: EngineRecord, message: pb.EngineMessage, body: str | None, now_s: float
    ) -> list[act.Action]:
        """Handle a message that is no publication and no demand."""
        directory = self._hub.directory
        if body == "renew":
            lease_s = lease_s_of(message.renew.lease_ms, directory.limits)
            return directory.renew(engine, message.renew.handoff_id, lease_s, now_s)
        if body == "cancel":
            cancel = message.cancel
            detail = cut(cancel.detail)
            return directory.cancel(engine, cancel.handoff_id, detail, now_s, cancel.demand)
        if body == "decline":
            decline = message.decline
            return directory.decline(
                engine,
                decline.handoff_id,
                cut(decline.detail),
                now_s,
                message.message_id,
                readers_of(decline.readers),
            )
        if body == "holdings":
            try:
                batch = batch_of(message.holdings)
            except RestowError:
                directory.prefixes.skip(engine.key, message.holdings.number)
                raise
            return directory.prefixes.hear(engine, batch)
        if body == "decline_offer":
            declined = message.decline_offer
            detail = cut(declined.detail)
            return directory.offering.decline(engine, declined.handoff_id, detail, now_s)
        if body == "known_end":
            known = message.known_end
            return directory.known_end(engine, known.handoff_id, known_end_of(known), now_s)
        if body == "keep":
            keep = message.keep
            named = named_of(keep.prefix, keep.position_tokens)
            return directory.offering.keep(engine, named, keep.marked)
        if body == "revise":
            check_revision(message.revise.revision)
            return self.revise(engine, message.revise.revision, now_s)
        if body == "forget_states":
            revision = engine.revision_said(revision_of(message.forget_states.revision))
            pool = pool_of(engine)
            return directory.offering.forget_states(pool.tenant, revision, pool)
        if body == "drain":
            return directory.members.drain(engine, True, now_s, leaves=True)
        if body == "commanded":
            status = message.commanded
            answer = answer_of(status)
            return directory.commands.answered(engine, status.command_id, answer, now_s)
        if body == "handed_over":
            engine.handing_over = False
            return []
        raise RequestError("a message without a body")

    def revise(self, engine: EngineRecord, revision: str, now_s: float) -> list[act.Action]:
        """Set an engine's revision, and log it. Raises as `Directory.revise`."""
        before = engine.revision
        actions = self._hub.directory.revise(engine, revision, now_s)
        if before != revision:
            words = "engine's weights replaced"
            tell_engine(self._hub.said, words, engine.key, before=before, now=revision)
        return actions

    def tell_refused(self, engine: EngineRecord, handoff_id: str, error: RestowError) -> None:
        """Tell D that the publication it waits for was refused."""
        hub = self._hub
        hub.perform(hub.directory.publication_refused(engine, handoff_id, error, hub.now_s()))
