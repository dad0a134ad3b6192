"""``restow router`` serves an OpenAI API in front of engines."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from restow.broker.addresses import host_and_port
from restow.broker.cli.common.connection import Connection, connects
from restow.broker.cli.settings.options import LogFormatOption
from restow.broker.errors import ExtraMissingError

ROUTER_PORT = 8000
ENGINE = re.compile(r"(?:([^=]+)=)?(https?://[^\s@]+)")


@connects
def router(
    prefill: Annotated[
        list[str],
        typer.Option(
            "--prefill",
            metavar="[ID=]URL",
            help="A prefill engine. Repeat the option for more engines.",
        ),
    ],
    decode: Annotated[
        list[str],
        typer.Option(
            "--decode",
            metavar="[ID=]URL",
            help="A decode engine. Repeat the option for more engines.",
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
    SIGTERM or SIGINT. Use it to try things; docs/router.md names routers for production.
    """
    try:
        from aiohttp import web

        from restow.broker.router.routing import RoutedEngine, Router
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"the router needs module {error.name}, which is not installed: "
            f"pip install 'restow[router]'",
            module=error.name,
        ) from None
    from restow.broker.client import AsyncAdminClient
    from restow.broker.stderr import logging_to_stderr

    host, port = host_and_port(listen, ROUTER_PORT)
    p = [RoutedEngine(*_address(words)) for words in prefill]
    d = [RoutedEngine(*_address(words)) for words in decode]
    if find_ms and not all(engine.engine_id for engine in p):
        raise typer.BadParameter(
            "each prefill engine needs its id (ID=URL) to be found", param_hint="--find-ms"
        )

    async def app() -> web.Application:
        if not find_ms:
            return Router(p, d, silence_s).app()
        client = AsyncAdminClient(connection.broker, credentials=connection.credentials())
        served = Router(p, d, silence_s, client, find_ms / 1000).app()
        served.on_cleanup.append(lambda _: client.close())
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


def _address(words: str) -> tuple[str, str]:
    """Return the URL and the id of an engine that is named ``URL`` or ``ID=URL``.

    >>> _address("p1=http://h:8100/"), _address("http://h/?a=b")
    (('http://h:8100', 'p1'), ('http://h/?a=b', ''))
    """
    if (match := ENGINE.fullmatch(words)) is None:
        raise typer.BadParameter(
            f"{words} is not an http:// or https:// URL without a user", param_hint="[ID=]URL"
        )
    return match[2].rstrip("/"), match[1] or ""
