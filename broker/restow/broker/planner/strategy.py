"""How the rows of a program travel: which are read into place, which through staging."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Strategy(StrEnum):
    """What an operator may ask for."""

    AUTO = "auto"
    """Row by row, whatever the cost model says is quicker."""
    SLICES = "slices"
    """One READ for each contiguous piece, straight into place."""
    PACK = "pack"
    """The source gathers into one run, one READ, the destination scatters."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the ways cost, in seconds: fitted on CMA between two processes of one host.

    A descriptor of a READ costs ``seconds_per_descriptor`` above its bytes; packing moves each byte
    twice more (gather and scatter) at ``pack_bytes_per_second`` and asks the source once
    (``seconds_per_stage``). docs/benchmarks.md has the measurements behind the defaults.
    """

    seconds_per_descriptor: float = 1.3e-6
    pack_bytes_per_second: float = 3.0e9
    seconds_per_stage: float = 0.5e-3
    nominal_tokens: int = 4096

    def packs(self, descriptors: float, size_bytes: float) -> bool:
        """Whether packing pieces of that number and total size beats reading them one by one."""
        return descriptors * self.seconds_per_descriptor > (
            2 * size_bytes / self.pack_bytes_per_second
        )

    def pays_stage(self, descriptors: float, size_bytes: float) -> bool:
        """Whether what packing saves also pays for asking the source."""
        saved = descriptors * self.seconds_per_descriptor
        return saved > 2 * size_bytes / self.pack_bytes_per_second + self.seconds_per_stage
