"""A handoff: P's side, D's demand, the grant, the deliveries, and the errors for wrong callers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from restow.broker.core.common.actions import Action, TellSampled
from restow.broker.core.common.events import Chunk, Failure, StagedRun, Wish
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.common.pair import PairPlan
from restow.broker.core.engines.account import HANDOFF_BYTES, Account
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.demand import NO_DEMAND, Demand, DemandMessages, PrefixOffers
from restow.broker.core.handoffs.lease import Lease
from restow.broker.core.handoffs.publication import Publication, SourceSide
from restow.broker.core.handoffs.timeline import Timeline
from restow.broker.errors import HandoffConflictError, HandoffOwnedError, RestowError


def owned(
    handoff_id: str, side: str, verb: str, owner: EngineRecord, caller: EngineRecord
) -> HandoffOwnedError:
    """Return the error for a side of a handoff that another engine has."""
    return HandoffOwnedError(
        f"handoff {handoff_id} was {verb} by engine {owner.key.engine_id} (incarnation "
        f"{owner.incarnation}), not by {caller.key.engine_id} (incarnation {caller.incarnation})",
        handoff=handoff_id,
        side=side,
    )


def no_place(handoff_id: str, words: str, engine: EngineRecord) -> HandoffOwnedError:
    """Return the error for a demand when all readers of the handoff have their deliveries."""
    return HandoffOwnedError(
        f"handoff {handoff_id} has no reader's place for engine {engine.key.engine_id}: {words}",
        handoff=handoff_id,
        side="destination",
    )


def asked_before(handoff_id: str, engine: EngineRecord) -> HandoffConflictError:
    """Return the error for a second, different demand of an engine."""
    return HandoffConflictError(
        f"engine {engine.key.engine_id} has already asked for handoff {handoff_id}: use a new id "
        f"for another demand",
        handoff=handoff_id,
    )


def waited_for(handoff_id: str, engine: EngineRecord) -> HandoffConflictError:
    """Return the error for a demand by prefix under an id that others use for a publication."""
    return HandoffConflictError(
        f"engine {engine.key.engine_id} asks by prefix for handoff {handoff_id}, but others wait "
        f"for a publication under this id: use a new id for a demand by prefix",
        handoff=handoff_id,
    )


def named_late(handoff_id: str) -> HandoffConflictError:
    """Return the error for a number of readers that P names after reading has begun."""
    return HandoffConflictError(
        f"handoff {handoff_id} is already being read by its only reader: name the number of "
        f"readers in the first chunk",
        handoff=handoff_id,
    )


def used_again(
    handoff_id: str, state: State, engine: EngineRecord, verb: str
) -> HandoffConflictError:
    """Return the error for a message about a handoff that has ended."""
    return HandoffConflictError(
        f"handoff {handoff_id} has ended {state}, but engine {engine.key.engine_id} {verb} again: "
        f"use a new id",
        handoff=handoff_id,
    )


MAX_READERS = 64
MAX_DELIVERIES = 128
"""Per publication, live or remembered."""


@dataclass(slots=True, eq=False)
class Deliveries:
    """The deliveries of a publication, by D, and the number of its readers."""

    readers: int = 0
    """Readers that must have the state before P's pages are free. 0 if nobody named a number; the
    handoff is then its own only delivery."""
    by_engine: dict[EngineKey, Handoff] = field(default_factory=dict)
    """The latest delivery of each D."""
    done: int = 0
    declined: int = 0
    """Readers that did without the state."""

    def __iter__(self) -> Iterator[Handoff]:
        """Iterate over the deliveries that have not ended, in the order of their demands."""
        return iter([delivery for delivery in self.by_engine.values() if not delivery.ended])

    @property
    def reading(self) -> list[Handoff]:
        """Return the granted deliveries."""
        return [delivery for delivery in self if delivery.granted]

    @property
    def has_place(self) -> bool:
        """Return whether another D may read."""
        return self.done + self.declined + len(self.reading) < self.readers

    @property
    def served(self) -> bool:
        """Return whether readers were named and each has the state or does without."""
        return 0 < self.readers <= self.done + self.declined

    def has_room(self) -> bool:
        """Make room for another delivery; return False if no delivery can be forgotten."""
        if len(self.by_engine) >= MAX_DELIVERIES:
            deliveries = self.by_engine.items()
            lost = next(
                (
                    key
                    for key, delivery in deliveries
                    if delivery.ended and delivery.state is not State.DONE
                ),
                None,
            )
            if lost is None:
                return False
            del self.by_engine[lost]
        return True

    def count(self, delivery: Handoff) -> None:
        """Count a delivery that ended. A decline counts only if a reader's place is left."""
        if delivery.failure is None:
            self.done += 1
        elif is_served(delivery) and self.has_place:
            self.declined += 1

    def in_words(self) -> str:
        """Describe how many readers have the state and who is reading."""
        words = f"{self.done} of {self.readers} readers have it"
        if self.declined:
            words += f", {self.declined} did without"
        if names := [key.engine_id for key, delivery in self.by_engine.items() if delivery.granted]:
            words += f", read by {' and '.join(names)}"
        return words


