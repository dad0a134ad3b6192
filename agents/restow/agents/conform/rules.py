"""The layers and geometries that connectors are asked about, and the elements of each rank.

What ranks hold is written down from the definition of the layers. It is the measure for Restow's
plan as well as for other connectors, so this file and `score` import nothing of the broker.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
PAGE_TOKENS = 16
CONV_ITEM_BYTES, STATE_ITEM_BYTES, KV_ITEM_BYTES = 2, 4, 2
"""Sizes of bfloat16, float32, bfloat16."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of layer, with its sizes before tensor parallelism."""

    title: str
    family: str
    sizes: dict[str, int]

    def channels(self, tp: int, rank: int) -> Int64s:
        """Return the channels of the conv state that a rank holds, in order.

        Channels are numbered over the whole layer, part by part. Each part is cut evenly, except B
        and C of fewer groups than ranks, which ranks share.
        """
        held, first = [], 0
        for units, size in self._conv_parts():
            first_unit, stop_unit = _cut(units, tp, rank)
            held.append(np.arange(first + first_unit * size, first + stop_unit * size))
            first += units * size
        return np.concatenate(held)

    def _conv_parts(self) -> tuple[tuple[int, int], ...]:
        """Return for each part the units that ranks never cut, and the channels of a unit."""
        n = self.sizes
        if self.family == "mamba2":
            shared = (n["groups"], n["state"])
            return (n["heads"], n["head_dim"]), shared, shared
        if self.family == "gdn":
            keys = (n["key_heads"], n["key_dim"])
            return keys, keys, (n["value_heads"], n["value_dim"])
        return ((n["heads"], n["head_dim"]),) * 3

    @property
    def taps(self) -> int:
        """Return the live rows of a conv state."""
        return self.sizes["conv_kernel"] - 1

    def state(self, tp: int, rank: int) -> Int64s:
        """Return the elements of the recurrent state that a rank holds: whole heads of a matrix."""
        n = self.sizes
        heads, matrix = {
            "mamba2": (n.get("heads", 0), n.get("head_dim", 0) * n.get("state", 0)),
            "gdn": (n.get("value_heads", 0), n.get("value_dim", 0) * n.get("key_dim", 0)),
            "kda": (n.get("heads", 0), n.get("head_dim", 0) ** 2),
        }[self.family]
        first, stop = _cut(heads, tp, rank)
        return np.arange(first * matrix, stop * matrix)

    def kv_heads(self, tp: int, rank: int) -> Int64s:
        """Return the heads of K and V that a rank holds; surplus ranks share a head."""
        return np.arange(*_cut(self.sizes["kv_heads"], tp, rank))


def _cut(units: int, tp: int, rank: int) -> tuple[int, int]:
    """Return the units ``[first, stop)`` of a rank: its slice, or the single unit that it shares.

    >>> _cut(8, 4, 1), _cut(2, 4, 1)
    ((2, 4), (0, 1))
    """
    if units >= tp:
        return rank * units // tp, (rank + 1) * units // tp
    return rank * units // tp, rank * units // tp + 1


def _mamba2(groups: int) -> Kind:
    sizes = {"heads": 64, "head_dim": 64, "state": 128, "groups": groups, "conv_kernel": 4}
    return Kind(f"Mamba2, {groups} group{'s' * (groups > 1)}", "mamba2", sizes)


KINDS = {
    "mamba2-g8": _mamba2(8),
    "mamba2-g1": _mamba2(1),
    "gdn": Kind(
        "GDN",
        "gdn",
        {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "conv_kernel": 4},
    ),
    "kda": Kind("KDA", "kda", {"heads": 32, "head_dim": 128, "conv_kernel": 4}),
    "gqa-8": Kind("GQA, 8 heads of K and V", "gqa", {"kv_heads": 8, "head_dim": 128}),
    "gqa-2": Kind("GQA, 2 heads of K and V", "gqa", {"kv_heads": 2, "head_dim": 128}),
}
"""Nemotron-H's and Granite-4.0-H's Mamba2 (smaller), Qwen3-Next's GDN, Kimi-Linear's KDA."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One layer of a kind, at P and at D.

    ``conv_layout`` is vLLM's setting, empty if the layer has no conv state. ``p_drafts`` and
    ``d_drafts`` are the tokens that each engine speculates; vLLM keeps as many more rows in its
    conv states.
    """

    kind: str
    p_tp: int
    d_tp: int
    conv_layout: str = ""
    p_drafts: int = 0
    d_drafts: int = 0

    def __str__(self) -> str:
        """Describe the geometry, as its line in the table does.

        >>> str(Geometry("mamba2-g8", 1, 2, "DS", 1, 3))
        'Mamba2, 8 groups: P1 to D2, DS, drafts 1 to 3'
        """
        words = [f"P{self.p_tp} to D{self.d_tp}"]
        if self.conv_layout:
            words.append(self.conv_layout)
        if self.p_drafts or self.d_drafts:
            words.append(f"drafts {self.p_drafts} to {self.d_drafts}")
        return f"{KINDS[self.kind].title}: {', '.join(words)}"

    def message(self) -> dict[str, Any]:
        """Return what a probe is asked (`asking.Asked`)."""
        kind = KINDS[self.kind]
        values = asdict(self) | {"family": kind.family, "sizes": kind.sizes}
        del values["kind"]
        return values | {"page_tokens": PAGE_TOKENS}


PARALLEL = ((1, 2), (1, 4), (4, 2))
"""TP of P and of D."""

GEOMETRIES = (
    *(
        Geometry(kind, p_tp, d_tp, layout)
        for kind in ("mamba2-g8", "mamba2-g1")
        for layout in ("DS", "SD")
        for p_tp, d_tp in PARALLEL
    ),
    Geometry("mamba2-g8", 1, 2, "DS", 1, 3),
    Geometry("mamba2-g8", 2, 2, "DS", 1, 3),
    *(Geometry(kind, p_tp, d_tp, "DS") for kind in ("gdn", "kda") for p_tp, d_tp in PARALLEL),
    *(Geometry("gqa-8", p_tp, d_tp) for p_tp, d_tp in PARALLEL),
    *(Geometry("gqa-2", p_tp, d_tp) for p_tp, d_tp in ((1, 4), (4, 1))),
)
