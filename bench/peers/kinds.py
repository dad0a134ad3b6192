"""The layers that peers are asked about, and which of their elements each rank holds.

Written from what the layers are, and not from Restow's families: what ranks hold is the measure
that Restow's plan is held against, as the peers' slices are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from restow.broker.layout.rows import Int64s

PAGE_TOKENS = 16
CONV_ITEM_BYTES, STATE_ITEM_BYTES, KV_ITEM_BYTES = 2, 4, 2
"""bfloat16, float32, bfloat16."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of layer: its sizes before any tensor parallelism."""

    title: str
    family: str
    sizes: dict[str, int]

    def channels(self, tp: int, rank: int) -> Int64s:
        """The channels of the conv state that a rank holds, in their order.

        They are numbered over the whole layer, one part after the other; each part is cut evenly,
        but for B and C of fewer groups than ranks, which ranks share.
        """
        held, first = [], 0
        for units, size in self._conv_parts():
            first_unit, stop_unit = _cut(units, tp, rank)
            held.append(np.arange(first + first_unit * size, first + stop_unit * size))
            first += units * size
        return np.concatenate(held)

    def _conv_parts(self) -> tuple[tuple[int, int], ...]:
        """Units that no rank cuts in two, and the channels of each."""
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
        """The live rows of a conv state."""
        return self.sizes["conv_kernel"] - 1

    def state(self, tp: int, rank: int) -> Int64s:
        """The elements of the recurrent state that a rank holds: whole heads, one matrix each."""
        n = self.sizes
        heads, matrix = {
            "mamba2": (n.get("heads", 0), n.get("head_dim", 0) * n.get("state", 0)),
            "gdn": (n.get("value_heads", 0), n.get("value_dim", 0) * n.get("key_dim", 0)),
            "kda": (n.get("heads", 0), n.get("head_dim", 0) ** 2),
        }[self.family]
        first, stop = _cut(heads, tp, rank)
        return np.arange(first * matrix, stop * matrix)

    def kv_heads(self, tp: int, rank: int) -> Int64s:
        """The heads of K and V that a rank holds; ranks share a head where they are more."""
        return np.arange(*_cut(self.sizes["kv_heads"], tp, rank))


def _cut(units: int, tp: int, rank: int) -> tuple[int, int]:
    """The units ``[first, stop)`` of a rank: its slice, or the one that it shares.

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
