"""A run in parts: which copies complete each of them, and which need no more than it.

The first question is that of a source, which gathers a run while it is being read; the second that
of who reads it so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from restow.agents.copying import PreparedCopies, prepared_copies, prepared_stretches
from restow.agents.pieces import Copies, EqualRuns, Grid
from restow.agents.staging import ALIGN_BYTES
from restow.broker.layout.rows import Int64s
from restow.broker.planner.table import ITEM_BYTES

PART_BYTES = 4 << 20
"""Parts of 1 MiB gained nothing over these: each costs turns of threads on both sides."""
MAX_PARTS = 254
"""They are counted in a byte, whose last value is `GIVEN_UP`."""
GIVEN_UP = 255


@dataclass(frozen=True, slots=True)
class Parts:
    """``length_bytes`` from ``address`` on, in parts of ``part_bytes``; the last may be shorter."""

    address: int
    length_bytes: int
    part_bytes: int

    @classmethod
    def of(cls, address: int, length_bytes: int) -> Parts:
        """In as many as one byte can count, none of them small."""
        least = -(-length_bytes // MAX_PARTS)
        return cls(address, length_bytes, max(PART_BYTES, -(-least // ALIGN_BYTES) * ALIGN_BYTES))

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-self.length_bytes // self.part_bytes)

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """The bytes ``[begin, end)`` of the run that lie in parts ``[first, stop)``."""
        begin, end = (min(one * self.part_bytes, self.length_bytes) for one in (first, stop))
        return begin, end

    def prepared_gather(
        self, copies: Sequence[Copies], device: torch.device
    ) -> list[PreparedCopies]:
        """The copies into the run, by parts: after those of ``[0, k]`` all these are complete.

        Each belongs to where it begins. Raises as `prepared_copies` does.
        """
        runs = Copies.joined(copies).equal_runs()
        found = runs and self._prepared_runs(runs, runs.dst_address, 0, device)
        return found or [prepared_copies(one, device) for one in self.gathered(copies)]

    def prepared_scatter(
        self, copies: Sequence[Copies], device: torch.device
    ) -> list[PreparedCopies]:
        """The copies out of the run, by parts: those of part ``k`` read nothing behind it.

        Each belongs to where it ends. Raises as `prepared_copies` does.
        """
        runs = Copies.joined(copies).equal_runs()
        found = runs and self._prepared_runs(runs, runs.src_address, runs.length_bytes - 1, device)
        return found or [prepared_copies(one, device) for one in self.scattered(copies)]

    def gathered(self, copies: Sequence[Copies]) -> list[Copies]:
        """What `prepared_gather` prepares."""
        return self._split(
            (grid, grid.dst_address, np.minimum(_reach(grid.count, grid.dst_step_bytes), 0))
            for one in copies
            for grid in one.grids
        )

    def scattered(self, copies: Sequence[Copies]) -> list[Copies]:
        """What `prepared_scatter` prepares."""
        return self._split(
            (
                grid,
                grid.src_address,
                np.maximum(_reach(grid.count, grid.src_step_bytes), 0)
                + (ITEM_BYTES[grid.src_dtype] - 1),
            )
            for one in copies
            for grid in one.grids
        )

    def _prepared_runs(
        self, runs: EqualRuns, address: Int64s, offset: int, device: torch.device
    ) -> list[PreparedCopies] | None:
        """The same for runs that lie in order: they are prepared at once, which is less work."""
        if _falls(address):
            return None
        return prepared_stretches(runs, [*self._stops(address, offset), len(address)], device)

    def _split(self, found: Iterable[tuple[Grid, Int64s, Int64s]]) -> list[Copies]:
        """Grids, by the part in which the byte at an address and an offset of each copy lies."""
        grids: list[list[Grid]] = [[] for _ in range(self.count)]
        for grid, address, offset in found:
            if not address.size:
                continue
            least = int(offset.min())
            if (offset != least).any():
                address = address + (offset - least)
            byte = address.ravel()
            if _falls(byte):
                order = np.argsort(byte, kind="stable")
                grid, byte = grid.taken(order), byte[order]
            bounds = [0, *self._stops(byte, least), len(byte)]
            for held, (first, stop) in zip(grids, pairwise(bounds), strict=True):
                held += grid.between(first, stop)
        return [Copies(tuple(held)) for held in grids]

    def _stops(self, address: Int64s, offset: int) -> list[int]:
        """How many of rising addresses lie before the end of each part but the last.

        What lies behind the run belongs to the last, and what lies before it to the first.
        """
        begins = self.address + self.part_bytes * np.arange(1, self.count) - offset
        stops: list[int] = np.searchsorted(address, begins).tolist()
        return stops


def _falls(values: Int64s) -> bool:
    return bool((values[1:] < values[:-1]).any())


def _reach(count: Int64s, step_bytes: Int64s) -> Int64s:
    """From the first element of each copy to the last one."""
    return (count - 1) * step_bytes
