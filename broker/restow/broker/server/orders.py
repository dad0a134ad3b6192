"""The core's actions as messages, written straight into the batch that carries them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from restow.broker.core.common import actions as act
from restow.broker.core.common.events import NamedPrefix
from restow.broker.core.common.keys import GroupIds, State, size_of
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.rpc import wire_program
from restow.broker.server.outbox import AgentOutbox, EngineOutbox
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2

_KINDS = {False: link.DIGEST_KIND_UNSPECIFIED, True: link.DIGEST_KIND_XXH3_128}
STATE_NUMBERS: dict[State, broker_pb2.HandoffState.ValueType] = {
    state: broker_pb2.HandoffState.Value(f"HANDOFF_STATE_{state.value}") for state in State
}


class _BlockLists(Protocol):
    def add(self) -> broker_pb2.BlockList: ...


def fill_ended(ended: broker_pb2.Ended, action: act.TellEnded) -> None:
    """How a handoff ended."""
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
    for one in action.counterparts:
        ended.counterparts.add(
            engine_id=one.engine_id,
            incarnation=one.incarnation,
            message_ids=one.messages,
            agents=one.agents,
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


def _write_sampled(outbox: EngineOutbox, action: act.TellSampled) -> None:
    sampled = outbox.open().events.add().sampled
    sampled.handoff_id = action.handoff_id
    sampled.demand = action.demand
    sampled.token = action.token


def _fill_blocks(lists: _BlockLists, blocks: tuple[GroupIds, ...]) -> None:
    for group, ids in blocks:
        message = lists.add()
        message.group = group
        message.block_ids = ids


def _write_program(outbox: AgentOutbox, action: act.SendProgram) -> None:
    program = wire_program.program_to_proto(action.program, action.src_rank, action.hashed)
    outbox.open(action.program.size_bytes).orders.add().program.CopyFrom(program)


def write_peer(outbox: AgentOutbox, record: AgentRecord) -> None:
    """An agent to read from."""
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
    _fill_blocks(stage.src_blocks, action.blocks)
    stage.first_token = action.first_token
    stage.stop_token = action.stop_token
    for part in action.parts:
        stage.parts.add(program_id=part.program_id, dst_rank=part.dst_rank)
    stage.digest = _KINDS[action.hashed]


def _write_execute(outbox: AgentOutbox, action: act.SendExecute) -> None:
    size_bytes = size_of(action.src_blocks) + size_of(action.dst_blocks)
    execute = outbox.open(size_bytes).orders.add().execute
    execute.handoff = action.handoff
    execute.handoff_id = action.handoff_id
    execute.program_id = action.program_id
    _fill_blocks(execute.src_blocks, action.src_blocks)
    _fill_blocks(execute.dst_blocks, action.dst_blocks)
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
    """Measure."""
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
}
"""Events for engines that need nothing but their action."""
WRITE: dict[type, Callable[[AgentOutbox, Any], None]] = {
    act.SendProgram: _write_program,
    act.SendForget: _write_forget,
    act.SendStage: _write_stage,
    act.SendExecute: _write_execute,
    act.SendUnstage: _write_unstage,
    act.SendUnprobe: _write_unprobe,
    act.SendUnfence: _write_unfence,
}
"""Orders that need nothing but their action."""
