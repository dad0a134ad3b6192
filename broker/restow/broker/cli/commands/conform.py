"""``restow conform`` judges KV connectors: which bytes they would bring where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from restow.broker.cli.common.connection import connects
from restow.broker.cli.common.output import FOUND, Output

CANNOT_JUDGE = 2


@connects
def conform(
    connector: Annotated[
        list[str] | None,
        typer.Argument(
            help="A name that --list prints, or a Python file that asks a connector of yours "
            "(docs/peers.md). Default: each listed connector whose package is installed.",
            show_default=False,
        ),
    ] = None,
    *,
    list_only: Annotated[
        bool,
        typer.Option("--list", help="List the connectors, and whether they can be asked here."),
    ] = False,
    python: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Python interpreter of the environment that has vLLM, SGLang or LMCache.",
            show_default="the one that runs restow",
        ),
    ] = Path(sys.executable),
    only: Annotated[
        str,
        typer.Option(metavar="WORDS", help="Ask only about geometries with these words in them."),
    ] = "",
    output: Output,
) -> None:
    """Ask connectors which bytes they copy between engines of other TP, and judge every byte.

    The report has a verdict for each geometry: right, wrong, refused, missed (D finds nothing), not
    asked (no function answers), or not judged. It is JSON with --json, else Markdown; progress goes
    to stderr. No engine runs and no broker is asked; the report says what this cannot see.

    Exits with 0 if no connector is wrong, with 4 if one brings wrong bytes, and with 2 for wrong
    usage, or if a connector cannot be judged.
    """
    from restow.agents.conform.judge import CONNECTORS, UNJUDGED, Connector, judge
    from restow.agents.conform.rules import GEOMETRIES

    if output.form == "name" and not list_only:
        raise typer.BadParameter("there are no names to print here", param_hint="-o")
    known = {one.name.lower(): one for one in CONNECTORS}
    asked = list(CONNECTORS)
    if connector:
        asked = []
        for name in connector:
            if name.lower() in known:
                asked.append(known[name.lower()])
            elif Path(name).is_file():
                asked.append(Connector.of_file(Path(name)))
            else:
                names = ", ".join(one.name for one in CONNECTORS)
                raise typer.BadParameter(f"{name} is no file, and none of {names}")
    geometries = [one for one in GEOMETRIES if only in str(one)] if not list_only else []
    if not geometries and not list_only:
        raise typer.BadParameter("no geometry has these words", param_hint="--only")
    report = judge(asked, geometries, str(python), lambda line: typer.echo(line, err=True))
    if list_only:
        output.answer(report["connectors"], _show_list, list)
        return
    output.answer(report, _show_report)
    verdicts = {
        verdict
        for name, about in report["connectors"].items()
        for verdict in report["counts"][name]
        if connector or not about["absent"]
    }
    if "wrong" in verdicts:
        raise typer.Exit(FOUND)
    if UNJUDGED in verdicts or not verdicts:
        raise typer.Exit(CANNOT_JUDGE)


def _show_list(connectors: dict[str, dict[str, str]], wide: bool) -> None:
    from restow.broker.cli.views.listing import console, listing, put

    rows = [
        [name, f"{about['package']} {about['version']}".strip(), about["absent"] or "can be asked"]
        for name, about in connectors.items()
    ]
    screen = console(wide)
    put(screen, listing(["connector", "package", "here"], rows, screen.width, words="here"))


def _show_report(report: dict[str, Any], _: bool) -> None:
    from restow.agents.conform.report import markdown

    typer.echo(markdown(report))
