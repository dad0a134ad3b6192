"""Why there is no store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from restow.broker.client import Prefix
from restow.broker.errors import ChainFormError, ChainInvalidError, RestowError
from restow.broker.layout import Layout
from restow.broker.layout.span import aligned


class RoomTooSmallError(RestowError, status="INVALID_ARGUMENT", reason="STORE_TOO_SMALL"):
    """The memory of a store holds no state at all."""


PAGE_ALIGN_BYTES = 4096
"""What direct reads and writes of files want, of addresses and of lengths."""


@dataclass(frozen=True, slots=True)
class PageMove:
    """The bytes of one page of a group are to be where another one is."""

    group: str
    source: int
    target: int


def page_strides(page_bytes: Mapping[str, int]) -> dict[str, int]:
    """How far apart the pages of each group lie: each a multiple of the next smaller one.

    >>> page_strides({"tokens": 4000, "window": 9000, "snapshots": 50000})
    {'tokens': 4096, 'window': 12288, 'snapshots': 61440}
    """
    strides: dict[str, int] = {}
    unit = PAGE_ALIGN_BYTES
    for group in sorted(page_bytes, key=lambda name: (page_bytes[name], name)):
        unit = strides[group] = aligned(page_bytes[group], unit)
    return {group: strides[group] for group in page_bytes}


class Room:
    """Which pages of a memory are free. Slab 0 is nobody's: page 0 of no group is ever given."""

    def __init__(self, page_bytes: Mapping[str, int], size_bytes: int) -> None:
        """Cut ``size_bytes`` into slabs. Raises `RoomTooSmallError`."""
        self.strides = page_strides(page_bytes)
        """Bytes from a page of each group to the next."""
        self.slab_bytes = max(self.strides.values())
        slabs = size_bytes // self.slab_bytes
        if slabs < 1 + len(self.strides):
            raise RoomTooSmallError(
                f"{size_bytes} bytes are too few: a page of each of the groups "
                f"{', '.join(self.strides)} and one that is left out take "
                f"{(1 + len(self.strides)) * self.slab_bytes}",
            )
        self.size_bytes = slabs * self.slab_bytes
        self._pages = {group: self.slab_bytes // one for group, one in self.strides.items()}
        self.page_counts = {group: slabs * pages for group, pages in self._pages.items()}
        """Ids of pages are below this."""
        self._free_slabs = list(range(slabs - 1, 0, -1))
        self._free: dict[str, dict[int, set[int]]] = {group: {} for group in self.strides}
        """By group and slab of it: its free pages, if it has any."""
        self._owned: dict[str, set[int]] = {group: set() for group in self.strides}
        self._free_pages = dict.fromkeys(self.strides, 0)

    @property
    def usable_bytes(self) -> int:
        """Of all slabs that are given out."""
        return self.size_bytes - self.slab_bytes

    @property
    def free_bytes(self) -> int:
        """Of free slabs, and of free pages in others."""
        pages = sum(count * self.strides[group] for group, count in self._free_pages.items())
        return len(self._free_slabs) * self.slab_bytes + pages

    def can_take(self, wanted: Mapping[str, int]) -> bool:
        """Whether so many pages of each group can be taken as it is."""
        slabs = 0
        for group, count in wanted.items():
            lacking = max(count - self._free_pages[group], 0)
            slabs += -(-lacking // self._pages[group])
        return slabs <= len(self._free_slabs)

    def take(self, group: str, count: int) -> list[int]:
        """Take pages; the caller has asked `can_take`."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._free[group]:
                slab = self._free_slabs.pop()
                self._owned[group].add(slab)
                first = slab * self._pages[group]
                self._free[group][slab] = set(range(first, first + self._pages[group]))
                self._free_pages[group] += self._pages[group]
            slab, pages = next(iter(self._free[group].items()))
            while pages and len(taken) < count:
                taken.append(pages.pop())
                self._free_pages[group] -= 1
            if not pages:
                del self._free[group][slab]
        return taken

    def give(self, group: str, page: int) -> None:
        """Give a page back; a slab whose pages are all free is free for any group."""
        slab = page // self._pages[group]
        pages = self._free[group].setdefault(slab, set())
        pages.add(page)
        self._free_pages[group] += 1
        if len(pages) == self._pages[group]:
            del self._free[group][slab]
            self._free_pages[group] -= len(pages)
            self._owned[group].remove(slab)
            self._free_slabs.append(slab)

    def gather(self, pinned: Mapping[str, Collection[int]]) -> list[PageMove]:
        """Moves that make one more slab free, as few as can be; none: there is no such slab.

        Pages that are ``pinned`` stay where they are. The moves are to be made at once: the slab is
        free by now.
        """
        best: tuple[int, str, int] | None = None
        for group, slabs in self._free.items():
            stay = {page // self._pages[group] for page in pinned.get(group, ())}
            for slab, free in slabs.items():
                used = self._pages[group] - len(free)
                elsewhere = self._free_pages[group] - len(free)
                cost = used * self.strides[group]
                if slab not in stay and used <= elsewhere and (best is None or cost < best[0]):
                    best = cost, group, slab
        if best is None:
            return []
        _, group, slab = best
        free = self._free[group].pop(slab)
        self._free_pages[group] -= len(free)
        first = slab * self._pages[group]
        used_pages = [page for page in range(first, first + self._pages[group]) if page not in free]
        targets = self.take(group, len(used_pages))
        self._owned[group].remove(slab)
        self._free_slabs.append(slab)
        return [PageMove(group, *pair) for pair in zip(used_pages, targets, strict=True)]


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
