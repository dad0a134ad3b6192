"""``./run bench``: data plane, control plane, planning and choices, each beside a reference."""

from __future__ import annotations

import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rows import Row, machine, show, write_json


class Suite(StrEnum):
    """What can be measured."""

    DATA = "data"
    CONTROL = "control"
    PLANNING = "planning"
    PIECES = "pieces"
    MODELS = "models"
    GROUND = "ground"
    RESTARTS = "restarts"
    KILLED = "killed"
    DIGESTS = "digests"
    VLLM = "vllm"


MODULES = {
    Suite.DATA: ("data", "run"),
    Suite.CONTROL: ("control", "run"),
    Suite.PLANNING: ("planning", "run"),
    Suite.PIECES: ("choice", "run_pieces"),
    Suite.MODELS: ("choice", "run_models"),
    Suite.GROUND: ("ground", "run"),
    Suite.RESTARTS: ("restarts", "run"),
    Suite.KILLED: ("killed", "run"),
    Suite.DIGESTS: ("digests", "run"),
    Suite.VLLM: ("vllm_engines", "run"),
}
NAMED_ONLY = (Suite.VLLM,)
"""Measured only where it is asked for by name, because it has to be installed first."""
BY_CASE = (Suite.PIECES, Suite.MODELS, Suite.GROUND)
"""Of these single cases can be measured."""


def main(
    suite: Annotated[
        list[Suite] | None, typer.Option(help="Measure only this; may be repeated.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows there.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each case.")] = 9,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            help="Of pieces, models, ground: cases with these in their name; may be repeated.",
        ),
    ] = None,
) -> None:
    """Measure medians of interleaved samples; ratios are the reference's seconds over ours."""
    if case and not (suite and all(one in BY_CASE for one in suite)):
        raise typer.BadParameter(f"name suites too, of {', '.join(BY_CASE)}", param_hint="--case")
    # Not a terminal, so a file: its lines may be long.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    about = machine()
    console.print(about)
    rows: list[Row] = []

    def put(row: Row) -> None:
        rows.append(row)
        console.print(f"  {row.suite}: {row.case}: {row.ratio:.2f} of {row.reference}")
        if json_file is not None:  # what is measured is kept, should the rest not come
            write_json(rows, json_file, about)

    for name in suite or [one for one in Suite if one not in NAMED_ONLY]:
        # Imported when needed: the control plane is measured without torch.
        module, run = MODULES[name]
        getattr(import_module(module), run)(put, repeats, *([case] if case else []))
    show(rows, console)


if __name__ == "__main__":
    typer.run(main)
