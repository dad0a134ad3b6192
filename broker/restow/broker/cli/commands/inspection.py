"""``restow status``, ``engines``, ``handoffs``, ``events`` and others show what a broker holds."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from restow.broker.cli.common.completion import complete_engine, complete_handoff
from restow.broker.cli.common.connection import Connection, TenantConnection, connects
from restow.broker.cli.common.output import Output, print_document
from restow.broker.cli.common.watching import looks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

StateOption = Annotated[
    Literal["WAITING", "READY", "STAGING", "READING", "DONE", "FAILED", "EXPIRED", "CANCELLED"]
    | None,
    typer.Option(case_sensitive=False, help="Show handoffs in this state only."),
]
HandoffArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        autocompletion=complete_handoff,
        help="Id of the handoff, or enough of its beginning to tell it from others.",
    ),
]
EngineArgument = Annotated[
    str,
    typer.Argument(
        metavar="[ENGINE]",
        autocompletion=complete_engine,
        show_default=False,
        help="Show engines whose ids begin like this.",
    ),
]
MAX_LIMIT = 100_000
MAX_LISTED = 10_000
"""Handoffs that a broker lists at once; handoffs under way come first."""
FOLLOW_S = 1.0


@connects
def status(*, connection: Connection, output: Output) -> None:
    """Show statistics of the broker, or of your tenant."""
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        models = documents.models_json(documents.engines_json(client.engines())["engines"])
        answer = client.status()
    value = documents.status_json(answer, client.address)
    value |= {"membership": documents.membership_json(answer), "models": models}
    output.answer(value, tables.show_status)


@connects
def brokers(*, connection: Connection, output: Output) -> None:
    """Show the brokers of a fleet, which of them leads, and the state of the asked broker."""
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        value = documents.brokers_json(client.brokers())
    output.answer(value, tables.show_brokers, _names("brokers", "address"))


@connects
def tenants(*, connection: Connection, output: Output) -> None:
    """Show the tenants that have engines or handoffs, and how much each has."""
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        value = documents.tenants_json(client.tenants().tenants)
    output.answer(value, tables.show_tenants, _names("tenants", "tenant"))


@connects
def engines(engine: EngineArgument = "", *, connection: TenantConnection, output: Output) -> None:
    """Show the registered engines, whether all their agents are connected, and their sessions."""
    from restow.broker.cli.common.handoff_ids import say_hidden
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        listed = [info for info in client.engines() if info.engine_id.startswith(engine)]
        value = documents.engines_json(listed)
        show = partial(tables.show_engines, tenants=connection.all_tenants)
        output.answer(value, show, _names("engines", "engine_id"))
        say_hidden(client, output)


@connects
def agents(engine: EngineArgument = "", *, connection: TenantConnection, output: Output) -> None:
    """Show the connected agents and the memory that they registered."""
    from restow.broker.cli.common.handoff_ids import say_hidden
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        listed = [info for info in client.agents() if info.engine_id.startswith(engine)]
        value = documents.agents_json(listed)
        show = partial(tables.show_agents, tenants=connection.all_tenants)
        output.answer(value, show, _names("agents", "agent_name"))
        say_hidden(client, output)


@connects
def holdings(engine: EngineArgument = "", *, connection: TenantConnection, output: Output) -> None:
    """Show the prefixes that engines say they hold, by group, and their memory at the broker."""
    from restow.broker.cli.common.handoff_ids import say_hidden
    from restow.broker.cli.views.tables import show_holdings
    from restow.broker.display.documents import holdings_json

    with connection.client() as client:
        value = holdings_json(client.holdings(), engine)
        show = partial(show_holdings, tenants=connection.all_tenants)
        output.answer(value, show, _names("engines", "engine_id"))
        say_hidden(client, output)


@connects
def costs(*, connection: Connection, output: Output) -> None:
    """Show the measured costs between hosts, which decide how state travels."""
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        value = documents.costs_json(client.costs())
    output.answer(value, tables.show_costs)


@connects
def handoffs(
    beginning: Annotated[
        str,
        typer.Argument(
            metavar="[ID]",
            autocompletion=complete_handoff,
            show_default=False,
            help="Show handoffs whose ids begin like this.",
        ),
    ] = "",
    state: StateOption = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="Show at most this many.")] = 20,
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Show handoffs: handoffs under way first, then the newest ends."""
    from restow.broker.cli.common.handoff_ids import say_hidden
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        value = documents.handoffs_json(client.handoffs(state, limit, beginning))
        show = partial(tables.show_handoffs, tenants=connection.all_tenants)
        output.answer(value, show, _names("handoffs", "handoff_id"))
        say_hidden(client, output)


@connects
def leases(
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="Show at most this many.")] = 20,
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Show the leases on P's pages, what each lease waits for, and how long it has left."""
    from restow.broker.cli.common.handoff_ids import say_hidden
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        value = documents.leases_json(client.handoffs(limit=MAX_LISTED), limit)
        show = partial(tables.show_leases, tenants=connection.all_tenants)
        output.answer(value, show, _names("leases", "handoff_id"))
        say_hidden(client, output)


@connects
def handoff(handoff_id: HandoffArgument, *, connection: TenantConnection, output: Output) -> None:
    """Show one handoff and everything that happened to it."""
    from restow.broker.cli.common.handoff_ids import find_handoff
    from restow.broker.cli.views import tables
    from restow.broker.display import documents

    with connection.client() as client:
        tenant, whole = find_handoff(connection, client, handoff_id)
    with connection.client_of(tenant) as client:
        value = documents.handoff_json(client.handoff(whole))
    output.answer(value, tables.show_handoff, lambda document: [document["handoff_id"]])


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


def _names(of: str, name: str) -> Callable[[Any], Iterable[str]]:
    return lambda value: (entry[name] for entry in value[of])
