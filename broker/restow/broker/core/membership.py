"""Membership: how engines register, drain and leave, and what that does to their handoffs."""

from __future__ import annotations

from collections import Counter
from math import inf

from restow.broker.core.common.actions import (
    Action,
    CloseAgent,
    CloseSession,
    SendUnfence,
    TellDrain,
)
from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.connections import Connections
from restow.broker.core.engines.account import ENGINE_BYTES
from restow.broker.core.engines.engine import EngineRecord, pool_of
from restow.broker.core.ledger.handoff_table import MAX_ID_LENGTH
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.prefix.prefixes import Prefixes
from restow.broker.errors import (
    DirectoryFullError,
    EngineConnectedError,
    EngineReplacedError,
    EngineUnknownError,
    RequestError,
    RestowError,
)
from restow.broker.layout import Layout, Model
from restow.broker.layout.values import Pool

MAX_FORMER = 64
"""Earlier incarnations that are remembered as replaced, per engine."""
SWEEP_S = 1.0
NO_LAYOUT = Layout(Model("", ()), ())
"""Replaces the layout of an engine that is gone: ended handoffs still refer to the engine."""


def check_names(key: EngineKey, incarnation: str) -> None:
    """Raise `RequestError` for an invalid tenant, engine id or incarnation."""
    for what, name in (
        ("tenant", key.tenant),
        ("engine_id", key.engine_id),
        ("incarnation", incarnation),
    ):
        if not 0 < len(name) <= MAX_ID_LENGTH or not name.isprintable():
            raise RequestError(
                f"{what} {name[:64]!r} must have 1 to {MAX_ID_LENGTH} printable characters",
                field="engine",
            )


