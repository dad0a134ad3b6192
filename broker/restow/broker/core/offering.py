"""Offering: a demand that names a prefix is offered to those who say that they hold it, in turn.

asked for --> offered to one --> published: as any handoff from there on
                  |   ^
                  v   | declined, refused, late, gone
               the next one --> nobody is left: CANCELLED, NOT_HELD
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from restow.broker.core.common.actions import Action, SendKeep, SendOffer, TellForget
from restow.broker.core.common.events import Failure, NamedPrefix
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.engines.engine import EngineRecord, pool_of
from restow.broker.core.handoffs.demand import Offer
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.ledger.ledger import Ledger
from restow.broker.core.membership import Membership
from restow.broker.core.prefix.prefixes import Prefixes
from restow.broker.errors import ChainFormError, RequestError, WeightsUnknownError
from restow.broker.layout.values import Pool


class Offering:
    """Demands that are on offer. Pure, like the directory that it serves."""

    def __init__(self, ledger: Ledger, members: Membership, prefixes: Prefixes) -> None:
        """Nothing is on offer."""
        self.open: dict[int, Offer] = {}
        """By the handoff's number."""
        self.asked = 0
        """Demands that had to be offered."""
        self.not_held = 0
        """Those of them that nobody could give."""
        self.offered = 0
        """Offers that were made."""
        self.declined = 0
        """Those of them that were declined, refused, or not answered in time."""
        self._ledger = ledger
        self._members = members
        self._prefixes = prefixes

    def begin(self, handoff: Handoff, prefix: NamedPrefix, now_s: float) -> list[Action]:
        """Offer what a new demand asks for to the first of its holders."""
        destination = handoff.destination
        if handoff.source is not None or destination is None:
            return []  # somebody publishes it already, as after a restart of the broker
        self.asked += 1
        offer = handoff.offer = Offer(prefix.position_tokens)
        try:
            revision = destination.revision_said(handoff.demand.revision)
            chain = prefix.chain(destination.identity(revision))
            held = self._prefixes.find(handoff.tenant, chain)
        except (ChainFormError, WeightsUnknownError) as error:
            return self._not_held(handoff, error.message, now_s)
        engines = [
            self._members.engines[one.engine]
            for one in held
            if one.tokens == prefix.position_tokens and one.engine != destination.key
        ]
        engines.sort(key=lambda one: (one.draining, len(one.handoffs), one.key), reverse=True)
        offer.left, offer.revision = [one.key for one in engines], revision
        self.open[handoff.number] = offer
        handoff.timeline.note(now_s, "looked up", (len(engines), offer.tokens))
        return self._next(handoff, offer, now_s)

    def is_open(self, handoff: Handoff) -> bool:
        """Whether it is on offer, to whomever."""
        return handoff.number in self.open

    def check_alone(self, handoff: Handoff) -> None:
        """Raise `RequestError` where readers are named for what one D alone asks for."""
        if self.is_open(handoff):
            raise RequestError(
                f"handoff {handoff.handoff_id} is asked for by its prefix: who answers an offer "
                f"names no readers",
                field="readers",
            )

    def is_offered(self, handoff: Handoff, engine: EngineRecord) -> bool:
        """Whether the engine may answer: what it drains for must not keep it from that."""
        offer = self.open.get(handoff.number)  # also a little beyond the end, until the next tick
        return offer is not None and offer.engine == engine.key and not handoff.ended

    def taken(self, handoff: Handoff) -> None:
        """Somebody publishes it."""
        if (offer := self.open.pop(handoff.number, None)) is not None:
            offer.close()

    def decline(
        self, engine: EngineRecord, handoff_id: str, detail: str, now_s: float
    ) -> list[Action]:
        """A holder does not publish what it was offered. What comes too late means nothing."""
        handoff = self._ledger.look_up(engine, handoff_id)
        if handoff is None or handoff.ended or not self.is_offered(handoff, engine):
            return []
        handoff.timeline.note_often(now_s, "offer declined", f"{engine.key.engine_id}: {detail}")
        return self._declined(handoff, self.open[handoff.number], now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Offer to the next what was not answered in time, or by an engine that is gone."""
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
        """Offer to others what an engine was or would be offered: its weights were replaced."""
        actions: list[Action] = []
        for number, offer in list(self.open.items()):
            offer.left = [key for key in offer.left if key != engine.key]
            handoff = self._ledger.by_number.get(number)
            if handoff is not None and offer.engine == engine.key:
                why = f"{engine.key.engine_id} has other weights now"
                handoff.timeline.note_often(now_s, "offer declined", why)
                actions += self._declined(handoff, offer, now_s)
        return actions

    def keep(self, engine: EngineRecord, prefix: NamedPrefix) -> list[Action]:
        """Tell a store of a state that the engine holds: of several always the same one."""
        pool = self._members.pools.get(pool_of(engine), {}).values()
        stores = [one for one in _stores(pool) if not one.draining and one is not engine]
        if not stores or not engine.has_revision(prefix.revision):
            return []
        # States that begin alike meet in one store, where their blocks are kept once.
        first = prefix.hashes[: prefix.form.hash_bytes] or prefix.end_hash
        chosen = max(stores, key=lambda one: _weight(one.key, first))
        named = prefix._replace(revision=engine.revision_said(prefix.revision))
        return [SendKeep(chosen.key, named)]

    def forget_states(self, tenant: str, revision: str, pool: Pool | None = None) -> list[Action]:
        """Have a tenant's stores drop the states of a revision; with ``pool``, those in it."""
        return [
            TellForget(one.key, revision)
            for key, engines in self._members.pools.items()
            if key.tenant == tenant and pool in (None, key)
            for one in _stores(engines.values())
        ]

    def _declined(self, handoff: Handoff, offer: Offer, now_s: float) -> list[Action]:
        offer.declined += 1
        self.declined += 1
        engine = self._members.engines.get(offer.engine) if offer.engine is not None else None
        if engine is not None:
            engine.offers_declined += 1
        return self._next(handoff, offer, now_s)

    def _next(self, handoff: Handoff, offer: Offer, now_s: float) -> list[Action]:
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
            words = f"nobody gave it: {offer.declined} said that they held it, and declined"
        else:
            words = "nobody says that it holds the state of these tokens"
        return self._not_held(handoff, words, now_s)

    def _not_held(self, handoff: Handoff, words: str, now_s: float) -> list[Action]:
        self.not_held += 1
        return self._ledger.stop(handoff, Failure(State.CANCELLED, "NOT_HELD", words), now_s)


def _stores(engines: Iterable[EngineRecord]) -> list[EngineRecord]:
    """Return the stores that have a session."""
    return [one for one in engines if one.keeps and one.has_session]


def _weight(store: EngineKey, first_hash: bytes) -> bytes:
    return blake2b(store.engine_id.encode() + first_hash, digest_size=8).digest()
