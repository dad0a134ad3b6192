"""Processes that a test starts, freezes and kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forked.server import pipe, start
from forked.signals import send, stop

READY_S = 60.0
READY = "ready"
TCP = "tcp,self,cuda_copy" if Path("/dev/nvidiactl").exists() else "tcp,self"
"""UCX's transports without shared memory: beside a GPU NIXL wants one that knows its memory."""


class Child:
    """A process that said ``ready``; it ends when its pipe does."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    def receive(self) -> Any:
        """Return the next message from the process."""
        assert self._pipe.poll(READY_S), "the process says nothing"
        return self._pipe.recv()

    def tell(self, something: object) -> None:
        self._pipe.send(something)

    def freeze(self) -> None:
        if self._process.pid is not None:
            stop(self._process.pid)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    async def kill(self) -> None:
        self._send(signal.SIGKILL)
        await asyncio.to_thread(self._process.join)

    async def terminate(self) -> int | None:
        """Send SIGTERM; return the exit status."""
        self._send(signal.SIGTERM)
        await asyncio.to_thread(self._process.join, READY_S)
        return self._process.exitcode

    def _send(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            send(self._process.pid, number)


@contextlib.asynccontextmanager
async def child(
    main: Callable[..., None], *args: object, tls: str | None = None
) -> AsyncIterator[Child]:
    """Run ``main(pipe, *args)`` in a process; ``tls`` narrows UCX's transports."""
    ours, theirs = pipe()
    environment = {key: value for key, value in os.environ.items() if key != "UCX_TLS"}
    if tls is not None:
        environment["UCX_TLS"] = tls
    process = await asyncio.to_thread(start, main, theirs, *args, environment=environment)
    theirs.close()
    running = Child(process, ours)
    try:
        said = await asyncio.to_thread(running.receive)
        assert said == READY
        yield running
    finally:
        ours.close()
        await running.kill()
