"""``restow agent``, ``store`` and ``router`` are programs that run until they are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from restow.broker.addresses import host_and_port
from restow.broker.cli.common.connection import Connection, connects
from restow.broker.cli.settings.options import LogFormatOption, parse_size
from restow.broker.cli.settings.settings_file import ConfigOption
from restow.broker.errors import ExtraMissingError

ROUTER_PORT = 8000
ENGINE = re.compile(r"(?:([^=]+)=)?(https?://[^\s@]+)")
Engines = list[tuple[str, str]]
"""URLs and ids."""
HttpListenOption = Annotated[
    str | None,
    typer.Option(
        envvar="RESTOW_HTTP_LISTEN",
        help="HOST:PORT where to show metrics (/metrics) and whether it is alive (/healthz), "
        "over plain HTTP, to whoever asks. Default: nowhere.",
    ),
]


@contextlib.contextmanager
def _extra(name: str, who: str) -> Iterator[None]:
    """Raise `ExtraMissingError` for an import that fails because the extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"{who} needs module {error.name}, which is not installed: "
            f"pip install 'restow[{name}]'",
            module=error.name,
        ) from None


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
    http_listen: HttpListenOption = None,
    log_format: LogFormatOption = "console",
    config: ConfigOption = None,
) -> None:
    """Run an agent as a daemon of this host until SIGTERM or SIGINT."""
    with _extra("agent", "an agent"):
        from restow.agents.daemon.cli import run_agent_daemon

    from restow.broker.stderr import logging_to_stderr

    credentials = connection.credentials()
    with logging_to_stderr(log_format == "json"):
        run_agent_daemon(
            connection.broker, socket, read_threads, host_reads, credentials, http_listen
        )


@connects
def store(
    memory: Annotated[
        int,
        typer.Option(parser=parse_size, metavar="SIZE", help="Memory for states, such as 8GiB."),
    ],
    *,
    connection: Connection,
    layout: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Layout of any engine of the model, as `restow layout from-config` writes it. "
            "The store makes its own layout from it.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Instead of --layout: take the layout of this engine, and wait until it "
            "registers.",
        ),
    ] = None,
    engine_id: Annotated[
        str, typer.Option(help="The name of the store itself, among engines.")
    ] = "store",
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a block. States that begin alike share the blocks that they have in "
            "common. Default: as few tokens as a block of the layout has.",
        ),
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder that the store alone uses, for states that memory has no room for. "
            "Default: the store drops them.",
        ),
    ] = None,
    disk_size: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Bytes that the store may use on disk, such as 100GiB.",
        ),
    ] = None,
    pin_memory: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory that pinned states may take (`restow state pin`). Default: half of "
            "--memory.",
        ),
    ] = None,
    http_listen: HttpListenOption = None,
    log_format: LogFormatOption = "console",
) -> None:
    """Keep states of one model in memory and on disk, until SIGTERM or SIGINT.

    It asks engines for states that they say are worth keeping, and gives them to engines that ask.
    """
    if (layout is None) == (engine is None):
        raise typer.BadParameter("--layout or --engine says of which model: give one of them")
    if (disk is None) != (disk_size is None):
        raise typer.BadParameter("--disk and --disk-size go together")
    with _extra("agent", "a store"):
        from restow.agents.store.cli import run_store
        from restow.agents.store.store import StoreOptions

    from restow.broker.cli.common.files import read_layout
    from restow.broker.stderr import logging_to_stderr

    options = StoreOptions(
        *(engine_id, connection.broker, memory, block_tokens, disk, disk_size or 0, pin_memory)
    )
    with logging_to_stderr(log_format == "json"):
        source = read_layout(layout) if layout is not None else engine or ""
        run_store(source, options, connection.credentials(), http_listen)


