"""From moves to the rows of a program: cut every box, then join what continues on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import CastUnsupportedError, TooManyPiecesError
from restow.broker.layout import DType, RankLayout, Region
from restow.broker.layout.rows import MAX_ROWS, Bools, Int64s, Rows, cut_rows
from restow.broker.planner.move import Move, Place
from restow.broker.planner.plan import Plan
from restow.broker.planner.program import Column, GroupPair, PageForm, no_rows


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of all moves to one rank, and which move each piece of them came from.

    ``rows`` is int64 ``[rows, len(Column)]``. Before they were joined there were more, the pieces:
    piece ``i`` belongs to move ``piece_move[i]`` and went into row ``piece_row[i]``.
    """

    rows: Int64s
    pieces: Int64s
    piece_move: Int64s
    piece_row: Int64s


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a move; ``aligned``: its elements lie at multiples of their size."""

    region: int
    place: Place
    aligned: bool


class Cutter:
    """Cuts moves of one plan into rows; remembers what it has cut, as layers are alike."""

    def __init__(self, plan: Plan) -> None:
        """Number all pairs of page lists, so that every program of the plan has the same."""
        self._sources = {rank.rank: _indexed(rank) for rank in plan.source.ranks}
        self._destinations = {rank.rank: _indexed(rank) for rank in plan.destination.ranks}
        self._windows = {field.name: field.window_tokens for field in plan.source.model.fields}
        self._numbers: dict[GroupPair, int] = {}
        self._cuts: dict[object, Rows] = {}
        self.pieces = 0
        """Of all tables so far: bounded. Who drops a table may take its pieces off."""
        for move in plan.moves:
            _, _, src_form = self._sources[move.src_rank][move.src.region]
            _, _, dst_form = self._destinations[move.dst_rank][move.dst.region]
            pair = GroupPair(src_form, dst_form, self._windows[move.field])
            self._numbers.setdefault(pair, len(self._numbers))

    def pair_number(self, src_rank: int, src: str, dst_rank: int, dst: str) -> int:
        """The number of the pair of lists that address two regions, which hold no window."""
        _, _, src_form = self._sources[src_rank][src]
        _, _, dst_form = self._destinations[dst_rank][dst]
        return self._numbers.setdefault(GroupPair(src_form, dst_form), len(self._numbers))

    def source_region(self, src_rank: int, name: str) -> int:
        """The index of a source's region."""
        return self._sources[src_rank][name][0]

    @property
    def pairs(self) -> tuple[GroupPair, ...]:
        """The pairs of page lists, in the order of their numbers."""
        return tuple(self._numbers)

    def table(self, moves: Sequence[Move]) -> Table:
        """The rows of moves to one rank.

        Raises `CastUnsupportedError` (see `_cut_move`) and `TooManyPiecesError`.
        """
        if not moves:
            nothing = np.empty(0, np.int64)
            return Table(no_rows(), no_rows(), nothing, nothing)
        pieces, counts = self._pieces_of([self._cut_move(move) for move in moves])
        rows, piece_row = join_rows(pieces)
        return Table(rows, pieces, np.repeat(np.arange(len(moves)), counts), piece_row)

    def through(self, moves: Sequence[Move], places: Sequence[Place]) -> tuple[Int64s, Int64s]:
        """Rows from the sources to the ``places`` in a chunk, and from there to the destinations.

        The chunk's region has number 0. Raises as `table`.
        """
        if not moves:
            return no_rows(), no_rows()
        there, back = [], []
        for move, place in zip(moves, places, strict=True):
            pair, chunk = self._pair(move), _End(0, place, True)
            there.append(self._cut_box(move, pair, self._src(move), chunk))
            back.append(self._cut_box(move, pair, chunk, self._dst(move)))
        first, second = (join_rows(self._pieces_of(cut)[0])[0] for cut in (there, back))
        return first, second

    def _pieces_of(self, cut: Sequence[tuple[tuple[int, ...], Int64s]]) -> tuple[Int64s, list[int]]:
        """All rows before they are joined, and how many there are of each box."""
        firsts, offsets = zip(*cut, strict=True)
        counts = [len(part) for part in offsets]
        self.pieces += sum(counts)
        if self.pieces > MAX_ROWS:
            raise TooManyPiecesError(f"the plan falls into more than {MAX_ROWS} pieces")
        pieces = np.repeat(np.array(firsts, np.int64), counts, axis=0)
        pieces[:, [Column.SRC_OFFSET_BYTES, Column.DST_OFFSET_BYTES]] += np.concatenate(offsets)
        return pieces, counts

    def _cut_move(self, move: Move) -> tuple[tuple[int, ...], Int64s]:
        """A row (in the order of `Column`) without offsets inside the box, and those offsets."""
        return self._cut_box(move, self._pair(move), self._src(move), self._dst(move))

    def _src(self, move: Move) -> _End:
        index, region, _ = self._sources[move.src_rank][move.src.region]
        return _End(index, move.src, _aligned(move.src, region.page_stride_bytes))

    def _dst(self, move: Move) -> _End:
        index, region, _ = self._destinations[move.dst_rank][move.dst.region]
        return _End(index, move.dst, _aligned(move.dst, region.page_stride_bytes))

    def _pair(self, move: Move) -> int:
        _, _, src_form = self._sources[move.src_rank][move.src.region]
        _, _, dst_form = self._destinations[move.dst_rank][move.dst.region]
        return self._numbers[GroupPair(src_form, dst_form, self._windows[move.field])]

    def _cut_box(
        self, move: Move, pair: int, src: _End, dst: _End
    ) -> tuple[tuple[int, ...], Int64s]:
        """The move's box, from one end to another.

        A row of strided elements needs each at a multiple of its size, as devices load nothing
        else. Where a layout breaks that, every element becomes a row of bytes; a cast can't, and
        raises `CastUnsupportedError`.
        """
        items = (src.place.dtype.itemsize_bytes, dst.place.dtype.itemsize_bytes)
        cut = self._cut(move, src.place, dst.place)
        same = src.place.dtype is dst.place.dtype
        raw = same and (cut.count == 1 or cut.steps_bytes == items)
        if not raw and not (src.aligned and dst.aligned):
            if not same:
                raise _misaligned(move)
            cut, raw = cut.elements(), True
        first = (
            move.src_rank,
            pair,
            src.region,
            src.place.offset_bytes,
            dst.region,
            dst.place.offset_bytes,
            cut.count * items[0] if raw else cut.count,
            1 if raw else cut.steps_bytes[0],
            1 if raw else cut.steps_bytes[1],
            src.place.token_stride_bytes or 0,
            dst.place.token_stride_bytes or 0,
            int(DType.UINT8 if raw else src.place.dtype),
            int(DType.UINT8 if raw else dst.place.dtype),
        )
        return first, cut.offsets_bytes

    def _cut(self, move: Move, src: Place, dst: Place) -> Rows:
        sizes = tuple([span.size for span in move.box])
        items = (src.dtype.itemsize_bytes, dst.dtype.itemsize_bytes)
        key = (sizes, src.strides_bytes, dst.strides_bytes, items)
        cut = self._cuts.get(key)
        if cut is None:
            cut = cut_rows(sizes, (src.strides_bytes, dst.strides_bytes), items)
            self._cuts[key] = cut
        return cut


