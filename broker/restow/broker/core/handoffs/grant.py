"""A grant: check that both sides fit together, and create the agents' orders."""

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
from restow.broker.planner import Program

NOTHING = StagedRun(0, 0)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why the two sides of a handoff do not fit together."""

    failure: Failure
    of_demand: bool = True
    """Whether P's side is valid, so that another demand may fit."""


def open_grant(
    handoff: Handoff, source: EngineRecord, pair: PairPlan, limits: Limits, now_s: float
) -> list[Action] | Failure:
    """Open a grant and return the orders to all agents, or return why no time is left.

    The caller has checked that both sides are complete and have no `misfit`, or that the leading
    ``part_tokens`` can be read.
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
    detail = (handoff.lease.grant_until_s - now_s, pair.strategies)
    handoff.timeline.append((now_s, "granted", detail))
    actions: list[Action] = []
    for gather in pair.gathers:
        actions += _stage(handoff, source, pair, gather)
    at_once = []
    for dst_rank, staging in pair.staging.items():
        if not staging:
            at_once.append(dst_rank)
    return actions + execute(handoff, pair, at_once, now_s) if at_once else actions


def misfit(
    handoff: Handoff, source: EngineRecord, destination: EngineRecord, pair: PairPlan
) -> Misfit | None:
    """Check what needs both sides, all agents and the position; return None if they fit."""
    published, wanted = handoff.side.publication, handoff.demand
    position_tokens = published.position_tokens
    if wanted.position_tokens not in (0, position_tokens):
        words = (
            f"P's state is at position {position_tokens}, but D continues from "
            f"{wanted.position_tokens}: the two sides cut the prompt differently"
        )
        return Misfit(Failure(State.FAILED, "POSITION_MISMATCH", words))
    if not 0 <= wanted.held_tokens <= position_tokens:
        words = f"D holds {wanted.held_tokens} tokens, but P's state is at {position_tokens}"
        return Misfit(Failure(State.FAILED, "ARGUMENT_INVALID", words))
    if wanted.takes_sampled and published.sampled_token is None:
        words = (
            f"D continues after the token that P samples at position {position_tokens}, but P "
            f"published no sampled token"
        )
        return Misfit(Failure(State.FAILED, "NOT_SAMPLED", words))
    # Agents that joined after the ids were checked may have less memory.
    if handoff.side.checked != source.admitted:
        try:
            for group, data in published.blocks.items():
                source.check_ids(group, data)
        except PagesError as error:
            failure = Failure(State.FAILED, error.reason, error.message)
            return Misfit(failure, of_demand=False)
    try:
        if wanted.content or wanted.prefix is not None:
            wanted.check_content(handoff.handoff_id, published)
        destination.check_counts(pair.dst_groups, wanted.blocks, position_tokens)
        if handoff.dst_checked != destination.admitted:
            for group, data in wanted.blocks.items():
                destination.check_ids(group, data)
        # The null block must not be among the blocks of tokens that are moved.
        for lists in pair.group_pairs if source.null_blocks or destination.null_blocks else ():
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
    """Return up to which token D may read early; 0 if fewer than ``least`` bytes are ready.

    Mismatches are left to `misfit`, which runs when both sides are complete.
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


def _stage(handoff: Handoff, source: EngineRecord, pair: PairPlan, gather: Gather) -> list[Action]:
    agent = source.agents[gather.src_rank]
    actions: list[Action] = []
    parts = []
    for dst_rank in gather.dst_ranks:
        program = pair.programs[dst_rank]
        named = program.hashed_id if pair.hashed else program.gather_id
        program_id = named(gather.src_rank)
        if program_id not in agent.programs:
            actions.append(_gather_program(agent, program, pair.hashed))
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
    """Return why the run that ``source`` claims to have gathered cannot be read; None if it can."""
    if is_memory(run.address, run.size_bytes):
        return None
    words = f"rank {source.key.rank} reported a run of {run.size_bytes} bytes at {run.address}"
    return Failure(State.FAILED, "ARGUMENT_INVALID", words)


def execute(
    handoff: Handoff, pair: PairPlan, dst_ranks: Sequence[int], now_s: float
) -> list[Action]:
    """Return orders for destination ranks whose sources are all staged."""
    source, destination = handoff.side.engine, handoff.destination
    if source is None or destination is None:
        return []
    src_blocks = _needed(handoff.side.publication.blocks, pair.src_groups)
    dst_blocks = _needed(handoff.demand.blocks, pair.dst_groups)
    first_token, stop_token = handoff.first_token, handoff.stop_token
    left_ms = handoff.lease.left_ms(now_s)
    actions: list[Action] = []
    for dst_rank in dst_ranks:
        program = pair.programs[dst_rank]
        agent = destination.agents[dst_rank]
        if program.program_id not in agent.programs:
            actions.append(_read_program(agent, program))
        runs = []
        for src_rank in pair.sources[dst_rank]:
            peer = source.agents.get(src_rank) or source.memory_of(src_rank)
            if peer.agent_name not in agent.peers:
                actions.append(_peer(agent, peer))
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
                first_token,
                stop_token,
                tuple(runs),
                left_ms,
                pair.hashed,
                handoff.demand.write_mark,
            )
        )
    return actions


def introduce(source: EngineRecord, destination: EngineRecord, pair: PairPlan) -> list[Action]:
    """Return the programs and peers that the agents of two engines lack for a handoff.

    As a handoff would, this lets agents read from the peers that the plan names.
    """
    actions: list[Action] = []
    for gather in pair.gathers:
        agent = source.agents[gather.src_rank]
        for program in (pair.programs[dst_rank] for dst_rank in gather.dst_ranks):
            if program.gather_id(gather.src_rank) not in agent.programs:
                actions.append(_gather_program(agent, program, hashed=False))
    for dst_rank, program in pair.programs.items():
        agent = destination.agents[dst_rank]
        if program.program_id not in agent.programs:
            actions.append(_read_program(agent, program))
        for peer in (source.agents[src_rank] for src_rank in pair.sources[dst_rank]):
            if peer.agent_name not in agent.peers:
                actions.append(_peer(agent, peer))
    return actions


def _gather_program(agent: AgentRecord, program: Program, hashed: bool) -> SendProgram:
    rank = agent.key.rank
    agent.programs.add(program.hashed_id(rank) if hashed else program.gather_id(rank))
    return SendProgram(agent.key, program, rank, hashed)


def _read_program(agent: AgentRecord, program: Program) -> SendProgram:
    agent.programs.add(program.program_id)
    return SendProgram(agent.key, program, None)


def _peer(agent: AgentRecord, peer: AgentRecord) -> SendPeer:
    agent.peers.add(peer.agent_name)
    return SendPeer(agent.key, peer.key)


def _needed(blocks: Mapping[str, bytes], groups: frozenset[str]) -> tuple[GroupIds, ...]:
    if blocks.keys() == groups:  # nearly always
        return tuple(blocks.items())
    return tuple([item for item in blocks.items() if item[0] in groups])


def release_staging(handoff: Handoff) -> list[Action]:
    """Return orders that free staging memory at the agents that gathered for the handoff.

    An agent whose stream broke has freed it already, and an agent that replaced another has none.
    """
    return [
        SendUnstage(agent.key, handoff.number)
        for _, agent in sorted(handoff.stagers.items())
        if not agent.gone
    ]
