"""``./run peers``: what peers' own functions would make of a state, beside Restow's plan."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer
from peers.asked_peers import RESTOW, ask
from peers.geometries import GEOMETRIES
from peers.table import FILE, PAGE, fresh
from rich.console import Console
from rich.markdown import Markdown


def main(
    write: Annotated[
        bool, typer.Option("--write", help="Write docs/peers.json, and the page anew.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Ask only for geometries whose words have this in them.")
    ] = "",
) -> None:
    """Ask every peer that can be had which bytes it would bring where, and print the shares.

    Ends with 1 if Restow's plan does not bring every byte.
    """
    chosen = [geometry for geometry in GEOMETRIES if only in str(geometry)]
    if not chosen or (write and only):
        raise typer.BadParameter("the page has all geometries; --only must name some")
    found = {"date": datetime.now(UTC).date().isoformat(), **ask(chosen)}
    page = fresh(PAGE.read_text(), found)
    if write:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(page)
    Console(width=200).print(Markdown(page))
    cells = [row["cells"][RESTOW] for row in found["rows"]]
    shares = [share for cell in cells for part in cell["shares"].values() for share in part]
    if any(share["right_bytes"] != share["due_bytes"] for share in shares):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
