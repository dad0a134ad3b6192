"""`pack` lays fields out without gaps, in the order in which an engine's page has them.

What an engine interleaves stays interleaved: keys and values of a head and token side by side, the
channels of several fields in one row of taps. So between a store and an engine of one rank pieces
are as long as they can be, whatever packs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

TOKEN = ""
"""The name of the token axis: no other axis has it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a field: its whole size, and what an engine's rank has of it, how far apart."""

    name: str
    size: int
    held: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A field as it lies in an engine's page: ``axes`` from the outermost to the innermost."""

    field: str
    item_bytes: int
    offset_bytes: int
    axes: tuple[Axis, ...]

    @property
    def stop_bytes(self) -> int:
        """Where its last element ends."""
        reach = sum((axis.held - 1) * axis.stride_bytes for axis in self.axes)
        return self.offset_bytes + reach + self.item_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a whole field lies: the stride of each of its axes by name."""

    offset_bytes: int
    strides_bytes: dict[str, int]


def pack(parts: Sequence[Part]) -> tuple[dict[str, Place], int]:
    """Return where each field lies, and the bytes that all of them have together.

    >>> head, token = Axis("head", 2, 2, 64), Axis(TOKEN, 4, 4, 16)
    >>> k = Part("k", 2, 0, (head, token, Axis("dim", 4, 4, 2)))
    >>> places, size = pack([k, replace(k, field="v", offset_bytes=8)])
    >>> places["v"].offset_bytes, places["v"].strides_bytes, size
    (8, {'dim': 2, '': 16, 'head': 64}, 128)
    """
    places: dict[str, Place] = {}
    end = 0
    for some in _interleaved(parts):
        found, size = _pack_together(some)
        for field, place in found.items():
            places[field] = replace(place, offset_bytes=end + place.offset_bytes)
        end += size
    return places, end


def _interleaved(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Parts whose bytes lie between each other's, in the order in which they begin."""
    some: list[Part] = []
    for part in sorted(parts, key=lambda one: (one.offset_bytes, one.stop_bytes)):
        if some and part.offset_bytes >= max(one.stop_bytes for one in some):
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def _pack_together(parts: list[Part]) -> tuple[dict[str, Place], int]:
    """Pack those that lie between each other: by an axis that all have outermost, or apart."""
    if len(parts) == 1:
        return _pack_alone(parts[0])
    outermost = {part.axes[:1] for part in parts}
    if len(outermost) > 1 or not parts[0].axes:
        places: dict[str, Place] = {}
        end = 0
        for part in parts:
            found, size = _pack_alone(part)
            places[part.field] = replace(found[part.field], offset_bytes=end)
            end += size
        return places, end
    axis = parts[0].axes[0]
    inner, size = pack([replace(part, axes=part.axes[1:]) for part in parts])
    for place in inner.values():
        place.strides_bytes[axis.name] = size
    return inner, size * axis.size


def _pack_alone(part: Part) -> tuple[dict[str, Place], int]:
    strides, size = {}, part.item_bytes
    for axis in reversed(part.axes):
        strides[axis.name] = size
        size *= axis.size
    return {part.field: Place(0, strides)}, size
