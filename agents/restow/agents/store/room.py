"""The memory of a store: pages and their slabs, and the pieces that states consist of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from restow.broker.client import Prefix
from restow.broker.errors import ChainFormError, ChainInvalidError, RestowError
from restow.broker.layout import Layout
from restow.broker.layout.span import aligned


class RoomTooSmallError(RestowError, status="INVALID_ARGUMENT", reason="STORE_TOO_SMALL"):
    """The memory of a store is too small for any state."""


PAGE_ALIGN_BYTES = 4096
"""Alignment that direct file I/O needs for addresses and lengths."""


@dataclass(frozen=True, slots=True)
class PageMove:
    """A page of a group whose bytes must move to another page."""

    group: str
    source: int
    target: int


def page_strides(page_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the distance between pages of each group, a multiple of the next smaller distance.

    >>> page_strides({"tokens": 4000, "window": 9000, "snapshots": 50000})
    {'tokens': 4096, 'window': 12288, 'snapshots': 61440}
    """
    strides: dict[str, int] = {}
    unit = PAGE_ALIGN_BYTES
    for group in sorted(page_bytes, key=lambda name: (page_bytes[name], name)):
        unit = strides[group] = aligned(page_bytes[group], unit)
    return {group: strides[group] for group in page_bytes}


class Room:
    """The free pages of a memory. Slab 0 is reserved, so page 0 of a group is never used."""

    def __init__(self, page_bytes: Mapping[str, int], size_bytes: int) -> None:
        """Divide ``size_bytes`` into slabs. Raises `RoomTooSmallError`."""
        self.strides = page_strides(page_bytes)
        """Bytes from page to page, by group."""
        self.slab_bytes = max(self.strides.values())
        slabs = size_bytes // self.slab_bytes
        if slabs < 1 + len(self.strides):
            raise RoomTooSmallError(
                f"{size_bytes} bytes are too few for a store: a page for each of the groups "
                f"{', '.join(self.strides)} and a page that stays unused take "
                f"{(1 + len(self.strides)) * self.slab_bytes} bytes",
            )
        self.size_bytes = slabs * self.slab_bytes
        self._pages = {group: self.slab_bytes // stride for group, stride in self.strides.items()}
        self.page_counts = {group: slabs * pages for group, pages in self._pages.items()}
        """Page ids are below this, by group."""
        self._free_slabs = list(range(slabs - 1, 0, -1))
        self._free: dict[str, dict[int, set[int]]] = {group: {} for group in self.strides}
        """Free pages by group and slab, without slabs that have none."""
        self._owned: dict[str, set[int]] = {group: set() for group in self.strides}
        self._free_pages = dict.fromkeys(self.strides, 0)

    @property
    def usable_bytes(self) -> int:
        """Bytes of all slabs that may be used."""
        return self.size_bytes - self.slab_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of free slabs, and of free pages in other slabs."""
        pages = sum(count * self.strides[group] for group, count in self._free_pages.items())
        return len(self._free_slabs) * self.slab_bytes + pages

    def can_take(self, wanted: Mapping[str, int]) -> bool:
        """Return whether that many pages of each group can be taken without moves."""
        slabs = 0
        for group, count in wanted.items():
            lacking = max(count - self._free_pages[group], 0)
            slabs += -(-lacking // self._pages[group])
        return slabs <= len(self._free_slabs)

    def take(self, group: str, count: int) -> list[int]:
        """Take pages; call `can_take` first."""
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
        """Give a page back; a slab whose pages are all free becomes free for any group."""
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
        """Free one more slab with as few moves as possible; return no moves if that is impossible.

        ``pinned`` pages stay where they are. The caller must make the moves at once, because the
        slab already counts as free.
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
    """The name of a page's content: its group, and the hash of all tokens up to its end."""

    group: str
    salt: str
    """The salt that keeps equal hashes apart."""
    hash: bytes
    revision: str = ""
    """Revision of the weights that computed the content."""


class StateKey(NamedTuple):
    """The name of a state: the hash of all its tokens."""

    salt: str
    hash: bytes
    revision: str = ""

    @classmethod
    def of(cls, prefix: Prefix) -> StateKey:
        """Return the key of the state after a prefix."""
        return cls(prefix.salt, prefix.end_hash or prefix.hashes[-1], prefix.revision)


def in_room(layout: Layout) -> Layout:
    """Return a store's layout with the page distances of a `Room`."""
    (rank,) = layout.ranks
    strides = page_strides({region.group: region.page_stride_bytes for region in rank.regions})
    regions = (replace(region, page_stride_bytes=strides[region.group]) for region in rank.regions)
    return replace(layout, ranks=(replace(rank, regions=tuple(regions)),))


@dataclass(frozen=True, slots=True)
class PieceGroup:
    """Pages of one group; ``block_tokens`` 0 for snapshots, ``window_tokens`` 0 for no window."""

    name: str
    block_tokens: int
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The groups of a store's layout, with the page size of each."""

    groups: tuple[PieceGroup, ...]
    page_bytes: Mapping[str, int]

    @classmethod
    def of(cls, layout: Layout) -> Shape:
        """Return the shape of a layout that `store_layout` made."""
        (rank,) = layout.ranks
        windows = {field.name: field.window_tokens for field in layout.model.fields}
        by_region = {shard.region: windows[shard.field] for shard in rank.shards}
        groups = [
            PieceGroup(region.group, region.page_tokens or 0, by_region[region.name])
            for region in rank.regions
        ]
        # What the fewest states share comes last, because a state has the uses of its last piece.
        groups.sort(key=lambda group: (not group.block_tokens, group.window_tokens > 0))
        return cls(
            tuple(groups), {region.group: region.page_stride_bytes for region in rank.regions}
        )

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; 0 if there are only snapshots."""
        return max(group.block_tokens for group in self.groups)

    @property
    def by_block(self) -> bool:
        """Whether all beginnings of a state, to the end of any block, are states too."""
        (group, *others) = self.groups
        return bool(group.block_tokens) and not group.window_tokens and not others

    def check(self, prefix: Prefix) -> None:
        """Raise `ChainFormError` or `ChainInvalidError` for a prefix that names no state here."""
        quantum_tokens = prefix.form.quantum_tokens
        if quantum_tokens < 1 or self.block_tokens % quantum_tokens:
            raise ChainFormError(
                f"the prefix has a hash after every {quantum_tokens} tokens, which does not divide "
                f"the store's blocks of {self.block_tokens} tokens",
            )
        whole, rest_tokens = divmod(prefix.position_tokens, quantum_tokens)
        ends = bool(prefix.end_hash) == bool(rest_tokens)
        if prefix.position_tokens < 1 or len(prefix.hashes) != whole or not ends:
            raise ChainInvalidError(
                f"{len(prefix.hashes)} hashes, and {'one' if prefix.end_hash else 'none'} at the "
                f"end, do not name {prefix.position_tokens} tokens with a hash after every "
                f"{quantum_tokens}",
                field="hashes",
            )
        hashes = (*prefix.hashes, *filter(None, [prefix.end_hash]))
        if len(set(hashes)) < len(hashes):  # a page cannot hold two blocks
            raise ChainInvalidError("the prefix has a hash twice", field="hashes")

    def block_hashes(self, prefix: Prefix) -> tuple[bytes, ...]:
        """Return the hash at the end of each whole block."""
        quanta = self.block_tokens // prefix.form.quantum_tokens
        return prefix.hashes[quanta - 1 :: quanta] if quanta else ()

    def pieces(self, prefix: Prefix) -> dict[str, list[PieceKey | None]]:
        """Return the pieces of each group's block list; None for blocks that the window has left.

        Call `check` first.
        """
        return {group.name: self._pieces(group, prefix) for group in self.groups}

    def _pieces(self, group: PieceGroup, prefix: Prefix) -> list[PieceKey | None]:
        end = StateKey.of(prefix)
        if not group.block_tokens:
            return [PieceKey(group.name, *end)]
        hashes = self.block_hashes(prefix)
        if prefix.position_tokens % group.block_tokens:
            hashes = (*hashes, end.hash)  # a partial block belongs to this state alone
        first = 0
        if group.window_tokens:
            first = max(prefix.position_tokens - group.window_tokens, 0) // group.block_tokens
        return [
            PieceKey(group.name, prefix.salt, hashed, prefix.revision) if index >= first else None
            for index, hashed in enumerate(hashes)
        ]
