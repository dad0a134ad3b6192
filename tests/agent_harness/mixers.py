"""Weights and inputs whose products are known: small integers, functions of their coordinates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from restow.broker.layout import Box, Field, Span

Floats = npt.NDArray[np.float32]


def input_of(field: Field, fields: Mapping[str, Field]) -> Field | None:
    """Return the input that a window is made of, or None if ``fields`` does not have it."""
    layer, _, rest = field.name.partition(".conv.")
    return fields.get(f"{layer}.mixer_input") if rest else None


def numbers(name: str, box: Box) -> Floats:
    """Return the known numbers of a part of a tensor."""
    total = np.full([span.size for span in box], sum(name.encode()))
    for axis, span in enumerate(box):
        index = np.arange(span.start, span.stop) * (2 * axis + 3)
        total = total + np.expand_dims(index * index, tuple(range(axis + 1 - len(box), 0)))
    return (total % 7 - 3).astype(np.float32)


def window(field: Field, read: Field) -> Floats:
    """Return all of a window, ``[*channels, tap]``."""
    channels = tuple(Span(0, size) for size in field.shape[:-1])
    taps, hidden = (Span(0, size) for size in read.shape)
    weights = numbers(field.name, (*channels, hidden))
    return weights @ numbers(read.name, (taps, hidden)).T
