"""Membership: engines and agents come and go, and what that does to their handoffs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from restow.broker.core.actions import (
    Action,
    CloseAgent,
    CloseSession,
    EngineKey,
    SendForget,
    SendUnfence,
    State,
)
from restow.broker.core.engines.agent import AgentRecord, RegionMemory
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Failure
from restow.broker.core.handoffs.ledger import MAX_ID_LENGTH, Ledger
from restow.broker.core.limits import Limits
from restow.broker.errors import (
    AgentMismatchError,
    AgentReplacedError,
    DirectoryFullError,
    EngineReplacedError,
    EngineUnknownError,
    RequestError,
    RestowError,
)
from restow.broker.layout import Layout
from restow.broker.layout.values import ModelIdentity

MAX_FORMER = 64
"""Earlier incarnations of an engine that are known to have been replaced."""
SWEEP_S = 1.0


def check_names(key: EngineKey, incarnation: str) -> None:
    """Raise `RequestError` for what no engine can register as."""
    longest = max(map(len, (*key, incarnation)))
    if not key.engine_id or not incarnation or longest > MAX_ID_LENGTH:
        raise RequestError(
            f"engine_id and incarnation must have 1 to {MAX_ID_LENGTH} characters",
            field="engine",
        )


class Membership:
    """The engines, each with its agents. Names of agents are unique in a tenant."""

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        """Start empty."""
        self.engines: dict[EngineKey, EngineRecord] = {}
        self.names: dict[tuple[str, str], AgentRecord] = {}
        """By tenant and name."""
        self._ledger = ledger
        self._limits = limits
        self._sweep_at_s = 0.0

    def engine(self, key: EngineKey, incarnation: str) -> EngineRecord:
        """Look an engine up.

        Raises `EngineReplacedError` for a life that ended here, and `EngineUnknownError` for any
        other that is not there: the agents of a new life may come before its engine registers.
        """
        record = self.engines.get(key)
        if record is None:
            raise EngineUnknownError(
                f"engine {key.engine_id} is not registered: call RegisterEngine first",
                engine=key.engine_id,
            )
        if record.incarnation == incarnation:
            return record
        words = (
            f"engine {key.engine_id} is registered as incarnation {record.incarnation}, "
            f"this is {incarnation}"
        )
        if incarnation in record.former:
            raise EngineReplacedError(words, engine=key.engine_id)
        raise EngineUnknownError(f"{words}: call RegisterEngine first", engine=key.engine_id)

    def find(self, key: EngineKey) -> EngineRecord:
        """The engine as it is now, in whatever life. Raises `EngineUnknownError`."""
        engine = self.engines.get(key)
        if engine is None:
            raise EngineUnknownError(
                f"no engine {key.engine_id} is registered: `restow engines` shows those that are",
                engine=key.engine_id,
            )
        return engine

    def register(
        self, key: EngineKey, incarnation: str, layout: Layout, layout_digest: str, now_s: float
    ) -> list[Action]:
        """Take an engine with a checked layout in; another incarnation of it is replaced.

        Raises `RequestError`, `QuotaExceededError`, `DirectoryFullError`, and `EngineReplacedError`
        for a life that was replaced already; then nothing changed.
        """
        check_names(key, incarnation)
        known = self.engines.get(key)
        if known is not None and known.incarnation == incarnation:
            if known.layout_digest != layout_digest:
                raise RequestError(
                    f"engine {key.engine_id} registered another layout in this incarnation: "
                    f"use a new incarnation",
                    engine=key.engine_id,
                )
            known.last_seen_s = now_s
            return []
        if known is not None and incarnation in known.former:
            raise EngineReplacedError(
                f"engine {key.engine_id}, incarnation {incarnation} was replaced by incarnation "
                f"{known.incarnation}: every start needs an incarnation of its own",
                engine=key.engine_id,
            )
        actions: list[Action] = []
        if known is not None:
            why = f"engine {key.engine_id} registered anew as incarnation {incarnation}"
            actions = self.remove_engine(
                known, EngineReplacedError(why, engine=key.engine_id), now_s
            )
        else:
            self._ledger.tenants.check_engine(key.tenant)
            if len(self.engines) >= self._limits.max_engines:
                raise DirectoryFullError(
                    f"the broker holds {len(self.engines)} engines, as many as it may"
                )
        engine = EngineRecord.of(key, incarnation, layout, layout_digest, now_s)
        if known is not None:
            engine.former = (known.incarnation, *known.former)[:MAX_FORMER]
        self.engines[key] = engine
        self._ledger.tenants.add_engines(key.tenant, 1)
        return actions

    def unregister(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Take an engine out that wishes to leave."""
        name = engine.key.engine_id
        error = EngineUnknownError(f"engine {name} unregistered", engine=name)
        return self.remove_engine(engine, error, now_s)

    def remove_engine(self, engine: EngineRecord, error: RestowError, now_s: float) -> list[Action]:
        """Take an engine out: nothing of its handoffs can go on, and its streams end with it."""
        if engine.gone:
            return []
        engine.gone = True
        del self.engines[engine.key]
        self._ledger.quarantine.forget(engine)
        self._ledger.flow.forget(engine.key)
        actions: list[Action] = []
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number[number]
            state = State.FAILED if handoff.source is engine else State.CANCELLED
            failure = Failure(state, "ENGINE_LOST", error.message)
            actions += self._ledger.stop(handoff, failure, now_s)
        for agent in [*engine.agents.values(), *engine.away.values()]:
            actions += self.remove_agent(engine, agent, now_s)
            actions.append(CloseAgent(agent.key, error))
        actions.append(CloseSession(engine.key, error))
        self._ledger.tenants.add_engines(engine.key.tenant, -1)
        return actions

    def admit(
        self,
        engine: EngineRecord,
        rank: int,
        agent_name: str,
        nixl_metadata: bytes,
        regions: Sequence[RegionMemory],
        staging_bytes: int,
        now_s: float,
        host: str = "",
        host_memory: bytes = b"",
    ) -> tuple[AgentRecord, list[Action]]:
        """Take an agent in, in place of an older one of its rank.

        Raises `AgentUnknownError`, `AgentMismatchError` or `EngineReplacedError`.
        """
        if engine.gone:
            raise engine.departed()
        engine.rank_layout(rank)
        name = (engine.key.tenant, agent_name)
        old = engine.agents.get(rank) or engine.away.get(rank)
        namesake = self.names.get(name)
        if not 0 < len(agent_name) <= MAX_ID_LENGTH or (
            namesake is not None and namesake is not old
        ):
            raise AgentMismatchError(
                f"engine {engine.key.engine_id}, rank {rank}: agent_name {agent_name[:64]!r} is "
                f"empty, too long or in use: take a new one",
                engine=engine.key.engine_id,
                rank=rank,
            )
        if len(host) > MAX_ID_LENGTH:
            raise AgentMismatchError(
                f"engine {engine.key.engine_id}, rank {rank}: host has more than {MAX_ID_LENGTH} "
                f"characters",
                engine=engine.key.engine_id,
                rank=rank,
            )
        # A Hello that is refused must not cost the rank the agent that it has.
        agent = engine.admit(
            rank, agent_name, nixl_metadata, regions, staging_bytes, host, host_memory
        )
        actions: list[Action] = []
        if old is not None:
            connected = not old.gone
            if connected:
                actions += self._break_off(engine, old, now_s)
            engine.away.pop(rank, None)
            if not old.is_back_as(agent):
                actions += self._lose(engine, old, now_s)
            if connected:
                engine_id = engine.key.engine_id
                why = f"the agent of engine {engine_id}, rank {rank} connected anew"
                error = AgentReplacedError(why, engine=engine_id, rank=rank)
                actions.append(CloseAgent(old.key, error))
        self.names[name] = agent
        engine.last_seen_s = now_s
        return agent, actions + self._heard(engine, rank, now_s)

    def _heard(self, engine: EngineRecord, rank: int, now_s: float) -> list[Action]:
        """An agent says Hello when nothing of an earlier stream reads any more."""
        actions: list[Action] = []
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number[number]
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
            handoff = self._ledger.by_number[number]
            if handoff.source is engine and handoff.gathers_on(rank):
                actions += self._ledger.give_back(handoff, _lost(engine, rank), now_s)
        return actions

    def remove_agent(self, engine: EngineRecord, agent: AgentRecord, now_s: float) -> list[Action]:
        """Take an agent out that is gone for good."""
        agent.gone = True
        engine.agents.pop(agent.key.rank, None)
        engine.away.pop(agent.key.rank, None)
        return self._lose(engine, agent, now_s)

    def look_for_lost(self, now_s: float) -> list[Action]:
        """Give those up that have not come back in time."""
        actions: list[Action] = []
        for engine in list(self.engines.values()):
            for agent in list(engine.away.values()):
                away_s = now_s - agent.gone_s
                if away_s >= self._limits.agent_wait_s:
                    actions += self.remove_agent(engine, agent, now_s)
                elif away_s >= self._limits.agent_back_s and not engine.has_session:
                    actions += self._give_up_reads(engine, agent.key.rank, now_s)
        return actions

    def _give_up_reads(self, engine: EngineRecord, rank: int, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for number in sorted(engine.handoffs):
            handoff = self._ledger.by_number[number]
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
            handoff = self._ledger.by_number[number]
            published = handoff.source is engine and (handoff.publication.final or handoff.fenced)
            if published or rank in handoff.unsettled:
                if handoff.source is engine:
                    handoff.fenced.discard(rank)
                actions += self._ledger.stop(handoff, _lost(engine, rank), now_s)
        return actions

    def session_opened(self, engine: EngineRecord) -> None:
        """An engine speaks."""
        engine.has_session = True

    def session_closed(self, engine: EngineRecord, now_s: float) -> None:
        """An engine's stream broke; its leases and its patience run on."""
        engine.has_session = False
        engine.last_seen_s = now_s

    def sweep(self, now_s: float) -> list[Action]:
        """Forget what nobody needs, now and then: early fences, lone handoffs, silent engines."""
        if now_s < self._sweep_at_s:
            return []
        self._sweep_at_s = now_s + SWEEP_S
        actions = self.look_for_lost(now_s)
        self._look_for_lone(now_s)
        for engine in list(self.engines.values()):
            for handoff_id, ranks in engine.early_fences.expired(now_s):
                actions += [
                    SendUnfence(engine.agents[rank].key, handoff_id)
                    for rank in sorted(ranks & engine.agents.keys())
                ]
            silent_s = now_s - engine.last_seen_s
            if silent_s > self._limits.engine_idle_s and not (
                engine.has_session or engine.agents or engine.away or engine.handoffs
            ):
                name = engine.key.engine_id
                error = EngineUnknownError(f"engine {name} fell silent", engine=name)
                actions += self.remove_engine(engine, error, now_s)
        return actions

    def _look_for_lone(self, now_s: float) -> None:
        """Handoffs of engines that no other engine of their model is there to ask are kept less."""
        asking: Counter[tuple[str, ModelIdentity]] = Counter()
        for engine in self.engines.values():
            asking[engine.key.tenant, engine.layout.model.identity] += engine.may_ask
        for engine in self.engines.values():
            others = asking[engine.key.tenant, engine.layout.model.identity] - engine.may_ask
            for number in () if others else engine.handoffs:
                self._ledger.wait_for_demand(self._ledger.by_number[number], now_s)


def _lost(engine: EngineRecord, rank: int) -> Failure:
    words = f"the agent of engine {engine.key.engine_id}, rank {rank} is gone"
    return Failure(State.FAILED, "AGENT_LOST", words)
