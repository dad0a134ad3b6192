"""The harness of the laws: two engines in poisoned memory, a transfer, and what must be true then.

The oracle is direct slicing of the global tensor through a strided view of a page; it shares no
code with the planner or the binding.
"""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from laws.executor import Arena
from laws.values import POISON, GlobalState, Patterns, to_bits
from restow.agents.binding.pages import Blocks, RegionTable, TokenRange
from restow.broker.layout import DType, Layout, RankLayout, Region, Shard, Span

_UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
Bytes = npt.NDArray[np.uint8]


class Engine:
    """One engine: a layout, memory for its pages, and the block ids of one request."""

    def __init__(
        self, arena: Arena, layout: Layout, tokens: int, rng: random.Random, guard_bytes: int
    ) -> None:
        self.arena, self.layout = arena, layout
        self.start = arena.used
        arena.used += guard_bytes
        self._ids: dict[str, list[int]] = {}
        self._block_count: dict[str, int] = {}
        for rank in layout.ranks:
            for region in rank.regions:
                if region.constant:
                    self._ids[""], self._block_count[""] = [0], 1
                elif region.group not in self._ids:
                    self._choose_ids(region, tokens, rng)
        for group, window in group_windows(layout).items():
            self._leave_behind(group, tokens - window)
        self.offsets = {
            (rank.rank, region.name): arena.allocate(self._region_bytes(region), guard_bytes)
            for rank in layout.ranks
            for region in rank.regions
        }
        self.stop = arena.used
        self.keeps_inputs = False
        """Whether it is P: what D's pages have room for is nothing that arrives."""

    def _choose_ids(self, region: Region, tokens: int, rng: random.Random) -> None:
        """Choose scattered ids in no order; block 0 is the null block and never chosen."""
        per_block = _block_reach(region)
        needed = -(-tokens // per_block) if per_block else 1
        self._block_count[region.group] = needed + 3
        self._ids[region.group] = rng.sample(range(1, needed + 3), needed)

    def _leave_behind(self, group: str, first_token: int) -> None:
        """Put the null block where a block lies wholly before the window."""
        region = next(r for rank in self.layout.ranks for r in rank.regions if r.group == group)
        per_block = _block_reach(region)
        for index in range(max(first_token, 0) // per_block):
            self._ids[group][index] = 0

    def _region_bytes(self, region: Region) -> int:
        return self._page_count(region) * region.page_stride_bytes

    def _page_count(self, region: Region) -> int:
        return self._block_count[region.group] * region.pages_per_block

    @property
    def blocks(self) -> Blocks:
        return Blocks({group: np.array(ids, np.int64) for group, ids in self._ids.items() if group})

    def regions(self, rank_number: int) -> RegionTable:
        """Return the rank's memory, as its agent would announce it."""
        rank = next(rank for rank in self.layout.ranks if rank.rank == rank_number)
        addresses = [self.arena.address(self.offsets[rank.rank, r.name]) for r in rank.regions]
        return RegionTable(
            np.array(addresses, np.int64),
            np.array([r.page_stride_bytes for r in rank.regions], np.int64),
            np.array([self._page_count(r) for r in rank.regions], np.int64),
        )

    def write(self, memory: Bytes, state: GlobalState, tokens: TokenRange) -> None:
        """Write every rank's slices of ``state`` into ``memory``, an image of the arena.

        Nothing lies before a field's window: those pages are null blocks. P has all of the block in
        which the window begins, and so has an engine that keeps whole blocks. Scratch memory
        is zero.
        """
        tensors: dict[tuple[str, DType], Patterns] = {}
        windows = {field.name: field.window_tokens for field in self.layout.model.fields}
        for rank in self.layout.ranks:
            for shard in rank.shards:
                whole = tensors.get((shard.field, shard.dtype))
                if whole is None:
                    whole = state.tensor(shard.field, shard.dtype)
                    tensors[shard.field, shard.dtype] = whole
                part = whole[(slice(None), *(slice(s.start, s.stop) for s in shard.box))]
                region = rank.region(shard.region)
                if region.page_tokens is None:
                    page = self._ids[region.group][0] * region.pages_per_block
                    self._view(memory, rank, region, shard, page)[...] = part[0][..., None]
                    continue
                first = max(tokens.stop - (windows[shard.field] or tokens.stop), 0)
                if self.keeps_inputs or region.whole_blocks:
                    first -= first % region.block_tokens
                for token in held_tokens(region, max(tokens.start, first), tokens.stop):
                    page, in_page = self._page_of(region, region.page_tokens, token)
                    view = self._view(memory, rank, region, shard, page)
                    view[..., in_page] = part[token]

        for rank in self.layout.ranks:
            for scratch in rank.scratch:
                region = rank.region(scratch.region)
                page = self._ids[region.group][0]
                start = self.offsets[rank.rank, region.name] + page * region.page_stride_bytes
                np.ndarray(
                    scratch.sizes,
                    _UINTS[scratch.dtype.itemsize_bytes],
                    memory.data,
                    start + scratch.offset_bytes,
                    scratch.strides_bytes,
                )[...] = 0

    def furnish(self, memory: Bytes, state: GlobalState) -> None:
        """Write what is no state into an image of the arena: weights, and P's inputs."""
        for rank in self.layout.ranks:
            for offered in rank.projections:
                bits = to_bits(state.weights(offered.field), offered.dtype)
                box = tuple(slice(span.start, span.stop) for span in offered.box[:-1])
                whole = Shard(
                    offered.field,
                    (*offered.box[:-1], Span(0, bits.shape[-1])),
                    offered.dtype,
                    offered.region,
                    offered.offset_bytes,
                    offered.strides_bytes,
                )
                region = rank.region(offered.region)
                self._view(memory, rank, region, whole, 0)[...] = bits[box][..., None]
            for shard in rank.inputs if self.keeps_inputs else ():
                region = rank.region(shard.region)
                bits = to_bits(state.read(shard.field), shard.dtype)
                page = self._ids[region.group][0]
                self._view(memory, rank, region, shard, page)[...] = bits[..., None]

    def _page_of(self, region: Region, page_tokens: int, token: int) -> tuple[int, int]:
        """Return the page of a token, and its place there, as vLLM's block tables have them."""
        block, in_block = divmod(token, _block_reach(region))
        turn, in_turn = divmod(in_block, region.interleave_tokens)
        in_block = turn // region.context_parts * region.interleave_tokens + in_turn
        page, in_page = divmod(in_block, page_tokens)
        return self._ids[region.group][block] * region.pages_per_block + page, in_page

    def _view(
        self, memory: Bytes, rank: RankLayout, region: Region, shard: Shard, page: int
    ) -> npt.NDArray[np.unsignedinteger]:
        """Return a shard in a page, ``[*box, token]``."""
        start = self.offsets[rank.rank, region.name] + page * region.page_stride_bytes
        return np.ndarray(
            (*(span.size for span in shard.box), region.page_tokens or 1),
            _UINTS[shard.dtype.itemsize_bytes],
            memory.data,
            start + shard.offset_bytes,
            (*shard.strides_bytes, shard.token_stride_bytes or 0),
        )

    def check(self, state: GlobalState, tokens: TokenRange, written: bool) -> None:
        """Check that every byte is what ``state`` says or still poison, written once or never."""
        image = np.full(self.arena.used, POISON, np.uint8)
        self.furnish(image, state)
        self.write(image, state, tokens)
        mine = slice(self.start, self.stop)
        wrong = np.flatnonzero(self.arena.data[mine] != image[mine])
        assert not len(wrong), self._place(int(wrong[0]), len(wrong))
        times = self.arena.writes[mine]
        if not written:
            assert not times.any(), "a source was written"
            return
        canvas = ~image  # a second image differs from the first one where nothing is written
        self.write(canvas, state, tokens)
        due = (canvas == image)[mine]
        assert (times == due).all(), "bytes written twice, never, or out of bounds"

    def _place(self, index: int, count: int) -> str:
        at = self.start + index
        rank, name = max(
            (key for key, start in self.offsets.items() if start <= at),
            key=lambda key: self.offsets[key],
            default=(-1, "guard"),
        )
        inside = at - self.offsets.get((rank, name), self.start)
        return f"{count} wrong bytes, the first at byte {inside} of rank {rank}, region {name}"


def held_tokens(region: Region, start: int, stop: int) -> list[int]:
    """Return the tokens of ``[start, stop)`` that a rank keeps in a region."""
    run, parts = region.interleave_tokens, region.context_parts
    return [token for token in range(start, stop) if token // run % parts == region.context_part]


def _block_reach(region: Region) -> int:
    """Return how many tokens of the prompt a block reaches over; 0: it holds a snapshot."""
    return (region.page_tokens or 0) * region.pages_per_block * region.context_parts


def group_windows(layout: Layout) -> dict[str, int]:
    """Return the window of every group that has one."""
    fields = {field.name: field.window_tokens for field in layout.model.fields}
    found: dict[str, set[int]] = defaultdict(set)
    for rank in layout.ranks:
        groups = {region.name: region.group for region in rank.regions}
        for shard in rank.shards:
            found[groups[shard.region]].add(fields[shard.field])
    return {group: max(some) for group, some in found.items() if all(some)}
