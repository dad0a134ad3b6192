"""Gathering runs part by part, each counted when it is complete: they are read meanwhile."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from restow.agents.parts import GIVEN_UP, PART_BYTES, Parts
from restow.agents.pieces import Copies
from restow.agents.staging import ALIGN_BYTES

WORTHWHILE_BYTES = 2 * PART_BYTES
"""Less is gathered before a reader would be there."""
COUNT_BYTES = ALIGN_BYTES
"""What the count of a run takes: the readers of one must not slow the writer of another."""
COUNTS_IN_ORDER = platform.machine() in {"x86_64", "AMD64"}
"""Whether who sees a count sees what was written before it. Elsewhere that would need a fence,
for which Python has no word."""


@dataclass(frozen=True, slots=True, eq=False)
class CountedRun:
    """A run, where the byte is that counts its complete parts, and the copies into it."""

    parts: Parts
    count_address: int
    bind: Callable[[], Sequence[Copies]]

    def count(self, value: int) -> None:
        """Say how many parts are complete."""
        ctypes.c_uint8.from_address(self.count_address).value = value

    def end(self) -> None:
        """Say of a run that is not complete that it never will be."""
        if ctypes.c_uint8.from_address(self.count_address).value != self.parts.count:
            self.count(GIVEN_UP)


def gather(runs: Sequence[CountedRun], device: torch.device, is_wanted: Callable[[], bool]) -> None:
    """Gather host memory, a part of each run by turns, for as long as it ``is_wanted``.

    Raises what binding does, and as `prepared_copies` does.
    """
    prepared = [(run, run.parts.prepared_gather(run.bind(), device)) for run in runs]
    for number in range(max(run.parts.count for run in runs)):
        for run, parts in prepared:
            if number < len(parts) and is_wanted():
                parts[number]()
                run.count(number + 1)
