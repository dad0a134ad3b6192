"""Several commands share these options beside those of their `connection`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

JsonFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSON file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")]
DigestModeName = Literal["off", "sampled", "all"]
CostsOption = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        exists=True,
        dir_okay=False,
        help="Costs to choose ways by: a JSON object such as `costs` in `restow costs --json`.",
    ),
]
LogFormatOption = Annotated[
    Literal["console", "json"],
    typer.Option("--log-format", envvar="RESTOW_LOG_FORMAT", help="Form of the log on stderr."),
]


def set_up_log(log_format: str) -> None:
    """Log to stderr, in lines for people or as one JSON object a line."""
    import logging
    import sys

    import structlog

    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks
            if log_format == "json"
            else structlog.dev.set_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
