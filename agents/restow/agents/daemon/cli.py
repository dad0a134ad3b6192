"""The command `restow agent`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import uvloop

from restow.agents.daemon.metrics import showing
from restow.agents.daemon.server import AgentDaemon
from restow.agents.link.settings import AgentSettings
from restow.broker.client.connection.channel import Credentials, broker_address, channel_options
from restow.broker.errors import RestowError
from restow.broker.logs import get_logger


def run_agent_daemon(
    broker: str | None,
    socket_path: str | Path,
    read_threads: int | None = None,
    host_reads: bool | None = None,
    credentials: Credentials | None = None,
    http_listen: str | None = None,
) -> None:
    """Serve ranks until SIGTERM or SIGINT; log ``daemon ready`` once it listens.

    ``credentials`` None means those of the environment. ``http_listen`` is the address for
    metrics; None serves none. Raises `AddressInvalidError`, `SocketInUseError`, `ListenError`, a
    `TrustError` for unusable credentials, and `TransportFailedError` if the host's interfaces are
    gone.
    """
    credentials = credentials or Credentials.of()
    # Engines come later, so report a wrong address or file now.
    broker_address(broker)
    channel_options()
    if credentials.secure:
        credentials.for_channel()
    settings = AgentSettings()
    if read_threads is not None:
        settings = replace(settings, read_threads=read_threads)
    if host_reads is not None:
        settings = replace(settings, host_reads=host_reads)
    uvloop.run(_serve(broker, Path(socket_path), settings, credentials, http_listen))


async def _serve(
    broker: str | None,
    socket_path: Path,
    settings: AgentSettings,
    credentials: Credentials,
    http_listen: str | None,
) -> None:
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    log = get_logger("restow.daemon")
    losses: list[RestowError] = []

    def lose(error: RestowError) -> None:
        losses.append(error)
        over.set()

    daemon = AgentDaemon(broker, socket_path, settings, credentials, lose)
    await daemon.start()
    try:
        async with contextlib.AsyncExitStack() as stack:
            shown = None
            if http_listen is not None:
                showing_there = showing(http_listen, lambda: daemon.figures)
                shown = await stack.enter_async_context(showing_there)
            log.info(
                "daemon ready",
                socket=str(socket_path),
                broker=broker_address(broker),
                http=shown,
                pid=os.getpid(),
            )
            await over.wait()
    finally:
        await daemon.close()
    log.info("daemon ended")
    if losses:
        raise losses[0]
