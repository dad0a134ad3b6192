"""Launch table: a piece table cut into tiles, one for each GPU program (numpy only).

tiles   int64 [t, 3]  SRC_ADDRESS, DST_ADDRESS, WORK = shape << 32 | code << 16 | elements
shapes  int64 [n, 5]  INNER, SRC_STEP_BYTES, DST_STEP_BYTES, SRC_GAP_BYTES, DST_GAP_BYTES

Element e of a tile lies e % INNER steps and e // INNER gaps after the tile's address. So a run of
short rows, evenly spaced on both sides, fills a tile in the order in which one side is contiguous:
a transpose reads and writes whole sectors, and the slices of a token share a program.

A contiguous row becomes a body of aligned 16-byte vectors, with a head and a tail of single bytes
where its ends are not aligned. If its two addresses differ modulo 16, its body uses the widest unit
that divides the difference.
"""

from dataclasses import dataclass

import numpy as np

from restow.kernels.codes import SRC_BYTES, Bools, CopyCode, Int64s, PieceColumn
from restow.kernels.tables import contiguous, evenly_spaced, tiles

VECTOR_BYTES = 16
BOX_16 = len(CopyCode)  # code of 16-byte vectors whose positions a shape gives
RUN_16 = BOX_16 + 1  # code of one contiguous run of 16-byte vectors, which needs no shape
ELEMS = 512  # elements of a tile that is not copied as vectors
VECTORS = (256, 1024)  # vectors of a tile, for short pieces and for long pieces
FULL_GPU_TILES = 4096  # enough tiles for several rounds on every multiprocessor
SHORT = 512  # rows of at most this many bytes (contiguous) or elements (strided) share tiles
SHAPE_COLUMNS = 5
BOX_CODES: Int64s = np.zeros(VECTOR_BYTES + 1, dtype=np.int64)  # by unit
BOX_CODES[[1, 2, 4, 8, 16]] = (*list(CopyCode)[:4], BOX_16)
RUN_CODES: Int64s = np.where(BOX_CODES == BOX_16, RUN_16, BOX_CODES)


