"""The core's actions as messages, written straight into the batch that carries them."""

from __future__ import annotations

from typing import Protocol

from restow.broker.core import actions as act
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.rpc import wire_program
from restow.v1 import agent_link_pb2 as link
from restow.v1 import broker_pb2

_KINDS = {False: link.DIGEST_KIND_UNSPECIFIED, True: link.DIGEST_KIND_XXH3_128}
STATE_NUMBERS: dict[act.State, broker_pb2.HandoffState.ValueType] = {
    state: broker_pb2.HandoffState.Value(f"HANDOFF_STATE_{state.value}") for state in act.State
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
    ended.demand = action.demand


def _fill_blocks(lists: _BlockLists, blocks: tuple[act.GroupIds, ...]) -> None:
    for group, ids in blocks:
        message = lists.add()
        message.group = group
        message.block_ids = ids


def fill_program(order: link.AgentOrder, action: act.SendProgram) -> None:
    """A program, or the part that a source gathers."""
    order.program.CopyFrom(
        wire_program.program_to_proto(action.program, action.src_rank, action.hashed)
    )


def fill_peer(order: link.AgentOrder, record: AgentRecord) -> None:
    """An agent to read from."""
    peer = order.peer
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


def fill_forget(order: link.AgentOrder, action: act.SendForget) -> None:
    """A peer is gone."""
    order.forget.agent_name = action.agent_name


def fill_stage(order: link.AgentOrder, action: act.SendStage) -> None:
    """Gather and hash."""
    stage = order.stage
    stage.handoff = action.handoff
    _fill_blocks(stage.src_blocks, action.blocks)
    stage.first_token = action.first_token
    stage.stop_token = action.stop_token
    for part in action.parts:
        stage.parts.add(program_id=part.program_id, dst_rank=part.dst_rank)
    stage.digest = _KINDS[action.hashed]


def fill_execute(order: link.AgentOrder, action: act.SendExecute) -> None:
    """Read."""
    execute = order.execute
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


def fill_probe(order: link.AgentOrder, action: act.SendProbe, peer: AgentRecord | None) -> None:
    """Measure."""
    probe = order.probe
    probe.number = action.number
    probe.bytes = action.size_bytes
    if peer is not None:
        probe.agent_name = peer.agent_name
        probe.address = action.address
        probe.name_transport = action.name_transport


def fill_unstage(order: link.AgentOrder, action: act.SendUnstage) -> None:
    """Give staging back."""
    order.unstage.handoff = action.handoff
