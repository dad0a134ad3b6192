"""One handoff: what is known of it, and what each event does to it.

    WAITING --published, fenced by all--> READY --granted--> (STAGING -->) READING --> DONE
       |                                    |                    |             |
       +------------------------------------+--------------------+-------------+--> FAILED,
                                                              EXPIRED or CANCELLED

Who may touch which pages, by half-open ranges of time:

    pages of    [published, granted)   [granted, last rank settled)   [ended, ...)
    P           leased, at rest        being read                     P's again
    D           D's, unread            being written                  D's; state iff DONE

So a failure between grant and settlement is only noted: the handoff ends when no rank can be
reading any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from restow.broker.core.actions import GroupIds, State
from restow.broker.core.roster import EngineRecord
from restow.broker.errors import HandoffConflictError, HandoffOwnedError, PageCountError


class Chunk(NamedTuple):
    """A part of P's publication."""

    blocks: tuple[tuple[str, int, bytes], ...]
    """Group, place of the first id, ids."""
    position_tokens: int
    final: bool
    lease_s: float


class Wish(NamedTuple):
    """D's demand."""

    blocks: tuple[GroupIds, ...]
    held_tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a handoff ends other than DONE."""

    state: State
    reason: str
    detail: str


@dataclass(slots=True)
class Handoff:
    """What the broker knows of one handoff."""

    number: int
    tenant: str
    handoff_id: str
    born_s: float
    state: State = State.WAITING
    source: EngineRecord | None = None
    destination: EngineRecord | None = None
    src_blocks: dict[str, bytes] = field(default_factory=dict)
    dst_blocks: tuple[GroupIds, ...] = ()
    position_tokens: int = 0
    held_tokens: int = 0
    final: bool = False
    fenced: set[int] = field(default_factory=set)
    lease_until_s: float = 0.0
    patience_until_s: float = 0.0
    granted_s: float = 0.0
    grant_until_s: float = 0.0
    settle_until_s: float = 0.0
    """The grant and the grace in which reports of it may still arrive."""
    unsettled: set[int] = field(default_factory=set)
    staged: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(destination rank, source rank) -> (address, bytes) of gathered runs."""
    bytes_read: int = 0
    ended_s: float = 0.0
    failure: Failure | None = None
    timeline: list[tuple[float, str, object]] = field(default_factory=list)

    def note(self, now_s: float, event: str, detail: object = "") -> None:
        """Put something on the timeline."""
        self.timeline.append((now_s, event, detail))

    @property
    def granted(self) -> bool:
        """Whether ranks may be reading."""
        return self.state is State.STAGING or self.state is State.READING

    @property
    def complete(self) -> bool:
        """Whether P's state is published and fenced on every rank."""
        return self.final and self.source is not None and len(self.fenced) >= self.source.ranks

    def claim_source(self, engine: EngineRecord) -> None:
        """Make ``engine`` P. Raises `HandoffOwnedError` if another one is."""
        if self.source is not None and self.source is not engine:
            raise HandoffOwnedError(
                f"handoff {self.handoff_id} is published by engine "
                f"{self.source.key.engine_id}, not by {engine.key.engine_id}",
                handoff=self.handoff_id,
                side="source",
            )
        self.source = engine

    def claim_destination(self, engine: EngineRecord) -> None:
        """Make ``engine`` D. Raises `HandoffOwnedError` if another one is."""
        if self.destination is not None and self.destination is not engine:
            raise HandoffOwnedError(
                f"handoff {self.handoff_id} was asked for by engine "
                f"{self.destination.key.engine_id}, not by {engine.key.engine_id}",
                handoff=self.handoff_id,
                side="destination",
            )
        self.destination = engine

    def publish(self, engine: EngineRecord, chunk: Chunk, now_s: float) -> None:
        """Take a chunk of P's, or a repetition of one.

        Raises a `PagesError`, `HandoffOwnedError` or `HandoffConflictError`; then nothing changed.
        """
        merged = dict(self.src_blocks)
        for group, first_block, data in chunk.blocks:
            engine.check_ids(group, data)
            merged[group] = self._append(merged.get(group, b""), group, first_block, data)
        if self.final and (
            merged != self.src_blocks
            or (chunk.final and chunk.position_tokens != self.position_tokens)
        ):
            raise HandoffConflictError(
                f"handoff {self.handoff_id} was published whole before, with other blocks or at "
                f"position {self.position_tokens}",
                handoff=self.handoff_id,
            )
        if chunk.final:
            if chunk.position_tokens < 1:
                raise PageCountError(
                    f"handoff {self.handoff_id}: position_tokens is {chunk.position_tokens}; "
                    f"a final publication needs at least 1",
                    handoff=self.handoff_id,
                )
            for group in engine.forms:
                engine.check_count(group, len(merged.get(group, b"")), chunk.position_tokens)
        self.claim_source(engine)
        self.src_blocks = merged
        if chunk.final:
            self.final = True
            self.position_tokens = chunk.position_tokens
        self.lease_until_s = max(self.lease_until_s, now_s + chunk.lease_s)
        self.note(now_s, "published", chunk.position_tokens if chunk.final else "a chunk")

    def _append(self, known: bytes, group: str, first_block: int, data: bytes) -> bytes:
        at = 4 * first_block
        if at == len(known):
            return known + data if known else data
        if first_block < 0 or at > len(known) or known[at : at + len(data)] != data:
            raise HandoffConflictError(
                f"handoff {self.handoff_id}, group {group}: a chunk at block {first_block} does "
                f"not continue the {len(known) // 4} blocks published before",
                handoff=self.handoff_id,
                group=group,
            )
        return known

    def fence(self, engine: EngineRecord, rank: int, now_s: float) -> None:
        """A rank of P has its part complete in memory. Raises `HandoffOwnedError`."""
        self.claim_source(engine)
        self.fenced.add(rank)
        self.note(now_s, "fenced", rank)

    def ask(self, engine: EngineRecord, wish: Wish, now_s: float) -> bool:
        """Take D's demand; False if it is a repetition.

        Raises a `PagesError`, `HandoffOwnedError` or `HandoffConflictError`; then nothing changed.
        """
        for group, data in wish.blocks:
            engine.check_ids(group, data)
        repeated = self.destination is not None
        self.claim_destination(engine)
        if repeated:
            if (wish.blocks, wish.held_tokens) != (self.dst_blocks, self.held_tokens):
                raise HandoffConflictError(
                    f"engine {engine.key.engine_id} asked for handoff {self.handoff_id} before, "
                    f"with other blocks",
                    handoff=self.handoff_id,
                )
            return False
        self.dst_blocks = wish.blocks
        self.held_tokens = wish.held_tokens
        self.patience_until_s = now_s + wish.timeout_s
        self.note(now_s, "requested", wish.held_tokens)
        return True

    def fail(self, failure: Failure, now_s: float) -> None:
        """Note the first thing that went wrong."""
        if self.failure is None:
            self.failure = failure
            self.note(now_s, failure.reason.lower(), failure.detail)

    def next_look_s(self) -> float:
        """When something happens even if nobody says a word."""
        if self.granted:
            return self.settle_until_s
        waits = [t for t in (self.lease_until_s, self.patience_until_s) if t > 0]
        return min(waits)
