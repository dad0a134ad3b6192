"""Connections: agents come, break off, come back and are lost, and what that does to handoffs."""

from __future__ import annotations

from collections.abc import Callable

from restow.broker.core.common.actions import Action, CloseAgent, SendForget
from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import State
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord, Heard
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.ledger.table import MAX_ID_LENGTH
from restow.broker.errors import AgentMismatchError, AgentReplacedError

MAX_FORMER_AGENTS = 64
"""Names of an engine's replaced agents that are known."""


class Connections:
    """The agents of all engines, connected or away. Their names are unique in a tenant."""

    def __init__(self, ledger: Ledger) -> None:
        """Nobody is connected."""
        self.names: dict[tuple[str, str], AgentRecord] = {}
        """By tenant and name."""
        self._ledger = ledger

    def admit(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Take an agent in, in place of an older one of its rank.

        Raises `AgentUnknownError`, `AgentMismatchError`, `EngineReplacedError`,
        `AgentReplacedError` for one that another agent has replaced, and `QuotaExceededError` or
        `DirectoryFullError` for its bytes.
        """
        engine.check_there()
        rank = agent.key.rank
        old, before = engine.agents.get(rank) or engine.away.get(rank), engine.heard.get(rank)
        self._check(engine, agent, old)
        more_bytes = agent.kept_bytes - (old.kept_bytes if old is not None else 0)
        engine.account.check(more_bytes)
        # A Hello that is refused must not cost the rank the agent that it has.
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
                why = f"the agent of engine {engine.key.engine_id}, rank {rank} connected anew"
                error = AgentReplacedError(why, engine=engine.key.engine_id, rank=rank)
                actions.append(CloseAgent(old.key, error))
        if before is not None and not is_back:
            actions += self._replace(engine, agent, before, now_s)
        self.names[agent.tenant, agent.agent_name] = agent
        engine.last_seen_s = now_s
        return actions + self._heard(engine, rank, now_s)

    def _check(self, engine: EngineRecord, agent: AgentRecord, old: AgentRecord | None) -> None:
        """Raise `AgentMismatchError` or `AgentReplacedError` for what no agent may announce."""
        engine_id, rank = engine.key.engine_id, agent.key.rank
        in_use = self.names.get((agent.tenant, agent.agent_name)) not in (None, old)
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
        if wrong:
            words = f"engine {engine_id}, rank {rank}: {wrong}"
            raise AgentMismatchError(words, engine=engine_id, rank=rank)
        if agent.agent_name in engine.former_agents:
            words = (
                f"agent {agent.agent_name} of engine {engine_id}, rank {rank} was replaced by an "
                f"agent of another process: end this process, or give the engine's new life an "
                f"incarnation of its own"
            )
            raise AgentReplacedError(words, engine=engine_id, rank=rank)

    def _replace(
        self, engine: EngineRecord, agent: AgentRecord, before: Heard, now_s: float
    ) -> list[Action]:
        """End what the engine said before an agent of another process came for a rank.

        The process that speaks for the engine may be another one, too. It is not where the word
        came after the old agent had gone, on the session that is open now.
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
        """End what an earlier session said before an agent was replaced.

        That session was believed to be of the process that lives.
        """
        return self._end_words(engine, lambda said_s: said_s > engine.replaced_s, now_s)

    def _end_words(
        self, engine: EngineRecord, holds: Callable[[float], bool], now_s: float
    ) -> list[Action]:
        """End the engine's open handoffs whose word does not hold; a refused D leaves P's state."""
        words = (
            f"an agent of engine {engine.key.engine_id} has come as another process: what the "
            f"engine had said before is void"
        )
        failure = Failure(State.FAILED, "AGENT_LOST", words)
        actions: list[Action] = []
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number.get(number)
            if handoff is None:  # it has ended with its publication
                continue
            if handoff.source is engine and not holds(handoff.side.said_s):
                actions += self._ledger.stop(handoff.parent or handoff, failure, now_s)
            elif handoff.destination is engine and not holds(handoff.asked_s):
                end = self._ledger.stop if handoff.begun else self._ledger.dismiss
                actions += end(handoff, failure, now_s)
        return actions

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
        engine.heard[agent.key.rank].gone_s = now_s
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
            # What a rank has read is gone with its memory, whether or not it has settled.
            if published or (handoff.destination is engine and handoff.begun):
                if handoff.source is engine:
                    handoff.side.unfence(rank)
                actions += self._ledger.stop(handoff, _lost(engine, rank), now_s)
        return actions


def _lost(engine: EngineRecord, rank: int) -> Failure:
    words = f"the agent of engine {engine.key.engine_id}, rank {rank} is gone"
    return Failure(State.FAILED, "AGENT_LOST", words)
