"""The geometries that peers are asked about: a kind of layer, and how P and D hold it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from peers.kinds import KINDS, PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Geometry:
    """One layer of a kind, at P and at D.

    ``conv_layout`` is vLLM's setting, "" where a layer has no conv state. ``p_drafts`` and
    ``d_drafts`` are the tokens that either engine speculates: vLLM keeps as many more rows in each
    conv state.
    """

    kind: str
    p_tp: int
    d_tp: int
    conv_layout: str = ""
    p_drafts: int = 0
    d_drafts: int = 0

    def __str__(self) -> str:
        """For people.

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
        """As the process that asks a peer is told it (`asking.Asked`)."""
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
