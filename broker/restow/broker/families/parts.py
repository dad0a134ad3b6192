"""Parts of a recurrent state, and which of them a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from restow.broker.families.cut import rank_slice, rank_span
from restow.broker.layout import Box, DType, Field, Kind, Span
from restow.broker.words import Worded


def input_name(layer: int) -> str:
    """The name of what a layer read."""
    return f"layers.{layer}.mixer_input"


class Sharing(StrEnum):
    """What becomes of a part when there are several ranks."""

    CUT = "cut"
    """Each rank has its slice."""
    SHARED = "shared"
    """As CUT, but ranks that are more than the units share them."""
    WHOLE = "whole"
    """Every rank holds all of it (vLLM `tp_replicated`)."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """One field of a layer: ``shape`` over ``axes``, of which the first is cut.

    That axis consists of ``units`` equal pieces, called ``unit`` (heads, groups), and no rank holds
    half of one.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    unit: str
    units: int
    sharing: Sharing = Sharing.CUT

    def box(self, tp: int, rank: int) -> Box:
        """What ``rank`` of ``tp`` holds. Raises `TpSizeError`."""
        return (self._span(tp, rank), *(Span(0, size) for size in self.shape[1:]))

    def _span(self, tp: int, rank: int) -> Span:
        if self.sharing is Sharing.WHOLE:
            return Span(0, self.shape[0])
        choose = rank_slice if self.sharing is Sharing.CUT else rank_span
        units = choose(self.units, tp, rank, self.unit)
        size = self.shape[0] // self.units
        return Span(units.start * size, units.stop * size)


@dataclass(frozen=True, slots=True)
class Mixer(Worded):
    """What a layer reads: vectors of ``hidden`` elements; its windows are their in-projection.

    The product is made in ``dtype``. ``obstacle`` says why a window is not that product alone, or
    is empty.
    """

    hidden: int
    dtype: DType
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a recurrent layer keeps: conv windows of ``taps`` rows, then states, in this order.

    ``kind`` names the region. Rows for speculative tokens follow the windows where the family
    ``speculates`` (vLLM `mamba_utils.py`).
    """

    kind: str
    taps: int
    conv: tuple[StatePart, ...]
    conv_dtype: DType
    states: tuple[StatePart, ...]
    state_dtype: DType
    speculates: bool = True
    mixer: Mixer | None = None

    @property
    def obstacle(self) -> str:
        """Why the windows can't be rebuilt from what the layer read; empty if they can be."""
        if not self.conv:
            return "it has no conv windows"
        if self.mixer is None:
            return f"the in-projection of {self.kind} layers is not described"
        if not self.conv_dtype.castable or not self.mixer.dtype.castable:
            return f"{self.mixer.dtype.label} can't be multiplied into {self.conv_dtype.label}"
        return self.mixer.obstacle

    @property
    def read(self) -> Mixer | None:
        """What the windows can be rebuilt from, if they can be."""
        return None if self.obstacle else self.mixer

    def inputs(self, layer: int) -> tuple[Field, ...]:
        """What the layer read last, if its windows can be rebuilt from it."""
        if self.read is None:
            return ()
        shape = (self.taps, self.read.hidden)
        return (Field(input_name(layer), Kind.SNAPSHOT, ("tap", "hidden"), shape),)

    def fields(self, layer: int) -> tuple[Field, ...]:
        """Every part as a field of the model; windows have an axis ``tap``."""
        windows = [(part, ("tap",), (self.taps,)) for part in self.conv]
        states = [(part, (), ()) for part in self.states]
        return tuple(
            Field(
                f"layers.{layer}.{part.name}",
                Kind.SNAPSHOT,
                (*part.axes, *axis),
                (*part.shape, *size),
            )
            for part, axis, size in (*windows, *states)
        )
