"""Hold the options that several commands share, except options of the connection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

JsonFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSON file.")]
ConfigPath = Annotated[
    Path,
    typer.Argument(exists=True, help="A model's config.json, or the folder of its checkpoint."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, errors too.")]
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
