"""P's side of a handoff: what it has published and fenced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from restow.broker.block_ids import ID_BYTES, MAX_BLOCKS, MAX_LIST_BYTES
from restow.broker.core.common.events import Chunk
from restow.broker.core.engines.blocks import BlockLists
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.errors import (
    HandoffConflictError,
    PageCountError,
    PagesError,
    RestowError,
    RevisionChangedError,
)

MAX_PUBLICATION_BYTES = 16 << 20
"""Limit for the ids of all lists, because an order with P's and D's ids must fit into a message."""


class Publication(NamedTuple):
    """What P has published of a handoff so far."""

    blocks: Mapping[str, bytes]
    position_tokens: int = 0
    content: bytes = b""
    """Identifies the state's content; empty if P named none."""
    final: bool = False
    """Whether the whole state is published."""
    readers: int = 0
    """Readers that must have the state, as P named it; 0 if P named no number."""
    sampled_token: int | None = None
    """The token that P sampled after the position; None if it sampled none."""
    size_bytes: int = 0
    """Bytes of all ids."""

    def with_chunk(self, handoff_id: str, lists: BlockLists, chunk: Chunk) -> Publication:
        """Return the publication with a new or repeated chunk; ``lists`` are P's.

        Raises a `PagesError` or `HandoffConflictError`.
        """
        merged = dict(self.blocks)
        listed: dict[str, bytes] = {}
        for group, first_block, data in chunk.blocks:
            if group in listed:  # repeated growth of a list within a chunk would copy it each time
                raise PagesError(
                    f"handoff {handoff_id}: group {group} is listed more than once in a chunk",
                    handoff=handoff_id,
                    group=group,
                )
            lists.check_ids(group, data)
            listed[group] = data
            if first_block or group in merged or len(data) > MAX_LIST_BYTES:
                data = _appended(merged.get(group, b""), handoff_id, group, first_block, data)
            merged[group] = data
        size_bytes = sum(map(len, merged.values()))
        if size_bytes > MAX_PUBLICATION_BYTES:
            raise PageCountError(
                f"handoff {handoff_id}: all lists have {size_bytes // ID_BYTES} blocks, but the "
                f"limit for a handoff is {MAX_PUBLICATION_BYTES // ID_BYTES}",
                handoff=handoff_id,
            )
        readers = max(self.readers, chunk.readers)
        at = chunk.position_tokens
        sampled = chunk.sampled_token
        said = Publication(merged, at, chunk.content, True, readers, sampled, size_bytes)
        if self.final and (merged != self.blocks or (chunk.final and said != self)):
            raise HandoffConflictError(
                f"handoff {handoff_id} was already published whole, at position "
                f"{self.position_tokens}, and this chunk differs in blocks, position, content, "
                f"readers or sampled token: use a new id",
                handoff=handoff_id,
            )
        if not chunk.final:
            return self._replace(blocks=merged, readers=readers, size_bytes=size_bytes)
        if chunk.position_tokens < 1:
            raise PageCountError(
                f"handoff {handoff_id}: position_tokens is {chunk.position_tokens}; a final "
                f"publication needs at least 1",
                handoff=handoff_id,
            )
        lists.check_counts(lists.block_tokens, merged, chunk.position_tokens)
        for group, data in merged.items():
            if listed.get(group) is not data:
                lists.check_distinct(group, data)  # over all chunks of the list
        if lists.overlaid:
            lists.check_overlaid(merged)
        return said

    def without_blocks(self) -> Publication:
        """Return what is remembered of the publication after the end."""
        return Publication({}, *self[1:6])


NOTHING_PUBLISHED = Publication({})


def _appended(known: bytes, handoff_id: str, group: str, first_block: int, data: bytes) -> bytes:
    """Append a chunk to a list; the chunk may first repeat known ids."""
    at = ID_BYTES * first_block
    again = known[at : at + len(data)] if 0 <= at <= len(known) else None
    if again is None or not data.startswith(again):
        raise HandoffConflictError(
            f"handoff {handoff_id}, group {group}: a chunk at block {first_block} does not "
            f"continue the {len(known) // ID_BYTES} blocks published before",
            handoff=handoff_id,
            group=group,
        )
    if at + len(data) > MAX_LIST_BYTES:
        raise PageCountError(
            f"handoff {handoff_id}, group {group}: more than {MAX_BLOCKS} blocks",
            handoff=handoff_id,
            group=group,
        )
    if len(again) == len(data):
        return known
    return known[:at] + data if at else data


