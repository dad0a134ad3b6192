"""``restow router`` stands before engines with an OpenAI API."""

from __future__ import annotations

from typing import Annotated

import typer

from restow.broker.addresses import host_and_port
from restow.broker.cli.options import LogFormatOption
from restow.broker.errors import ExtraMissingError

ROUTER_PORT = 8000


def router(
    prefill: Annotated[
        list[str],
        typer.Option("--prefill", metavar="URL", help="A prefill engine; once for each."),
    ],
    decode: Annotated[
        list[str],
        typer.Option("--decode", metavar="URL", help="A decode engine; once for each."),
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen.")
    ] = f"127.0.0.1:{ROUTER_PORT}",
    aside_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds for which an engine that failed is left alone.")
    ] = 5.0,
    max_body_mb: Annotated[
        int, typer.Option(min=1, help="The largest request that is taken, in MiB.")
    ] = 64,
    log_format: LogFormatOption = "console",
) -> None:
    """Send each prompt to a prefill and a decode engine, under a handoff id of its own.

    Serves /v1/completions, /v1/chat/completions, /v1/responses, /v1/models and /health until
    SIGTERM or SIGINT. Keys and traces in headers go on to the engines. Asks no broker.
    """
    try:
        from restow.broker.router.serve import RouterSettings, serve_router
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"the router needs module {error.name}, which is not installed: "
            f"pip install 'restow[router]'",
            module=error.name,
        ) from None
    host, port = host_and_port(listen, ROUTER_PORT)
    for url in (*prefill, *decode):
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{url} is no http:// or https:// URL", param_hint="URL")
    from restow.broker.stderr import logging_to_stderr

    settings = RouterSettings(prefill, decode, aside_s, max_body_bytes=max_body_mb << 20)
    with logging_to_stderr(log_format == "json"):
        serve_router(settings, host, port)
