"""Connections: how agents connect, reconnect and get lost, and what that does to handoffs."""

from __future__ import annotations

from collections.abc import Callable

from restow.broker.core.common.actions import Action, CloseAgent, SendForget
from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord, Heard
from restow.broker.core.ledger.handoff_table import MAX_ID_LENGTH
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.errors import AgentMismatchError, AgentReplacedError

MAX_FORMER_AGENTS = 64
"""Names of replaced agents that are remembered per engine."""


class Connections:
    """The agents of all engines, connected or away. Their names are unique within a tenant."""

    def __init__(self, ledger: Ledger) -> None:
        """Begin without agents."""
        self.names: dict[tuple[str, str], AgentRecord] = {}
        """By tenant and name."""
        self._ledger = ledger

    def admit(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Admit an agent in place of an earlier agent of its rank.

        Raises `AgentUnknownError`, `AgentMismatchError`, `EngineReplacedError`,
        `AgentReplacedError` if another agent has replaced this agent, and `QuotaExceededError` or
        `DirectoryFullError` for its bytes.
        """
        engine.check_there()
        rank = agent.key.rank
        old, before = engine.agents.get(rank) or engine.away.get(rank), engine.heard.get(rank)
        self._check(engine, agent, old)
        more_bytes = agent.kept_bytes - (old.kept_bytes if old is not None else 0)
        engine.account.check(more_bytes)
        # Admit first: a refused Hello must not cost the rank its present agent.
        engine.admit(agent)
        engine.account.keep(more_bytes)
        actions: list[Action] = []
        is_back = before is None or before.agent_name == agent.agent_name
        if old is not None:
            connected = not old.gone
            if connected:
                actions += self._break_off(engine, old, now_s)
            engine.away.pop(rank, None)
            if not old.is_back_as(agent):
                is_back = False
                actions += self._lose(engine, old, now_s)
            if connected:
                why = f"another agent connected for engine {engine.key.engine_id}, rank {rank}"
                error = AgentReplacedError(why, engine=engine.key.engine_id, rank=rank)
                actions.append(CloseAgent(old.key, error))
        if before is not None and not is_back:
            actions += self._replace(engine, agent, before, now_s)
        self.names[agent.tenant, agent.agent_name] = agent
        engine.last_seen_s = now_s
        return actions + self._heard(engine, rank, now_s)

    def _check(self, engine: EngineRecord, agent: AgentRecord, old: AgentRecord | None) -> None:
        """Raise `AgentMismatchError` or `AgentReplacedError` for an agent that must not connect."""
        engine_id, rank = engine.key.engine_id, agent.key.rank
        in_use = self.names.get((agent.tenant, agent.agent_name)) not in (None, old)
        wrong = ""
        if in_use or not 0 < len(agent.agent_name) <= MAX_ID_LENGTH:
            shown = repr(agent.agent_name[:64])
            wrong = f"agent_name {shown} is empty, too long or in use: choose another name"
        elif not agent.agent_name.isprintable():
            wrong = f"agent_name {agent.agent_name!r} is not printable"
        elif len(agent.host) > MAX_ID_LENGTH or not agent.host.isprintable():
            wrong = f"host {agent.host[:64]!r} is not printable, or longer than {MAX_ID_LENGTH}"
        elif agent.staging_bytes < 0:
            wrong = f"staging_bytes is {agent.staging_bytes}: it must not be negative"
        if wrong:
            words = f"engine {engine_id}, rank {rank}: {wrong}"
            raise AgentMismatchError(words, engine=engine_id, rank=rank)
        if agent.agent_name in engine.former_agents:
            words = (
                f"agent {agent.agent_name} of engine {engine_id}, rank {rank} was replaced by an "
                f"agent of another process: end this process, or restart the engine under a new "
                f"incarnation"
            )
            raise AgentReplacedError(words, engine=engine_id, rank=rank)

    def _replace(
        self, engine: EngineRecord, agent: AgentRecord, before: Heard, now_s: float
    ) -> list[Action]:
        """End handoffs that the engine opened before another process took over a rank.

        The process that speaks for the engine may have changed too. It has not if the engine spoke
        on its present session after the old agent had gone.
        """
        engine.replacements += 1
        engine.replaced_s = now_s
        if before.agent_name != agent.agent_name:
            names = (before.agent_name, *engine.former_agents)
            engine.former_agents = names[:MAX_FORMER_AGENTS]
        said_before_s = min(before.gone_s, now_s)
        return self._end_words(
            engine, lambda said_s: said_before_s < said_s >= engine.session_s, now_s
        )

    def session_opened(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """End handoffs that an earlier session opened before an agent was replaced.

        Until now that session was assumed to belong to the present process.
        """
        return self._end_words(engine, lambda said_s: said_s > engine.replaced_s, now_s)

    def _end_words(
        self, engine: EngineRecord, holds: Callable[[float], bool], now_s: float
    ) -> list[Action]:
        """End the open handoffs whose message is void; refusing a D keeps P's state."""
        words = (
            f"an agent of engine {engine.key.engine_id} came back as another process, which voids "
            f"what the engine had said before"
        )
        failure = Failure(State.FAILED, "AGENT_LOST", words)
        actions: list[Action] = []
        for handoff in self._ledger.live_of(engine):
            if handoff.source is engine and not holds(handoff.side.said_s):
                actions += self._ledger.stop(handoff.parent or handoff, failure, now_s)
            elif handoff.destination is engine and not holds(handoff.asked_s):
                end = self._ledger.stop if handoff.begun else self._ledger.dismiss
                actions += end(handoff, failure, now_s)
        return actions

    def _heard(self, engine: EngineRecord, rank: int, now_s: float) -> list[Action]:
        """Release what waited for a rank: after its Hello no earlier stream reads any more."""
        actions: list[Action] = []
        for handoff in self._ledger.live_of(engine):
            if handoff.destination is not engine:
                continue
            handoff.unheard.discard(rank)
            # The report of these reads was lost with the earlier stream.
            if rank in handoff.unsettled:
                handoff.unsettled.discard(rank)
                actions += self._ledger.give_back(handoff, _lost(engine, rank), now_s)
        return actions + self._ledger.quarantine.heard(engine, rank, now_s)

    def break_off(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Handle the loss of an agent's stream; the agent may return with its memory intact."""
        if agent.gone:
            return []
        del engine.agents[agent.key.rank]
        engine.complete = False
        engine.away[agent.key.rank] = agent
        engine.heard[agent.key.rank].gone_s = now_s
        engine.last_seen_s = now_s
        return self._break_off(engine, agent, now_s)

    def _break_off(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Revoke grants that need the agent's gathered runs; direct reads of its pages continue."""
        agent.gone, agent.gone_s = True, now_s
        rank = agent.key.rank
        actions: list[Action] = []
        for handoff in self._ledger.live_of(engine):
            if handoff.source is engine and handoff.gathers_on(rank):
                actions += self._ledger.give_back(handoff, _lost(engine, rank), now_s)
        return actions

    def remove(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Remove an agent that is gone for good."""
        agent.gone = True
        engine.account.let_go(agent.kept_bytes)
        engine.agents.pop(agent.key.rank, None)
        engine.complete = False
        engine.away.pop(agent.key.rank, None)
        return self._lose(engine, agent, now_s)

    def look_for_lost(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Give up agents that have not returned in time."""
        limits = self._ledger.limits
        actions: list[Action] = []
        for agent in list(engine.away.values()):
            away_s = now_s - agent.gone_s
            if away_s >= limits.agent_wait_s:
                actions += self.remove(engine, agent, now_s)
            elif away_s >= limits.agent_back_s and not engine.has_session:
                actions += self._give_up_reads(engine, agent.key.rank, now_s)
        return actions

    def _give_up_reads(self, engine: EngineRecord, rank: int, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for handoff in self._ledger.live_of(engine):
            if handoff.destination is engine and rank in handoff.unsettled:
                actions += self._ledger.stop(handoff, _lost(engine, rank), now_s)
        return actions

    def _lose(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        del self.names[agent.tenant, agent.agent_name]
        engine.unpublished_fences.forget_rank(agent.key.rank)
        actions: list[Action] = []
        for reader in self.names.values():
            if agent.agent_name in reader.peers and reader.tenant == agent.tenant:
                reader.peers.discard(agent.agent_name)
                if not reader.gone:  # an agent that is away starts afresh when it returns
                    actions.append(SendForget(reader.key, agent.agent_name))
        rank = agent.key.rank
        for handoff in self._ledger.live_of(engine):
            published = handoff.source is engine and (
                handoff.publication.final or handoff.side.begun
            )
            # A rank's memory is lost, and what it had read with it, whether or not it has settled.
            if published or (handoff.destination is engine and handoff.begun):
                if handoff.source is engine:
                    handoff.side.unfence(rank)
                actions += self._ledger.stop(handoff, _lost(engine, rank), now_s)
        return actions


def _lost(engine: EngineRecord, rank: int) -> Failure:
    words = f"the agent of engine {engine.key.engine_id}, rank {rank} is gone"
    return Failure(State.FAILED, "AGENT_LOST", words)
