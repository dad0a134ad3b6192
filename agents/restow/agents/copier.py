"""Large copies are done on a thread, so that the event loop goes on meanwhile.

On one: two were tried, and took longer for pieces of 256 bytes and 1 KiB, because each chunk of a
copy has to wait for the interpreter's lock. Copies of device memory are one launch, waited for in
place.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from restow.agents.binding import Copies
from restow.agents.copying import run_copies

LARGE_BYTES = 1 << 20
"""From here on copies may keep a thread for longer than an event loop should be kept."""


class Copier:
    """Runs the copies of one rank's agent. Belongs to one event loop."""

    def __init__(self) -> None:
        """The thread starts with the first large copy."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="restow-copy")

    async def run(self, copies: Copies, device: torch.device) -> None:
        """Do the copies; they are not under way any more when this returns, raises or is cancelled.

        Raises `ProgramInvalidError` for elements that do not lie at multiples of their size.
        """
        if device.type != "cpu" or copies.size_bytes < LARGE_BYTES:
            run_copies(copies, device)
            return
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, run_copies, copies, device)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise

    def close(self) -> None:
        """Wait for copies under way. May be repeated."""
        self._thread.shutdown()
