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
    GPU = "gpu"
    RESTARTS = "restarts"
    KILLED = "killed"
    FAILOVER = "failover"
    OUTAGES = "outages"
    FIRST = "first"
    BESIDE = "beside"
    CONTENT = "content"
    DIGESTS = "digests"
    STORE = "store"
    PREFIXES = "prefixes"
    OFFERS = "offers"
    KEPT = "kept"
    SESSIONS = "sessions"
    VLLM = "vllm"
    TURNS = "turns"
    EARLY = "early"
    PARTS = "parts"


MODULES = {
    Suite.DATA: ("data", "run"),
    Suite.CONTROL: ("control", "run"),
    Suite.PLANNING: ("planning", "run"),
    Suite.PIECES: ("choice", "run_pieces"),
    Suite.MODELS: ("choice", "run_models"),
    Suite.GPU: ("choice", "run_gpu"),
    Suite.RESTARTS: ("restarts", "run"),
    Suite.KILLED: ("killed", "run"),
    Suite.FAILOVER: ("failover", "run"),
    Suite.OUTAGES: ("outages", "run"),
    Suite.FIRST: ("first", "run"),
    Suite.BESIDE: ("beside", "run"),
    Suite.CONTENT: ("contents", "run"),
    Suite.DIGESTS: ("digests", "run"),
    Suite.STORE: ("store_worth", "run"),
    Suite.PREFIXES: ("prefixes", "run"),
    Suite.OFFERS: ("offers", "run"),
    Suite.KEPT: ("kept", "run"),
    Suite.SESSIONS: ("sessions", "run"),
    Suite.VLLM: ("vllm_engines", "run"),
    Suite.TURNS: ("vllm_turns", "run"),
    Suite.EARLY: ("vllm_early", "run"),
    Suite.PARTS: ("parts", "run"),
}
NAMED_ONLY = (Suite.VLLM, Suite.TURNS, Suite.EARLY, Suite.OUTAGES, Suite.FAILOVER, Suite.GPU)
"""Measured only where asked for by name: three want vLLM, two take minutes, one wants a GPU."""
BY_CASE = (Suite.PIECES, Suite.MODELS, Suite.GPU)
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
            help="Of pieces, models and gpu: cases with these in their name; may be repeated.",
        ),
    ] = None,
    sets: Annotated[
        int,
        typer.Option(
            min=1,
            help="Of pieces, models and gpu: so many sets of processes, minutes apart, for a case "
            "that missed a goal or barely reached it; the samples of all are taken together. Where "
            "the memory of one set happens to lie makes up to a tenth.",
        ),
    ] = 1,
) -> None:
    """Measure medians of interleaved samples; ratios are the reference's seconds over ours."""
    for given, option, enough in ((case, "--case", all), (sets > 1, "--sets", any)):
        if given and not (suite and enough(one in BY_CASE for one in suite)):
            words = f"name suites too, of {', '.join(BY_CASE)}"
            raise typer.BadParameter(words, param_hint=option)
    # Not a terminal, so a file: its lines may be long.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    about = machine()
    console.print(about)
    rows: dict[tuple[str, str, str], Row] = {}

    def put(row: Row) -> None:
        rows[row.suite, row.case, row.reference] = row
        console.print(f"  {row.suite}: {row.case}: {row.ratio:.2f} of {row.reference}")
        if json_file is not None:  # what is measured is kept, should the rest not come
            write_json(list(rows.values()), json_file, about)

    for name in suite or [one for one in Suite if one not in NAMED_ONLY]:
        # Imported when needed: the control plane is measured without torch.
        module, run = MODULES[name]
        named = (case or (), sets) if name in BY_CASE else ()
        getattr(import_module(module), run)(put, repeats, *named)
    show(list(rows.values()), console)


if __name__ == "__main__":
    typer.run(main)
