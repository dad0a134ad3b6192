"""How the rows of a program travel."""

from __future__ import annotations

from enum import StrEnum


class Strategy(StrEnum):
    """What an operator may ask for."""

    AUTO = "auto"
    """Row by row, whatever the cost model says is quicker."""
    SLICES = "slices"
    """One READ for each contiguous piece, straight into place."""
    WHOLE = "whole"
    """One READ for each source page, of all between the first and the last byte that is needed;
    the destination takes out what it wants."""
    PACK = "pack"
    """The source gathers into one run, one READ, the destination scatters."""
    INTERLEAVE = "interleave"
    """The source permutes a state for all its readers in one launch, channel by channel, so that
    each one's share is one run; the destination applies the inverse. Snapshots only: per-token
    fields are packed into the same run."""
    RECOMPUTE = "recompute"
    """Conv windows are rebuilt at the destination from what the mixers read, where P keeps that and
    D offers weights; all else as `AUTO` says."""

    @property
    def number(self) -> int:
        """By which a draft says how each of its rows travels."""
        return STRATEGIES.index(self)


STRATEGIES = tuple(Strategy)
