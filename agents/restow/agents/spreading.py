"""Whether large reads are shared out over threads: only while there are cores for them.

Two threads copy nearly twice as fast as one on idle cores. Where every core has work already (the
ranks of an engine read at the same time), more threads only take turns, and cost more than one.
"""

from __future__ import annotations

BUSY_SHARE = 0.7
"""A copying thread that ran for less of the time than this waited for a core."""
SHORT_S = 0.002
"""A share that took no longer tells nothing."""
FIRST_PAUSE_READS = 2
LAST_PAUSE_READS = 64


class Spreading:
    """Learns from every shared read; after one that waited for cores, pauses for some reads."""

    def __init__(self) -> None:
        """Nothing is known to speak against it."""
        self._pause_reads = FIRST_PAUSE_READS
        self._left_reads = 0

    def allows(self) -> bool:
        """Whether the next read may be shared out. Counts it if not."""
        if self._left_reads:
            self._left_reads -= 1
            return False
        return True

    def saw(self, ran_s: float, elapsed_s: float) -> None:
        """One share of a read took ``elapsed_s``, of which its thread ran for ``ran_s``."""
        if elapsed_s < SHORT_S or self._left_reads:
            return
        if ran_s >= BUSY_SHARE * elapsed_s:
            self._pause_reads = FIRST_PAUSE_READS
        else:
            self._left_reads = self._pause_reads
            self._pause_reads = min(2 * self._pause_reads, LAST_PAUSE_READS)