def _indexed(rank: RankLayout) -> dict[str, tuple[int, Region, PageForm]]:
    return {
        region.name: (
            index,
            region,
            PageForm(region.group, region.page_tokens or 0, region.pages_per_block),
        )
        for index, region in enumerate(rank.regions)
    }


def _aligned(place: Place, page_stride_bytes: int) -> bool:
    item = place.dtype.itemsize_bytes
    steps = (*place.strides_bytes, place.token_stride_bytes or 0, page_stride_bytes)
    return item == 1 or not any(step % item for step in (place.offset_bytes, *steps))


def _misaligned(move: Move) -> CastUnsupportedError:
    return CastUnsupportedError(
        f"field {move.field}: rank {move.src_rank} of P or rank {move.dst_rank} of D has elements "
        f"that do not lie at multiples of their size, so they can't be cast",
        field=move.field,
        ranks=f"{move.src_rank},{move.dst_rank}",
    )


_SAME_IN_A_RUN = [
    Column.SRC_RANK,
    Column.GROUP_PAIR,
    Column.SRC_REGION,
    Column.DST_REGION,
    Column.SRC_TOKEN_STRIDE_BYTES,
    Column.DST_TOKEN_STRIDE_BYTES,
    Column.SRC_STEP_BYTES,
    Column.DST_STEP_BYTES,
    Column.SRC_DTYPE,
    Column.DST_DTYPE,
]


