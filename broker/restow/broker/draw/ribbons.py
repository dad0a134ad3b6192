"""A move is drawn as a ribbon of strands, each from a stretch of a page of P to one of D's."""

from __future__ import annotations

from dataclasses import dataclass

from restow.broker.layout import Box, Span
from restow.broker.layout.span import volume
from restow.broker.planner.plan import Move, Place

MAX_STRANDS = 64
"""Of one move: what falls into more is not taken apart further."""


@dataclass(frozen=True, slots=True)
class Strand:
    """Bytes of both pages, each from the first to the last that a part of a move touches there."""

    src: Span
    dst: Span


@dataclass(frozen=True, slots=True)
class Ribbon:
    """One move, drawn. Of a per-token field the first token of a page."""

    name: str
    move: Move
    strands: tuple[Strand, ...]


def ribbon_of(move: Move, name: str) -> Ribbon:
    """A move taken apart until each strand is one run on both sides, or can't be made so."""
    parts = [move.box]
    for place in (move.src, move.dst):
        while (axis := _outermost(parts[0], place)) is not None:
            if parts[0][axis].size * len(parts) > MAX_STRANDS:
                break
            parts = [
                (*part[:axis], Span(at, at + 1), *part[axis + 1 :])
                for part in parts
                for at in range(part[axis].start, part[axis].stop)
            ]
    strands = (
        Strand(_reached(part, move.box, move.src), _reached(part, move.box, move.dst))
        for part in parts
    )
    return Ribbon(name, move, tuple(strands))


def _outermost(box: Box, place: Place) -> int | None:
    """The axis at whose steps a box that is no run of bytes begins anew."""
    if _reached(box, box, place).size == volume(box) * place.dtype.itemsize_bytes:
        return None
    return max(
        (axis for axis, span in enumerate(box) if span.size > 1),
        key=lambda axis: place.strides_bytes[axis],
    )


def _reached(part: Box, box: Box, place: Place) -> Span:
    """The bytes of ``part`` of ``box``, which begins at ``place``."""
    start = stop = place.offset_bytes
    for span, whole, step in zip(part, box, place.strides_bytes, strict=True):
        start += (span.start - whole.start) * step
        stop += (span.stop - 1 - whole.start) * step
    return Span(start, stop + place.dtype.itemsize_bytes)
