"""Whether large reads are shared out over threads: only while there are cores for them.

Two threads copy nearly twice as fast as one on idle cores. Where every core has work already (the
ranks of an engine read at the same time), more threads only take turns, and cost more than one.
"""

from __future__ import annotations

GAIN = 1.1
"""Threads that together ran for less than this of a read's time did no more than one would."""
BUSY_READS = 2
"""One read may have met something that passes."""
SHORT_S = 0.002
"""A read that took no longer tells nothing."""
FIRST_PAUSE_READS = 2
LAST_PAUSE_READS = 64


class Spreading:
    """Learns from every shared read; when some in a row gained nothing, pauses for a while."""

    def __init__(self) -> None:
        """Nothing is known to speak against it."""
        self._pause_reads = FIRST_PAUSE_READS
        self._left_reads = 0
        self._busy_reads = 0
        """Of the latest ones, with none between them that gained."""

    def allows(self) -> bool:
        """Whether the next read may be shared out. Counts it if not."""
        if self._left_reads:
            self._left_reads -= 1
            return False
        return True

    def saw(self, ran_s: float, elapsed_s: float) -> None:
        """A shared read took ``elapsed_s``; all its threads together ran for ``ran_s``."""
        if elapsed_s < SHORT_S or self._left_reads:
            return
        if ran_s >= GAIN * elapsed_s:
            self._busy_reads, self._pause_reads = 0, FIRST_PAUSE_READS
            return
        self._busy_reads += 1
        if self._busy_reads >= BUSY_READS:
            self._left_reads = self._pause_reads
            self._pause_reads = min(2 * self._pause_reads, LAST_PAUSE_READS)