def join_rows(rows: Int64s) -> tuple[Int64s, Int64s]:
    """Join rows of bytes that continue each other on both sides, across fields too.

    Returns the joined rows, those of one region together, and for each given row the number of the
    one that it went into.
    """
    if len(rows) < 2:
        return rows, np.zeros(len(rows), np.int64)
    order = np.lexsort((rows[:, Column.DST_OFFSET_BYTES], *rows[:, _SAME_IN_A_RUN].T[::-1]))
    rows = rows[order]
    continues = (rows[1:, _SAME_IN_A_RUN] == rows[:-1, _SAME_IN_A_RUN]).all(axis=1)
    continues &= ~strided(rows[1:])
    lengths = rows[:, Column.COUNT]
    for offset in (Column.SRC_OFFSET_BYTES, Column.DST_OFFSET_BYTES):
        continues &= rows[1:, offset] == rows[:-1, offset] + lengths[:-1]
    begins = np.concatenate([[True], ~continues])
    first = np.flatnonzero(begins)
    joined = rows[first]
    joined[:, Column.COUNT] = np.add.reduceat(lengths, first)
    row_of = np.empty(len(rows), np.int64)
    row_of[order] = np.cumsum(begins) - 1
    return joined, row_of


def strided(rows: Int64s) -> Bools:
    """Mask of the rows that are not runs of bytes."""
    steps = rows[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]]
    dtypes = rows[:, [Column.SRC_DTYPE, Column.DST_DTYPE]]
    mask: Bools = (steps != 1).any(axis=1) | (dtypes != DType.UINT8).any(axis=1)
    return mask


def split_rows(rows: Int64s) -> Int64s:
    """Strided rows as one row an element, because a READ moves contiguous bytes.

    Raises `TooManyPiecesError`.
    """
    wide = strided(rows)
    if not wide.any():
        return rows
    table = rows[wide]
    counts = table[:, Column.COUNT]
    if int(counts.sum()) > MAX_ROWS:
        raise TooManyPiecesError(
            f"a rank would read more than {MAX_ROWS} single elements: use pack or auto"
        )
    single = np.repeat(table, counts, axis=0)
    index = np.arange(len(single)) - np.repeat(np.cumsum(counts) - counts, counts)
    single[:, Column.SRC_OFFSET_BYTES] += index * single[:, Column.SRC_STEP_BYTES]
    single[:, Column.DST_OFFSET_BYTES] += index * single[:, Column.DST_STEP_BYTES]
    single[:, Column.COUNT] = ITEM_BYTES[single[:, Column.SRC_DTYPE]]
    single[:, [Column.SRC_STEP_BYTES, Column.DST_STEP_BYTES]] = 1
    single[:, [Column.SRC_DTYPE, Column.DST_DTYPE]] = DType.UINT8
    return join_rows(np.concatenate([rows[~wide], single]))[0]


def _itemsizes() -> Int64s:
    table = np.zeros(max(DType) + 1, np.int64)
    for dtype in DType:
        table[dtype] = dtype.itemsize_bytes
    return table


ITEM_BYTES: Int64s = _itemsizes()
"""Bytes of an element by `DType` number."""
