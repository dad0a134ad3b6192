"""Large copies, products and digests are made on a thread, so that the event loop goes on.

On one: two were tried, and took longer for pieces of 256 bytes and 1 KiB, because each chunk of a
copy has to wait for the interpreter's lock. What touches device memory is one launch, waited for in
place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from restow.agents.binding.pieces import Copies
from restow.agents.copying.prepared_copies import PreparedCopies, prepared_copies
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
        await self.prepare(copies, device)()

    def prepare(
        self, copies: Copies | PreparedCopies, device: torch.device
    ) -> Callable[[], Awaitable[None]]:
        """What `run` does, later: all that touches no memory is done, or under way, already.

        Of small copies that is half the work: after a read the caches hold nothing of what does
        it. Raises as `run` does; so may what is returned.
        """
        if isinstance(copies, PreparedCopies):
            prepared = copies
        elif device.type == "cpu" and copies.size_bytes >= LARGE_BYTES:
            ready = self._thread.submit(prepared_copies, copies, device)
            return lambda: self.on_thread(lambda: ready.result()())
        else:
            prepared = prepared_copies(copies, device)

        async def run() -> None:
            prepared()

        return run

    async def project(self, rows: Int64s, device: torch.device) -> None:
        """Make the products of a kernels' table; ends as `run` does.

        Raises `ProgramInvalidError` as `run` does.
        """
        if device.type != "cpu":
            run_projections(rows, device)
        else:
            await self.on_thread(lambda: run_projections(rows, device))

    async def on_thread(self, work: Callable[[], T]) -> T:
        """Do the work there; it has ended when this returns, raises or is cancelled."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise

    def close(self) -> None:
        """Wait for copies under way. May be repeated."""
        self._thread.shutdown()
