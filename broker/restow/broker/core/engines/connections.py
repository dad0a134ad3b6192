"""Connections: agents come, break off, come back and are lost, and what that does to handoffs."""

from __future__ import annotations

from restow.broker.core.actions import Action, CloseAgent, SendForget, State
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Failure
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.ledger.table import MAX_ID_LENGTH
from restow.broker.errors import AgentMismatchError, AgentReplacedError


class Connections:
    """The agents of all engines, connected or away. Their names are unique in a tenant."""

    def __init__(self, ledger: Ledger) -> None:
        """Nobody is connected."""
        self.names: dict[tuple[str, str], AgentRecord] = {}
        """By tenant and name."""
        self._ledger = ledger

    def admit(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Take an agent in, in place of an older one of its rank.

        Raises `AgentUnknownError`, `AgentMismatchError`, `EngineReplacedError`, and
        `QuotaExceededError` or `DirectoryFullError` for its bytes.
        """
        engine.check_there()
        rank, name = agent.key.rank, (agent.tenant, agent.agent_name)
        old = engine.agents.get(rank) or engine.away.get(rank)
        in_use = self.names.get(name) not in (None, old)
        wrong = ""
        if in_use or not 0 < len(agent.agent_name) <= MAX_ID_LENGTH:
            shown = repr(agent.agent_name[:64])
            wrong = f"agent_name {shown} is empty, too long or in use: take a new one"
        elif not agent.agent_name.isprintable():
            wrong = f"agent_name {agent.agent_name!r} is not printable"
        elif len(agent.host) > MAX_ID_LENGTH or not agent.host.isprintable():
            wrong = f"host {agent.host[:64]!r} is not printable, or longer than {MAX_ID_LENGTH}"
        elif agent.staging_bytes < 0:
            wrong = f"staging_bytes is {agent.staging_bytes}"
        engine_id = engine.key.engine_id
        if wrong:
            words = f"engine {engine_id}, rank {rank}: {wrong}"
            raise AgentMismatchError(words, engine=engine_id, rank=rank)
        more_bytes = agent.kept_bytes - (old.kept_bytes if old is not None else 0)
        engine.account.check(more_bytes)
        # A Hello that is refused must not cost the rank the agent that it has.
        engine.admit(agent)
        engine.account.keep(more_bytes)
        actions: list[Action] = []
        if old is not None:
            connected = not old.gone
            if connected:
                actions += self._break_off(engine, old, now_s)
            engine.away.pop(rank, None)
            if not old.is_back_as(agent):
                actions += self._lose(engine, old, now_s)
            if connected:
                why = f"the agent of engine {engine_id}, rank {rank} connected anew"
                error = AgentReplacedError(why, engine=engine_id, rank=rank)
                actions.append(CloseAgent(old.key, error))
        self.names[name] = agent
        engine.last_seen_s = now_s
        return actions + self._heard(engine, rank, now_s)

    def _heard(self, engine: EngineRecord, rank: int, now_s: float) -> list[Action]:
        """An agent says Hello when nothing of an earlier stream reads any more."""
        actions: list[Action] = []
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number.get(number)
            if handoff is None:  # it has ended with its publication
                continue
            if handoff.destination is not engine:
                continue
            handoff.unheard.discard(rank)
            # Whether it has read what it was told to was lost with that stream.
            if rank in handoff.unsettled:
                handoff.unsettled.discard(rank)
                actions += self._ledger.give_back(handoff, _lost(engine, rank), now_s)
        return actions + self._ledger.quarantine.heard(engine, rank, now_s)

    def break_off(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """An agent's stream broke: it may come back, with its memory as it was."""
        if agent.gone:
            return []
        del engine.agents[agent.key.rank]
        engine.away[agent.key.rank] = agent
        engine.last_seen_s = now_s
        return self._break_off(engine, agent, now_s)

    def _break_off(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """What it gathered it drops; what is read straight from its pages goes on."""
        agent.gone, agent.gone_s = True, now_s
        rank = agent.key.rank
        actions: list[Action] = []
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number.get(number)
            if handoff is None:  # it has ended with its publication
                continue
            if handoff.source is engine and handoff.gathers_on(rank):
                actions += self._ledger.give_back(handoff, _lost(engine, rank), now_s)
        return actions

    def remove(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Take an agent out that is gone for good."""
        agent.gone = True
        engine.account.let_go(agent.kept_bytes)
        engine.agents.pop(agent.key.rank, None)
        engine.away.pop(agent.key.rank, None)
        return self._lose(engine, agent, now_s)

    def look_for_lost(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Give those up that have not come back in time."""
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
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number.get(number)
            if handoff is None:  # it has ended with its publication
                continue
            if handoff.destination is engine and rank in handoff.unsettled:
                actions += self._ledger.stop(handoff, _lost(engine, rank), now_s)
        return actions

    def _lose(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        del self.names[agent.tenant, agent.agent_name]
        engine.early_fences.forget_rank(agent.key.rank)
        actions: list[Action] = []
        for reader in self.names.values():
            if agent.agent_name in reader.peers and reader.tenant == agent.tenant:
                reader.peers.discard(agent.agent_name)
                if not reader.gone:  # one that is away begins anew when it is back
                    actions.append(SendForget(reader.key, agent.agent_name))
        rank = agent.key.rank
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number.get(number)
            if handoff is None:  # it has ended with its publication
                continue
            published = handoff.source is engine and (
                handoff.publication.final or handoff.side.begun
            )
            if published or rank in handoff.unsettled:
                if handoff.source is engine:
                    handoff.side.unfence(rank)
                actions += self._ledger.stop(handoff, _lost(engine, rank), now_s)
        return actions


def _lost(engine: EngineRecord, rank: int) -> Failure:
    words = f"the agent of engine {engine.key.engine_id}, rank {rank} is gone"
    return Failure(State.FAILED, "AGENT_LOST", words)
