"""The hub: carries messages between streams and the directory."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from restow.broker.core.common import actions as act
from restow.broker.core.common.keys import AgentKey, EngineKey, PairKey, State
from restow.broker.core.common.limits import Limits
from restow.broker.core.common.pair import Digests, PairOutcome, PairRefused
from restow.broker.core.engine_events import Directory
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.statistics import Durations
from restow.broker.errors import PlanError, RestowError
from restow.broker.logs import get_logger
from restow.broker.planner import CostModel, Strategy
from restow.broker.rpc.status import cut
from restow.broker.server.base.logging import (
    BoundedLog,
    tell_agent,
    tell_command,
    tell_engine,
    tell_failures,
)
from restow.broker.server.base.outbox import (
    TELL,
    WRITE,
    AgentOutbox,
    EngineOutbox,
    fill_ended,
    write_peer,
    write_probe,
)
from restow.broker.server.base.planning import Planner, plan_pair
from restow.broker.server.base.standing import Standing
from restow.broker.server.base.waiting_calls import Expected, WaitingCalls
from restow.broker.server.base.watching import Watchers
from restow.broker.words import member

TICK_S = 0.02
P_HEARS_AFTER_S = 0.005
"""Delay of telling P that a state was read; D's stream is written to first."""


class Hub:
    """Owns the directory, the clock and the outboxes of all streams.

    ``now_s`` is the injected clock, in seconds that never run backwards.
    """

    def __init__(
        self,
        limits: Limits,
        strategy: Strategy,
        max_queue: int,
        now_s: Callable[[], float] = time.monotonic,
        allow_narrowing: bool = False,
        costs: CostModel | None = None,
        digests: Digests | None = None,
    ) -> None:
        """Begin with an empty directory and a new epoch; without ``costs`` they are measured."""
        # Agents may still report numbers of an earlier process, which must not match numbers of
        # this process.
        first_us = secrets.randbits(49)
        self.strategy = member(Strategy, strategy, "strategy")
        measures = self.strategy is Strategy.AUTO and costs is None
        self.directory = Directory(limits, first_us, measures, digests, secrets.token_bytes(32))
        self.directory.ledger.fresh_failures = []
        self.costs = costs or CostModel()
        self.measures = measures
        self.allow_narrowing = allow_narrowing
        self.epoch = secrets.token_hex(8)
        self.now_s = now_s
        self.started_s = now_s()
        self.max_queue = max_queue
        self.said = BoundedLog(now_s)
        """Log of events that peers cause."""
        self.standing = Standing()
        self.engines: dict[EngineKey, EngineOutbox] = {}
        self.agents: dict[AgentKey, AgentOutbox] = {}
        self.waiting = WaitingCalls()
        self.watchers = Watchers(self.directory.prefixes, self.perform)
        self._ends_for_p: list[act.TellEnded] = []
        self._examined: dict[int, asyncio.Future[act.TellExamined]] = {}
        self.commanded: dict[tuple[str, str], asyncio.Event] = {}
        """Set when the command ends, for calls that wait, by tenant and command id."""
        self.expected = Expected(self.directory.members, self.said)
        self.planner = Planner()
        self.planning = Durations()
        """Durations of planning, with the wait for a turn."""
        self.loop_lag = Durations()
        """Delays of the clock's ticks."""
        self._drained = asyncio.Event()
        self._watcher: Callable[[Handoff], None] | None = None
        self._tasks: set[asyncio.Task[PairOutcome]] = set()
        self._log = get_logger("restow.broker")
        self._do: dict[type, Callable[[Any], None]] = {
            act.SendPeer: self._send_peer,
            act.SendProbe: self._send_probe,
            act.TellEnded: self._tell_ended,
            act.TellSampled: self._tell,
            act.TellHoldings: self._tell,
            act.TellDrain: self._tell,
            act.TellForget: self._tell,
            act.SendOffer: self._send_offer,
            act.SendKeep: self._send_keep,
            act.TellExamined: self._tell_examined,
            act.SendCommand: self._tell,
            act.TellCommand: self._tell_command,
            act.MakePlan: self._make_plan,
            act.CloseSession: self._close_session,
            act.CloseAgent: self._close_agent,
        }

    def perform(self, actions: list[act.Action]) -> None:
        """Carry out the actions that the directory wants."""
        action: Any
        for action in actions:
            kind = type(action)
            write = WRITE.get(kind)
            if write is None:
                self._do[kind](action)
            elif (outbox := self.agents.get(action.agent)) is not None:
                write(outbox, action)
        ledger = self.directory.ledger
        if ledger.fresh_failures:
            tell_failures(self.said, ledger.fresh_failures)
            ledger.fresh_failures = []
        if self._watcher is not None:
            ends, ledger.fresh_ends = ledger.fresh_ends, []
            for handoff in ends or ():
                self._watcher(handoff)
        if self.directory.granting.draining and not self.directory.granted:
            self._drained.set()

    def all_said(self) -> bool:
        """Return whether no message to an engine or agent of a pool is waiting."""
        if self._ends_for_p:
            return False
        engines, agents = self.engines.values(), self.agents.values()
        return not any(outbox.waiting for outbox in engines) and not any(
            outbox.waiting for outbox in agents
        )

    def refuse(self, engine: EngineRecord, handoff_id: str, error: RestowError) -> None:
        """Count a refused message of an engine, and note it in the handoff's timeline."""
        ledger = self.directory.ledger
        ledger.statistics.refuse(error.reason)
        known = ledger.known(engine.key.tenant, handoff_id)
        if known is not None and engine is not known.source:
            known = ledger.part_of(known, engine)
        if known is None:
            return
        # Only engines with a part in the handoff may write into it; a refused D would have had a
        # part.
        sides = (known.source, known.destination)
        if engine in sides or (known.destination is None and not known.ended):
            name, words = engine.key.engine_id, cut(error.message)
            known.timeline.note_refused(self.now_s(), name, error.reason, words)

    def watch_ends(self, watcher: Callable[[Handoff], None] | None) -> None:
        """Call ``watcher`` on the loop with each handoff that ends; None stops that."""
        self._watcher = watcher
        self.directory.ledger.fresh_ends = None if watcher is None else []

    async def drain(self) -> None:
        """Stop granting, and wait for the reads under way."""
        self._drained.clear()
        self._log.info("draining", handoffs=self.directory.granted)
        self.perform(self.directory.granting.drain(True, self.now_s()))
        await self._drained.wait()

    def close(self) -> None:
        """End every stream, and all planning."""
        self._tell_p()
        self.planner.close()
        self.expected.close()
        for engine_outbox in self.engines.values():
            engine_outbox.close()
        for agent_outbox in self.agents.values():
            agent_outbox.close()
        self.waiting.close()
        self.watchers.closed = True
        for examined in self._examined.values():
            examined.cancel()

    async def run_clock(self) -> None:
        """Tell the directory the time, for the life of the broker."""
        while True:
            due_s = self.now_s() + TICK_S
            await asyncio.sleep(TICK_S)
            now_s = self.now_s()
            self.loop_lag.add(max(now_s - due_s, 0.0))
            self.said.tick(now_s)
            if self.standing.is_sure():
                self.perform(self.directory.tick(now_s))

    async def examine(self, source: EngineKey, destination: EngineKey) -> act.TellExamined:
        """Let D's agent read from P's once, and return how it read.

        Raises `EngineUnknownError`, and as `Examining.begin`.
        """
        members, examining = self.directory.members, self.directory.examining
        sides = members.find(source), members.find(destination)
        number, actions = examining.begin(*sides, self.now_s())
        future: asyncio.Future[act.TellExamined] = asyncio.get_running_loop().create_future()
        self._examined[number] = future
        try:
            self.perform(actions)
            return await future
        finally:
            del self._examined[number]

    def _tell_examined(self, action: act.TellExamined) -> None:
        future = self._examined.get(action.number)
        if future is not None and not future.done():
            future.set_result(action)

    def forget_commands(self) -> None:
        """Forget all commands, because another broker leads; calls that wait look again."""
        self.directory.commands.clear()
        for waited in self.commanded.values():
            waited.set()
        self.commanded.clear()

    def _tell_command(self, action: act.TellCommand) -> None:
        tell_command(self.said, action)
        key = action.command.engine.tenant, action.command.command_id
        if (waited := self.commanded.pop(key, None)) is not None:
            waited.set()

    def _tell_ended(self, action: act.TellEnded) -> None:
        if action.state is State.DONE and action.demand is None:
            # D hears first: if the broker dies in between, P only keeps its pages longer. In the
            # other order D could ask for a state that is gone.
            if not self._ends_for_p:
                asyncio.get_running_loop().call_later(P_HEARS_AFTER_S, self._tell_p)
            self._ends_for_p.append(action)
            return
        if action.demand:
            self.waiting.tell(action)
        if action.demand is None or action.demand >= 0:
            self._write_ended(action)

    def _tell_p(self) -> None:
        """Tell the P's what their D's have been told by now."""
        actions, self._ends_for_p = self._ends_for_p, []
        for action in actions:
            self._write_ended(action)

    def _write_ended(self, action: act.TellEnded) -> None:
        outbox = self.engines.get(action.engine)
        if outbox is not None:
            fill_ended(outbox.open().events.add().ended, action)

    def _send_offer(self, action: act.SendOffer) -> None:
        """Send an offer if the stream has room, so that others' requests cannot end the stream."""
        outbox = self.engines.get(action.engine)
        if outbox is None or outbox.has_room(action.prefix.size_bytes):
            return self._tell(action)
        offering, engine = self.directory.offering, self.directory.members.engines[action.engine]
        words = "the engine's stream has no room for the offer"
        self.perform(offering.decline(engine, action.handoff_id, words, self.now_s()))

    def _send_keep(self, action: act.SendKeep) -> None:
        outbox = self.engines.get(action.engine)
        if outbox is not None and outbox.has_room(action.prefix.size_bytes):
            self._tell(action)

    def _tell(self, action: Any) -> None:
        if (outbox := self.engines.get(action.engine)) is not None:
            TELL[type(action)](outbox, action)

    def _send_peer(self, action: act.SendPeer) -> None:
        engine = self.directory.members.engines[action.peer.engine]
        if (outbox := self.agents.get(action.agent)) is not None:
            write_peer(outbox, engine.memory_of(action.peer.rank))

    def _send_probe(self, action: act.SendProbe) -> None:
        peer = None
        if action.peer is not None:
            peer = self.directory.members.engines[action.peer.engine].agents[action.peer.rank]
        if (outbox := self.agents.get(action.agent)) is not None:
            write_probe(outbox, action, peer)

    def _close_session(self, action: act.CloseSession) -> None:
        outbox = self.engines.pop(action.engine, None)
        tell_engine(self.said, "engine gone", action.engine, why=action.error.message)
        if outbox is not None:
            outbox.close(action.error)
        self.waiting.fail(action.engine, action.error)

    def _close_agent(self, action: act.CloseAgent) -> None:
        outbox = self.agents.pop(action.agent, None)
        if outbox is not None:
            tell_agent(self.said, "agent gone", action.agent, why=action.error.message)
            outbox.close(action.error)

    def _make_plan(self, action: act.MakePlan) -> None:
        task = asyncio.create_task(self._plan(action))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._planned(action.pair, done))

    async def _plan(self, action: act.MakePlan) -> PairOutcome:
        started_s = self.now_s()
        try:
            outcome = await self.planner.plan(
                action.pair.tenant,
                plan_pair,
                action.source,
                action.destination,
                self.strategy,
                self.allow_narrowing,
                action.costs or self.costs,
                ahead=action.ahead,
            )
        finally:
            await self.standing.sure()
        took_s = self.now_s() - started_s
        self.planning.add(took_s)
        self.said.info(
            "planned",
            source=action.pair.source_digest[:12],
            destination=action.pair.destination_digest[:12],
            milliseconds=round(took_s * 1000, 1),
            measured=action.costs is not None,
            ahead=action.ahead,
            refused=outcome.error.reason if isinstance(outcome, PairRefused) else None,
        )
        return outcome

    def _planned(self, pair: PairKey, task: asyncio.Task[PairOutcome]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            outcome = task.result()
        else:
            # A fault of the planner fails the handoffs of this pair only.
            self._log.error("planning failed", pair=pair, exc_info=error)
            outcome = PairRefused(PlanError(f"the planner failed: {error!r}"))
        self.perform(self.directory.granting.plan_made(pair, outcome, self.now_s()))
