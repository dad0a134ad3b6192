"""``restow router`` stands before engines with an OpenAI API."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from restow.broker.addresses import host_and_port
from restow.broker.cli.connection import Connection, connects
from restow.broker.cli.settings.options import LogFormatOption

ROUTER_PORT = 8000


@connects
def router(
    prefill: Annotated[
        list[str],
        typer.Option("--prefill", metavar="[ID=]URL", help="A prefill engine; once for each."),
    ],
    decode: Annotated[
        list[str],
        typer.Option("--decode", metavar="[ID=]URL", help="A decode engine; once for each."),
    ],
    *,
    connection: Connection,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen.")
    ] = f"127.0.0.1:{ROUTER_PORT}",
    aside_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds for which an engine that failed is left alone.")
    ] = 5.0,
    max_body_mb: Annotated[
        int, typer.Option(min=1, help="The largest request that is taken, in MiB.")
    ] = 4,
    max_connections: Annotated[
        int, typer.Option(min=1, help="How many clients' connections may be open at once.")
    ] = 1000,
    connect_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds that connecting to an engine may take.")
    ] = 3.0,
    answer_s: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds that an engine may take to a stream's first token, or to all of an "
            "answer that is not streamed.",
        ),
    ] = 600.0,
    silence_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a stream may be silent after that.")
    ] = 30.0,
    client_s: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds that a client may be idle, and take for headers, for a body, and to "
            "read a piece of its answer.",
        ),
    ] = 30.0,
    find_ms: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Ask the broker who holds most of each prompt, and wait for so long: for its "
            "token ids, and for the broker. For engines that are named by their ids. 0: do not.",
        ),
    ] = 0,
    busy_tokens: Annotated[
        int,
        typer.Option(min=0, help="How many tokens held outweigh one request more under way."),
    ] = 1000,
    log_format: LogFormatOption = "console",
) -> None:
    """Send each prompt to a prefill and a decode engine, under a handoff id of its own.

    Serves /v1/completions, /v1/chat/completions, /v1/responses, /v1/models and /health until
    SIGTERM or SIGINT. Keys and traces in headers go on to the engines. Asks no broker, unless
    --find-ms says so. It is for trying things; docs/vllm.md names routers for production.
    """
    from restow.broker.router.engines import Engine, is_url
    from restow.broker.router.finding import FindSettings
    from restow.broker.router.serve import RouterSettings, serve_router

    host, port = host_and_port(listen, ROUTER_PORT)
    engines = [Engine.named(words) for words in (*prefill, *decode)]
    for one in engines:
        if not is_url(one.base):
            raise typer.BadParameter(
                f"{one.base} is no http:// or https:// URL", param_hint="[ID=]URL"
            )
    if find_ms and not any(one.engine_id for one in engines):
        raise typer.BadParameter(
            "no engine is named by its id (ID=URL), so that none could be found",
            param_hint="--find-ms",
        )
    from restow.broker.stderr import logging_to_stderr

    find = FindSettings(find_ms / 1000, connection.broker, connection.credentials())
    settings = RouterSettings(
        prefill,
        decode,
        aside_s,
        connect_s=connect_s,
        answer_s=answer_s,
        silence_s=silence_s,
        client_s=client_s,
        max_connections=max_connections,
        max_body_bytes=max_body_mb << 20,
        max_bodies_bytes=max(128, max_body_mb) << 20,
        find=find if find_ms else None,
        busy_tokens=busy_tokens,
    )
    with logging_to_stderr(log_format == "json"):
        asyncio.run(serve_router(settings, host, port))
