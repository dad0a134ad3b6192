"""Large copies, products and digests are made on a thread, so that the event loop goes on.

On one: two were tried, and took longer for pieces of 256 bytes and 1 KiB, because each chunk of a
copy has to wait for the interpreter's lock. What touches device memory is one launch, waited for in
place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from restow.agents.binding.copies import Copies
from restow.agents.copying.piece_copies import run_copies
from restow.agents.copying.projecting import run_projections
from restow.broker.layout.rows import Int64s

T = TypeVar("T")

LARGE_BYTES = 1 << 20
"""From here on copies may keep a thread for longer than an event loop should be kept."""


class Copier:
    """Runs the copies and products of one rank's agent. Belongs to one event loop."""

    def __init__(self) -> None:
        """The thread starts with the first large copy or product."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="restow-copy")

    async def run(self, copies: Copies, device: torch.device) -> None:
        """Do the copies; they are not under way any more when this returns, raises or is cancelled.

        Raises `ProgramInvalidError` for elements that do not lie at multiples of their size, and
        `CopyFailedError`.
        """
        if device.type == "cpu" and copies.size_bytes >= LARGE_BYTES:
            await self.on_thread(lambda: run_copies(copies, device))
        else:
            run_copies(copies, device)

    async def project(self, rows: Int64s, device: torch.device) -> None:
        """Make the products of a kernels' table; ends as `run` does.

        Raises as `run` does.
        """
        if device.type != "cpu":
            run_projections(rows, device)
        else:
            await self.on_thread(lambda: run_projections(rows, device))

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Do the work there; it has ended when this returns, raises or is cancelled."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        cancelled: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError as error:  # by more than one, such as a broken stream
                cancelled = error
        if cancelled is not None:
            raise cancelled from done.exception()
        return done.result()

    def close(self) -> None:
        """Wait for copies under way. May be repeated."""
        self._thread.shutdown()