class Membership:
    """The registered engines."""

    def __init__(self, ledger: Ledger, connections: Connections, prefixes: Prefixes) -> None:
        """Start empty."""
        self._prefixes = prefixes
        self.engines: dict[EngineKey, EngineRecord] = {}
        self._ledger = ledger
        self._limits = ledger.limits
        self._connections = connections
        self.pools: dict[Pool, dict[EngineKey, EngineRecord]] = {}
        self._layouts: dict[tuple[str, str], set[EngineKey]] = {}
        """Engines of a tenant by layout digest: a layout is stored once per tenant."""
        self._sweep_at_s = 0.0

    def engine(self, key: EngineKey, incarnation: str) -> EngineRecord:
        """Return a registered engine.

        Raises `EngineReplacedError` for an incarnation that was replaced here, and
        `EngineUnknownError` otherwise: the agents of a new incarnation may connect before its
        engine registers.
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
        """Return an engine in its present incarnation. Raises `EngineUnknownError`."""
        engine = self.engines.get(key)
        if engine is None:
            raise EngineUnknownError(
                f"engine {key.engine_id} is not registered: `restow engines` lists all engines",
                engine=key.engine_id,
            )
        return engine

    def register(
        self,
        key: EngineKey,
        incarnation: str,
        layout: Layout,
        layout_digest: str,
        now_s: float,
        version: str = "",
        layout_bytes: int = 0,
        sides: tuple[bool, bool] = (False, False),
        keeps: bool = False,
        revision: str = "",
    ) -> list[Action]:
        """Register an engine with a checked layout, in place of its earlier incarnation.

        ``layout_bytes`` is the size of the layout, which is charged once per tenant. ``sides`` says
        whether the engine will publish and whether it will ask, ``keeps`` whether it is a store.
        ``revision`` replaces that of the layout at a first registration; later changes go through
        `Directory.revise`.

        Raises `RequestError`, `QuotaExceededError`, `DirectoryFullError`, and `EngineReplacedError`
        for an incarnation that was replaced; in any case nothing changes.
        """
        check_names(key, incarnation)
        known = self.engines.get(key)
        if known is not None and known.incarnation == incarnation:
            if known.layout_digest != layout_digest:
                raise RequestError(
                    f"engine {key.engine_id} has another layout registered for this incarnation: "
                    f"use a new incarnation",
                    engine=key.engine_id,
                )
            known.last_seen_s = now_s
            return []
        if known is not None and incarnation in known.former:
            raise EngineReplacedError(
                f"engine {key.engine_id}, incarnation {incarnation} was replaced by incarnation "
                f"{known.incarnation}: use a new incarnation for every start",
                engine=key.engine_id,
            )
        account = self._ledger.tenants.account(key.tenant)
        sharing = self._layouts.get((key.tenant, layout_digest), set()) - {key}
        if sharing:  # messages of different sizes may describe the same layout
            layout_bytes = self.engines[next(iter(sharing))].layout_bytes
        more_bytes = ENGINE_BYTES + (0 if sharing else layout_bytes)
        freed_bytes = 0 if known is None else self._freed_bytes(known)
        account.check(more_bytes - freed_bytes)
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
                    f"the broker holds its maximum of {len(self.engines)} engines: remove engines "
                    f"or raise the limit"
                )
        engine = EngineRecord.of(
            key, incarnation, layout, layout_digest, now_s, account, layout_bytes
        )
        engine.version = version
        engine.publishes, engine.asks = sides
        engine.keeps = keeps
        engine.revision = engine.revision_said(revision)
        if known is not None:
            engine.former = (known.incarnation, *known.former)[:MAX_FORMER]
        self.engines[key] = engine
        self.pools.setdefault(pool_of(engine), {})[key] = engine
        self._layouts.setdefault((key.tenant, layout_digest), set()).add(key)
        account.keep(more_bytes)
        self._ledger.tenants.add(key.tenant, engines=1)
        return actions

    def _freed_bytes(self, engine: EngineRecord) -> int:
        """Return the bytes that removing an engine frees: a shared layout stays."""
        alone = len(self._layouts[engine.key.tenant, engine.layout_digest]) == 1
        return ENGINE_BYTES + (engine.layout_bytes if alone else 0)

    def unregister(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Remove an engine that unregisters."""
        name = engine.key.engine_id
        error = EngineUnknownError(f"engine {name} unregistered", engine=name)
        return self.remove_engine(engine, error, now_s)

    def forget(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Remove an absent engine at once. Raises `EngineConnectedError` if it is connected."""
        name = engine.key.engine_id
        if engine.has_session or engine.agents:
            raise EngineConnectedError(
                f"engine {name} is connected ({len(engine.agents)} agents, session: "
                f"{'open' if engine.has_session else 'none'}): drain it with `restow drain "
                f"--engine {name}` and end its processes; it is then removed",
                engine=name,
            )
        error = EngineUnknownError(f"an operator removed engine {name}", engine=name)
        return self.remove_engine(engine, error, now_s)

    def hand_on(self, error: RestowError, now_s: float) -> list[Action]:
        """Forget all engines and handoffs, and end all streams with ``error``.

        Another broker leads now. The live handoffs do not end: their engines announce them to it.
        Ended handoffs are forgotten too, because under the other broker their ids may be used anew.
        """
        for handoff in list(self._ledger.live.values()):
            self._ledger.forget(handoff, now_s)
        self._ledger.forget_ended()
        engines = list(self.engines.values())
        return [a for engine in engines for a in self.remove_engine(engine, error, now_s)]

    def drain(
        self, engine: EngineRecord, draining: bool, now_s: float, *, leaves: bool = False
    ) -> list[Action]:
        """Start or stop draining an engine, which then joins no new handoffs.

        An engine with a session is told once, and with holdings it hands them over. With ``leaves``
        the engine itself asked to drain; that lasts as long as its session, while an operator's
        drain outlives the session.
        """
        if engine.draining == draining:
            engine.leaves = engine.leaves and leaves
            return []
        engine.leaves = leaves
        engine.drains_since_s = now_s if draining else 0.0
        engine.handing_over = draining and self._prefixes.teller(engine.key) is not None
        return [TellDrain(engine.key)] if draining and engine.has_session else []

    def remove_engine(self, engine: EngineRecord, error: RestowError, now_s: float) -> list[Action]:
        """Remove an engine: its handoffs end, and its streams close with ``error``."""
        if engine.gone:
            return []
        engine.gone = True
        del self.engines[engine.key]
        pool = self.pools[pool_of(engine)]
        del pool[engine.key]
        if not pool:
            del self.pools[pool_of(engine)]
        self._prefixes.forget(engine.key)
        self._ledger.quarantine.forget(engine)
        self._ledger.flow.forget(engine.key)
        actions: list[Action] = []
        for handoff in self._ledger.live_of(engine):
            state = State.FAILED if handoff.source is engine else State.CANCELLED
            failure = Failure(state, "ENGINE_LOST", error.message)
            actions += self._ledger.stop(handoff, failure, now_s)
        for agent in [*engine.agents.values(), *engine.away.values()]:
            actions += self._connections.remove(engine, agent, now_s)
            actions.append(CloseAgent(agent.key, error))
        actions.append(CloseSession(engine.key, error))
        engine.unpublished_fences.forget()
        engine.account.let_go(self._freed_bytes(engine))
        if engine.in_use is not None:
            engine.account.let_go(engine.in_use.size_bytes)
        sharing = self._layouts[engine.key.tenant, engine.layout_digest]
        sharing.discard(engine.key)
        if not sharing:
            del self._layouts[engine.key.tenant, engine.layout_digest]
        engine.layout = NO_LAYOUT
        self._ledger.tenants.add(engine.key.tenant, engines=-1)
        return actions

    def session_opened(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Open an engine's session, on which it announces its holdings anew."""
        self._prefixes.forget(engine.key)
        if engine.leaves:  # it will say so again, unless this is another process of the incarnation
            engine.leaves, engine.drains_since_s = False, 0.0
        engine.session_over(now_s)
        engine.has_session, engine.session_s = True, now_s
        return self._connections.session_opened(engine, now_s)

    def session_closed(self, engine: EngineRecord, now_s: float) -> None:
        """Record that an engine's session broke; its leases and timeouts keep running."""
        self._prefixes.forget(engine.key)
        engine.has_session = engine.handing_over = False
        engine.session_s = inf
        engine.session_over(now_s)
        engine.last_seen_s = now_s

    def sweep(self, now_s: float) -> list[Action]:
        """Drop expired early fences, lost agents and silent engines, once per `SWEEP_S`."""
        if now_s < self._sweep_at_s:
            return []
        self._sweep_at_s = now_s + SWEEP_S
        actions: list[Action] = []
        self._look_for_lone(now_s)
        for engine in list(self.engines.values()):
            actions += self._connections.look_for_lost(engine, now_s)
            for handoff_id, ranks in engine.unpublished_fences.expired(now_s):
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
        """Limit how long handoffs are kept if their pool has no other engine that could ask."""
        asking: Counter[Pool] = Counter()
        for engine in self.engines.values():
            asking[pool_of(engine)] += engine.may_ask
        for engine in self.engines.values():
            other_askers = asking[pool_of(engine)] - engine.may_ask
            for number in () if other_askers else engine.handoffs:
                self._ledger.wait_for_demand(self._ledger.by_number[number], now_s)
