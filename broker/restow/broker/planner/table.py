"""From moves to the rows of a program: cut every box, then join what continues on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.broker.errors import CastUnsupportedError, TooManyPiecesError
from restow.broker.layout import DType, Layout
from restow.broker.layout.rows import MAX_ROWS, Int64s, Rows, cut_rows
from restow.broker.planner.plan import Move, Place, Plan
from restow.broker.planner.program import Column, GroupPair, PageForm, no_rows
from restow.broker.planner.program.programs import join_rows


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
class _Pages:
    """Pages of a region: its index in its rank's layout, and how they are addressed."""

    region: int
    stride_bytes: int
    form: PageForm


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
        self._sources, self._destinations = _pages(plan.source), _pages(plan.destination)
        self._windows = {field.name: field.window_tokens for field in plan.source.model.fields}
        self._numbers: dict[GroupPair, int] = {}
        self._cuts: dict[object, Rows] = {}
        self.pieces = 0
        """Of all tables so far: bounded. Who drops a table may take its pieces off."""
        for move in plan.moves:
            self._pair(move)

    def pair_number(
        self, src_rank: int, src: str, dst_rank: int, dst: str, window_tokens: int = 0
    ) -> int:
        """The number of the pair of lists that address two regions."""
        forms = self._sources[src_rank, src].form, self._destinations[dst_rank, dst].form
        return self._numbers.setdefault(GroupPair(*forms, window_tokens), len(self._numbers))

    def source_region(self, src_rank: int, name: str) -> int:
        """The index of a source's region."""
        return self._sources[src_rank, name].region

    @property
    def pairs(self) -> tuple[GroupPair, ...]:
        """The pairs of page lists, in the order of their numbers."""
        return tuple(self._numbers)

    def table(self, moves: Sequence[Move]) -> Table:
        """The rows of moves to one rank.

        Raises `CastUnsupportedError` (see `_cut_box`) and `TooManyPiecesError`.
        """
        if not moves:
            nothing = np.empty(0, np.int64)
            return Table(no_rows(), no_rows(), nothing, nothing)
        pieces, counts = self._pieces_of(
            [self._cut_box(move, self._src(move), self._dst(move)) for move in moves]
        )
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
            chunk = _End(0, place, True)
            there.append(self._cut_box(move, self._src(move), chunk))
            back.append(self._cut_box(move, chunk, self._dst(move)))
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

    def _src(self, move: Move) -> _End:
        return _end(self._sources[move.src_rank, move.src.region], move.src)

    def _dst(self, move: Move) -> _End:
        return _end(self._destinations[move.dst_rank, move.dst.region], move.dst)

    def _pair(self, move: Move) -> int:
        window = self._windows[move.field]
        ends = move.src_rank, move.src.region, move.dst_rank, move.dst.region
        return self.pair_number(*ends, window)

    def _cut_box(self, move: Move, src: _End, dst: _End) -> tuple[tuple[int, ...], Int64s]:
        """The move's box from one end to another: a row without offsets inside it, and those.

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
    """By rank and name of a region."""
    return {
        (rank.rank, one.name): _Pages(
            index,
            one.page_stride_bytes,
            PageForm(
                one.group,
                one.page_tokens or 0,
                one.pages_per_block,
                one.tokens,
                one.whole_blocks,
            ),
        )
        for rank in layout.ranks
        for index, one in enumerate(rank.regions)
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
        f"that do not lie at multiples of their size, so they can't be cast",
        field=move.field,
        ranks=f"{move.src_rank},{move.dst_rank}",
    )