@dataclass(slots=True, eq=False)
class SourceSide:
    """P, the pages that it has published, and its ranks that have fenced them."""

    engine: EngineRecord | None = None
    publication: Publication = NOTHING_PUBLISHED
    fenced: set[int] = field(default_factory=set)
    fenced_tokens: dict[int, int] = field(default_factory=dict)
    """By rank that still computes: number of leading tokens that are complete in its memory."""
    said_s: float = 0.0
    """When P published last."""
    revision: str = ""
    """Revision of the weights that P computed the state with."""
    checked: int = 0
    """`EngineRecord.admitted` when the oldest ids were checked."""
    complete: bool = False
    """Whether P's state is published whole, and fenced on every rank."""
    anew: bool = False
    """Whether P withdrew chunks. Leading tokens are then no longer read early, because a fence does
    not tell whether it is for the withdrawn chunks or for the new chunks."""
    number: int = 0
    """The number of P's message that published the last chunk."""
    repeated: bool = False
    """Whether P had already sent that message to an earlier broker."""

    @property
    def begun(self) -> bool:
        """Return whether any rank has fenced anything."""
        return bool(self.fenced or self.fenced_tokens)

    @property
    def early_tokens(self) -> int:
        """Return how many leading tokens are complete on every rank before the whole is."""
        engine = self.engine
        if self.anew or engine is None or len(self.fenced_tokens) < len(engine.layout.ranks):
            return 0
        return min(self.fenced_tokens.values())

    def fence(self, rank: int) -> None:
        """Record that a rank has the whole state in memory."""
        self.fenced.add(rank)
        engine = self.engine
        if engine is not None and len(self.fenced) >= len(engine.layout.ranks):
            self.complete = self.publication.final

    def unfence(self, rank: int) -> None:
        """Remove the fences of a rank that has lost its memory."""
        self.complete = False
        self.fenced.discard(rank)
        self.fenced_tokens.pop(rank, None)

    def publish(self, handoff_id: str, engine: EngineRecord, chunk: Chunk, now_s: float) -> None:
        """Add a chunk, or a repetition of an earlier chunk.

        Raises a `PagesError`, `HandoffConflictError`, `RevisionChangedError`, and what
        `Account.keep` raises; in any case nothing changes.
        """
        revision = chunk.revision or engine.layout.model.revision
        if self.engine is None:
            if revision != engine.revision:
                check_revision(engine, chunk.revision, f"publishes handoff {handoff_id}")
        elif revision != self.revision:
            raise RevisionChangedError(
                f"handoff {handoff_id}: a chunk is of revision {revision!r}, but earlier chunks "
                f"are of {self.revision!r}: compute the prompt again under a new id",
                handoff=handoff_id,
            )
        known = self.publication
        if chunk.anew != self.anew:
            if known.final or not chunk.anew:
                was = "published whole" if known.final else "withdrawn and published again"
                raise HandoffConflictError(
                    f"handoff {handoff_id} was {was}, but this chunk belongs to another attempt: "
                    f"cancel the handoff, and use a new id",
                    handoff=handoff_id,
                )
            # Keep the ranks that have fenced the whole state: the whole is fenced only once, so
            # these ranks were faster than P's session and have already computed it again.
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
        if self.fenced and publication.final:  # ranks may be faster than P's session
            self.complete = len(self.fenced) >= len(engine.layout.ranks)

    def forget_blocks(self) -> int:
        """Keep what the timeline of an ended publication needs; return the bytes of the rest."""
        size_bytes = self.publication.size_bytes
        if self.engine is not None and self.engine.in_use is not None:
            self.engine.in_use.unpublish(self)
        self.publication = self.publication.without_blocks()
        return size_bytes


def check_revision(engine: EngineRecord, revision: str, what: str) -> None:
    """Raise `RevisionChangedError` if the engine no longer has the weights it speaks of."""
    if not engine.has_revision(revision):
        raise RevisionChangedError(
            f"engine {engine.key.engine_id} {what} of revision "
            f"{engine.revision_said(revision)!r}, but its weights are now of {engine.revision!r}: "
            f"compute the prompt again",
            engine=engine.key.engine_id,
        )
