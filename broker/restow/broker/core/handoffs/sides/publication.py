"""P's publication: lists of block ids that come in chunks, and the position that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from restow.broker.block_ids import ID_BYTES, MAX_BLOCKS, MAX_LIST_BYTES
from restow.broker.core.engines.block_lists import BlockLists
from restow.broker.core.events import Chunk
from restow.broker.errors import HandoffConflictError, PageCountError, PagesError

MAX_PUBLICATION_BYTES = 16 << 20
"""Of the ids of all lists: an order that names them with D's must fit into one message."""


class Publication(NamedTuple):
    """What P has published of a handoff so far."""

    blocks: Mapping[str, bytes]
    position_tokens: int = 0
    content: bytes = b""
    """What the state is of, as P names it; empty: not named."""
    final: bool = False
    """Whether it is whole."""
    readers: int = 0
    """How many must have it, as P names it; 0: it does not."""
    sampled_token: int | None = None
    """What P sampled behind the position; None: nothing."""

    def with_chunk(self, handoff_id: str, lists: BlockLists, chunk: Chunk) -> Publication:
        """It and one chunk more, or one that was said before; ``lists`` are P's.

        Raises a `PagesError` or `HandoffConflictError`.
        """
        merged = dict(self.blocks)
        listed: set[str] = set()
        for group, first_block, data in chunk.blocks:
            if group in listed:  # lists that grow list by list would be copied as often
                raise PagesError(
                    f"handoff {handoff_id}: group {group} is listed more than once in a chunk",
                    handoff=handoff_id,
                    group=group,
                )
            listed.add(group)
            lists.check_ids(group, data)
            if first_block or group in merged or len(data) > MAX_LIST_BYTES:
                data = _appended(merged.get(group, b""), handoff_id, group, first_block, data)
            merged[group] = data
        size_bytes = sum(map(len, merged.values()))
        if size_bytes > MAX_PUBLICATION_BYTES:
            raise PageCountError(
                f"handoff {handoff_id}: {size_bytes // ID_BYTES} blocks in all lists, at most "
                f"{MAX_PUBLICATION_BYTES // ID_BYTES} are handed over at once",
                handoff=handoff_id,
            )
        readers = max(self.readers, chunk.readers)
        at = chunk.position_tokens
        said = Publication(merged, at, chunk.content, True, readers, chunk.sampled_token)
        if self.final and (merged != self.blocks or (chunk.final and said != self)):
            raise HandoffConflictError(
                f"handoff {handoff_id} was published whole before, with other blocks, of other "
                f"content, for other readers, with another token sampled or at position "
                f"{self.position_tokens}",
                handoff=handoff_id,
            )
        if not chunk.final:
            return self._replace(blocks=merged, readers=readers)
        if chunk.position_tokens < 1:
            raise PageCountError(
                f"handoff {handoff_id}: position_tokens is {chunk.position_tokens}; a final "
                f"publication needs at least 1",
                handoff=handoff_id,
            )
        lists.check_counts(lists.block_tokens, merged, chunk.position_tokens)
        for group, data in merged.items():
            if not any(data is given for _, _, given in chunk.blocks):
                lists.check_distinct(group, data)  # over all of its chunks
        if lists.overlaid:
            lists.check_overlaid(merged)
        return said

    @property
    def size_bytes(self) -> int:
        """Of its ids."""
        return sum(map(len, self.blocks.values()))

    def without_blocks(self) -> Publication:
        """What is kept of it after the end."""
        return self._replace(blocks={})


NOTHING_PUBLISHED = Publication({})


def _appended(known: bytes, handoff_id: str, group: str, first_block: int, data: bytes) -> bytes:
    """A chunk begins behind what is known, or repeats some of that first."""
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
