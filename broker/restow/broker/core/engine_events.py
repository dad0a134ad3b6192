"""The directory: the broker's whole state, and the effect of each message of an engine.

It does no I/O: it takes events and a time, and returns actions. It is not thread-safe; the server
calls it from a single event loop.
"""

from __future__ import annotations

from math import inf

from restow.broker.core.agent_events import Reports
from restow.broker.core.ahead import Ahead
from restow.broker.core.commands import Commands
from restow.broker.core.common.actions import Action, SendUnfence
from restow.broker.core.common.events import Chunk, Failure, KnownEnd, Wish
from restow.broker.core.common.keys import State
from restow.broker.core.common.limits import Limits, Numbering
from restow.broker.core.common.pair import Digests
from restow.broker.core.connections import Connections
from restow.broker.core.engines.blocks import PagesInUse
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.handoff import Handoff, is_served, waited_for
from restow.broker.core.handoffs.late import why_late
from restow.broker.core.ledger.ends import told, told_destination
from restow.broker.core.ledger.handoff_table import check_handoff_id
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.membership import Membership
from restow.broker.core.offering import Offering
from restow.broker.core.plans import Plans
from restow.broker.core.prefix.prefixes import Prefixes
from restow.broker.core.probing import Examining, Probing
from restow.broker.errors import HandoffOwnedError, RequestError, RestowError


