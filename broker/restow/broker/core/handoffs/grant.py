"""A grant: whether both sides' words fit together, and the orders that agents get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from restow.broker.core.common.actions import (
    Action,
    SendExecute,
    SendPeer,
    SendProgram,
    SendStage,
    SendUnstage,
    SourceRun,
    StagePart,
)
from restow.broker.core.common.events import Failure, StagedRun
from restow.broker.core.common.keys import GroupIds, State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Gather, PairPlan
from restow.broker.core.engines.agent import AgentRecord, is_memory
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.errors import ContentMismatchError, PagesError

NOTHING = StagedRun(0, 0)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why the two sides' words of a handoff do not fit together."""

    failure: Failure
    of_demand: bool = True
    """Whether P's words are good, so that another demand may fit."""


def open_grant(
    handoff: Handoff, source: EngineRecord, pair: PairPlan, limits: Limits, now_s: float
) -> list[Action] | Failure:
    """Orders to all agents for what a handoff's grant reads, or why there is no time.

    All is there by then, and it has no `misfit`; or its ``part_tokens`` are.
    """
    late = handoff.lease.grant(limits, now_s)
    if late is not None:
        return late
    handoff.pair = pair
    handoff.strategies = pair.strategies
    handoff.granted_s = now_s
    if handoff.lives is None and (destination := handoff.destination) is not None:
        handoff.lives = (source.replacements, destination.replacements)
    handoff.unsettled = set(pair.programs)
    handoff.state = State.STAGING if pair.gathers else State.READING
    handoff.timeline.note(now_s, "granted", (handoff.lease.grant_until_s - now_s, pair.strategies))
    actions: list[Action] = []
    for gather in pair.gathers:
        actions += _stage(handoff, source, pair, gather)
    at_once = [dst_rank for dst_rank, staging in pair.staging.items() if not staging]
    return actions + execute(handoff, pair, at_once, now_s) if at_once else actions


def misfit(
    handoff: Handoff, source: EngineRecord, destination: EngineRecord, pair: PairPlan
) -> Misfit | None:
    """What can be checked only now that both sides, all agents and the position are known."""
    published, wanted = handoff.publication, handoff.demand
    position_tokens = published.position_tokens
    if wanted.position_tokens not in (0, position_tokens):
        words = (
            f"P's state stands at {position_tokens} tokens, and D goes on from "
            f"{wanted.position_tokens}: the two do not cut the same prompt alike"
        )
        return Misfit(Failure(State.FAILED, "POSITION_MISMATCH", words))
    if not 0 <= wanted.held_tokens <= position_tokens:
        words = f"D holds {wanted.held_tokens} tokens of a state at {position_tokens}"
        return Misfit(Failure(State.FAILED, "ARGUMENT_INVALID", words))
    if wanted.takes_sampled and published.sampled_token is None:
        words = (
            f"D goes on behind the token that P samples at {position_tokens} tokens, and P has "
            f"published none"
        )
        return Misfit(Failure(State.FAILED, "NOT_SAMPLED", words))
    # Agents that came later may have less memory than those that the ids were checked against.
    if handoff.side.checked != source.admitted:
        try:
            for group, data in published.blocks.items():
                source.check_ids(group, data)
        except PagesError as error:
            failure = Failure(State.FAILED, error.reason, error.message)
            return Misfit(failure, of_demand=False)
    try:
        wanted.check_content(handoff.handoff_id, published)
        destination.check_counts(pair.dst_groups, wanted.blocks, position_tokens)
        if handoff.dst_checked != destination.admitted:
            for group, data in wanted.blocks.items():
                destination.check_ids(group, data)
        # The null block may not be among those of tokens that are moved.
        for lists in pair.group_pairs:
            if lists.per_token:
                first = lists.first_token(wanted.held_tokens, position_tokens)
                if lists.has_source:
                    source.check_no_null(lists.src.group, published.blocks, first, position_tokens)
                destination.check_no_null(lists.dst.group, wanted.blocks, first, position_tokens)
    except (PagesError, ContentMismatchError) as error:
        return Misfit(Failure(State.FAILED, error.reason, error.message))
    return None


