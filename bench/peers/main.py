"""``./run peers``: which bytes other connectors would bring where, beside Restow's plan."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from bench.peers.ask import RESTOW, ask
from bench.peers.layers import GEOMETRIES
from bench.peers.page import FILE, PAGE, fresh


def main(
    write: Annotated[
        bool, typer.Option("--write", help="Write bench/results/peers.json and docs/peers.md.")
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            metavar="WORDS", help="Ask only about geometries with these words in their name."
        ),
    ] = "",
) -> None:
    """Ask every peer that can be installed which bytes it would copy, and print the shares.

    The exit status is 1 if Restow's plan does not bring every byte.
    """
    chosen = [geometry for geometry in GEOMETRIES if only in str(geometry)]
    if not chosen or (write and only):
        raise typer.BadParameter("--only must match a geometry, and does not go with --write")
    results = {"date": datetime.now(UTC).date().isoformat(), **ask(chosen)}
    page = fresh(PAGE.read_text(), results)
    if write:
        FILE.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page)
    Console(width=200).print(Markdown(page))
    cells = [row["cells"][RESTOW] for row in results["rows"]]
    shares = [share for cell in cells for part in cell["shares"].values() for share in part]
    if any(share["right_bytes"] != share["due_bytes"] for share in shares):
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    app(prog_name="./run peers")