class Directory:
    """The broker's state, kept in memory: engines and agents tell a restarted broker again."""

    def __init__(
        self,
        limits: Limits | None = None,
        first_us: int = 1,
        measures: bool = False,
        digests: Digests | None = None,
        secret: bytes = b"",
    ) -> None:
        """Start empty; ``first_us`` keeps handoff numbers apart from those of an earlier broker.

        With ``measures``, costs are measured if agents name their hosts. ``digests`` chooses the
        handoffs whose content is checked; None checks none. ``secret`` is the secret of prefix
        keys.
        """
        self.limits = limits or Limits()
        self.ledger = Ledger(self.limits, first_us)
        self.connections = Connections(self.ledger)
        self.prefixes = Prefixes(self.limits, secret)
        self.members = Membership(self.ledger, self.connections, self.prefixes)
        numbering = Numbering(first_us)
        self.probing = Probing(self.limits, measures, numbering)
        self.examining = Examining(self.limits, numbering)
        self.plans = Plans(self.ledger, self.probing)
        self.granting = Granting(self.ledger, self.plans, digests or Digests())
        self.offering = Offering(self.ledger, self.members, self.prefixes)
        self.commands = Commands(self.members.engines)
        self.ahead = Ahead(self.ledger, self.members, self.granting, self.plans, self.probing)
        self.reports = Reports(self.ledger, self.granting, self.probing, self.examining)

    @property
    def granted(self) -> int:
        """Return the number of handoffs that ranks may be reading or gathering for."""
        return sum(handoff.granted for handoff in self.ledger.by_number.values())

    def publish(
        self, engine: EngineRecord, handoff_id: str, chunk: Chunk, now_s: float
    ) -> list[Action]:
        """Publish a chunk of P's. Raises a typed error; then nothing has changed."""
        if engine.gone:
            engine.check_there()
        known = self.ledger.hear(engine, handoff_id, now_s)
        if known is not None and known.ended:
            known.check_published_before(engine, chunk)
            return [*_forget_fences(engine, handoff_id), told(known, engine)]
        handoff = known or self.ledger.make(engine.account, handoff_id, now_s)
        taken_back = chunk.anew and not handoff.side.anew
        try:
            if handoff.side.engine is not None:
                handoff.check_source(engine)
            elif engine.drains_since_s and not (
                chunk.repeated or self.offering.is_offered(handoff, engine)
            ):
                engine.check_takes(handoff_id, handoff.born_s if known else inf)
            if chunk.readers:
                self.offering.check_alone(handoff)
                self.ledger.readers.share(handoff, chunk.readers, now_s)
            handoff.publish(engine, chunk, now_s)
        except RestowError:
            if known is None:
                self.ledger.unmake(handoff)
            raise
        engine.handoffs.add(handoff.number)
        for delivery in handoff.deliveries if handoff.deliveries.by_engine else ():
            engine.handoffs.add(delivery.number)
        engine.publishes = True
        if self.offering.open:
            self.offering.taken(handoff)
        if chunk.readers and handoff.deliveries.served:
            return self.ledger.readers.end_served(handoff, now_s)
        for rank in sorted(engine.unpublished_fences.take(handoff_id)):
            handoff.fence(rank, 0, now_s)
        actions = self.ledger.take_back(handoff, now_s) if taken_back else []
        return actions + self.granting.advance(handoff, now_s)

    def revise(self, engine: EngineRecord, revision: str, now_s: float) -> list[Action]:
        """Record that an engine's weights were replaced; its later messages are of ``revision``.

        States that it has published whole and fenced stay available to a D of their revision. All
        its other open handoffs end. Early fences are dropped, because their revision is unknown.
        Raises `RequestError` for a store, which holds states of any revision.
        """
        engine.check_there()
        if engine.keeps:
            raise RequestError(
                f"engine {engine.key.engine_id} is a store: each of its messages names a revision",
                field="revise",
            )
        if engine.revision == revision:
            return []
        engine.revision = revision
        self.prefixes.forget(engine.key)
        actions: list[Action] = [
            SendUnfence(engine.agents[rank].key, handoff_id)
            for handoff_id, ranks in engine.unpublished_fences.take_all()
            for rank in sorted(ranks & engine.agents.keys())
        ]
        actions += self.offering.retract(engine, now_s)
        for handoff in self.ledger.live_of(engine):
            publishes = handoff.source is engine and handoff.parent is None
            if handoff.destination is engine or (publishes and not handoff.side.complete):
                actions += self.ledger.stop(handoff, revision_changed(engine), now_s)
        return actions

    def publication_refused(
        self, engine: EngineRecord, handoff_id: str, error: RestowError, now_s: float
    ) -> list[Action]:
        """Tell everybody who waits or will ask for a handoff why its publication was refused.

        States that are complete, and publications of other engines, stay as they are. An incomplete
        publication ends, because a later fence might be of either publication.
        """
        known = self.ledger.hear(engine, handoff_id, now_s)
        if known is None:
            try:
                known = self.ledger.make(engine.account, handoff_id, now_s)
            except RestowError:
                return []
        if engine.gone or known.ended or known.side.complete or known.source not in (None, engine):
            return []
        if self.offering.is_open(known):  # an answer to an offer, or to an offer that has passed on
            return self.offering.decline(engine, handoff_id, error.reason, now_s)
        words = f"P's publication was refused with {error.reason}: {error.message}"
        failure = Failure(State.FAILED, "PUBLICATION_REFUSED", words)
        return _forget_fences(engine, handoff_id) + self.ledger.stop(known, failure, now_s)

    def request(
        self, engine: EngineRecord, handoff_id: str, wish: Wish, now_s: float
    ) -> list[Action]:
        """Add a demand of D's, or repeat it. Raises a typed error; then nothing has changed."""
        if engine.gone:
            engine.check_there()
        known, over = self.ledger.hear(engine, handoff_id, now_s), None
        if known is not None and (known.ended or known.deliveries.by_engine):
            over = self._over(known, engine, wish.repeated, now_s)
        if over is not None:
            over.check_asked_before(engine, wish)
            if wish.repeated:
                self.ledger.quarantine.hold(over, engine, engine.unheard_ranks, now_s)
            return self._told_again(over, engine, wish.demand)
        handoff = known or self.ledger.make(engine.account, handoff_id, now_s)
        try:
            asking = self._ask(handoff, engine, wish, now_s, handoff.born_s if known else inf)
        except RestowError:
            if known is None:
                self.ledger.unmake(handoff)
            else:
                self.ledger.wait_for_demand(handoff, now_s)
            raise
        if asking is None:
            part = self.ledger.part_of(handoff, engine)
            return part.tell_sampled() + self.granting.advance(part, now_s)
        engine.asks = True
        if wish.revision != engine.revision and not engine.has_revision(wish.revision):
            return self.ledger.stop(asking, revision_changed(engine), now_s)
        ended = self.granting.known_ends.complete(asking, now_s) if wish.repeated else []
        if asking.ended:  # there may be no action yet, if D's agents are not back
            return ended
        if wish.prefix is not None and asking.source is None:
            return self.offering.begin(asking, wish.prefix, now_s)
        return self.granting.advance(asking, now_s)

    def _ask(
        self, handoff: Handoff, engine: EngineRecord, wish: Wish, now_s: float, began_s: float
    ) -> Handoff | None:
        """Return what the demand is for, the handoff or a delivery of it; None for a repetition."""
        readers, part = self.ledger.readers, handoff
        if handoff.deliveries.by_engine:
            part = self.ledger.part_of(handoff, engine)
        shared = handoff.deliveries.readers > 0
        if shared and handoff.source is None and wish.prefix is not None:
            raise waited_for(handoff.handoff_id, engine)
        shared = shared or (wish.readers > 0 and handoff.destination is None)
        begins = shared and (part is handoff or part.ended)
        if begins:
            part = readers.begin(handoff, engine, now_s)
        try:
            if engine.drains_since_s and part.destination is None and not wish.repeated:
                engine.check_takes(handoff.handoff_id, began_s)
            if engine.in_use is None:
                engine.in_use = self._in_use(engine)
            first = part.ask(engine, wish, now_s)
        except RestowError:
            if begins:
                readers.drop(part)
            raise
        if begins:
            readers.keep(part, engine)
            readers.name(handoff, wish.readers)
        engine.handoffs.add(part.number)
        return part if first else None

    def _in_use(self, engine: EngineRecord) -> PagesInUse:
        """Return the blocks in use of an engine before its first demand: its publications'."""
        in_use = PagesInUse(engine, engine.account)
        for handoff in map(self.ledger.by_number.get, engine.handoffs):
            if handoff is not None and handoff.source is engine and handoff.parent is None:
                in_use.publish(handoff.side, handoff.handoff_id, handoff.publication.blocks)
        return in_use

    def renew(
        self, engine: EngineRecord, handoff_id: str, lease_s: float, now_s: float
    ) -> list[Action]:
        """Extend P's lease. Raises `HandoffUnknownError` or `HandoffOwnedError`."""
        engine.check_there()
        handoff = self.ledger.find_of(engine, handoff_id, now_s)
        if handoff.source is not engine:
            raise HandoffOwnedError(
                f"engine {engine.key.engine_id} does not publish handoff {handoff_id}: only P can "
                f"renew the lease",
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
        """Cancel a side's handoff; with ``demand``, only that demand of D's.

        P may cancel a handoff that it has not published, together with its fences. Raises
        `HandoffUnknownError`, and what `Ledger.make` raises.
        """
        engine.check_there()
        words = f"engine {engine.key.engine_id} cancelled" + (f": {detail}" if detail else "")
        failure = Failure(State.CANCELLED, "CANCELLED", words)
        known = self.ledger.known(engine.key.tenant, handoff_id)
        begins = known is None and engine.publishes
        if not demand and (begins or handoff_id in engine.unpublished_fences):
            return self._give_up_unpublished(engine, handoff_id, failure, now_s)
        handoff = self.ledger.find_of(engine, handoff_id, now_s)
        if demand:
            handoff = self.ledger.part_of(handoff, engine)
        if demand and (
            engine is not handoff.destination or demand not in handoff.demand_messages.numbers
        ):
            return []  # that demand was refused, or was told its end
        if handoff.ended:
            whole = engine is handoff.source and handoff.parent is None
            actions: list[Action] = [told(handoff, engine)] if whole else []
            if engine is handoff.destination and handoff.number not in engine.quarantined:
                actions += told_destination(handoff, engine)
            return actions
        if demand and not handoff.demand_messages.give_up(demand):
            return []
        return self.ledger.stop(handoff, failure, now_s)

    def _give_up_unpublished(
        self, engine: EngineRecord, handoff_id: str, failure: Failure, now_s: float
    ) -> list[Action]:
        """Cancel a handoff that P has not published, and forget the fences of its ranks.

        The ended handoff stays known, because further fences may be on their way, and a later
        publication under the id must not use the present fences.
        """
        known = self.ledger.known(engine.key.tenant, handoff_id)
        known = known or self.ledger.make(engine.account, handoff_id, now_s)
        actions = _forget_fences(engine, handoff_id)
        if self.offering.is_open(known):
            return actions + self.offering.decline(engine, handoff_id, failure.detail, now_s)
        if known.ended or known.source is not None:
            return actions
        known.side.engine = engine
        return actions + self.ledger.stop(known, failure, now_s)

    def decline(
        self,
        engine: EngineRecord,
        handoff_id: str,
        detail: str,
        now_s: float,
        demand: int = 0,
        readers: int = 0,
    ) -> list[Action]:
        """Let D continue without the state; P's pages are free at once, or when P publishes.

        ``demand`` is the number of D's message. With several ``readers``, D counts as a reader that
        needs nothing. Raises `HandoffOwnedError` if another engine is D, `HandoffConflictError` if
        too many messages have asked, and what `Ledger.make` raises.
        """
        engine.check_there()
        known = self.ledger.hear(engine, handoff_id, now_s)
        if known is not None:
            known.check_destination(engine)
            over = self._over(known, engine, False, now_s)
            if over is not None:
                return self._told_again(over, engine, demand)
        handoff = known or self.ledger.make(engine.account, handoff_id, now_s)
        part = self.ledger.part_of(handoff, engine)
        shared = handoff.shared or (readers > 0 and handoff.destination is None)
        if shared and (part is handoff or part.ended):
            part = self.ledger.readers.begin(handoff, engine, now_s)
            part.destination = engine
            self.ledger.readers.keep(part, engine)
            self.ledger.readers.name(handoff, readers)
        elif part.destination is None:
            part.destination = engine
        part.add_demand_message(engine, demand)
        words = f"engine {engine.key.engine_id} declined" + (f": {detail}" if detail else "")
        return self.ledger.stop(part, Failure(State.CANCELLED, "DECLINED", words), now_s)

    def _over(
        self, handoff: Handoff, engine: EngineRecord, again: bool, now_s: float
    ) -> Handoff | None:
        """Return the ended part of a handoff that answers D; None if D may ask.

        D may ask again after a failed delivery. ``again`` says that D repeats a demand. Raises
        `HandoffOwnedError`.
        """
        part = self.ledger.part_of(handoff, engine)
        if handoff.ended and handoff.shared and part is handoff:
            return self.ledger.readers.late(handoff, engine, now_s)
        over = handoff.ended or again or is_served(part)
        return part if part.ended and over else None

    def _told_again(self, handoff: Handoff, engine: EngineRecord, number: int) -> list[Action]:
        """Tell D how an ended handoff ended, by message ``number``; not yet if it is quarantined.

        Raises `HandoffConflictError` as `decline` does.
        """
        if engine is not handoff.destination and handoff.destination is not None:
            return []
        if handoff.number not in engine.quarantined:
            # The sampled token may have been lost with a broken stream, so send it again.
            return [*handoff.tell_sampled_to(number), told(handoff, engine, number)]
        handoff.add_demand_message(engine, number)
        return []

    def known_end(
        self, engine: EngineRecord, handoff_id: str, end: KnownEnd, now_s: float
    ) -> list[Action]:
        """Accept an end that an engine heard from an earlier broker.

        Raises `EngineReplacedError`, and `RequestError` for an invalid handoff id.
        """
        engine.check_there()
        check_handoff_id(handoff_id)
        return self.granting.known_ends.hear(engine, handoff_id, end, now_s)

    def release(self, handoff: Handoff, now_s: float) -> list[Action]:
        """Cancel a handoff for an operator."""
        if handoff.ended:
            return []
        failure = Failure(State.CANCELLED, "RELEASED", "an operator released it")
        return self.ledger.stop(handoff, failure, now_s)

    def abandon(self, tenant: str, handoff_id: str, now_s: float) -> list[Action]:
        """Cancel a handoff for a router if no D has asked for it; otherwise change nothing.

        Raises what `Ledger.make` raises.
        """
        known = self.ledger.known(tenant, handoff_id)
        if known and (known.ended or known.destination is not None or any(known.deliveries)):
            return []
        account = self.ledger.tenants.account(tenant)
        handoff = known or self.ledger.make(account, handoff_id, now_s)
        words = "the router abandoned it because its client had left"
        return self.ledger.stop(handoff, Failure(State.CANCELLED, "ABANDONED", words), now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Process all deadlines that have passed."""
        actions: list[Action] = []
        for handoff in self.ledger.due(now_s):
            if not handoff.ended:
                actions += self._late(handoff, now_s)
        actions += self.offering.tick(now_s) + self.commands.tick(now_s)
        actions += self.granting.tick(now_s)
        self.prefixes.tick()
        self.granting.known_ends.tick(now_s)
        actions += self.probing.tick(now_s) + self.examining.tick(now_s)
        return actions + self.members.sweep(now_s) + self.ahead.tick(now_s)

    def _late(self, handoff: Handoff, now_s: float) -> list[Action]:
        """End a handoff that ran out of time; if only D's agents are missing, P's side goes on."""
        if handoff.ranks_away:  # their agents come back, or are lost, which decides what happens
            handoff.lease.settle_until_s = now_s + self.ledger.limits.agent_wait_s
            self.ledger.watch(handoff)
            return []
        lacks = self.granting.waits_for(handoff)
        failure = why_late(handoff, lacks, self.granting.draining, now_s)
        waited = failure.reason in ("AGENT_MISSING", "AGENT_LOST") and not handoff.granted
        if waited and handoff.source and handoff.source.complete:
            return self.ledger.dismiss(handoff, failure, now_s)
        return self.ledger.stop(handoff, failure, now_s)


def _forget_fences(engine: EngineRecord, handoff_id: str) -> list[Action]:
    """Tell the engine's agents to forget their fences of an unpublished handoff."""
    ranks = engine.unpublished_fences.take(handoff_id) & engine.agents.keys()
    return [SendUnfence(engine.agents[rank].key, handoff_id) for rank in sorted(ranks)]


def revision_changed(engine: EngineRecord) -> Failure:
    """Return the failure of a handoff for weights that its engine no longer has."""
    words = (
        f"the weights of engine {engine.key.engine_id} were replaced: it now computes with "
        f"revision {engine.revision!r}"
    )
    return Failure(State.FAILED, "REVISION_CHANGED", words)
