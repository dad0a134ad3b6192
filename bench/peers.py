"""``./run peers``: judge connectors as `restow conform` does, and write docs/peers.md."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from restow.agents.conform.judge import CONNECTORS, OWN, judge
from restow.agents.conform.report import markdown, parts
from restow.agents.conform.rules import GEOMETRIES

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "peers.md", ROOT / "bench" / "results" / "peers.json"


def fresh(page: str, report: dict[str, Any]) -> str:
    """Return the page with everything that the command writes."""
    made = parts(report) | {"unseen": [f"- {line}" for line in report["unseen"]]}
    for name, lines in made.items():
        text = "\n".join(["", *lines, ""])
        before, mark, rest = page.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not end:
            raise ValueError(f"{PAGE.name} has no place for {name}")
        page = f"{before}{mark}{text}{end}{after}"
    return page


def main(
    write: Annotated[
        bool, typer.Option("--write", help="Write bench/results/peers.json and docs/peers.md.")
    ] = False,
) -> None:
    """Judge every connector; exit with 1 if Restow's plan is not right everywhere."""
    python = os.environ.get("RESTOW_VLLM_PYTHON", sys.executable)
    report = judge(CONNECTORS, GEOMETRIES, python, lambda line: typer.echo(line, err=True))
    if write:
        FILE.write_text(json.dumps(report, indent=1) + "\n")
        PAGE.write_text(fresh(PAGE.read_text(), report))
    typer.echo(markdown(report))
    if report["counts"][OWN] != {"right": len(GEOMETRIES)}:
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    app(prog_name="./run peers")
