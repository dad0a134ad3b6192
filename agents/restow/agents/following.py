"""Reading runs that their sources still gather: a part is scattered while the next one is read."""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from restow.agents.copier import Copier
from restow.agents.copying import PreparedCopies
from restow.agents.errors import ReadFailedError
from restow.agents.lane import Read
from restow.agents.memory import HOST
from restow.agents.parts import GIVEN_UP, PART_BYTES, Parts
from restow.agents.pieces import Copies, Descriptors
from restow.agents.reader import Reader

SPIN_S = 0.002
POLL_S = 0.001
"""A count is looked at again at once for so long after a part has come, and then after so long."""


@dataclass(slots=True, eq=False)
class Following:
    """One run in host memory at a source, and what of it has arrived in the run at ``parts``."""

    peer: str
    src_address: int
    count_address: int
    """In the peer's memory."""
    parts: Parts
    copies: Sequence[Copies]
    """Out of own run."""
    seen_address: int
    """Where the count is read to."""
    gathered: int = 0
    """Parts that were complete at the source when it was last looked at."""
    arrived: int = 0
    """Parts that were read."""

    @property
    def ended(self) -> bool:
        """Whether all of it has arrived."""
        return self.arrived == self.parts.count

    @property
    def ready(self) -> bool:
        """Whether the next part can be read."""
        return self.gathered > self.arrived

    def look(self) -> Read:
        """What brings the count here."""
        ctypes.c_uint8.from_address(self.seen_address).value = GIVEN_UP
        return self._read(self.count_address, self.seen_address, 1)

    def looked(self) -> None:
        """Take the count that has come. Raises `ReadFailedError`."""
        count = ctypes.c_uint8.from_address(self.seen_address).value
        if count == GIVEN_UP:
            raise ReadFailedError(
                f"agent {self.peer} gave up gathering what was being read: its own log says why",
                agent=self.peer,
            )
        if not self.gathered <= count <= self.parts.count:
            raise ReadFailedError(
                f"agent {self.peer} counts {count} gathered parts, after {self.gathered} of "
                f"{self.parts.count}",
                agent=self.peer,
            )
        self.gathered = count

    def read(self) -> Read:
        """The next part."""
        begin, end = self.parts.span(self.arrived, self.arrived + 1)
        return self._read(self.src_address + begin, self.parts.address + begin, end - begin)

    def prepared(self) -> list[PreparedCopies]:
        """What scatters each part."""
        return self.parts.prepared_scatter(self.copies, HOST.device)

    def _read(self, src_address: int, dst_address: int, length_bytes: int) -> Read:
        one = (np.array([value], np.int64) for value in (src_address, dst_address, length_bytes))
        # A turn of threads takes longer than what a part keeps the event loop for: 0.7 ms.
        return Read(self.peer, Descriptors(*one), HOST, HOST, here=length_bytes <= PART_BYTES)


async def follow(
    runs: Sequence[Following], reader: Reader, copier: Copier, deadline_s: float
) -> None:
    """Read all runs while they are gathered, and scatter what has arrived.

    Nothing is scattered any more when this returns, raises or is cancelled. Raises what
    `Reader.read` and `Copier.run` do, and `ReadFailedError` for what is given up.
    """
    if not runs:
        return
    # Beside the first read it would take longer, for it holds the interpreter's lock now and then.
    prepared = await copier.on_thread(lambda: [run.prepared() for run in runs])
    scattered: list[asyncio.Future[None]] = []
    try:
        spin_until_s = time.monotonic() + SPIN_S
        while reading := [run for run in runs if not run.ended]:
            waiting = [run for run in reading if not run.ready]
            if waiting:
                await reader.read([run.look() for run in waiting], deadline_s)
            for run in waiting:
                run.looked()
            ready = [index for index, run in enumerate(runs) if run.ready]
            if ready:
                await reader.read([runs[index].read() for index in ready], deadline_s)
                for index in ready:
                    scattered.append(copier.begin(prepared[index][runs[index].arrived]))
                    runs[index].arrived += 1
                spin_until_s = time.monotonic() + SPIN_S
            elif scattered and not scattered[-1].done():
                await asyncio.wait(scattered)
            else:
                await asyncio.sleep(0 if time.monotonic() < spin_until_s else POLL_S)
    finally:
        if scattered:
            await asyncio.wait(scattered)
    for one in scattered:
        one.result()
