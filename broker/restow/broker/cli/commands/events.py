"""``restow events`` prints ends of handoffs, and engines that come, go or lose an agent."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from restow.broker.cli.common.connection import TenantConnection, connects
from restow.broker.cli.common.output import Output, print_document
from restow.broker.cli.common.watching import looks

FOLLOW_S = 1.0


@connects
def events(
    since_s: Annotated[
        float,
        typer.Option("--since-s", min=0.0, help="Begin with ends this many seconds ago."),
    ] = 600.0,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", "-f", help="Follow until Ctrl-C, and print events of engines too."
        ),
    ] = False,
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Print what happened, the oldest first: a line for each event, or an object with -o json."""
    from restow.broker.cli.common.handoff_ids import say_hidden
    from restow.broker.cli.common.news import News
    from restow.broker.cli.views.tables import event_line

    if output.form == "name":
        raise typer.BadParameter("events have no names", param_hint="-o")
    with connection.client() as client:
        say_hidden(client, output)
        news = News(client, since_s)
        for _ in looks(FOLLOW_S, None if follow else 1):
            for event in news.look():
                if output.document:
                    print_document(event, output.document, in_a_row=True)
                else:
                    sys.stdout.write(event_line(event, connection.all_tenants) + "\n")
            if news.left_out:
                sys.stderr.write(f"... and {news.left_out} more ends\n")
            sys.stdout.flush()
