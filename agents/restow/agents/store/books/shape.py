"""The `Shape` of a store's states: of which pieces each is made, by the groups of its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from restow.agents.store.books.room import page_strides
from restow.broker.client import Prefix
from restow.broker.errors import ChainFormError, ChainInvalidError
from restow.broker.layout import Layout


class PieceKey(NamedTuple):
    """Names what one page holds: its group, and all tokens up to its end."""

    group: str
    salt: str
    """What the hash is kept apart by."""
    hash: bytes
    revision: str = ""
    """Of the weights that computed it."""


class StateKey(NamedTuple):
    """Names a state: by all of its tokens."""

    salt: str
    hash: bytes
    revision: str = ""

    @classmethod
    def of(cls, prefix: Prefix) -> StateKey:
        """That of the state after a prefix."""
        return cls(prefix.salt, prefix.end_hash or prefix.hashes[-1], prefix.revision)


def in_room(layout: Layout) -> Layout:
    """The layout of a store with pages as far apart as they are in a `Room`."""
    (rank,) = layout.ranks
    strides = page_strides({one.group: one.page_stride_bytes for one in rank.regions})
    regions = (replace(one, page_stride_bytes=strides[one.group]) for one in rank.regions)
    return replace(layout, ranks=(replace(rank, regions=tuple(regions)),))


@dataclass(frozen=True, slots=True)
class PieceGroup:
    """Pages of one sort; ``block_tokens`` 0: snapshots, ``window_tokens`` 0: all are kept."""

    name: str
    block_tokens: int
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups of a store's layout, and how many bytes a page of each has."""

    groups: tuple[PieceGroup, ...]
    page_bytes: Mapping[str, int]

    @classmethod
    def of(cls, layout: Layout) -> Shape:
        """That of a layout by `store_layout`."""
        (rank,) = layout.ranks
        windows = {field.name: field.window_tokens for field in layout.model.fields}
        by_region = {shard.region: windows[shard.field] for shard in rank.shards}
        return cls(
            tuple(
                PieceGroup(one.group, one.page_tokens or 0, by_region[one.name])
                for one in rank.regions
            ),
            {one.group: one.page_stride_bytes for one in rank.regions},
        )

    @property
    def block_tokens(self) -> int:
        """How many tokens a block has; 0: there are none."""
        return max(group.block_tokens for group in self.groups)

    @property
    def recurrent(self) -> bool:
        """Whether a state has a snapshot, so that it stands at its position alone."""
        return any(not group.block_tokens for group in self.groups)

    def check(self, prefix: Prefix) -> None:
        """Raise `ChainFormError` or `ChainInvalidError` for what names no state of this shape."""
        quantum_tokens = prefix.form.quantum_tokens
        if quantum_tokens < 1 or self.block_tokens % quantum_tokens:
            raise ChainFormError(
                f"there is a hash after every {quantum_tokens} tokens, which does not divide the "
                f"{self.block_tokens} of the store's blocks",
            )
        whole, rest_tokens = divmod(prefix.position_tokens, quantum_tokens)
        ends = bool(prefix.end_hash) == bool(rest_tokens)
        if prefix.position_tokens < 1 or len(prefix.hashes) != whole or not ends:
            raise ChainInvalidError(
                f"{len(prefix.hashes)} hashes, and {'one' if prefix.end_hash else 'none'} at the "
                f"end, do not name {prefix.position_tokens} tokens with one after every "
                f"{quantum_tokens}",
                field="hashes",
            )

    def block_hashes(self, prefix: Prefix) -> tuple[bytes, ...]:
        """The hash at the end of each whole block."""
        quanta = self.block_tokens // prefix.form.quantum_tokens
        return prefix.hashes[quanta - 1 :: quanta] if quanta else ()

    def pieces(self, prefix: Prefix) -> dict[str, list[PieceKey | None]]:
        """By group, the pieces that its list of blocks names; None: the window has left it behind.

        The caller has asked `check`.
        """
        return {group.name: self._pieces(group, prefix) for group in self.groups}

    def _pieces(self, group: PieceGroup, prefix: Prefix) -> list[PieceKey | None]:
        end = StateKey.of(prefix)
        if not group.block_tokens:
            return [PieceKey(group.name, *end)]
        hashes = self.block_hashes(prefix)
        if prefix.position_tokens % group.block_tokens:
            hashes = (*hashes, end.hash)  # a block that is not whole belongs to this state alone
        first = 0
        if group.window_tokens:
            first = max(prefix.position_tokens - group.window_tokens, 0) // group.block_tokens
        return [
            PieceKey(group.name, prefix.salt, one, prefix.revision) if index >= first else None
            for index, one in enumerate(hashes)
        ]