@dataclass(frozen=True, slots=True, eq=False)
class LaunchTable:
    """Tiles of up to ``vectors`` vectors or `ELEMS` elements, and the shapes that they refer to."""

    tiles: Int64s  # [t, 3]
    shapes: Int64s  # [n, 5]
    vectors: int

    @classmethod
    def of(cls, rows: Int64s, vectors: int | None = None) -> "LaunchTable":
        """Cut the rows of a piece table; without ``vectors``, choose the faster tile size."""
        nonempty = rows[:, PieceColumn.COUNT] > 0
        boxes = _boxes(rows.copy() if nonempty.all() else rows[nonempty])
        per_tile = {size: _rows_per_tile(boxes, size) for size in VECTORS}
        per_box = {size: -(-boxes.outer // per) for size, per in per_tile.items()}
        if vectors is None:
            many, few = (int(per_box[size].sum()) for size in VECTORS)
            pays = few >= FULL_GPU_TILES and 3 * few <= many
            vectors = VECTORS[1] if pays else VECTORS[0]
        per = per_tile[vectors]
        box, i_tile = tiles(per_box[vectors], 1).T
        first, per = i_tile * per[box], per[box]  # rows of the box
        count = np.minimum(per, boxes.outer[box] - first) * boxes.shapes[:, 0][box]
        table = np.empty((len(box), 3), dtype=np.int64)
        for side in (0, 1):
            gap = boxes.shapes[:, 3 + side][box]
            table[:, side] = boxes.address[:, side][box] + first * gap
        table[:, 2] = box << 32 | boxes.code[box] << 16 | count
        return cls(table, boxes.shapes, vectors)


@dataclass(frozen=True, slots=True, eq=False)
class _Boxes:
    """Boxes of ``outer`` rows with INNER elements each."""

    address: Int64s  # [n, 2]: source, destination
    outer: Int64s  # [n]
    code: Int64s  # [n]
    shapes: Int64s  # [n, 5]

    @classmethod
    def joined(cls, *parts: "_Boxes") -> "_Boxes":
        fields = ((part.address, part.outer, part.code, part.shapes) for part in parts)
        return cls(*(np.concatenate(field) for field in zip(*fields, strict=True)))


def _rows_per_tile(boxes: _Boxes, vectors: int) -> Int64s:
    size = np.where(boxes.code >= BOX_16, vectors, ELEMS)
    per: Int64s = size // boxes.shapes[:, 0]
    return per


def _boxes(rows: Int64s) -> _Boxes:
    """Turn nonempty rows into boxes, joining short, evenly spaced rows; overwrites ``rows``."""
    dense = contiguous(rows)
    of_bytes = slice(None) if dense.all() else dense
    rows[of_bytes, PieceColumn.COUNT] *= SRC_BYTES[rows[of_bytes, PieceColumn.CODE]]
    rows[of_bytes, PieceColumn.SRC_STEP_BYTES :] = (1, 1, CopyCode.COPY_1)

    short = rows[:, PieceColumn.COUNT] <= SHORT
    if not short.any():
        return _Boxes.joined(_peeled(rows[of_bytes]), _rows_of_elements(rows[~dense]))
    start, length, gap = evenly_spaced(rows, short)
    dense, rows = dense[start], rows[start]
    step = rows[:, PieceColumn.SRC_STEP_BYTES : PieceColumn.CODE]
    abut = (length > 1) & np.all(gap == rows[:, [PieceColumn.COUNT]] * step, axis=1)
    rows[abut, PieceColumn.COUNT] *= length[abut]
    alone = abut | (length == 1)
    grouped = ~alone & dense
    strided = ~alone & ~dense
    return _Boxes.joined(
        _peeled(rows[alone & dense]),
        _rows_of_elements(rows[alone & ~dense]),
        _of_bytes(rows[grouped], length[grouped], gap[grouped]),
        _Boxes(
            rows[strided, :2],
            length[strided],
            rows[strided, PieceColumn.CODE],
            np.column_stack([rows[strided, PieceColumn.COUNT : PieceColumn.CODE], gap[strided]]),
        ),
    )


def _rows_of_elements(rows: Int64s) -> _Boxes:
    """Turn each strided row into a box whose rows have one element."""
    step = rows[:, PieceColumn.SRC_STEP_BYTES : PieceColumn.CODE]
    shapes = np.column_stack([np.ones(len(rows), np.int64), step, step])
    return _Boxes(rows[:, :2], rows[:, PieceColumn.COUNT], rows[:, PieceColumn.CODE], shapes)


def _of_bytes(rows: Int64s, outer: Int64s, gap: Int64s) -> _Boxes:
    """Make boxes of contiguous short rows, in the widest unit that divides all their numbers."""
    length = rows[:, PieceColumn.COUNT]
    unit = _unit(np.bitwise_or.reduce([*rows[:, :2].T, length, *gap.T]))
    return _Boxes(
        rows[:, :2], outer, BOX_CODES[unit], np.column_stack([length // unit, unit, unit, gap])
    )


def _peeled(rows: Int64s) -> _Boxes:
    """Turn each contiguous row into an aligned body and single bytes at its ends."""
    src, dst, length = rows[:, 0], rows[:, 1], rows[:, PieceColumn.COUNT]
    unit = _unit(src - dst)
    head = np.minimum(-dst % unit, length)
    body = (length - head) // unit * unit
    tail = length - head - body
    ends = [(head, head * 0), (tail, head + body)]
    parts = [_runs(rows[:, :2] + head[:, None], body // unit, unit)]
    parts += [_runs(rows[:, :2] + begin[:, None], size, unit * 0 + 1) for size, begin in ends]
    return _Boxes.joined(*parts)


def _runs(address: Int64s, count: Int64s, unit: Int64s) -> _Boxes:
    nonempty: Bools = count > 0
    if not nonempty.all():
        address, count, unit = address[nonempty], count[nonempty], unit[nonempty]
    shapes = np.repeat(unit, SHAPE_COLUMNS).reshape(-1, SHAPE_COLUMNS)
    shapes[:, 0] = 1
    return _Boxes(address, count, RUN_CODES[unit], shapes)


def _unit(bits: Int64s) -> Int64s:
    """Return the widest unit, up to a vector, that divides all numbers or-ed into ``bits``."""
    bits = bits | VECTOR_BYTES
    return bits & -bits
