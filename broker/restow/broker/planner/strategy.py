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
    INTERLEAVE = "interleave"
    """The source permutes a state for all its readers in one launch, channel by channel, so that
    each one's share is one run; the destination applies the inverse. Snapshots only: per-token
    fields are packed into the same run."""


WAYS = (Strategy.SLICES, Strategy.WHOLE, Strategy.PACK, Strategy.INTERLEAVE)
"""The ways between which `Strategy.AUTO` chooses."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the ways cost, in seconds: fitted on CMA between two processes of one host.

    A descriptor of a READ costs ``seconds_per_descriptor`` above its bytes, which travel at
    ``read_bytes_per_second``. GATHER and SCATTER cost ``seconds_per_launch`` each however little
    they copy, ``seconds_per_copy`` for each piece and ``seconds_per_element`` for each element that
    lies apart from the next one, and copy at ``copy_bytes_per_second``; asking a source to gather
    costs ``seconds_per_stage``. docs/benchmarks.md has the measurements behind the defaults.
    """

    seconds_per_descriptor: float = 3.3e-6
    read_bytes_per_second: float = 6.0e9
    copy_bytes_per_second: float = 3.0e9
    seconds_per_launch: float = 0.5e-3
    seconds_per_copy: float = 0.5e-6
    seconds_per_element: float = 5e-9
    seconds_per_stage: float = 0.5e-3
    nominal_tokens: int = 4096

    @property
    def gap_bytes(self) -> int:
        """So many bytes that nobody needs cost as much to read as one descriptor more."""
        return int(self.seconds_per_descriptor * self.read_bytes_per_second)
