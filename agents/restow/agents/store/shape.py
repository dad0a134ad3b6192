"""The `Shape` of a store's states: of which pieces each is made, by the groups of its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from restow.agents.store.prefix import Prefix
from restow.agents.store.room import page_strides
from restow.broker.errors import RequestError
from restow.broker.layout import Layout

PieceKey = tuple[str, bytes]
"""Names what one page holds: its group, and a hash of all tokens up to its end."""


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

    def pieces(self, prefix: Prefix) -> dict[str, list[PieceKey | None]]:
        """By group, the pieces that its list of blocks names; None: the window has left it behind.

        Raises `RequestError` for blocks of another size.
        """
        if self.block_tokens not in (0, prefix.block_tokens):
            raise RequestError(
                f"the prefix has blocks of {prefix.block_tokens} tokens, and the store has some of "
                f"{self.block_tokens}",
                field="block_tokens",
            )
        return {group.name: self._pieces(group, prefix) for group in self.groups}

    def _pieces(self, group: PieceGroup, prefix: Prefix) -> list[PieceKey | None]:
        if not group.block_tokens:
            return [(group.name, prefix.content)]
        hashes = prefix.block_hashes
        if prefix.tail_tokens:  # a block that is not whole belongs to this state alone
            hashes = (*hashes, prefix.content)
        first = 0
        if group.window_tokens:
            first = max(prefix.position_tokens - group.window_tokens, 0) // group.block_tokens
        return [(group.name, one) if index >= first else None for index, one in enumerate(hashes)]
