"""Offering: a demand by prefix is offered to the engines that announced the prefix, in turn.

The steps of an offer:

    asked for --> offered to an engine --> published: from there on like any handoff
                      |   ^
                      v   | declined, refused, late, gone
                   the next engine --> no engine is left: CANCELLED, NOT_HELD
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

from restow.broker.core.common.actions import Action, SendKeep, SendOffer, TellForget
from restow.broker.core.common.events import Failure, NamedPrefix
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.engines.engine import EngineRecord, pool_of
from restow.broker.core.handoffs.demand import PrefixOffers
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.membership import Membership
from restow.broker.core.prefix.prefixes import Prefixes
from restow.broker.errors import ChainFormError, RequestError, WeightsUnknownError
from restow.broker.layout.values import Pool


class Offering:
    """Demands that are on offer."""

    def __init__(self, ledger: Ledger, members: Membership, prefixes: Prefixes) -> None:
        """Begin without offers."""
        self.open: dict[int, PrefixOffers] = {}
        """By handoff number."""
        self.asked = 0
        """Demands that needed offers."""
        self.not_held = 0
        """Demands that no engine could serve."""
        self.offered = 0
        """Offers that were made."""
        self.declined = 0
        """Offers that were declined, refused, or not answered in time."""
        self._ledger = ledger
        self._members = members
        self._prefixes = prefixes

    def begin(self, handoff: Handoff, prefix: NamedPrefix, now_s: float) -> list[Action]:
        """Offer a new demand to the best holder of its prefix."""
        destination = handoff.destination
        if handoff.source is not None or destination is None:
            return []  # an engine already publishes it, as after a restart of the broker
        self.asked += 1
        offer = handoff.offer = PrefixOffers(prefix.position_tokens)
        try:
            revision = destination.revision_said(handoff.demand.revision)
            chain = prefix.chain(destination.identity(revision))
            held = self._prefixes.find(handoff.tenant, chain)
        except (ChainFormError, WeightsUnknownError) as error:
            return self._not_held(handoff, error.message, now_s)
        engines = [
            self._members.engines[holding.engine]
            for holding in held
            if holding.tokens == prefix.position_tokens and holding.engine != destination.key
        ]
        # An offer that is not answered yet is no handoff of its engine.
        offered = Counter(one.engine for one in self.open.values()) if len(engines) > 1 else {}
        engines.sort(
            key=lambda engine: (
                engine.draining,
                len(engine.handoffs) + offered.get(engine.key, 0),
                engine.key,
            ),
            reverse=True,
        )
        offer.left, offer.revision = [engine.key for engine in engines], revision
        self.open[handoff.number] = offer
        handoff.timeline.note(now_s, "looked up", (len(engines), offer.tokens))
        return self._next(handoff, offer, now_s)

    def is_open(self, handoff: Handoff) -> bool:
        """Return whether a handoff is on offer to any engine."""
        return handoff.number in self.open

    def check_alone(self, handoff: Handoff) -> None:
        """Raise `RequestError` if a publication names readers for a demand by prefix."""
        if self.is_open(handoff):
            raise RequestError(
                f"handoff {handoff.handoff_id} is asked for by prefix: an engine that answers an "
                f"offer must not name readers",
                field="readers",
            )

    def is_offered(self, handoff: Handoff, engine: EngineRecord) -> bool:
        """Return whether the engine may answer an offer of the handoff, even if it drains."""
        offer = self.open.get(handoff.number)  # kept until the tick after the end
        return offer is not None and offer.engine == engine.key and not handoff.ended

    def taken(self, handoff: Handoff) -> None:
        """Close the offer, because an engine publishes the handoff."""
        if (offer := self.open.pop(handoff.number, None)) is not None:
            offer.close()

    def decline(
        self, engine: EngineRecord, handoff_id: str, detail: str, now_s: float
    ) -> list[Action]:
        """Record that a holder declines an offer, and offer to the next; ignore late answers."""
        handoff = self._ledger.known(engine.key.tenant, handoff_id)
        if handoff is None or handoff.ended or not self.is_offered(handoff, engine):
            return []
        handoff.timeline.note_often(now_s, "offer declined", f"{engine.key.engine_id}: {detail}")
        return self._declined(handoff, self.open[handoff.number], now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Pass on offers that were not answered in time, or whose engine is gone."""
        actions: list[Action] = []
        for number, offer in list(self.open.items()):
            handoff = self._ledger.by_number.get(number)
            if handoff is None or offer.engine is None:
                self.open.pop(number).close()
                continue
            engine = self._members.engines.get(offer.engine)
            gone = engine is None or not engine.has_session
            if gone or now_s >= offer.until_s:
                why = "is gone" if gone else "has not answered"
                detail = f"{offer.engine.engine_id} {why}"
                handoff.timeline.note_often(now_s, "offer declined", detail)
                actions += self._declined(handoff, offer, now_s)
        return actions

    def retract(self, engine: EngineRecord, now_s: float) -> list[Action]:
        """Withdraw offers to an engine whose weights were replaced, and pass them on."""
        actions: list[Action] = []
        for number, offer in list(self.open.items()):
            offer.left = [key for key in offer.left if key != engine.key]
            handoff = self._ledger.by_number.get(number)
            if handoff is not None and offer.engine == engine.key:
                why = f"{engine.key.engine_id} now has other weights"
                handoff.timeline.note_often(now_s, "offer declined", why)
                actions += self._declined(handoff, offer, now_s)
        return actions

    def keep(self, engine: EngineRecord, prefix: NamedPrefix, marked: bool = False) -> list[Action]:
        """Tell a store about a state that the engine holds; each state has a fixed store."""
        pool = self._members.pools.get(pool_of(engine), {}).values()
        stores = [store for store in _stores(pool) if not store.draining and store is not engine]
        if not stores or not engine.has_revision(prefix.revision):
            return []
        # Prefixes with the same beginning go to the same store, which stores their common blocks
        # once.
        first = prefix.hashes[: prefix.form.hash_bytes] or prefix.end_hash
        chosen = max(stores, key=lambda store: _weight(store.key, first))
        named = prefix._replace(revision=engine.revision_said(prefix.revision))
        return [SendKeep(chosen.key, named, marked)]

    def forget_states(self, tenant: str, revision: str, pool: Pool | None = None) -> list[Action]:
        """Tell a tenant's stores, or those in ``pool``, to drop the states of a revision."""
        return [
            TellForget(store.key, revision)
            for key, engines in self._members.pools.items()
            if key.tenant == tenant and pool in (None, key)
            for store in _stores(engines.values())
        ]

    def _declined(self, handoff: Handoff, offer: PrefixOffers, now_s: float) -> list[Action]:
        offer.declined += 1
        self.declined += 1
        engine = self._members.engines.get(offer.engine) if offer.engine is not None else None
        if engine is not None:
            engine.offers_declined += 1
        return self._next(handoff, offer, now_s)

    def _next(self, handoff: Handoff, offer: PrefixOffers, now_s: float) -> list[Action]:
        prefix = handoff.demand.prefix
        while offer.left and prefix is not None:
            key = offer.left.pop()
            engine = self._members.engines.get(key)
            if engine is None or not engine.has_session:
                continue
            offer.engine = key
            offer.until_s = now_s + self._ledger.limits.offer_s
            offer.made += 1
            engine.offers += 1
            self.offered += 1
            handoff.timeline.note_often(now_s, "offered", key.engine_id)
            self._ledger.watch(handoff)
            named = prefix._replace(revision=offer.revision)
            return [SendOffer(key, handoff.handoff_id, named, self._ledger.limits.offer_s)]
        self.open.pop(handoff.number).close()
        if offer.declined:
            words = f"all engines that announced this state declined it ({offer.declined})"
        else:
            words = "no engine has announced the state of these tokens"
        return self._not_held(handoff, words, now_s)

    def _not_held(self, handoff: Handoff, words: str, now_s: float) -> list[Action]:
        self.not_held += 1
        return self._ledger.stop(handoff, Failure(State.CANCELLED, "NOT_HELD", words), now_s)


def _stores(engines: Iterable[EngineRecord]) -> list[EngineRecord]:
    """Return the stores that have a session."""
    return [engine for engine in engines if engine.keeps and engine.has_session]


def _weight(store: EngineKey, first_hash: bytes) -> bytes:
    return blake2b(store.engine_id.encode() + first_hash, digest_size=8).digest()
