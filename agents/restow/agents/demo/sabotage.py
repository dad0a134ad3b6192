"""Three ways to break a handoff that must not go unseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

from torch import Tensor

from restow.broker.layout import Layout

State = Mapping[str, Tensor]
_OTHER = {"B": "C", "C": "B"}


class Sabotage(StrEnum):
    """What is broken."""

    NO_N_MINUS_1 = "no_n_minus_1"
    """P absorbs all N tokens; D absorbs the last one again."""
    SWAPPED_B_C = "swapped_b_c"
    """P tells the broker that C lies where B lies, and the other way round; where it keeps what its
    mixers read, that the first one read what the last one did."""
    STALE_SSM = "stale_ssm"
    """The SSM part of the page still holds what another request left there."""


def swap_b_and_c(layout: Layout) -> Layout:
    """The layout with the places of B and C exchanged, and those of the inputs turned round."""
    ranks = tuple(
        replace(
            rank,
            shards=tuple(replace(s, field=_other_letter(s.field)) for s in rank.shards),
            inputs=tuple(
                replace(one, field=other.field)
                for one, other in zip(rank.inputs, reversed(rank.inputs), strict=True)
            ),
        )
        for rank in layout.ranks
    )
    return replace(layout, ranks=ranks)


def _other_letter(field: str) -> str:
    stem, _, letter = field.rpartition(".")
    return f"{stem}.{_OTHER.get(letter, letter)}"


def with_ssm_of(other: State) -> Callable[[State], State]:
    """Exchange the SSM states of a request for those of another one."""

    def exchange(state: State) -> State:
        return {name: other[name] if name.endswith(".ssm") else state[name] for name in state}

    return exchange
