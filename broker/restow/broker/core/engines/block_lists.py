"""What an engine's lists of block ids may name: of its groups, and of the memory of its agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from restow.broker.block_ids import ID_BYTES, check_whole, unpacked, unsigned
from restow.broker.core.actions import EngineKey
from restow.broker.errors import (
    NullBlockError,
    PageCountError,
    PageRangeError,
    PageRepeatedError,
    PagesError,
)

FEW = 32
"""Of so many ids a set tells faster than a sorted array whether two are the same."""


@dataclass(slots=True, eq=False)
class BlockLists:
    """The rules of one engine's lists, by group."""

    key: EngineKey
    block_tokens: dict[str, int]
    """Tokens that a block of each group holds; 0: it holds snapshots."""
    null_blocks: dict[str, int]
    """The id of no block, of each group that has one."""
    block_limits: dict[str, int]
    """The first block id of each group that some connected rank has no memory for."""
    overlaid: tuple[tuple[str, ...], ...] = field(default=(), kw_only=True)
    """Groups whose blocks of one id are the same memory on some connected rank: engines lay groups
    of layers over the same bytes, and give each block to one of these groups at a time."""

    def together(self, group: str) -> tuple[str, ...]:
        """Return the groups that lie on the same memory as ``group``, itself among them."""
        return next((groups for groups in self.overlaid if group in groups), (group,))

    def check_overlaid(self, blocks: Mapping[str, bytes]) -> None:
        """Raise `PageRepeatedError` for a block that lists of two overlaid groups name."""
        for groups in self.overlaid:
            ids = [unsigned(blocks[group]) for group in groups if blocks.get(group)]
            nulls = [self.null_blocks[group] for group in groups if group in self.null_blocks]
            named = np.concatenate(ids) if len(ids) > 1 else np.empty(0, np.uint32)
            named = named[~np.isin(named, nulls)]
            if named.size:
                self.check_distinct(" or ".join(groups), named.tobytes())

    def check_ids(self, group: str, data: bytes) -> None:
        """Raise a `PagesError` unless the ids are int32 inside the group's memory.

        And no two are the same but null blocks, of which none may be a snapshot.
        """
        limit = self.block_limits.get(group)
        if limit is None:
            raise PagesError(
                f"engine {self.key.engine_id} has no group {group!r}; it has "
                f"{sorted(self.block_limits)}",
                group=group,
            )
        size_bytes = len(data)
        check_whole(group, data)
        if size_bytes == ID_BYTES:  # a snapshot's one id needs no array
            highest = int.from_bytes(data, "little")
        elif data:
            highest = self.check_distinct(group, data)
        else:
            return
        if highest >= limit:
            wrong = unpacked(group, data).item(int(np.argmax(unsigned(data) >= limit)))
            raise PageRangeError(
                f"engine {self.key.engine_id}, group {group}: block {wrong} is outside of "
                f"[0, {limit})",
                engine=self.key.engine_id,
                group=group,
                page=wrong,
                range=f"[0, {limit})",
            )
        if self.block_tokens[group] == 0:
            if size_bytes > ID_BYTES:
                raise self._miscounted(group, 0, size_bytes // ID_BYTES, 0)
            if highest == self.null_blocks.get(group):
                raise self.given_null(group, highest, "a snapshot")

    def check_distinct(self, group: str, data: bytes) -> int:
        """The highest of a list's ids, of which there are some, as unsigned.

        Raises `PageRepeatedError` if any but the null block is there twice.
        """
        ids = unsigned(data)
        if ids.size <= FEW:
            few: list[int] = ids.tolist()
            if len(set(few)) == len(few):
                return max(few)
        ordered = ids.copy()
        ordered.sort()
        same = ordered[1:] == ordered[:-1]
        if not np.count_nonzero(same):
            return ordered.item(-1)
        twice, null = ordered[1:][same], self.null_blocks.get(group)
        if null is not None:
            twice = twice[twice != null]
        if twice.size:
            page = twice.item(0)
            raise PageRepeatedError(
                f"engine {self.key.engine_id}, group {group}: block {page} is there more than "
                f"once, and its layout does not call it the null block: give every page once",
                engine=self.key.engine_id,
                group=group,
                page=page,
            )
        return ordered.item(-1)

    def given_null(self, group: str, page: int, what: str) -> NullBlockError:
        """What to answer where the null block is given for ``what`` is moved."""
        return NullBlockError(
            f"engine {self.key.engine_id}, group {group}: block {page} is the null block, and is "
            f"given for {what}: give blocks that the request owns",
            engine=self.key.engine_id,
            group=group,
            page=page,
        )

    def check_no_null(
        self, group: str, blocks: Mapping[str, bytes], first_token: int, stop_token: int
    ) -> None:
        """Raise `NullBlockError` if the null block is among those of tokens that are moved."""
        null, tokens = self.null_blocks.get(group), self.block_tokens[group]
        if null is None or first_token >= stop_token:
            return
        first = first_token // tokens
        ids = unsigned(blocks[group])[first : -(-stop_token // tokens)]
        (given,) = (ids == null).nonzero()
        if given.size:
            at = max((first + given.item(0)) * tokens, first_token)
            raise self.given_null(group, null, f"token {at} of [{first_token}, {stop_token})")

    def check_counts(
        self, groups: Iterable[str], blocks: Mapping[str, bytes], position_tokens: int
    ) -> None:
        """Raise `PageCountError` unless each group's list holds a prompt up to the position."""
        for group in groups:
            tokens, count = self.block_tokens[group], len(blocks.get(group, b"")) // ID_BYTES
            if count != 1 if tokens == 0 else count * tokens < position_tokens:
                raise self._miscounted(group, tokens, count, position_tokens)

    def _miscounted(
        self, group: str, tokens: int, count: int, position_tokens: int
    ) -> PageCountError:
        if tokens == 0:
            return PageCountError(
                f"engine {self.key.engine_id}, group {group} holds snapshots: exactly one "
                f"block is needed, got {count}",
                group=group,
                count=count,
            )
        return PageCountError(
            f"engine {self.key.engine_id}, group {group}: {count} blocks of {tokens} tokens "
            f"do not hold {position_tokens} tokens",
            group=group,
            count=count,
        )
