"""A move as strands, together its ribbon: each from a stretch of a source page to one of D's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from restow.broker.layout import Box, Span
from restow.broker.layout.span import volume
from restow.broker.planner.move import Move, Place

MAX_STRANDS = 64
"""Of one move: what falls into more is not taken apart further."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The bytes of a page from the first to the last that a part of a box touches there."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Strand:
    """A part of a move, from where it lies to where it goes."""

    src: Stretch
    dst: Stretch


@dataclass(frozen=True, slots=True)
class Ribbon:
    """One move, drawn. Of a per-token field the first token of a page."""

    name: str
    src_rank: int
    src_region: str
    dst_rank: int
    dst_region: str
    box: Box
    bytes: int
    strands: tuple[Strand, ...]


def ribbon_of(move: Move, name: str) -> Ribbon:
    """A move taken apart until each strand is one run on both sides, or can't be made so."""
    src, dst = move.src, move.dst
    strands = tuple(
        Strand(_stretch(part, move.box, src), _stretch(part, move.box, dst))
        for part in _parts(move.box, src, dst)
    )
    return Ribbon(
        name, move.src_rank, src.region, move.dst_rank, dst.region, move.box, move.bytes, strands
    )


def _parts(box: Box, src: Place, dst: Place) -> Sequence[Box]:
    parts = [box]
    for place in (src, dst):
        while (axis := _outermost(parts[0], place)) is not None:
            if parts[0][axis].size * len(parts) > MAX_STRANDS:
                break
            parts = [
                (*part[:axis], Span(at, at + 1), *part[axis + 1 :])
                for part in parts
                for at in range(part[axis].start, part[axis].stop)
            ]
    return parts


def _outermost(box: Box, place: Place) -> int | None:
    """The axis at whose steps a box that is no run of bytes begins anew."""
    size = _length(box, place)
    if size == volume(box) * place.dtype.itemsize_bytes:
        return None
    return max(
        (axis for axis, span in enumerate(box) if span.size > 1),
        key=lambda axis: place.strides_bytes[axis],
    )


def _length(box: Box, place: Place) -> int:
    steps = zip(box, place.strides_bytes, strict=True)
    return sum((span.size - 1) * step for span, step in steps) + place.dtype.itemsize_bytes


def _stretch(part: Box, box: Box, place: Place) -> Stretch:
    """Where ``part`` of ``box`` lies, which begins at ``place``."""
    start = place.offset_bytes + sum(
        (span.start - whole.start) * step
        for span, whole, step in zip(part, box, place.strides_bytes, strict=True)
    )
    return Stretch(start, start + _length(part, place))
