"""Half-open ranges and their products: the algebra of layouts and plans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from restow.broker.errors import LayoutFormError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The integers from ``start`` up to, but not including, ``stop``; never empty.

    >>> Span(0, 4).overlap(Span(2, 8))
    Span(2, 4)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        """Refuse an empty or negative range."""
        if not 0 <= self.start < self.stop:
            raise LayoutFormError(f"range [{self.start}, {self.stop}) is empty or negative")

    def __repr__(self) -> str:
        """Return the range as an expression."""
        return f"Span({self.start}, {self.stop})"

    def __str__(self) -> str:
        """Return the range in the notation of the docs."""
        return f"[{self.start}, {self.stop})"

    @property
    def size(self) -> int:
        """Return the number of integers."""
        return self.stop - self.start

    def overlap(self, other: Span) -> Span | None:
        """Return the integers in both, or None."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None


Box: TypeAlias = tuple[Span, ...]
"""A product of ranges, with a span per axis."""


def volume(box: Box) -> int:
    """Return the number of elements in a box (1 for a box without axes)."""
    return math.prod(span.size for span in box)


def overlap(first: Box, second: Box) -> Box | None:
    """Return the elements in both boxes, or None."""
    spans = tuple(a.overlap(b) for a, b in zip(first, second, strict=True))
    return None if None in spans else tuple(span for span in spans if span is not None)


def packed_strides(box: Box, innermost_bytes: int) -> tuple[int, ...]:
    """Return the strides of a box without gaps, with the last axis innermost."""
    return tuple(volume(box[axis + 1 :]) * innermost_bytes for axis in range(len(box)))


def box_text(box: Box) -> str:
    """Return a box in the notation of the docs."""
    return " x ".join(map(str, box))


def aligned(length_bytes: int, align_bytes: int) -> int:
    """Round up to a multiple of ``align_bytes``.

    >>> aligned(17, 16), aligned(32, 16)
    (32, 32)
    """
    return -(-length_bytes // align_bytes) * align_bytes