def early_tokens(
    handoff: Handoff, source: EngineRecord, destination: EngineRecord, pair: PairPlan, least: int
) -> int:
    """Up to which token D may read while P computes on; 0: nothing, or less than ``least`` bytes.

    What does not fit is left to `misfit`, once all is known.
    """
    early, published, wanted = pair.early, handoff.publication, handoff.demand
    first, stop = handoff.first_token, handoff.side.early_tokens
    if wanted.position_tokens:
        stop = min(stop, wanted.position_tokens)
    if early is None or stop <= first or destination.token_bytes * (stop - first) < least:
        return 0
    if handoff.side.checked != source.admitted or handoff.dst_checked != destination.admitted:
        return 0
    try:
        source.check_counts(early.src_groups, published.blocks, stop)
        destination.check_counts(early.dst_groups, wanted.blocks, stop)
        for lists in early.group_pairs:
            if lists.per_token:
                if lists.has_source:
                    source.check_no_null(lists.src.group, published.blocks, first, stop)
                destination.check_no_null(lists.dst.group, wanted.blocks, first, stop)
    except PagesError:
        return 0
    return stop


def read_bytes(handoff: Handoff, destination: EngineRecord) -> int:
    """About how many bytes its grant reads."""
    first, stop = handoff.first_token, handoff.stop_token
    if handoff.part_tokens:
        return destination.token_bytes * (stop - first)
    return destination.state_bytes(first, stop)


def _stage(handoff: Handoff, source: EngineRecord, pair: PairPlan, gather: Gather) -> list[Action]:
    agent = source.agents[gather.src_rank]
    actions: list[Action] = []
    parts = []
    for dst_rank in gather.dst_ranks:
        program = pair.programs[dst_rank]
        named = program.hashed_id if pair.hashed else program.gather_id
        program_id = named(gather.src_rank)
        if program_id not in agent.programs:
            agent.programs.add(program_id)
            actions.append(SendProgram(agent.key, program, gather.src_rank, pair.hashed))
        parts.append(StagePart(program_id, dst_rank))
    actions.append(
        SendStage(
            agent.key,
            handoff.number,
            tuple(parts),
            _needed(handoff.publication.blocks, pair.src_groups),
            handoff.first_token,
            handoff.stop_token,
            pair.hashed,
        )
    )
    return actions


def unreadable(run: StagedRun, source: AgentRecord) -> Failure | None:
    """Why nobody can be told to read what ``source`` says that it has gathered."""
    if is_memory(run.address, run.size_bytes):
        return None
    words = f"rank {source.key.rank} says that it gathered {run.size_bytes} bytes at {run.address}"
    return Failure(State.FAILED, "ARGUMENT_INVALID", words)


def execute(
    handoff: Handoff, pair: PairPlan, dst_ranks: Sequence[int], now_s: float
) -> list[Action]:
    """Orders for destination ranks whose sources are all staged."""
    source, destination = handoff.source, handoff.destination
    if source is None or destination is None:
        return []
    src_blocks = _needed(handoff.publication.blocks, pair.src_groups)
    dst_blocks = _needed(handoff.demand.blocks, pair.dst_groups)
    left_ms = handoff.lease.left_ms(now_s)
    actions: list[Action] = []
    for dst_rank in dst_ranks:
        program = pair.programs[dst_rank]
        agent = destination.agents[dst_rank]
        if program.program_id not in agent.programs:
            agent.programs.add(program.program_id)
            actions.append(SendProgram(agent.key, program, None))
        runs = []
        for src_rank in pair.sources[dst_rank]:
            peer = source.memory_of(src_rank)
            if peer.agent_name not in agent.peers:
                agent.peers.add(peer.agent_name)
                actions.append(SendPeer(agent.key, peer.key))
            run = handoff.staged.get((dst_rank, src_rank), NOTHING)
            runs.append(SourceRun(src_rank, peer.agent_name, *run))
        actions.append(
            SendExecute(
                agent.key,
                handoff.number,
                handoff.handoff_id,
                program.program_id,
                src_blocks,
                dst_blocks,
                handoff.first_token,
                handoff.stop_token,
                tuple(runs),
                left_ms,
                pair.hashed,
                handoff.demand.write_mark,
            )
        )
    return actions


def _needed(blocks: Mapping[str, bytes], groups: frozenset[str]) -> tuple[GroupIds, ...]:
    return tuple([item for item in blocks.items() if item[0] in groups])


def release_staging(handoff: Handoff) -> list[Action]:
    """Tell the agents that gathered for the handoff to give that memory back.

    An agent whose stream broke has dropped it, and one that came in its place has none.
    """
    return [
        SendUnstage(agent.key, handoff.number)
        for _, agent in sorted(handoff.stagers.items())
        if not agent.gone
    ]
