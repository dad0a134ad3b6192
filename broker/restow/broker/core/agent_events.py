"""Reports: the effect of each message of an agent."""

from __future__ import annotations

from restow.broker.core.common.actions import Action, SendUnfence, SendUnstage
from restow.broker.core.common.events import Failure, Probed, Settlement, StagedRun
from restow.broker.core.common.keys import State
from restow.broker.core.common.pair import not_compared, not_hashed
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.grant import execute, unreadable
from restow.broker.core.handoffs.lease import unpublished_until_s
from restow.broker.core.ledger.handoff_table import check_handoff_id
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.probing import Examining, Probing
from restow.broker.errors import RequestError

NOT_BEGUN = "READ_NOT_BEGUN"
"""The reason of an agent that could not start an order inside its grant."""


class Reports:
    """Handles the messages of agents for a directory."""

    def __init__(
        self,
        ledger: Ledger,
        granting: Granting,
        probing: Probing,
        examining: Examining,
    ) -> None:
        """Serve the parts of a directory."""
        self._ledger = ledger
        self._limits = ledger.limits
        self._granting = granting
        self._probing = probing
        self._examining = examining

    def fence(
        self,
        engine: EngineRecord,
        agent: AgentRecord,
        handoff_id: str,
        now_s: float,
        tokens: int = 0,
    ) -> list[Action]:
        """Record that a rank of P has ``tokens`` leading tokens in memory, or for 0 the whole.

        Fences of leading tokens before the publication are ignored, because the rank will send
        later fences.

        Raises `RequestError`, `HandoffOwnedError`, `QuotaExceededError` or `DirectoryFullError`; in
        any case nothing changes.
        """
        if agent.gone:
            return []
        if tokens < 0:
            raise RequestError(
                f"handoff {handoff_id}: the number of fenced tokens is {tokens}: it must not be "
                f"negative",
                field="tokens",
            )
        known = self._ledger.known(engine.key.tenant, handoff_id)
        if known is not None and known.ended:
            return [SendUnfence(agent.key, handoff_id)]
        if known is None or known.side.engine is None:
            check_handoff_id(handoff_id)
            if tokens:
                return []
            until_s = unpublished_until_s(self._limits, now_s)
            engine.unpublished_fences.add(handoff_id, agent.key.rank, until_s)
            return []
        if known.side.engine is not engine:
            known.check_source(engine)
        known.fence(agent.key.rank, tokens, now_s)
        may_read = known.side.complete or known.side.early_tokens
        return self._granting.advance(known, now_s) if may_read else []

    def staged(
        self,
        engine: EngineRecord,
        agent: AgentRecord,
        number: int,
        dst_rank: int,
        run: StagedRun,
        failure: Failure | None,
        now_s: float,
    ) -> list[Action]:
        """Record the run that a source's agent gathered and hashed, or its failure."""
        if agent.gone:
            return []
        handoff, rank = self._ledger.by_number.get(number), agent.key.rank
        if handoff is None or handoff.source is not engine or handoff.pair is None:
            return [SendUnstage(agent.key, number)]
        pair = handoff.pair
        if rank not in pair.staging.get(dst_rank, ()) or (dst_rank, rank) in handoff.staged:
            return []
        if failure is not None:
            return self._ledger.stop(handoff, failure, now_s)
        # Store the run even if it is refused below: the agent holds it and must be told to free it.
        failure = unreadable(run, agent)
        if failure is None and pair.hashed:
            failure = not_hashed(run, rank)
        handoff.staged[dst_rank, rank] = run.kept(pair.hashed and failure is None)
        handoff.stagers[rank] = agent
        handoff.timeline.note(now_s, "staged", (rank, dst_rank))
        if failure is not None:
            handoff.unsettled.discard(dst_rank)
            return self._ledger.stop(handoff, failure, now_s)
        destination = handoff.destination
        if handoff.given_back or destination is None or dst_rank not in destination.agents:
            return []
        if not handoff.is_staged(pair, dst_rank):
            return []
        if (late := handoff.lease.used_up(self._limits, now_s)) is not None:
            # This rank was never told to read, so it has nothing to settle.
            handoff.unsettled.discard(dst_rank)
            return self._ledger.stop(handoff, late, now_s)
        if len(handoff.staged) == pair.staged_runs:
            handoff.state = State.READING
        return execute(handoff, pair, (dst_rank,), now_s)

    def settled(
        self, engine: EngineRecord, agent: AgentRecord, settlement: Settlement, now_s: float
    ) -> list[Action]:
        """Record that a destination's agent has finished its part."""
        handoff, rank = self._ledger.by_number.get(settlement.number), agent.key.rank
        if agent.gone:
            return []
        if handoff is None:
            return self._ledger.quarantine.settled(engine, settlement.number, rank, now_s)
        if handoff.destination is not engine or not handoff.may_read(rank):
            return []
        hashed = handoff.pair is not None and handoff.pair.hashed
        handoff.settle(rank, settlement.bytes, settlement.elapsed_us, now_s)
        if handoff.given_back:
            return self._ledger.go_back(handoff, now_s)
        if settlement.reason == NOT_BEGUN:
            failure = Failure(State.FAILED, NOT_BEGUN, settlement.detail)
            return self._ledger.give_back(handoff, failure, now_s)
        if settlement.reason:
            words = f"rank {rank} of engine {engine.key.engine_id}: {settlement.detail}"
            failure = Failure(State.FAILED, settlement.reason, words)
            return self._ledger.stop(handoff, failure, now_s)
        if (late := handoff.lease.outlived(self._limits, now_s)) is not None:
            return self._ledger.stop(handoff, late, now_s)
        if hashed and (unsaid := not_compared(settlement, rank)) is not None:
            return self._ledger.stop(handoff, unsaid, now_s)
        if handoff.unsettled:
            return []
        if handoff.part_tokens:
            actions = self._ledger.end_part(handoff, now_s)
            actions += self._granting.advance(handoff, now_s)
        else:
            actions = self._ledger.end(handoff, now_s)
        return actions + self._granting.call_next(engine.key, now_s)

    def probed(self, agent: AgentRecord, answer: Probed, now_s: float) -> list[Action]:
        """Process an agent's measurement or its failure."""
        if agent.gone:
            return []
        actions = self._probing.answered(agent, answer, now_s)
        return actions + self._examining.answered(agent, answer, now_s)
