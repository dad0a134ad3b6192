"""`main` runs ``restow``: commands import what they need when they run, so ``--help`` is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from restow.broker.cli.commands.actions import check, drain, forget, release
from restow.broker.cli.commands.conform import conform
from restow.broker.cli.commands.doctor import doctor
from restow.broker.cli.commands.find import find
from restow.broker.cli.commands.inspection import (
    agents,
    brokers,
    costs,
    engines,
    events,
    handoff,
    handoffs,
    holdings,
    leases,
    status,
    tenants,
)
from restow.broker.cli.commands.layout import app as layout_app
from restow.broker.cli.commands.layout import plan
from restow.broker.cli.commands.programs import agent, router, store
from restow.broker.cli.commands.reasons import reasons
from restow.broker.cli.commands.serve import ServeCommand, serve
from restow.broker.cli.commands.state import state
from restow.broker.cli.commands.token import token
from restow.broker.cli.commands.top import top
from restow.broker.cli.common.output import asked_form, colors_unwanted, print_error
from restow.broker.errors import RequestError, RestowError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(layout_app, name="layout")
COMMANDS: tuple[Callable[..., None], ...] = (
    *(plan, agent, store, router),
    *(status, brokers, top, events, tenants, engines, agents, handoffs, handoff, leases, costs),
    reasons,
    *(find, holdings, state),
    *(check, doctor, conform, release, drain, forget, token),
)
STATUSES = {"BROKER_UNREACHABLE": 3, "ADDRESS_INVALID": 2, "SETTING_UNKNOWN": 2}
"""Exit statuses by reason; other reasons exit with 1."""
app.command(cls=ServeCommand)(serve)
for command in COMMANDS:
    app.command()(command)
get = typer.Typer(no_args_is_help=True, help="List what a broker holds: `restow get handoffs`.")
for command in (brokers, tenants, engines, agents, handoffs, leases, holdings, costs, events):
    get.command()(command)
describe = typer.Typer(no_args_is_help=True, help="Show one thing: `restow describe handoff ID`.")
for command in (handoff, status):
    describe.command()(command)
app.add_typer(get, name="get")
app.add_typer(describe, name="describe")


def _print_version(wanted: bool) -> None:
    if wanted:
        from restow.broker.versions import own_version

        typer.echo(f"restow {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Move and re-stow the state of hybrid language models between engines."""
    if colors_unwanted():
        context.color = False


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Exits with 0, with 1 for a `RestowError`, with 2 for wrong usage, with 3 if no broker answers.

    With ``--json`` or ``-o yaml`` an error is a document on stdout, else one line on stderr.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _run(given)
    except RestowError as error:
        print_error(error, asked_form(given))
        sys.exit(STATUSES.get(error.reason, 1))


def _run(arguments: Sequence[str]) -> None:
    """Run a command. Raises `RequestError` too, for an argument whose bytes are no UTF-8."""
    try:
        app(arguments)
    except UnicodeEncodeError as error:
        if error.encoding != "utf-8":
            raise
        raise RequestError(f"{error.object!r} is no text in UTF-8") from None


if __name__ == "__main__":
    main()
