"""The directory: what each word about a handoff means.

Pure: events and a time go in, actions come out. Single-threaded by construction; the server calls
it from one event loop.
"""

from __future__ import annotations

from collections import OrderedDict

from restow.broker.core.actions import (
    Action,
    EngineKey,
    MakePlan,
    PairKey,
    SendUnfence,
    SendUnstage,
    State,
)
from restow.broker.core.digests import Digests, not_compared, not_hashed
from restow.broker.core.engines import AgentRecord, EngineRecord
from restow.broker.core.events import Chunk, Failure, Probed, Settlement, StagedRun, Wish
from restow.broker.core.examining import Examining
from restow.broker.core.grant import Misfit, execute, misfit, open_grant, unreadable
from restow.broker.core.handoff import Handoff, told
from restow.broker.core.handoff_numbers import Numbers
from restow.broker.core.lease import unpublished_until_s
from restow.broker.core.ledger import Ledger
from restow.broker.core.limits import Limits
from restow.broker.core.membership import Membership
from restow.broker.core.pair import PairOutcome, PairRefused
from restow.broker.core.probing import Probing
from restow.broker.errors import HandoffOwnedError, RestowError

NOT_BEGUN = "READ_NOT_BEGUN"
"""What an agent reports that had no turn for an order inside its grant."""


