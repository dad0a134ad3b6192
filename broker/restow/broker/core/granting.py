"""Granting: a handoff waits for its plan, agents and turn, and is then granted."""

from __future__ import annotations

from collections.abc import Iterable

from restow.broker.core.common.actions import Action
from restow.broker.core.common.events import Failure
from restow.broker.core.common.keys import EngineKey, PairKey, State
from restow.broker.core.common.pair import DigestMode, Digests, PairOutcome, PairPlan, PairRefused
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.grant import Misfit, early_tokens, misfit, open_grant
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.late import waits_for
from restow.broker.core.ledger.known_ends import KnownEnds
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.plans import Plans
from restow.broker.errors import RestowError
from restow.broker.layout.values import ModelIdentity


class Granting:
    """Handoffs on their way to a grant."""

    def __init__(self, ledger: Ledger, plans: Plans, digests: Digests) -> None:
        """Begin without handoffs."""
        self.draining = False
        """Whether nothing is granted any more; the next broker will serve what waits."""
        self.known_ends = KnownEnds(ledger)
        self._ledger = ledger
        self._limits = ledger.limits
        self._plans = plans
        self._digests = digests

    def drain(self, draining: bool, now_s: float) -> list[Action]:
        """Stop granting, or resume and grant what waits."""
        self.draining = draining
        if draining:
            return []
        return self.go_on(set(self._ledger.by_number), now_s)

    def waits_for(self, handoff: Handoff) -> str:
        """Describe what a live handoff waits for; empty if it is granted."""
        if handoff.granted:
            return ""
        if handoff.side.complete and handoff.destination and self.draining:
            return "the broker is draining and grants nothing"
        return waits_for(handoff)

    def resume(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Continue handoffs that waited for an engine's agents, after an agent was admitted."""
        actions: list[Action] = []
        if engine.complete:
            known = bool(self.known_ends.by_id)
            for handoff in self._ledger.live_of(engine):
                if known or handoff.lease.agents_until_s:
                    actions += self.advance(handoff, now_s)
        return actions

    def plan_made(self, pair: PairKey, outcome: PairOutcome, now_s: float) -> list[Action]:
        """Store a plan and continue its handoffs; they fail if the tenant has no room for it."""
        waiting = self._plans.planning.pop(pair, set())
        try:
            self._plans.made(pair, outcome, waiting)
        except RestowError as error:
            failure = Failure(State.FAILED, error.reason, error.message)
            handoffs = [self._ledger.by_number.get(number) for number in sorted(waiting)]
            return [
                action
                for handoff in handoffs
                if handoff is not None and handoff.pair is None and handoff.destination
                for action in self._ledger.stop(handoff, failure, now_s)
            ]
        for number in waiting if isinstance(outcome, PairPlan) else ():
            if (handoff := self._ledger.by_number.get(number)) is not None:
                handoff.timeline.note_planned(now_s)
        return self.go_on(waiting, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Grant again after revoked grants, and grant handoffs whose turn it is."""
        returned, self._ledger.returned = self._ledger.returned, set()
        actions = self.go_on(returned, now_s)
        for engine in self._ledger.flow.engines():
            actions += self.call_next(engine, now_s)
        return actions

    def call_next(self, destination: EngineKey, now_s: float) -> list[Action]:
        """Grant what waits for a destination, as far as it has room."""
        actions: list[Action] = []
        while (number := self._ledger.flow.next(destination)) is not None:
            actions += self.go_on({number}, now_s)
        return actions

    def go_on(self, numbers: Iterable[int], now_s: float) -> list[Action]:
        """Continue handoffs that waited for something in the broker."""
        actions: list[Action] = []
        for number in sorted(numbers):
            handoff = self._ledger.by_number.get(number)
            if handoff is not None:
                actions += self.advance(handoff, now_s)
        return actions

    def advance(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Grant a handoff, or each delivery of a publication, as soon as everything is ready."""
        if handoff.pair is not None:
            return []
        side, destination = handoff.side, handoff.destination
        actions: list[Action] = []
        if self.known_ends.by_id:
            actions += self.known_ends.complete(handoff, now_s)
            if handoff.ended:
                return actions
        if handoff.state is State.WAITING and side.complete:
            handoff.state = State.READY
            handoff.timeline.append((now_s, "ready", ""))
        if destination is not None:
            if handoff.state is State.READY and not handoff.met_s:
                handoff.met_s = now_s
            if side.engine is not None:
                actions += self._try_grant(handoff, side.engine, destination, now_s)
        if not handoff.ended:  # an ended handoff has no deadline
            self._ledger.watch(handoff)
        if handoff.deliveries.by_engine:  # most handoffs have no deliveries
            for delivery in handoff.deliveries:
                if not delivery.ended:
                    actions += self.advance(delivery, now_s)
        return actions

    def _try_grant(
        self, handoff: Handoff, source: EngineRecord, destination: EngineRecord, now_s: float
    ) -> list[Action]:
        if handoff.weights_differ(destination):
            wanted = destination.revision_said(handoff.demand.revision)
            ours, theirs = source.identity(handoff.side.revision), destination.identity(wanted)
            return self._ledger.stop(handoff, _other_weights(ours, theirs), now_s)
        complete = source.complete and destination.complete and handoff.stands
        if complete and handoff.lease.agents_until_s:
            handoff.lease.agents_came()
        best = own, key, pair = self._plans.best(source, destination)
        if pair is None:
            handoff.timeline.note_wait_for_plan(now_s)
            actions = (
                [] if key in self._plans.planning else self._plans.make(key, source, destination)
            )
            self._plans.planning[key].add(handoff.number)
            return actions
        self._plans.known.move_to_end(key)
        if key.hosts != own:
            self._plans.improve(best, source, destination, now_s)
        if isinstance(pair, PairRefused):
            failure = Failure(State.FAILED, pair.error.reason, pair.error.message)
            return self._ledger.stop(handoff, failure, now_s)
        # Tell D the token now: the state may take long to arrive, or is not yet fenced.
        told: list[Action] = []
        if handoff.side.publication.sampled_token is not None:
            told = handoff.tell_sampled()
        if self.draining:
            return told
        if complete and handoff.state is State.READY:
            return told + self._try_whole(handoff, source, destination, pair, now_s)
        if complete and handoff.side.early_tokens:
            return told + self._try_part(handoff, source, destination, pair, now_s)
        if handoff.state is State.READY and handoff.lease.wait_for_agents(self._limits, now_s):
            handoff.timeline.note(now_s, "waits for agents")
        return told

    def _try_whole(
        self,
        handoff: Handoff,
        source: EngineRecord,
        destination: EngineRecord,
        pair: PairPlan,
        now_s: float,
    ) -> list[Action]:
        """Grant the read of a state that is complete."""
        refused = misfit(handoff, source, destination, pair)
        if isinstance(refused, Misfit):
            if refused.of_demand:
                return self._ledger.dismiss(handoff, refused.failure, now_s)
            return self._ledger.stop(handoff.parent or handoff, refused.failure, now_s)
        if handoff.parent is not None and not handoff.parent.deliveries.has_place:
            return []
        return self._read(handoff, source, destination, pair, now_s)

    def _try_part(
        self,
        handoff: Handoff,
        source: EngineRecord,
        destination: EngineRecord,
        pair: PairPlan,
        now_s: float,
    ) -> list[Action]:
        """Grant an early read of what P has completed; the rest waits for the whole."""
        if handoff.whole_only:
            return []
        least_bytes = self._limits.early_bytes
        stop = early_tokens(handoff, source, destination, pair, least_bytes)
        if not stop or pair.early is None:
            return []
        if handoff.parent is not None and not handoff.parent.deliveries.has_place:
            return []
        handoff.part_tokens = stop
        actions = self._read(handoff, source, destination, pair.early, now_s)
        if not handoff.granted:
            handoff.part_tokens = 0
        return actions

    def _read(
        self,
        handoff: Handoff,
        source: EngineRecord,
        destination: EngineRecord,
        pair: PairPlan,
        now_s: float,
    ) -> list[Action]:
        """Open the grant if it is the handoff's turn."""
        chosen = self._digests.mode is not DigestMode.OFF and self._digests.choose(handoff.number)
        if chosen or source.digests or destination.digests:
            pair = pair.with_digests()
        # Roughly: windows may need fewer bytes.
        size_bytes = destination.token_bytes * (handoff.stop_token - handoff.first_token)
        if not handoff.part_tokens:
            size_bytes += destination.snapshot_bytes
        admitted = self._ledger.flow.begin(destination.key, handoff.number, size_bytes, now_s)
        if admitted == handoff.queued:
            handoff.queued = not admitted
            handoff.timeline.note(now_s, "its turn came" if admitted else "waits for its turn")
        if not admitted:
            return []
        granted = open_grant(handoff, source, pair, self._limits, now_s)
        if not isinstance(granted, Failure):
            return granted
        if handoff.part_tokens:
            self._ledger.flow.leave(destination.key, handoff.number, now_s)
            return []
        return self._ledger.stop(handoff, granted, now_s)


def _other_weights(ours: ModelIdentity, theirs: ModelIdentity) -> Failure:
    """Return the failure of a handoff whose P and D have different weights."""
    words = (
        f"P's state is of model {ours}, but D computes with {theirs}: states of different weights "
        f"are not interchangeable. Run both engines from one checkpoint; if they do, give both "
        f"the same revision"
    )
    return Failure(State.FAILED, "MODEL_MISMATCH", words)