def is_served(delivery: Handoff) -> bool:
    """Return whether an ended delivery serves D: D has the state, or does without."""
    failure = delivery.failure
    return delivery.ended and (failure is None or failure.reason == "DECLINED")


MAX_REASON = 64
MAX_DETAIL = 512
MAX_RANK_BYTES = 1 << 50


@dataclass(slots=True, eq=False)
class Handoff:
    """A handoff: a publication, a delivery of a shared publication, or both."""

    number: int
    tenant: str
    handoff_id: str
    born_s: float
    account: Account
    """The account of its tenant."""
    state: State = State.WAITING
    parent: Handoff | None = None
    """The publication that it is a delivery of; None for a publication."""
    side: SourceSide = field(default_factory=SourceSide)
    """P's side; a delivery shares that of its parent."""
    deliveries: Deliveries = field(default_factory=Deliveries)
    destination: EngineRecord | None = None
    demand: Demand = NO_DEMAND
    asked_s: float = 0.0
    """When D last stated its demand."""
    lives: tuple[int, int] | None = None
    """`EngineRecord.replacements` of P and D at the first grant; None if nothing was read for D."""
    demand_messages: DemandMessages = field(default_factory=DemandMessages)
    """D's messages that state the demand."""
    asked_again: bool = False
    """Whether D had already asked an earlier broker."""
    sampled_told: bool = False
    """Whether each of D's messages was told the token that P sampled."""
    offer: PrefixOffers | None = None
    """The offers, if D asked by prefix and no publication was waiting."""
    lease: Lease = field(default_factory=Lease)
    queued: bool = False
    """Whether D's agents read other states first."""
    looked_s: float = math.inf
    """When the clock checks the handoff next."""
    dst_checked: int = 0
    """`EngineRecord.admitted` when D's ids were checked."""
    writing: int = 0
    """The number under which `PagesInUse` has D's blocks; 0 if none of them may be written any
    more."""
    pair: PairPlan | None = None
    """The plan of the grant; None before the grant and after the end."""
    met_s: float = 0.0
    """When P's state was complete and D had asked for it; 0 until then."""
    strategies: tuple[str, ...] = ()
    """The strategies of that plan, also after the end."""
    granted_s: float = 0.0
    unsettled: set[int] = field(default_factory=set)
    unheard: set[int] = field(default_factory=set)
    """Ranks of D that may still execute an order of an earlier broker."""
    staged: dict[tuple[int, int], StagedRun] = field(default_factory=dict)
    """(destination rank, source rank) -> the run that was gathered and hashed."""
    stagers: dict[int, AgentRecord] = field(default_factory=dict)
    """Source rank -> the agent that holds its gathered run."""
    part_tokens: int = 0
    """End of the early read of the present grant; 0 without a grant, or if it reads the whole."""
    early_tokens: int = 0
    """Number of leading tokens that were read early."""
    early_bytes: int = 0
    """Bytes of these tokens."""
    whole_only: bool = False
    """Whether an early read took too long, so that D reads the rest only when P's state is
    complete."""
    bytes_read: int = 0
    given_back: bool = False
    """Whether the grant is revoked and will be given again when no rank reads any more."""
    ended: bool = False
    """Whether the handoff has ended and nothing changes any more."""
    ended_s: float = 0.0
    asked: int = 0
    """The key of D's demand, by which a repetition is recognized after the end."""
    failure: Failure | None = None
    trace_parent: str = ""
    """W3C trace context of the request; empty if there is none."""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def granted(self) -> bool:
        """Return whether ranks may be reading."""
        return self.pair is not None

    @property
    def begun(self) -> bool:
        """Return whether bytes may have been read for D's demand, now or under an earlier grant."""
        return self.lives is not None

    @property
    def ranks_away(self) -> bool:
        """Return whether ranks may be reading whose agents are away, and may come back."""
        return self.destination is not None and not self.unsettled.isdisjoint(self.destination.away)

    @property
    def first_token(self) -> int:
        """Return the first token that D still lacks."""
        return max(self.demand.held_tokens, self.early_tokens)

    @property
    def stop_token(self) -> int:
        """Return the end of the tokens that the grant, or the next grant, reads."""
        return self.part_tokens or self.side.publication.position_tokens

    @property
    def source(self) -> EngineRecord | None:
        """Return P."""
        return self.side.engine

    @property
    def publication(self) -> Publication:
        """Return what P has published."""
        return self.side.publication

    @property
    def shared(self) -> bool:
        """Return whether it is a publication whose deliveries are handoffs of their own."""
        return self.deliveries.readers > 0

    def next_look_s(self) -> float:
        """Return when the clock must act if no message comes; not while deliveries may read."""
        until_s = [delivery.lease.settle_until_s for delivery in self.deliveries.reading]
        return max([self.lease.next_look_s(), *until_s])

    @property
    def transfer_s(self) -> float | None:
        """Return the time from the grant to the end; None without a grant or before the end."""
        return self.ended_s - self.granted_s if self.ended and self.granted_s else None

    @property
    def stands(self) -> bool:
        """Return whether both engines have named the handoff in their present process."""
        source, destination = self.side.engine, self.destination
        return (
            source is not None
            and destination is not None
            and self.side.said_s >= source.repeat_from_s
            and self.asked_s >= destination.repeat_from_s
        )

    def gathers_on(self, src_rank: int) -> bool:
        """Return whether a rank of P has gathered or hashed for this handoff, or was told to."""
        return self.pair is not None and any(
            gather.src_rank == src_rank for gather in self.pair.gathers
        )

    def check_source(self, engine: EngineRecord) -> None:
        """Raise `HandoffOwnedError` if another engine is P."""
        source = self.side.engine
        if source is not None and source is not engine:
            raise owned(self.handoff_id, "source", "published", source, engine)

    def check_destination(self, engine: EngineRecord) -> None:
        """Raise `HandoffOwnedError` if another engine is D."""
        if self.destination is not None and self.destination is not engine:
            raise owned(self.handoff_id, "destination", "asked for", self.destination, engine)

    def weights_differ(self, destination: EngineRecord) -> bool:
        """Return whether P and D computed with different weights."""
        wanted = self.demand.revision or destination.layout.model.revision
        return self.side.revision != wanted

    def publish(self, engine: EngineRecord, chunk: Chunk, now_s: float) -> None:
        """Add a chunk of P's, or a repetition of an earlier chunk. Raises as `SourceSide.publish`.

        The caller has checked that no other engine is P.
        """
        self.side.publish(self.handoff_id, engine, chunk, now_s)
        self.deliveries.readers = self.side.publication.readers or self.deliveries.readers
        for part in (self, *self.deliveries) if self.deliveries.by_engine else (self,):
            part.lease.renew(chunk.lease_s, now_s)
        self.trace_parent = self.trace_parent or chunk.trace_parent
        at = chunk.position_tokens if chunk.final else "a chunk"
        self.timeline.note_often(now_s, "published", at)

    def renew(self, lease_s: float, now_s: float) -> None:
        """Extend P's lease."""
        for part in (self, *self.deliveries):
            part.lease.renew(lease_s, now_s)
        self.timeline.note_often(now_s, "renewed", lease_s)

    def fence(self, rank: int, tokens: int, now_s: float) -> None:
        """Record that a rank of P has ``tokens`` leading tokens in memory, or for 0 the whole."""
        side = self.side
        if tokens:
            side.fenced_tokens[rank] = max(tokens, side.fenced_tokens.get(rank, 0))
            self.timeline.note_often(now_s, "fenced early", (rank, tokens))
        else:
            side.fence(rank)
            self.timeline.note(now_s, "fenced", rank)

    def ask(self, engine: EngineRecord, wish: Wish, now_s: float) -> bool:
        """Accept D's demand; return False if it is a repetition.

        Raises a `PagesError`, `HandoffOwnedError`, `HandoffConflictError`, and what `Account.keep`
        raises; in any case nothing changes.
        """
        if self.destination is not None:
            self.check_destination(engine)
        demand = Demand.checked(self.handoff_id, engine, wish)
        if self.destination is not None:
            if demand != self.demand or not wish.repeated:
                raise asked_before(self.handoff_id, engine)
            self.add_demand_message(engine, wish.demand)
            self.asked_s = now_s
            return False
        if self.side.publication.final and (demand.content or demand.prefix is not None):
            demand.check_content(self.handoff_id, self.side.publication)
        engine.account.keep(demand.size_bytes)
        if engine.in_use is not None:
            try:
                engine.in_use.take(self, demand.blocks, demand.held_tokens)
            except RestowError:
                engine.account.let_go(demand.size_bytes)
                raise
        self.destination = engine
        self.demand, self.asked_s = demand, now_s
        self.demand_messages.add(wish.demand)
        self.asked_again = wish.repeated
        self.lease.ask(wish.timeout_s, now_s)
        self.dst_checked = engine.admitted
        if wish.repeated:
            self.unheard = engine.unheard_ranks
        self.trace_parent = self.trace_parent or wish.trace_parent
        self.timeline.append((now_s, "requested", wish.held_tokens))
        return True

    def tell_sampled(self) -> list[Action]:
        """Tell D the token that P sampled, if D wants it, both sides fit and D has not heard."""
        if self.sampled_told or self.side.publication.sampled_token is None:
            return []
        actions = [
            action
            for number in self.demand_messages.numbers
            for action in self.tell_sampled_to(number)
        ]
        self.sampled_told = bool(actions)
        return actions

    def tell_sampled_to(self, number: int) -> list[Action]:
        """Tell D the sampled token by its message ``number``, even if D was told before."""
        destination, token = self.destination, self.side.publication.sampled_token
        if token is None or destination is None or number < 1:
            return []
        if not self.demand.fits_sampled(self.handoff_id, self.publication):
            return []
        return [TellSampled(destination.key, self.handoff_id, number, token)]

    def add_demand_message(self, engine: EngineRecord, number: int) -> None:
        """Add D's message ``number``, which will be told the end. Raises `HandoffConflictError`."""
        if not self.demand_messages.add(number):
            raise asked_before(self.handoff_id, engine)
        self.sampled_told = False

    def check_published_before(self, engine: EngineRecord, chunk: Chunk) -> None:
        """Check that P may be told how an ended handoff ended.

        Raises `HandoffOwnedError`, and `HandoffConflictError` if P publishes something new under
        the id of a handoff that has ended.
        """
        self.check_source(engine)
        if self.publication.final and not chunk.repeated:
            raise used_again(self.handoff_id, self.state, engine, "publishes it")

    def check_asked_before(self, engine: EngineRecord, wish: Wish) -> None:
        """Check that D may be told how an ended handoff ended.

        Raises `HandoffOwnedError`, and `HandoffConflictError` if this is another demand, because
        the end says nothing about the pages of another demand.
        """
        self.check_destination(engine)
        if self.destination is not None:
            demand = Demand.of(wish)
            once = len(demand.blocks) == len(wish.blocks)
            if not wish.repeated or not once or self.asked != demand.key:
                raise used_again(self.handoff_id, self.state, engine, "asks for it")

    def forget_blocks(self) -> None:
        """Keep only what the timeline of an ended handoff needs."""
        size_bytes = HANDOFF_BYTES
        if self.parent is None:
            size_bytes += self.side.forget_blocks()
        if self.destination is not None:
            self.asked = self.demand.key
            self._give_blocks_back(self.destination)
            size_bytes += self.demand.size_bytes
            self.demand = self.demand.without_blocks()
        self.account.let_go(size_bytes)
        if self.staged:
            self.staged, self.stagers = {}, {}
        self.pair = None

    def keep_part(self) -> None:
        """Record that all ranks have finished an early read."""
        self.early_tokens, self.early_bytes = self.part_tokens, self.bytes_read

    def forget_grant(self, number: int) -> None:
        """Drop the grant and take another number, so that late reports of it are ignored."""
        self.number = number
        self.state = State.READY if self.side.complete else State.WAITING
        self.pair = None
        self.staged, self.stagers = {}, {}
        self.unsettled = set()
        self.failure = None
        self.given_back = False
        self.granted_s = 0.0
        self.lease.revoke()
        self.part_tokens = 0
        self.bytes_read = self.early_bytes
        self.looked_s = math.inf

    def forget_early(self) -> None:
        """Discard what was read early."""
        self.early_tokens = self.early_bytes = self.bytes_read = 0

    def _give_blocks_back(self, engine: EngineRecord) -> None:
        """Return D's blocks to D; blocks of a handoff in quarantine may still be written."""
        if engine.in_use is not None:
            if self.demand.held_tokens:
                engine.in_use.forget_held(self.demand.blocks, self.demand.held_tokens)
            if self.number not in engine.quarantined:
                engine.in_use.give_back(self)

    def forget_demand(self) -> None:
        """Remove the demand, so that another D may ask."""
        if self.destination is not None:
            self._give_blocks_back(self.destination)
            self.account.let_go(self.demand.size_bytes)
        self.destination = None
        self.demand, self.demand_messages = NO_DEMAND, DemandMessages()
        self.sampled_told = False
        self.queued = False
        self.lives = None
        self.met_s = 0.0
        self.forget_early()
        self.whole_only = False
        self.lease.forget_demand()

    def fail(self, failure: Failure, now_s: float) -> None:
        """Record the first failure."""
        if self.failure is None:
            state, reason, detail = failure.state, failure.reason, failure.detail
            self.failure = Failure(state, reason[:MAX_REASON], detail[:MAX_DETAIL])
            self.timeline.note(now_s, self.failure.reason.lower(), self.failure.detail)

    def settle(self, rank: int, size_bytes: int, elapsed_us: int, now_s: float) -> None:
        """Record that a rank has finished its part."""
        self.unsettled.discard(rank)
        self.bytes_read += min(max(size_bytes, 0), MAX_RANK_BYTES)
        self.timeline.note(now_s, "settled", (rank, size_bytes, elapsed_us))

    def forget_untold(self) -> None:
        """Forget ranks that were never told to read; they have nothing to settle."""
        if self.state is State.STAGING and self.pair is not None:
            for dst_rank in self.pair.staging:
                if not self.is_staged(self.pair, dst_rank):
                    self.unsettled.discard(dst_rank)

    def may_read(self, rank: int) -> bool:
        """Return whether a destination rank was told to read and has not settled."""
        if rank not in self.unsettled or self.pair is None:
            return False
        return self.state is State.READING or self.is_staged(self.pair, rank)

    def is_staged(self, pair: PairPlan, dst_rank: int) -> bool:
        """Return whether all staged runs of a destination rank are ready."""
        return all((dst_rank, src_rank) in self.staged for src_rank in pair.staging[dst_rank])
