"""``restow store`` runs an engine that keeps states and never computes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from restow.broker.cli.common.connection import Connection, connects
from restow.broker.cli.settings.options import LogFormatOption
from restow.broker.cli.settings.sizes import parse_size
from restow.broker.errors import ExtraMissingError


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
    http_listen: Annotated[
        str | None,
        typer.Option(
            envvar="RESTOW_HTTP_LISTEN",
            help="HOST:PORT where to show metrics (/metrics) and whether it is alive (/healthz), "
            "over plain HTTP, to whoever asks. Default: nowhere.",
        ),
    ] = None,
    log_format: LogFormatOption = "console",
) -> None:
    """Keep states of one model in memory and on disk, until SIGTERM or SIGINT.

    It asks engines for states that they say are worth keeping, and gives them to engines that ask.
    """
    if (layout is None) == (engine is None):
        raise typer.BadParameter("--layout or --engine says of which model: give one of them")
    if (disk is None) != (disk_size is None):
        raise typer.BadParameter("--disk and --disk-size go together")
    try:
        from restow.agents.store.cli import run_store
        from restow.agents.store.store import StoreOptions
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"a store needs module {error.name}, which is not installed: "
            f"pip install 'restow[agent]'",
            module=error.name,
        ) from None

    from restow.broker.cli.common.files import read_layout
    from restow.broker.stderr import logging_to_stderr

    options = StoreOptions(engine_id, connection.broker, memory, block_tokens, disk, disk_size or 0)
    with logging_to_stderr(log_format == "json"):
        source = read_layout(layout) if layout is not None else engine or ""
        run_store(source, options, connection.credentials(), http_listen)
