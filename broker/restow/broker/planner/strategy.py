"""How the rows of a program travel, and what the ways cost."""

from __future__ import annotations

from dataclasses import dataclass
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

    RECOMPUTE = "recompute"
    """Conv windows are rebuilt at the destination from what the mixers read, where P keeps that and
    D offers weights; all else as `AUTO` says."""


WAYS = (Strategy.SLICES, Strategy.WHOLE, Strategy.PACK)
"""The ways of a row, between which `Strategy.AUTO` chooses."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the ways cost, in seconds: fitted on CMA between two processes of one host.

    A descriptor of a READ costs ``seconds_per_descriptor`` above its bytes, which travel at
    ``read_bytes_per_second``. GATHER and SCATTER cost ``seconds_per_launch`` each however little
    they copy, ``seconds_per_copy`` for each piece, and copy at ``copy_bytes_per_second``; asking a
    source to gather costs ``seconds_per_stage``. Rebuilding conv windows is bound by reading their
    weights, at ``seconds_per_weight_byte``. docs/benchmarks.md has the measurements behind
    the defaults.
    """

    seconds_per_descriptor: float = 3.3e-6
    read_bytes_per_second: float = 6.0e9
    copy_bytes_per_second: float = 3.0e9
    seconds_per_launch: float = 0.5e-3
    seconds_per_copy: float = 0.5e-6
    seconds_per_stage: float = 0.5e-3
    seconds_per_weight_byte: float = 2.0e-10
    nominal_tokens: int = 4096

    @property
    def gap_bytes(self) -> int:
        """So many bytes that nobody needs cost as much to read as one descriptor more."""
        return int(self.seconds_per_descriptor * self.read_bytes_per_second)
