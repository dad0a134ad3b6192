"""Strategies: the ways in which the rows of a program travel."""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """Strategies that an operator can request."""

    AUTO = "auto"
    """Choose the fastest way for each row by the cost model."""
    SLICES = "slices"
    """Read each contiguous piece with a READ of its own, directly into place."""
    WHOLE = "whole"
    """Read each source page with a single READ, from the first to the last byte that is needed; the
    destination extracts its part."""
    PACK = "pack"
    """Pack at the source into a contiguous run, read that with a READ, and scatter at the
    destination."""
    INTERLEAVE = "interleave"
    """Permute a state channel by channel at the source in a single launch for all readers, so that
    each reader's part is a contiguous run; the destination applies the inverse. Only snapshots are
    permuted: per-token fields are packed into the same run."""
    RECOMPUTE = "recompute"
    """Recompute conv windows at the destination from the inputs of the mixers if P keeps these and
    D offers weights; other rows travel as with `AUTO`."""

    @property
    def number(self) -> int:
        """Return the strategy's index, which stands for it in the rows of a draft."""
        return STRATEGIES.index(self)


STRATEGIES = tuple(Strategy)
