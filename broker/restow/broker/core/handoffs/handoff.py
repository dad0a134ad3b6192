"""What is answered to an engine whose word of a handoff is another's, or was said before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from restow.broker.core.common.actions import Action, TellSampled
from restow.broker.core.common.events import Chunk, Failure, StagedRun, Wish
from restow.broker.core.common.keys import EngineKey, State
from restow.broker.core.common.pair import PairPlan
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.handoffs.demand import NO_DEMAND, Demand, DemandMessages, Offer
from restow.broker.core.handoffs.lease import Lease
from restow.broker.core.handoffs.publication import Publication, SourceSide
from restow.broker.core.handoffs.timeline import Timeline
from restow.broker.errors import HandoffConflictError, HandoffOwnedError, RestowError


def owned(
    handoff_id: str, side: str, verb: str, owner: EngineRecord, other: EngineRecord
) -> HandoffOwnedError:
    """Another engine has that side."""
    return HandoffOwnedError(
        f"handoff {handoff_id} is {verb} by engine {owner.key.engine_id} (incarnation "
        f"{owner.incarnation}), not by {other.key.engine_id} (incarnation {other.incarnation})",
        handoff=handoff_id,
        side=side,
    )


def no_place(handoff_id: str, words: str, other: EngineRecord) -> HandoffOwnedError:
    """All its readers have their deliveries."""
    return HandoffOwnedError(
        f"handoff {handoff_id} is not for engine {other.key.engine_id} too: {words}",
        handoff=handoff_id,
        side="destination",
    )


def asked_before(handoff_id: str, engine: EngineRecord) -> HandoffConflictError:
    """It is a second demand of one engine."""
    return HandoffConflictError(
        f"engine {engine.key.engine_id} has asked for handoff {handoff_id} already: an id "
        f"names one state for one demand",
        handoff=handoff_id,
    )


def waited_for(handoff_id: str, engine: EngineRecord) -> HandoffConflictError:
    """It is asked for by a prefix, and others wait until a P publishes it."""
    return HandoffConflictError(
        f"engine {engine.key.engine_id} asks by a prefix for handoff {handoff_id}, which others "
        f"wait for: a demand by prefix has an id of its own",
        handoff=handoff_id,
    )


def named_late(handoff_id: str) -> HandoffConflictError:
    """Its readers are named when one of them reads already."""
    return HandoffConflictError(
        f"handoff {handoff_id} is being read, and was published for one reader: name its readers "
        f"in the first chunk",
        handoff=handoff_id,
    )


def used_again(
    handoff_id: str, state: State, engine: EngineRecord, verb: str
) -> HandoffConflictError:
    """It has ended, and is said anew."""
    return HandoffConflictError(
        f"handoff {handoff_id} has ended {state}, and engine {engine.key.engine_id} {verb} again: "
        f"an id names one state, use a new one",
        handoff=handoff_id,
    )


MAX_READERS = 64
MAX_DELIVERIES = 128
"""Of one publication, live or remembered."""


@dataclass(slots=True, eq=False)
class Deliveries:
    """What became of each D that asked, and how many readers the publication has."""

    readers: int = 0
    """How many must have the state before P's pages are free; 0: nobody named any, and the handoff
    is its own one delivery."""
    by_engine: dict[EngineKey, Handoff] = field(default_factory=dict)
    """The latest of each D."""
    done: int = 0
    declined: int = 0
    """Readers that did without."""

    def __iter__(self) -> Iterator[Handoff]:
        """Those that have not ended, the one first that asked first."""
        if not self.by_engine:  # most handoffs have none
            return iter(())
        return iter([one for one in self.by_engine.values() if not one.ended])

    @property
    def reading(self) -> list[Handoff]:
        """Those that are granted."""
        return [one for one in self if one.granted]

    @property
    def has_place(self) -> bool:
        """Whether another one may read."""
        return self.done + self.declined + len(self.reading) < self.readers

    @property
    def served(self) -> bool:
        """Whether readers were named, and each has it or does without."""
        return 0 < self.readers <= self.done + self.declined

    def has_room(self) -> bool:
        """Make room for one more; False: too many are kept that must be."""
        if len(self.by_engine) >= MAX_DELIVERIES:
            ended = self.by_engine.items()
            lost = next((k for k, one in ended if one.ended and one.state is not State.DONE), None)
            if lost is None:
                return False
            del self.by_engine[lost]
        return True

    def count(self, delivery: Handoff) -> None:
        """One has ended. A decline takes no place from those that read."""
        if delivery.failure is None:
            self.done += 1
        elif is_served(delivery) and self.has_place:
            self.declined += 1

    def in_words(self) -> str:
        """How many have it, and who reads."""
        words = f"{self.done} of {self.readers} readers have it"
        if self.declined:
            words += f", {self.declined} did without"
        if names := [key.engine_id for key, one in self.by_engine.items() if one.granted]:
            words += f", read by {' and '.join(names)}"
        return words


def is_served(delivery: Handoff) -> bool:
    """Whether D needs an ended one no more: it has the state, or does without."""
    failure = delivery.failure
    return delivery.ended and (failure is None or failure.reason == "DECLINED")


MAX_REASON = 64
MAX_DETAIL = 512
MAX_RANK_BYTES = 1 << 50


@dataclass(slots=True, eq=False)
class Handoff:
    """What the broker knows of one handoff."""

    number: int
    tenant: str
    handoff_id: str
    born_s: float
    state: State = State.WAITING
    parent: Handoff | None = None
    """The publication that it is a delivery of; None: it is one, or both."""
    side: SourceSide = field(default_factory=SourceSide)
    """P's; of a delivery that of its parent."""
    deliveries: Deliveries = field(default_factory=Deliveries)
    destination: EngineRecord | None = None
    demand: Demand = NO_DEMAND
    asked_s: float = 0.0
    """When D said its demand last."""
    lives: tuple[int, int] | None = None
    """`EngineRecord.replacements` of P and D at the first grant; None: nothing was read for D."""
    demand_messages: DemandMessages = field(default_factory=DemandMessages)
    """D's messages that say the demand."""
    asked_again: bool = False
    """Whether D had asked a broker before."""
    sampled_told: bool = False
    """Whether D was told the token that P sampled, by each of them."""
    offer: Offer | None = None
    """Where it asked by prefix, and had to be offered."""
    lease: Lease = field(default_factory=Lease)
    queued: bool = False
    """Whether D's agents read others' states first."""
    looked_s: float = math.inf
    """When the clock looks at it next."""
    dst_checked: int = 0
    """`EngineRecord.admitted` when D's ids were checked."""
    writing: int = 0
    """The number under which `PagesInUse` has D's blocks; 0: none of them is written any more."""
    pair: PairPlan | None = None
    """The plan that it was granted with; None before the grant and after the end."""
    met_s: float = 0.0
    """When P's state was whole and D had asked for it; 0: not yet."""
    strategies: tuple[str, ...] = ()
    """The ways in which that plan has rows travel, also after the end."""
    granted_s: float = 0.0
    unsettled: set[int] = field(default_factory=set)
    unheard: set[int] = field(default_factory=set)
    """Ranks of D that may be at work on an order of a broker before this one."""
    staged: dict[tuple[int, int], StagedRun] = field(default_factory=dict)
    """(destination rank, source rank) -> what was gathered and hashed."""
    stagers: dict[int, AgentRecord] = field(default_factory=dict)
    """Source rank -> the agent that holds what was gathered there."""
    part_tokens: int = 0
    """Up to where the grant that it has reads early; 0: it has none, or reads the whole."""
    early_tokens: int = 0
    """How many leading tokens were read early."""
    early_bytes: int = 0
    """What was read of them."""
    whole_only: bool = False
    """Whether an early read took too long: D reads the rest when P has computed all of it."""
    bytes_read: int = 0
    given_back: bool = False
    """Whether its grant is taken back, to be given anew, once no rank reads any more."""
    ended: bool = False
    """Whether nothing can happen to it any more."""
    ended_s: float = 0.0
    asked: int = 0
    """The key of D's demand, to know a repetition after the end."""
    failure: Failure | None = None
    trace_parent: str = ""
    """W3C trace context of the request that it is for; empty: none was told."""
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def granted(self) -> bool:
        """Whether ranks may be reading."""
        return self.pair is not None

    @property
    def begun(self) -> bool:
        """Whether bytes may have been read for D's demand, now or under an earlier grant."""
        return self.lives is not None

    @property
    def first_token(self) -> int:
        """Where the tokens begin that D lacks still."""
        return max(self.demand.held_tokens, self.early_tokens)

    @property
    def stop_token(self) -> int:
        """One past the last token that its grant reads, or its next one if that is the last."""
        return self.part_tokens or self.publication.position_tokens

    @property
    def source(self) -> EngineRecord | None:
        """P."""
        return self.side.engine

    @property
    def publication(self) -> Publication:
        """What P has published."""
        return self.side.publication

    @property
    def fenced(self) -> set[int]:
        """P's ranks whose part is complete in memory."""
        return self.side.fenced

    @property
    def complete(self) -> bool:
        """Whether P's state is published whole, and fenced on every rank."""
        return self.side.complete

    @property
    def shared(self) -> bool:
        """Whether it is a publication whose deliveries are handoffs of their own."""
        return self.deliveries.readers > 0

    def next_look_s(self) -> float:
        """When something happens even if nobody says a word: not while deliveries may read."""
        look_s = self.lease.next_look_s()
        if self.deliveries.by_engine:
            for one in self.deliveries:
                if one.granted:
                    look_s = max(look_s, one.lease.settle_until_s)
        return look_s

    @property
    def transfer_s(self) -> float | None:
        """From the grant to the end; None: it was not granted, or has not ended."""
        return self.ended_s - self.granted_s if self.ended and self.granted_s else None

    def gathers_on(self, src_rank: int) -> bool:
        """Whether a rank of P has gathered or hashed for it, or was told to."""
        return self.pair is not None and any(
            gather.src_rank == src_rank for gather in self.pair.gathers
        )

    def check_source(self, engine: EngineRecord) -> None:
        """Raise `HandoffOwnedError` if another engine is P."""
        if self.source is not None and self.source is not engine:
            raise owned(self.handoff_id, "source", "published", self.source, engine)

    def check_destination(self, engine: EngineRecord) -> None:
        """Raise `HandoffOwnedError` if another engine is D."""
        if self.destination is not None and self.destination is not engine:
            raise owned(self.handoff_id, "destination", "asked for", self.destination, engine)

    def weights_differ(self, destination: EngineRecord) -> bool:
        """Return whether P's state was computed with other weights than D computes with."""
        return self.side.revision != destination.revision_said(self.demand.revision)

    def publish(self, engine: EngineRecord, chunk: Chunk, now_s: float) -> None:
        """Take a chunk of P's, or a repetition of one.

        Raises a `PagesError`, `HandoffOwnedError`, `HandoffConflictError`, and what `Account.keep`
        raises; then nothing changed.
        """
        self.check_source(engine)
        self.side.publish(self.handoff_id, engine, chunk, now_s)
        self.deliveries.readers = self.publication.readers or self.deliveries.readers
        for one in (self, *self.deliveries):
            one.lease.renew(chunk.lease_s, now_s)
        self.trace_parent = self.trace_parent or chunk.trace_parent
        at = chunk.position_tokens if chunk.final else "a chunk"
        self.timeline.note_often(now_s, "published", at)

    def renew(self, lease_s: float, now_s: float) -> None:
        """P prolongs its lease."""
        for one in (self, *self.deliveries):
            one.lease.renew(lease_s, now_s)
        self.timeline.note_often(now_s, "renewed", lease_s)

    def fence(self, rank: int, tokens: int, now_s: float) -> None:
        """A rank of P has its part complete in memory; of ``tokens`` leading ones, 0: all of it."""
        self.side.fence(rank, tokens)
        if tokens:
            self.timeline.note_often(now_s, "fenced early", (rank, tokens))
        else:
            self.timeline.note(now_s, "fenced", rank)

    def ask(self, engine: EngineRecord, wish: Wish, now_s: float) -> bool:
        """Take D's demand; False if it is a repetition.

        Raises a `PagesError`, `HandoffOwnedError`, `HandoffConflictError`, and what `Account.keep`
        raises; then nothing changed.
        """
        self.check_destination(engine)
        demand = Demand.checked(self.handoff_id, engine, wish)
        if self.destination is not None:
            if demand != self.demand or not wish.repeated:
                raise asked_before(self.handoff_id, engine)
            self.add_demand_message(engine, wish.demand)
            self.asked_s = now_s
            return False
        if self.publication.final:
            demand.check_content(self.handoff_id, self.publication)
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
        self.timeline.note(now_s, "requested", wish.held_tokens)
        return True

    def tell_sampled(self) -> list[Action]:
        """Have D hear the token that P sampled, if it takes that, all fits and it has not heard."""
        if self.sampled_told:
            return []
        actions = [
            action
            for number in self.demand_messages.numbers
            for action in self.tell_sampled_to(number)
        ]
        self.sampled_told = bool(actions)
        return actions

    def tell_sampled_to(self, number: int) -> list[Action]:
        """Have D hear it by its message ``number``, whether or not it has heard it."""
        destination, token = self.destination, self.publication.sampled_token
        if token is None or destination is None or number < 1:
            return []
        if not self.demand.fits_sampled(self.handoff_id, self.publication):
            return []
        return [TellSampled(destination.key, self.handoff_id, number, token)]

    def add_demand_message(self, engine: EngineRecord, number: int) -> None:
        """Take D's message ``number``, which is told the end. Raises `HandoffConflictError`."""
        if not self.demand_messages.add(number):
            raise asked_before(self.handoff_id, engine)
        self.sampled_told = False

    def check_published_before(self, engine: EngineRecord, chunk: Chunk) -> None:
        """Whether P may be told how an ended handoff ended.

        Raises `HandoffOwnedError`, and `HandoffConflictError` where this is another publication
        under the id of one that has ended.
        """
        self.check_source(engine)
        if self.publication.final and not chunk.repeated:
            raise used_again(self.handoff_id, self.state, engine, "publishes it")

    def check_asked_before(self, engine: EngineRecord, wish: Wish) -> None:
        """Whether D may be told how an ended handoff ended.

        Raises `HandoffOwnedError`, and `HandoffConflictError` where this is another demand: the end
        says nothing of the pages that are asked for now.
        """
        self.check_destination(engine)
        if self.destination is not None:
            demand = Demand.of(wish)
            once = len(demand.blocks) == len(wish.blocks)
            if not wish.repeated or not once or self.asked != demand.key:
                raise used_again(self.handoff_id, self.state, engine, "asks for it")

    def forget_blocks(self) -> None:
        """Keep of an ended handoff what its story needs."""
        self.asked = self.demand.key
        self._let_blocks_go()
        if self.parent is None:
            self.side.forget_blocks()
        self.demand = self.demand.without_blocks()
        self.staged, self.stagers = {}, {}
        self.pair = None

    def keep_part(self) -> None:
        """All ranks have read what was to be read early."""
        self.early_tokens, self.early_bytes = self.part_tokens, self.bytes_read

    def forget_grant(self, number: int) -> None:
        """Have no grant, under another number: what is still said of the old one is of no use."""
        self.number = number
        self.state = State.READY if self.complete else State.WAITING
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
        """Be as if nothing had been read early."""
        self.early_tokens = self.early_bytes = self.bytes_read = 0

    def _let_blocks_go(self) -> None:
        """Have D's blocks be its own again; those in quarantine may still be written."""
        if (engine := self.destination) is None:
            return
        engine.account.let_go(self.demand.size_bytes)
        if engine.in_use is not None:
            if self.demand.held_tokens:
                engine.in_use.forget_held(self.demand.blocks, self.demand.held_tokens)
            if self.number not in engine.quarantined:
                engine.in_use.give_back(self)

    def forget_demand(self) -> None:
        """Be as if nobody had asked."""
        self._let_blocks_go()
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
        """Note the first thing that went wrong."""
        if self.failure is None:
            state, reason, detail = failure.state, failure.reason, failure.detail
            self.failure = Failure(state, reason[:MAX_REASON], detail[:MAX_DETAIL])
            self.timeline.note(now_s, self.failure.reason.lower(), self.failure.detail)

    def settle(self, rank: int, size_bytes: int, elapsed_us: int, now_s: float) -> None:
        """A rank has ended its part."""
        self.unsettled.discard(rank)
        self.bytes_read += min(max(size_bytes, 0), MAX_RANK_BYTES)
        self.timeline.note(now_s, "settled", (rank, size_bytes, elapsed_us))

    def forget_untold(self) -> None:
        """Ranks that were never told to read have nothing to settle."""
        if self.state is State.STAGING and self.pair is not None:
            for dst_rank in self.pair.staging:
                if not self.is_staged(self.pair, dst_rank):
                    self.unsettled.discard(dst_rank)

    def may_read(self, rank: int) -> bool:
        """Whether a destination rank was told to read and has not settled."""
        if rank not in self.unsettled or self.pair is None:
            return False
        return self.state is State.READING or self.is_staged(self.pair, rank)

    def is_staged(self, pair: PairPlan, dst_rank: int) -> bool:
        """Whether all that a destination rank reads through staging is there."""
        return all((dst_rank, src_rank) in self.staged for src_rank in pair.staging[dst_rank])
