"""Which part of an axis a rank holds."""

from __future__ import annotations

from restow.broker.errors import TpSizeError
from restow.broker.layout import Span


def rank_span(count: int, tp: int, rank: int, what: str) -> Span:
    """The heads or groups of ``rank``: its slice, or the one that it shares with neighbours.

    ``count % tp == 0`` cuts; ``tp % count == 0`` replicates, ``rank // (tp / count)`` says which
    (vLLM PR #55091 for groups, ``rank * heads // tp`` for heads: the same). Raises `TpSizeError`.

    >>> rank_span(8, 4, 1, "head"), rank_span(2, 4, 1, "head")
    (Span(2, 4), Span(0, 1))
    """
    if count % tp == 0:
        return rank_slice(count, tp, rank, what)
    if tp % count == 0:
        index = rank // (tp // count)
        return Span(index, index + 1)
    raise TpSizeError(
        f"{count} {what}s can be neither cut nor replicated over TP {tp}: "
        f"one must divide the other",
        axis=what,
        ranks=tp,
    )


def rank_slice(count: int, tp: int, rank: int, what: str) -> Span:
    """The slice of an axis that can't be replicated. Raises `TpSizeError` unless tp divides it."""
    if count % tp:
        raise TpSizeError(
            f"{count} {what}s can't be cut over TP {tp}: it does not divide them",
            axis=what,
            ranks=tp,
        )
    size = count // tp
    return Span(rank * size, (rank + 1) * size)
