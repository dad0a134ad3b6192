"""Gathering runs part by part, each counted when it is complete: they are read meanwhile."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from restow.agents.parts import GIVEN_UP, PART_BYTES, Parts
from restow.agents.pieces import Copies
from restow.agents.staging import ALIGN_BYTES

WORTHWHILE_BYTES = 2 * PART_BYTES
"""Less is gathered before a reader would be there."""
GAIN = 0.55
"""With less of a core for who gathers, there is none for who reads meanwhile. Six ranks on two
processors ran for 0.22 to 0.51 of the time and lost by it; two ranks for 0.6 to 1, and gained."""
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


def gather(
    runs: Sequence[CountedRun], device: torch.device, is_wanted: Callable[[], bool]
) -> tuple[float, float]:
    """Gather host memory, a part of each run by turns, for as long as it ``is_wanted``.

    For how many seconds of how many this thread ran: the less, the fewer cores are idle. Raises
    what binding does, and as `prepared_copies` does.
    """
    began_s, ran_s = time.perf_counter(), time.thread_time()
    prepared = [(run, run.parts.prepared_gather(run.bind(), device)) for run in runs]
    for number in range(max(run.parts.count for run in runs)):
        for run, parts in prepared:
            if number < len(parts) and is_wanted():
                parts[number]()
                run.count(number + 1)
    return time.thread_time() - ran_s, time.perf_counter() - began_s