class Directory:
    """The broker's state. Soft: a restarted broker is told everything again."""

    def __init__(
        self,
        limits: Limits | None = None,
        first_us: int = 1,
        measures: bool = False,
        digests: Digests | None = None,
    ) -> None:
        """Start empty. ``first_us`` keeps numbers apart from those of another life.

        With ``measures`` costs are measured where agents say on which hosts they are. ``digests``
        None: nobody's content is checked.
        """
        self.limits = limits or Limits()
        self.digests = digests or Digests()
        self.ledger = Ledger(self.limits, first_us)
        self.members = Membership(self.ledger, self.limits)
        self.pairs: OrderedDict[PairKey, PairOutcome] = OrderedDict()
        self.planning: dict[PairKey, set[int]] = {}
        probes = Numbers(first_us)
        self.probing = Probing(self.limits, measures, probes)
        self.examining = Examining(self.limits, probes)
        self.draining = False
        """Nothing is granted any more: the next broker will be told of all that waits."""

    @property
    def granted(self) -> int:
        """Handoffs that ranks may be reading, or gathering for."""
        return sum(handoff.granted for handoff in self.ledger.live.values())

    # -- words of engines -------------------------------------------------------------------------

    def publish(
        self, engine: EngineRecord, handoff_id: str, chunk: Chunk, now_s: float
    ) -> list[Action]:
        """P publishes a chunk. Raises a typed error; then nothing changed."""
        if engine.gone:
            raise engine.departed()
        known = self.ledger.look_up(engine, handoff_id)
        if known is not None and known.ended:
            known.check_published_before(engine, chunk)
            return [told(known, engine)]
        handoff = known or self.ledger.make(engine, handoff_id, now_s)
        try:
            handoff.publish(engine, chunk, now_s)
        except RestowError:
            if known is None:
                self.ledger.unmake(handoff)
            raise
        engine.handoffs.add(handoff.number)
        engine.publishes = True
        for rank in sorted(engine.early_fences.take(handoff_id)):
            handoff.fence(rank, now_s)
        return self._advance(handoff, now_s)

    def publication_refused(
        self, engine: EngineRecord, handoff_id: str, error: RestowError, now_s: float
    ) -> list[Action]:
        """A publication was refused: who waits for the state, or will ask for it, hears why.

        What was published and fenced before stays as it was, and what another engine publishes.
        Where a fence is still to come nobody could say which of the two publications it is of.
        """
        known = self.ledger.look_up(engine, handoff_id)
        if known is None:
            try:
                known = self.ledger.make(engine, handoff_id, now_s)
            except RestowError:
                return []
        if engine.gone or known.ended or known.complete or known.source not in (None, engine):
            return []
        words = f"P's publication was refused with {error.reason}: {error.message}"
        return self.ledger.stop(known, Failure(State.FAILED, "PUBLICATION_REFUSED", words), now_s)

    def request(
        self, engine: EngineRecord, handoff_id: str, wish: Wish, now_s: float
    ) -> list[Action]:
        """D asks, once or again. Raises a typed error; then nothing changed."""
        if engine.gone:
            raise engine.departed()
        known = self.ledger.look_up(engine, handoff_id)
        if known is not None and known.ended:
            known.check_asked_before(engine, wish)
            known.number_demand(wish.demand)
            if wish.repeated:
                self.ledger.quarantine.hold(known, engine, engine.unheard_ranks, now_s)
            return self._told_again(known, engine)
        handoff = known or self.ledger.make(engine, handoff_id, now_s)
        try:
            first = handoff.ask(engine, wish, now_s)
        except RestowError:
            if known is None:
                self.ledger.unmake(handoff)
            else:
                self.ledger.wait_for_demand(handoff, now_s)
            raise
        if not first:
            return []
        engine.handoffs.add(handoff.number)
        engine.asks = True
        return self._advance(handoff, now_s)

    def renew(
        self, engine: EngineRecord, handoff_id: str, lease_s: float, now_s: float
    ) -> list[Action]:
        """P prolongs its lease. Raises `HandoffUnknownError` or `HandoffOwnedError`."""
        if engine.gone:
            raise engine.departed()
        handoff = self.ledger.find_of(engine, handoff_id)
        if handoff.source is not engine:
            raise HandoffOwnedError(
                f"engine {engine.key.engine_id} does not publish handoff {handoff_id}: only P has "
                f"a lease to renew",
                handoff=handoff_id,
                side="source",
            )
        if handoff.ended:
            return [told(handoff, engine)]
        handoff.renew(lease_s, now_s)
        return []

    def cancel(
        self, engine: EngineRecord, handoff_id: str, detail: str, now_s: float, demand: int = 0
    ) -> list[Action]:
        """A side gives up; D this ``demand`` of its own, if it names one, and no other.

        Raises `HandoffUnknownError`.
        """
        if engine.gone:
            raise engine.departed()
        handoff = self.ledger.find_of(engine, handoff_id)
        if demand and (engine is not handoff.destination or demand != handoff.demand_number):
            return []  # it was refused, or told its end
        if handoff.ended:
            actions: list[Action] = [told(handoff, engine)] if engine is handoff.source else []
            if engine is handoff.destination:
                actions += self._told_again(handoff, engine)
            return actions
        words = f"engine {engine.key.engine_id} cancelled" + (f": {detail}" if detail else "")
        return self.ledger.stop(handoff, Failure(State.CANCELLED, "CANCELLED", words), now_s)

    def decline(
        self, engine: EngineRecord, handoff_id: str, detail: str, now_s: float, demand: int = 0
    ) -> list[Action]:
        """D goes on without the state: P's pages are free at once, or will be when it publishes.

        ``demand`` is the number of D's message.

        Raises `HandoffOwnedError` if another engine is D, and what `Ledger.make` raises.
        """
        if engine.gone:
            raise engine.departed()
        known = self.ledger.look_up(engine, handoff_id)
        if known is not None:
            known.check_destination(engine)
            if known.ended:
                known.demand_number = demand
                return self._told_again(known, engine)
        handoff = known or self.ledger.make(engine, handoff_id, now_s)
        if handoff.destination is None:
            handoff.destination, handoff.demand_number = engine, demand
        words = f"engine {engine.key.engine_id} does without" + (f": {detail}" if detail else "")
        return self.ledger.stop(handoff, Failure(State.CANCELLED, "DECLINED", words), now_s)

    def release(self, handoff: Handoff, now_s: float) -> list[Action]:
        """An operator gives a handoff up."""
        if handoff.ended:
            return []
        failure = Failure(State.CANCELLED, "RELEASED", "an operator gave it up")
        return self.ledger.stop(handoff, failure, now_s)

    def drain(self, draining: bool, now_s: float) -> list[Action]:
        """Grant nothing any more, or again all that waits for it."""
        self.draining = draining
        if draining:
            return []
        return self._go_on(set(self.ledger.by_number), now_s)

    def _told_again(self, handoff: Handoff, engine: EngineRecord) -> list[Action]:
        """How an ended handoff ended, for D or who asks late, unless D must not know yet."""
        if engine is not handoff.destination and handoff.destination is not None:
            return []
        held = handoff.number in engine.quarantined
        return [] if held else [told(handoff, engine, handoff.demand_number)]

    # -- words of agents --------------------------------------------------------------------------

    def resume(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """An agent has been welcomed: handoffs that waited for it may go on."""
        actions: list[Action] = []
        if engine.complete:
            for number in sorted(engine.handoffs):
                handoff = self.ledger.by_number[number]
                if handoff.lease.agents_until_s:
                    actions += self._advance(handoff, now_s)
        return actions

    def fence(
        self, engine: EngineRecord, agent: AgentRecord, handoff_id: str, now_s: float
    ) -> list[Action]:
        """A rank of P says that its part is complete in memory. Raises like `publish`."""
        if agent.gone:
            return []
        known = self.ledger.look_up(engine, handoff_id)
        if known is not None and known.ended:
            return [SendUnfence(agent.key, handoff_id)]
        if known is None or known.source is None:
            until_s = unpublished_until_s(self.limits, now_s)
            engine.early_fences.add(handoff_id, agent.key.rank, until_s)
            return []
        known.check_source(engine)
        known.fence(agent.key.rank, now_s)
        return self._advance(known, now_s)

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
        """A source's agent has gathered and hashed ``run``, or could not."""
        if agent.gone:
            return []
        handoff, rank = self.ledger.by_number.get(number), agent.key.rank
        if handoff is None or handoff.source is not engine or handoff.pair is None:
            return [SendUnstage(agent.key, number)]
        pair = handoff.pair
        if rank not in pair.staging.get(dst_rank, ()) or (dst_rank, rank) in handoff.staged:
            return []
        if failure is not None:
            return self.ledger.stop(handoff, failure, now_s)
        # Whatever is wrong with it from here on: the agent holds a run, which must be given back.
        failure = unreadable(run, agent)
        if failure is None and pair.hashed:
            failure = not_hashed(run, rank)
        handoff.staged[dst_rank, rank] = run.kept(pair.hashed and failure is None)
        handoff.note(now_s, "staged", (rank, dst_rank))
        if failure is not None:
            handoff.unsettled.discard(dst_rank)
            return self.ledger.stop(handoff, failure, now_s)
        destination = handoff.destination
        if handoff.given_back or destination is None or dst_rank not in destination.agents:
            return []
        if not handoff.is_staged(pair, dst_rank):
            return []
        if (late := handoff.lease.used_up(self.limits, now_s)) is not None:
            # This rank is not told to read: it has nothing to settle.
            handoff.unsettled.discard(dst_rank)
            return self.ledger.stop(handoff, late, now_s)
        if all(handoff.is_staged(pair, one) for one in pair.staging):
            handoff.state = State.READING
        return execute(handoff, pair, dst_rank, now_s)

    def settled(
        self, engine: EngineRecord, agent: AgentRecord, settlement: Settlement, now_s: float
    ) -> list[Action]:
        """A destination's agent has ended its part."""
        handoff, rank = self.ledger.by_number.get(settlement.number), agent.key.rank
        if agent.gone:
            return []
        if handoff is None:
            return self.ledger.quarantine.settled(engine, settlement.number, rank, now_s)
        if handoff.destination is not engine:
            return []
        if not handoff.may_read(rank):
            return []
        hashed = handoff.pair is not None and handoff.pair.hashed
        handoff.settle(rank, settlement.bytes, settlement.elapsed_us, now_s)
        if handoff.given_back:
            return self.ledger.go_back(handoff, now_s)
        if settlement.reason == NOT_BEGUN:
            late = Failure(State.FAILED, NOT_BEGUN, settlement.detail)
            return self.ledger.give_back(handoff, late, now_s)
        if settlement.reason:
            words = f"rank {rank} of engine {engine.key.engine_id}: {settlement.detail}"
            return self.ledger.stop(handoff, Failure(State.FAILED, settlement.reason, words), now_s)
        if (late := handoff.lease.outlived(self.limits, now_s)) is not None:
            return self.ledger.stop(handoff, late, now_s)
        if hashed and (failure := not_compared(settlement, rank)) is not None:
            return self.ledger.stop(handoff, failure, now_s)
        if handoff.unsettled:
            return []
        return self.ledger.end(handoff, now_s) + self._call_next(engine.key, now_s)

    def probed(self, agent: AgentRecord, answer: Probed, now_s: float) -> list[Action]:
        """An agent has measured costs, or could not."""
        if agent.gone:
            return []
        actions, waiting = self.probing.answered(agent, answer, now_s)
        examined = self.examining.answered(agent, answer, now_s)
        return examined + actions + self._go_on(waiting, now_s)

    # -- the planner and the clock ----------------------------------------------------------------

    def plan_made(self, pair: PairKey, outcome: PairOutcome, now_s: float) -> list[Action]:
        """The planner answered."""
        self.pairs[pair] = outcome
        if len(self.pairs) > self.limits.max_pairs:
            self.pairs.popitem(last=False)
        return self._go_on(self.planning.pop(pair, set()), now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for handoff in self.ledger.due(now_s):
            actions += self._late(handoff, now_s)
        returned, self.ledger.returned = self.ledger.returned, set()
        actions += self._go_on(returned, now_s)
        for engine in self.ledger.flow.engines():
            actions += self._call_next(engine, now_s)
        more, waiting = self.probing.tick(now_s)
        more += self.examining.tick(now_s)
        return actions + more + self._go_on(waiting, now_s) + self.members.sweep(now_s)

    def _call_next(self, destination: EngineKey, now_s: float) -> list[Action]:
        """Grant what waits for a destination, as far as it has room."""
        actions: list[Action] = []
        while (number := self.ledger.flow.next(destination)) is not None:
            actions += self._go_on({number}, now_s)
        return actions

    def _late(self, handoff: Handoff, now_s: float) -> list[Action]:
        """A handoff has run out of time. That D's agents are missing is no fault of P's."""
        failure = handoff.why_late(now_s)
        waited = failure.reason in ("AGENT_MISSING", "AGENT_LOST") and not handoff.granted
        if waited and handoff.source and handoff.source.complete:
            return self.ledger.dismiss(handoff, failure, now_s)
        return self.ledger.stop(handoff, failure, now_s)

    def _go_on(self, numbers: set[int], now_s: float) -> list[Action]:
        """Handoffs that waited for something of the broker's own."""
        actions: list[Action] = []
        for number in sorted(numbers):
            handoff = self.ledger.by_number.get(number)
            if handoff is not None:
                actions += self._advance(handoff, now_s)
        return actions

    def _advance(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Grant as soon as everything is there."""
        if handoff.pair is not None:
            return []
        if handoff.state is State.WAITING and handoff.complete:
            handoff.state = State.READY
            handoff.note(now_s, "ready")
        if handoff.state is State.READY and handoff.destination is not None and not handoff.met_s:
            handoff.met_s = now_s
        actions = self._try_grant(handoff, now_s)
        # One that has ended needs no clock.
        if not handoff.ended:
            self.ledger.watch(handoff)
        return actions

    def _try_grant(self, handoff: Handoff, now_s: float) -> list[Action]:
        source, destination = handoff.source, handoff.destination
        if source is None or destination is None:
            return []
        hosts = self.probing.costs(source, destination)
        key = PairKey(source.layout_digest, destination.layout_digest, hosts)
        pair = self.pairs.get(key)
        if pair is None:
            planning = self.planning.get(key)
            if planning is None:
                self.planning[key] = {handoff.number}
                costs = None if hosts is None else self.probing.known[hosts].costs
                return [MakePlan(key, source.layout, destination.layout, costs)]
            planning.add(handoff.number)
            return []
        if isinstance(pair, PairRefused):
            failure = Failure(State.FAILED, pair.error.reason, pair.error.message)
            return self.ledger.stop(handoff, failure, now_s)
        if handoff.state is not State.READY or self.draining:
            return []
        if not (source.complete and destination.complete):
            if handoff.lease.wait_for_agents(self.limits, now_s):
                handoff.note(now_s, "waits for agents")
            return []
        probes = self.probing.wait(handoff.number, source, destination, pair, now_s)
        if probes is not None:
            return probes
        if self.digests.choose(handoff.number):
            pair = pair.with_digests()
        refused = misfit(handoff, source, destination, pair)
        if isinstance(refused, Misfit):
            refuse = self.ledger.dismiss if refused.of_demand else self.ledger.stop
            return refuse(handoff, refused.failure, now_s)
        size_bytes = destination.state_bytes(
            handoff.demand.held_tokens, handoff.publication.position_tokens
        )
        admitted = self.ledger.flow.begin(destination.key, handoff.number, size_bytes, now_s)
        if admitted == handoff.queued:
            handoff.queued = not admitted
            handoff.note(now_s, "its turn came" if admitted else "waits for its turn")
        if not admitted:
            return []
        granted = open_grant(handoff, source, pair, self.limits, now_s)
        if isinstance(granted, Failure):
            return self.ledger.stop(handoff, granted, now_s)
        return granted
