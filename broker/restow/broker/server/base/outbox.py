"""Outboxes of streams, whose queued messages leave as batches, and the messages themselves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from restow.broker.core.common import actions as act
from restow.broker.core.common.events import NamedPrefix
from restow.broker.core.common.keys import State, size_of
from restow.broker.core.engines.account import Account
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.errors import (
    DirectoryFullError,
    QueueFullError,
    QuotaExceededError,
    RestowError,
)
from restow.broker.rpc import wire_program
from restow.broker.state_commands import Verb
from restow.v1 import agent_link_pb2, broker_pb2
from restow.v1 import agent_link_pb2 as link

Batch = TypeVar("Batch")

MAX_BATCH = 512
MAX_BATCH_BYTES = 16 << 20
MAX_QUEUE_BYTES = 256 << 20
LAGS_AT, LAGS_BYTES = 4096, 32 << 20
COPIES = 3
"""Copies of a batch that is being sent: messages, bytes, and gRPC's own."""
AGENT_FREE_BYTES = 64 << 10
ENGINE_FREE_BYTES = 1 << 20
"""Bytes of each stream that count for no quota, so that a tenant at its quota can be told."""
MESSAGE_BYTES = 128
"""Bytes that a message counts beside its size, copies included."""


class Outbox(Generic[Batch]):
    """A bounded queue of batches, in which messages are written in place.

    Batches grow with the load: no message waits for others or is copied. A reader loses its stream
    if more than ``max_queue`` messages (rounded up to whole batches), ``MAX_QUEUE_BYTES``, or more
    than its tenant's account allows are waiting. Nothing more is sent then, because messages after
    a gap could be misunderstood.
    """

    def __init__(
        self,
        make: Callable[[], Batch],
        max_queue: int,
        on_full: Callable[[], object] | None = None,
        account: Account | None = None,
        free_bytes: int = 0,
    ) -> None:
        """Begin empty and open; ``make`` makes an empty batch.

        ``account`` carries the waiting bytes above ``free_bytes``, until the next batch is taken.
        ``on_full`` is called once from inside `open` when the reader has lost its stream; it must
        only take a note.
        """
        self._make = make
        self._account, self._free_bytes = account, free_bytes
        self._carried_bytes = self._carried_in_taken = self._carried_in_last = 0
        self._on_full = on_full
        self._full: deque[tuple[Batch, int, int, int]] = deque()
        """Full batches, each with its message count, its bytes, and its bytes in the account."""
        self._in_full = self._bytes_in_full = 0
        self._last = make()
        self._in_last = 0
        self._bytes_in_last = 0
        self._max_full = max(1, -(-max_queue // MAX_BATCH))
        self._wake = asyncio.Event()
        self._end: RestowError | None = None
        self.closed = False
        """Whether the stream ends, though its reader may not know yet."""

    def open(self, size_bytes: int = 0) -> Batch:
        """Return the batch to add exactly one message to; never blocks.

        ``size_bytes`` is about the message's size, if it may be large: a batch must not outgrow
        what a stream can carry at once.
        """
        self._bytes_in_last += size_bytes
        if self._in_last >= MAX_BATCH or self._bytes_in_last > MAX_BATCH_BYTES:
            full_bytes = self._bytes_in_last - size_bytes
            self._bytes_in_full += full_bytes
            if len(self._full) >= self._max_full or self._bytes_in_full > MAX_QUEUE_BYTES:
                self._overflow()
            else:
                self._full.append((self._last, self._in_last, full_bytes, self._carried_in_last))
                self._in_full += self._in_last
            self._start()
            self._bytes_in_last = size_bytes
        if self.closed:
            return self._make()
        copied_bytes = MESSAGE_BYTES + COPIES * size_bytes
        carried_bytes = self._carried_bytes + copied_bytes
        if carried_bytes > self._free_bytes and self._account is not None:
            try:
                self._account.carry(min(copied_bytes, carried_bytes - self._free_bytes))
            except (QuotaExceededError, DirectoryFullError) as error:
                self._overflow(f", and its tenant has no room for more: {error.message}")
                return self._make()
        self._carried_bytes = carried_bytes
        self._carried_in_last += copied_bytes
        if not self._in_last:  # a reader waits only while there is no message
            self._wake.set()
        self._in_last += 1
        return self._last

    def _deliver(self, size_bytes: int) -> None:
        before_bytes = self._carried_bytes
        self._carried_bytes -= size_bytes
        if before_bytes > self._free_bytes and self._account is not None:
            left_bytes = max(self._carried_bytes, self._free_bytes)
            self._account.deliver(before_bytes - left_bytes)

    def drop(self) -> None:
        """Close the outbox for good, because nobody will take a batch any more."""
        self.close()
        self._clear()
        self._deliver(self._carried_in_taken)
        self._carried_in_taken = 0

    def _clear(self) -> None:
        self._full.clear()
        self._in_full = self._bytes_in_full = 0
        self._start()
        self._deliver(self._carried_bytes - self._carried_in_taken)

    def _start(self) -> None:
        self._last = self._make()
        self._in_last = self._bytes_in_last = self._carried_in_last = 0

    def _overflow(self, why: str = "") -> None:
        self._clear()
        self.close(QueueFullError(f"too many messages wait: the stream reads too slowly{why}"))
        if self._on_full is not None:
            self._on_full()

    def close(self, end: RestowError | None = None) -> None:
        """End the stream after the queued messages, with the error ``end`` if it is given."""
        if not self.closed:
            self.closed = True
            self._end = end
        self._wake.set()

    def has_room(self, size_bytes: int) -> bool:
        """Return whether an optional message may be added without risk to the stream."""
        if self.waiting > LAGS_AT or self._bytes_in_full + self._bytes_in_last > LAGS_BYTES:
            return False
        carried_bytes = self._carried_bytes + MESSAGE_BYTES + COPIES * size_bytes
        if self._account is None or carried_bytes <= self._free_bytes:
            return True
        try:
            self._account.check(carried_bytes - max(self._carried_bytes, self._free_bytes))
        except (QuotaExceededError, DirectoryFullError):
            return False
        return True

    @property
    def waiting(self) -> int:
        """Number of messages that have not been taken."""
        return self._in_full + self._in_last

    async def take(self) -> Batch | None:
        """Wait for a batch; None when closed. Raises the error of `close`.

        The batch taken before counts as sent.
        """
        self._deliver(self._carried_in_taken)
        self._carried_in_taken = 0
        while True:
            if self._full:
                batch, in_full, full_bytes, self._carried_in_taken = self._full.popleft()
                self._in_full -= in_full
                self._bytes_in_full -= full_bytes
                return batch
            if self._in_last:
                batch, self._carried_in_taken = self._last, self._carried_in_last
                self._start()
                return batch
            if self.closed:
                if self._end is not None:
                    raise self._end
                return None
            self._wake.clear()
            await self._wake.wait()


AgentOutbox = Outbox[agent_link_pb2.ConnectResponse]
EngineOutbox = Outbox[broker_pb2.SessionResponse]


_KINDS = {False: link.DIGEST_KIND_UNSPECIFIED, True: link.DIGEST_KIND_XXH3_128}
STATE_NUMBERS: dict[State, broker_pb2.HandoffState.ValueType] = {
    state: broker_pb2.HandoffState.Value(f"HANDOFF_STATE_{state.value}") for state in State
}


def fill_ended(ended: broker_pb2.Ended, action: act.TellEnded) -> None:
    """Write how a handoff ended."""
    ended.handoff_id = action.handoff_id
    ended.state = STATE_NUMBERS[action.state]
    if action.reason:
        ended.reason = action.reason
        ended.detail = action.detail
    ended.bytes = action.bytes
    ended.transfer_us = action.transfer_us
    ended.demand = action.demand or 0
    ended.delivered = action.delivered
    ended.position_tokens = action.position
    ended.content_compared = action.compared
    ended.readers = action.readers
    for counterpart in action.counterparts:
        ended.counterparts.add(
            engine_id=counterpart.engine_id,
            incarnation=counterpart.incarnation,
            message_ids=counterpart.messages,
            agents=counterpart.agents,
        )
    if action.sampled is not None:
        ended.sampled_token = action.sampled


def _fill_prefix(filled: broker_pb2.Prefix, prefix: NamedPrefix) -> None:
    filled.form.algorithm, filled.form.quantum_tokens, filled.form.hash_bytes = prefix.form
    filled.salt = prefix.salt
    filled.hashes = prefix.hashes
    filled.end_hash = prefix.end_hash
    filled.revision = prefix.revision


def _write_offer(outbox: EngineOutbox, action: act.SendOffer) -> None:
    offer = outbox.open(action.prefix.size_bytes).events.add().offer
    offer.handoff_id = action.handoff_id
    _fill_prefix(offer.prefix, action.prefix)
    offer.position_tokens = action.prefix.position_tokens
    offer.content = action.prefix.content
    offer.within_ms = int(action.within_s * 1000)


def _write_keep(outbox: EngineOutbox, action: act.SendKeep) -> None:
    keep = outbox.open(action.prefix.size_bytes).events.add().keep
    _fill_prefix(keep.prefix, action.prefix)
    keep.position_tokens = action.prefix.position_tokens
    keep.marked = action.marked


def _write_command(outbox: EngineOutbox, action: act.SendCommand) -> None:
    given = action.command
    command = outbox.open(given.prefix.size_bytes).events.add().command
    command.command_id = given.command_id
    command.engine_id = action.engine.engine_id
    _fill_prefix(command.prefix, given.prefix)
    command.position_tokens = given.prefix.position_tokens
    command.timeout_ms = int(given.timeout_s * 1000)
    if action.verb is Verb.PIN:
        command.pin.for_ms = int(given.for_s * 1000)
    else:
        getattr(command, action.verb.value).SetInParent()


def _write_sampled(outbox: EngineOutbox, action: act.TellSampled) -> None:
    sampled = outbox.open().events.add().sampled
    sampled.handoff_id = action.handoff_id
    sampled.demand = action.demand
    sampled.token = action.token


def _write_program(outbox: AgentOutbox, action: act.SendProgram) -> None:
    program = wire_program.program_to_proto(action.program, action.src_rank, action.hashed)
    outbox.open(action.program.size_bytes).orders.add().program.CopyFrom(program)


def write_peer(outbox: AgentOutbox, record: AgentRecord) -> None:
    """Write an agent to read from."""
    size_bytes = len(record.nixl_metadata) + len(record.host_memory)
    peer = outbox.open(size_bytes).orders.add().peer
    peer.agent_name = record.agent_name
    peer.rank = record.key.rank
    peer.nixl_metadata = record.nixl_metadata
    peer.host_memory = record.host_memory
    for memory in record.regions:
        peer.regions.add(
            name=memory.name,
            base_address=memory.base_address,
            page_count=memory.page_count,
            page_stride_bytes=memory.page_stride_bytes,
            memory=link.MemoryKind.ValueType(memory.memory),
            device_id=memory.device_id,
        )


def _write_forget(outbox: AgentOutbox, action: act.SendForget) -> None:
    outbox.open().orders.add().forget.agent_name = action.agent_name


def _write_stage(outbox: AgentOutbox, action: act.SendStage) -> None:
    stage = outbox.open(size_of(action.blocks)).orders.add().stage
    stage.handoff = action.handoff
    for group, ids in action.blocks:
        stage.src_blocks.add(group=group, block_ids=ids)
    stage.first_token = action.first_token
    stage.stop_token = action.stop_token
    for part in action.parts:
        stage.parts.add(program_id=part.program_id, dst_rank=part.dst_rank)
    stage.digest = _KINDS[action.hashed]


def _write_execute(outbox: AgentOutbox, action: act.SendExecute) -> None:
    size_bytes = size_of(action.src_blocks + action.dst_blocks)
    execute = outbox.open(size_bytes).orders.add().execute
    execute.handoff = action.handoff
    execute.handoff_id = action.handoff_id
    execute.program_id = action.program_id
    for group, ids in action.src_blocks:
        execute.src_blocks.add(group=group, block_ids=ids)
    for group, ids in action.dst_blocks:
        execute.dst_blocks.add(group=group, block_ids=ids)
    execute.first_token = action.first_token
    execute.stop_token = action.stop_token
    for run in action.sources:
        source = execute.sources.add()
        source.src_rank = run.src_rank
        source.agent_name = run.agent_name
        if run.staged_bytes:
            source.staged_address = run.staged_address
            source.staged_bytes = run.staged_bytes
        source.digest = run.digest
    execute.grant_ms = action.grant_ms
    execute.digest = _KINDS[action.hashed]
    execute.write_mark = action.write_mark


def write_probe(outbox: AgentOutbox, action: act.SendProbe, peer: AgentRecord | None) -> None:
    """Write an order to measure."""
    probe = outbox.open().orders.add().probe
    probe.number = action.number
    probe.bytes = action.size_bytes
    if peer is not None:
        probe.agent_name = peer.agent_name
        probe.address = action.address
        probe.name_transport = action.name_transport


def _write_unstage(outbox: AgentOutbox, action: act.SendUnstage) -> None:
    outbox.open().orders.add().unstage.handoff = action.handoff


def _write_unprobe(outbox: AgentOutbox, action: act.SendUnprobe) -> None:
    outbox.open().orders.add().unprobe.number = action.number


def _write_unfence(outbox: AgentOutbox, action: act.SendUnfence) -> None:
    outbox.open(len(action.handoff_id)).orders.add().unfence.handoff_id = action.handoff_id


def _write_tell_holdings(outbox: EngineOutbox, action: act.TellHoldings) -> None:
    outbox.open().events.add().tell_holdings.SetInParent()


def _write_forget_states(outbox: EngineOutbox, action: act.TellForget) -> None:
    outbox.open().events.add().forget_states.revision = action.revision


def _write_drain(outbox: EngineOutbox, action: act.TellDrain) -> None:
    outbox.open().events.add().drain.SetInParent()


TELL: dict[type, Callable[[EngineOutbox, Any], None]] = {
    act.TellSampled: _write_sampled,
    act.TellHoldings: _write_tell_holdings,
    act.TellDrain: _write_drain,
    act.TellForget: _write_forget_states,
    act.SendOffer: _write_offer,
    act.SendKeep: _write_keep,
    act.SendCommand: _write_command,
}
"""Events for engines that need only their action."""
WRITE: dict[type, Callable[[AgentOutbox, Any], None]] = {
    act.SendProgram: _write_program,
    act.SendForget: _write_forget,
    act.SendStage: _write_stage,
    act.SendExecute: _write_execute,
    act.SendUnstage: _write_unstage,
    act.SendUnprobe: _write_unprobe,
    act.SendUnfence: _write_unfence,
}
"""Orders that need only their action."""