@connects
def router(
    prefill: Annotated[
        list[str],
        typer.Option(
            "--prefill",
            metavar="[ID=]URL|@FILE",
            help="A prefill engine, or a file with one in each line. Repeat it for more engines.",
        ),
    ],
    decode: Annotated[
        list[str],
        typer.Option(
            "--decode",
            metavar="[ID=]URL|@FILE",
            help="A decode engine, or a file with one in each line. Repeat it for more engines.",
        ),
    ],
    *,
    connection: Connection,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen.")
    ] = f"127.0.0.1:{ROUTER_PORT}",
    silence_s: Annotated[
        float,
        typer.Option(min=0.1, help="Give up an engine that sends nothing for this many seconds."),
    ] = 600.0,
    find_ms: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Ask the broker who holds most of each prompt. Wait this long for the prompt's "
            "token ids, and again this long for the broker. Each prefill engine needs its ID. "
            "0: do not ask.",
        ),
    ] = 0,
    log_format: LogFormatOption = "console",
) -> None:
    """Send each prompt to a prefill and a decode engine, under a handoff id of its own.

    Serves /v1/completions, /v1/chat/completions, /v1/responses, /v1/models and /health until
    SIGTERM or SIGINT. SIGHUP has it read files of engines again. Use it to try things;
    docs/router.md names routers for production.
    """
    in_files = any(words.startswith("@") for words in (*prefill, *decode))
    if in_files:  # a signal that comes before the server runs does not end it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with _extra("router", "the router"):
        from aiohttp import web

        from restow.broker.router.routing import RoutedEngine, Router
    from restow.broker.client import AsyncAdminClient
    from restow.broker.logs import get_logger
    from restow.broker.stderr import logging_to_stderr

    host, port = host_and_port(listen, ROUTER_PORT)

    def named() -> tuple[Engines, Engines]:
        p, d = _named(prefill), _named(decode)
        if find_ms and not all(engine_id for _, engine_id in p):
            raise typer.BadParameter(
                "each prefill engine needs its id (ID=URL) to be found", param_hint="--find-ms"
            )
        return p, d

    p, d = ([RoutedEngine(*one) for one in side] for side in named())

    async def app() -> web.Application:
        client = None
        if find_ms:
            client = AsyncAdminClient(connection.broker, credentials=connection.credentials())
        router = Router(p, d, silence_s, client, find_ms / 1000, may_change=in_files)
        served = router.app()
        if client is not None:
            served.on_cleanup.append(lambda _: client.close())

        def read_again() -> None:
            try:
                router.use(*named())
            except typer.BadParameter as error:
                get_logger("restow.router").error("engines stay", detail=error.message)

        if in_files:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)
            read_again()  # a signal may have come before
        return served

    with logging_to_stderr(log_format == "json"):
        web.run_app(
            app(),
            host=host,
            port=port,
            handler_cancellation=True,
            access_log=None,
            print=lambda text: print(text, flush=True),
        )


def _named(words: list[str]) -> Engines:
    """Return the URLs and ids of engines; ``@FILE`` stands for the lines of a file."""
    lines: list[str] = []
    for one in words:
        try:
            lines += Path(one[1:]).read_text().split() if one.startswith("@") else [one]
        except OSError as error:
            raise typer.BadParameter(f"{one[1:]} can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise typer.BadParameter(f"{one[1:]} is no text") from None
    if not lines:
        raise typer.BadParameter(f"{' '.join(words)} names no engine")
    return [_url_and_id(line) for line in lines]


def _url_and_id(words: str) -> tuple[str, str]:
    """Return the URL and the id of an engine that is named ``URL`` or ``ID=URL``.

    >>> _url_and_id("p1=http://h:8100/"), _url_and_id("http://h/?a=b")
    (('http://h:8100', 'p1'), ('http://h/?a=b', ''))
    """
    if (match := ENGINE.fullmatch(words)) is None:
        raise typer.BadParameter(
            f"{words} is not an http:// or https:// URL without a user", param_hint="[ID=]URL"
        )
    return match[2].rstrip("/"), match[1] or ""
