"""P's side of a handoff: what it has published and fenced, which all of its deliveries read."""

from __future__ import annotations

from dataclasses import dataclass, field

from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.events import Chunk
from restow.broker.core.handoffs.sides.publication import NOTHING_PUBLISHED, Publication
from restow.broker.errors import HandoffConflictError, RestowError, RevisionChangedError


@dataclass(slots=True, eq=False)
class SourceSide:
    """Who is P, which pages it has published, and which of its ranks have fenced them."""

    engine: EngineRecord | None = None
    publication: Publication = NOTHING_PUBLISHED
    fenced: set[int] = field(default_factory=set)
    fenced_tokens: dict[int, int] = field(default_factory=dict)
    """By rank that computes on: how many leading tokens are complete in its memory."""
    said_s: float = 0.0
    """When P published last."""
    revision: str = ""
    """Revision of the weights that P computed the state with."""
    checked: int = 0
    """`EngineRecord.admitted` when the oldest ids were checked."""
    anew: bool = False
    """Whether P took chunks back: leading tokens are not read early any more, since nothing tells
    whether a fence of them is of the first chunks or of those that followed."""
    number: int = 0
    """The number of P's message that published the last chunk."""
    repeated: bool = False
    """Whether P had said that message to a broker before."""

    @property
    def complete(self) -> bool:
        """Whether P's state is published and fenced on every rank."""
        engine, whole = self.engine, self.publication.final
        return whole and engine is not None and len(self.fenced) >= engine.ranks

    @property
    def begun(self) -> bool:
        """Whether any of its ranks has something complete in memory."""
        return bool(self.fenced or self.fenced_tokens)

    @property
    def early_tokens(self) -> int:
        """How many leading tokens are complete on every rank, before the whole is."""
        if self.anew or self.engine is None or len(self.fenced_tokens) < self.engine.ranks:
            return 0
        return min(self.fenced_tokens.values())

    def fence(self, rank: int, tokens: int) -> None:
        """A rank has its part complete in memory; of ``tokens`` leading ones, 0: all of it."""
        if tokens:
            self.fenced_tokens[rank] = max(tokens, self.fenced_tokens.get(rank, 0))
        else:
            self.fenced.add(rank)

    def unfence(self, rank: int) -> None:
        """A rank has lost its memory."""
        self.fenced.discard(rank)
        self.fenced_tokens.pop(rank, None)

    def publish(self, handoff_id: str, engine: EngineRecord, chunk: Chunk, now_s: float) -> None:
        """Take a chunk, or a repetition of one.

        Raises a `PagesError`, `HandoffConflictError`, `RevisionChangedError`, and what
        `Account.keep` raises; then nothing changed.
        """
        revision = engine.revision_said(chunk.revision)
        if self.engine is None:
            if revision != engine.revision:
                check_revision(engine, chunk.revision, f"publishes handoff {handoff_id}")
        elif revision != self.revision:
            raise RevisionChangedError(
                f"handoff {handoff_id}: a chunk is of revision {revision!r}, and those before it "
                f"are of {self.revision!r}: compute the prompt again under another id",
                handoff=handoff_id,
            )
        known = self.publication
        if chunk.anew != self.anew:
            if known.final or not chunk.anew:
                was = "published whole" if known.final else "taken back and published anew"
                raise HandoffConflictError(
                    f"handoff {handoff_id} was {was}, and this chunk is of another attempt: cancel "
                    f"the handoff, and use a new id",
                    handoff=handoff_id,
                )
            # Ranks that have fenced the whole were quicker than P's session: they have computed it
            # again, for the whole is fenced once.
            known = known.without_blocks()
        publication = known.with_chunk(handoff_id, engine, chunk)
        more_bytes = publication.size_bytes - self.publication.size_bytes
        engine.account.keep(more_bytes)
        if engine.in_use is not None:
            try:
                engine.in_use.publish(self, handoff_id, publication.blocks)
            except RestowError:
                engine.account.let_go(more_bytes)
                raise
        self.engine, self.said_s = engine, now_s
        self.revision, self.anew = revision, chunk.anew
        if not known.blocks:
            self.checked = engine.admitted
        if publication.final and not self.publication.final:
            self.number, self.repeated = chunk.number, chunk.repeated
        self.publication = publication

    def forget_blocks(self) -> None:
        """Keep of an ended publication what its story needs."""
        if self.engine is not None:
            self.engine.account.let_go(self.publication.size_bytes)
            if self.engine.in_use is not None:
                self.engine.in_use.unpublish(self)
        self.publication = self.publication.without_blocks()


def check_revision(engine: EngineRecord, revision: str, what: str) -> None:
    """Raise `RevisionChangedError` where ``what`` an engine does is of weights that it has not."""
    if not engine.has_revision(revision):
        raise RevisionChangedError(
            f"engine {engine.key.engine_id} {what} of revision "
            f"{engine.revision_said(revision)!r}, and its weights are of {engine.revision!r} now: "
            f"compute the prompt again",
            engine=engine.key.engine_id,
        )
