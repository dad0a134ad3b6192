"""Cut moves into the rows of a program, and join rows that are contiguous on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import CastUnsupportedError, TooManyPiecesError
from restow.broker.layout import DType, Layout
from restow.broker.layout.rows import MAX_ROWS, Int64s, Rows, cut_rows
from restow.broker.planner.plan import Move, Place, Plan
from restow.broker.planner.program import Column, GroupPair, PageForm, join_rows, no_rows


@dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of all moves to a rank, and the move of each piece.

    ``rows`` is int64 ``[rows, len(Column)]``. Pieces are the rows before joining: piece ``i``
    belongs to move ``piece_move[i]`` and became part of row ``piece_row[i]``.
    """

    rows: Int64s
    pieces: Int64s
    piece_move: Int64s
    piece_row: Int64s


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of a region: its index in its rank's layout, and how block ids address it."""

    region: int
    stride_bytes: int
    form: PageForm


@dataclass(frozen=True, slots=True)
class _End:
    """An end of a move; ``aligned`` says that its elements are aligned to their size."""

    region: int
    place: Place
    aligned: bool


class Cutter:
    """Cut the moves of a plan into rows; cache the cuts, because layers are alike."""

    def __init__(self, plan: Plan) -> None:
        """Assign numbers to all pairs of lists, common to all programs of the plan."""
        self._sources, self._destinations = _pages(plan.source), _pages(plan.destination)
        self._windows = {field.name: field.window_tokens for field in plan.source.model.fields}
        self._numbers: dict[GroupPair, int] = {}
        self._cuts: dict[object, Rows] = {}
        self.pieces = 0
        """Pieces of all tables so far, for the limit; subtract the pieces of a dropped table."""
        for move in plan.moves:
            self._pair(move)

    def pair_number(
        self, src_rank: int, src: str, dst_rank: int, dst: str, window_tokens: int = 0
    ) -> int:
        """Return the number of the pair of lists that address two regions."""
        forms = self._sources[src_rank, src].form, self._destinations[dst_rank, dst].form
        return self._numbers.setdefault(GroupPair(*forms, window_tokens), len(self._numbers))

    def source_region(self, src_rank: int, name: str) -> int:
        """Return the index of a source's region."""
        return self._sources[src_rank, name].region

    @property
    def pairs(self) -> tuple[GroupPair, ...]:
        """Return the pairs of lists in the order of their numbers."""
        return tuple(self._numbers)

    def table(self, moves: Sequence[Move]) -> RowTable:
        """Return the table of moves to a rank.

        Raises `CastUnsupportedError` (see `_cut_box`) and `TooManyPiecesError`.
        """
        if not moves:
            nothing = np.empty(0, np.int64)
            return RowTable(no_rows(), no_rows(), nothing, nothing)
        pieces, counts = self._pieces_of(
            [self._cut_box(move, self._src(move), self._dst(move)) for move in moves]
        )
        rows, piece_row = join_rows(pieces)
        return RowTable(rows, pieces, np.repeat(np.arange(len(moves)), counts), piece_row)

    def through(self, moves: Sequence[Move], places: Sequence[Place]) -> tuple[Int64s, Int64s]:
        """Return rows from the sources to ``places`` in a chunk, and from the chunk to D's pages.

        The chunk's region has number 0. Raises what `table` raises.
        """
        if not moves:
            return no_rows(), no_rows()
        there, back = [], []
        for move, place in zip(moves, places, strict=True):
            chunk = _End(0, place, True)
            there.append(self._cut_box(move, self._src(move), chunk))
            back.append(self._cut_box(move, chunk, self._dst(move)))
        first, second = (join_rows(self._pieces_of(cut)[0])[0] for cut in (there, back))
        return first, second

    def _pieces_of(self, cut: Sequence[tuple[tuple[int, ...], Int64s]]) -> tuple[Int64s, list[int]]:
        """Return all rows before joining, and the number of rows of each box."""
        firsts, offsets = zip(*cut, strict=True)
        counts = [len(part) for part in offsets]
        self.pieces += sum(counts)
        if self.pieces > MAX_ROWS:
            raise TooManyPiecesError(f"the plan falls into more than {MAX_ROWS} pieces")
        pieces = np.repeat(np.array(firsts, np.int64), counts, axis=0)
        pieces[:, [Column.SRC_OFFSET_BYTES, Column.DST_OFFSET_BYTES]] += np.concatenate(offsets)
        return pieces, counts

    def _src(self, move: Move) -> _End:
        return _end(self._sources[move.src_rank, move.src.region], move.src)

    def _dst(self, move: Move) -> _End:
        return _end(self._destinations[move.dst_rank, move.dst.region], move.dst)

    def _pair(self, move: Move) -> int:
        window = self._windows[move.field]
        ends = move.src_rank, move.src.region, move.dst_rank, move.dst.region
        return self.pair_number(*ends, window)

    def _cut_box(self, move: Move, src: _End, dst: _End) -> tuple[tuple[int, ...], Int64s]:
        """Cut a move's box between two ends; return a common row, and the offsets of all rows.

        Strided elements must be aligned to their size, because devices load nothing else. If a
        layout breaks that, every element becomes a row of bytes. A cast is impossible then and
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
            self._pair(move),
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


def _pages(layout: Layout) -> dict[tuple[int, str], _Pages]:
    """Return the pages of all regions, by rank and region name."""
    return {
        (rank.rank, region.name): _Pages(index, region.page_stride_bytes, PageForm.of(region))
        for rank in layout.ranks
        for index, region in enumerate(rank.regions)
    }


def _end(pages: _Pages, place: Place) -> _End:
    return _End(pages.region, place, _aligned(place, pages.stride_bytes))


def _aligned(place: Place, page_stride_bytes: int) -> bool:
    item = place.dtype.itemsize_bytes
    steps = (*place.strides_bytes, place.token_stride_bytes or 0, page_stride_bytes)
    return item == 1 or not any(step % item for step in (place.offset_bytes, *steps))


def _misaligned(move: Move) -> CastUnsupportedError:
    return CastUnsupportedError(
        f"field {move.field}: rank {move.src_rank} of P or rank {move.dst_rank} of D has elements "
        f"that are not aligned to their size, so they cannot be cast",
        field=move.field,
        ranks=f"{move.src_rank},{move.dst_rank}",
    )
