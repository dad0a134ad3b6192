"""``restow agent`` serves the ranks of engines on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from restow.broker.cli.common.connection import Connection, connects
from restow.broker.cli.settings.options import LogFormatOption
from restow.broker.cli.settings.settings_file import ConfigOption
from restow.broker.errors import ExtraMissingError


@connects
def agent(
    socket: Annotated[
        Path,
        typer.Option(
            "--socket",
            envvar="RESTOW_SOCKET",
            help="Unix socket on which engines hand memory over.",
        ),
    ],
    *,
    connection: Connection,
    read_threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            envvar="RESTOW_READ_THREADS",
            help="Threads that copy a large read between processes of one host. "
            "Default: two, or as many as there are cores.",
        ),
    ] = None,
    host_reads: Annotated[
        bool | None,
        typer.Option(
            "--host-reads/--no-host-reads",
            envvar="RESTOW_HOST_READS",
            help="Read other processes of this host, and be read by them, many pieces in one "
            "system call instead of one by one through NIXL. Default: unless UCX_TLS forbids it.",
        ),
    ] = None,
    http_listen: Annotated[
        str | None,
        typer.Option(
            envvar="RESTOW_HTTP_LISTEN",
            help="HOST:PORT where to show metrics (/metrics) and whether it is alive (/healthz), "
            "over plain HTTP, to whoever asks. Default: nowhere.",
        ),
    ] = None,
    log_format: LogFormatOption = "console",
    config: ConfigOption = None,
) -> None:
    """Run an agent as a daemon of this host until SIGTERM or SIGINT."""
    try:
        from restow.agents.daemon.cli import run_agent_daemon
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"an agent needs module {error.name}, which is not installed: "
            f"pip install 'restow[agent]'",
            module=error.name,
        ) from None

    from restow.broker.stderr import logging_to_stderr

    credentials = connection.credentials()
    with logging_to_stderr(log_format == "json"):
        run_agent_daemon(
            connection.broker, socket, read_threads, host_reads, credentials, http_listen
        )
