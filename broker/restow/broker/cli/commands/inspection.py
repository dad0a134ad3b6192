"""``restow status``, ``engines``, ``agents``, ``handoffs`` and others show what a broker holds."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from restow.broker.cli.completion import complete_engine, complete_handoff
from restow.broker.cli.connection import Connection, TenantConnection, connects
from restow.broker.cli.output import Output
from restow.broker.cli.watching import looks
from restow.broker.printable import shown_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

StateOption = Annotated[
    Literal["WAITING", "READY", "STAGING", "READING", "DONE", "FAILED", "EXPIRED", "CANCELLED"]
    | None,
    typer.Option(case_sensitive=False, help="Only those in this state."),
]
HandoffArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        autocompletion=complete_handoff,
        help="Id of the handoff, or a beginning of it that no other has.",
    ),
]
EngineArgument = Annotated[
    str,
    typer.Argument(
        metavar="[ENGINE]",
        autocompletion=complete_engine,
        show_default=False,
        help="Only engines whose ids begin so.",
    ),
]
MAX_LIMIT = 100_000
MAX_LISTED = 10_000
"""As many handoffs as a broker lists at once; those under way come first."""
WATCH_S = 1.0


@connects
def status(*, connection: Connection, output: Output) -> None:
    """Statistics of the whole broker, of each that is given; or of an operator's one tenant."""
    from restow.broker.cli.views import admin_json, admin_tables
    from restow.broker.cli.views.models_served import models_json

    with connection.client() as client:
        models = models_json(admin_json.engines_json(client.engines())["engines"])
        told = [admin_json.status_json(one.status(), one.address) for one in client.each()]
        value = told[0] if len(client.addresses) == 1 else {"brokers": told}
        value["models"] = models
    output.answer(value, admin_tables.show_status)


@connects
def tenants(*, connection: Connection, output: Output) -> None:
    """The tenants that have engines or handoffs, and what they have."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.tenants_json(client.tenants().tenants)
    output.answer(value, admin_tables.show_tenants, _names("tenants", "tenant"))


@connects
def engines(engine: EngineArgument = "", *, connection: TenantConnection, output: Output) -> None:
    """The registered engines: are all their agents connected, is a session open?"""
    from restow.broker.cli.handoff_ids import say_hidden
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        found = [one for one in client.engines() if one.engine_id.startswith(engine)]
        value = admin_json.engines_json(found)
        show = partial(admin_tables.show_engines, tenants=connection.all_tenants)
        output.answer(value, show, _names("engines", "engine_id"))
        say_hidden(client, output)


@connects
def agents(engine: EngineArgument = "", *, connection: TenantConnection, output: Output) -> None:
    """The connected agents and the memory that they registered."""
    from restow.broker.cli.handoff_ids import say_hidden
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        found = [one for one in client.agents() if one.engine_id.startswith(engine)]
        value = admin_json.agents_json(found)
        show = partial(admin_tables.show_agents, tenants=connection.all_tenants)
        output.answer(value, show, _names("agents", "agent_name"))
        say_hidden(client, output)


@connects
def holdings(engine: EngineArgument = "", *, connection: TenantConnection, output: Output) -> None:
    """What engines say that they hold of prefixes, by group, and the room that it takes."""
    from restow.broker.cli.handoff_ids import say_hidden
    from restow.broker.cli.views.prefix_views import holdings_json, show_holdings

    with connection.client() as client:
        value = holdings_json(client.holdings(), engine)
        show = partial(show_holdings, tenants=connection.all_tenants)
        output.answer(value, show, _names("engines", "engine_id"))
        say_hidden(client, output)


@connects
def costs(*, connection: Connection, output: Output) -> None:
    """What reading and copying costs between hosts, by which ways of travelling are chosen."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.costs_json(client.costs())
    output.answer(value, admin_tables.show_costs)


@connects
def handoffs(
    beginning: Annotated[
        str,
        typer.Argument(
            metavar="[ID]",
            autocompletion=complete_handoff,
            show_default=False,
            help="Only those whose ids begin so.",
        ),
    ] = "",
    state: StateOption = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="At most so many.")] = 20,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show them anew every second, until Ctrl-C.")
    ] = False,
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Handoffs, those under way first, then the newest ends."""
    from restow.broker.cli.handoff_ids import say_hidden
    from restow.broker.cli.views import admin_json, admin_tables
    from restow.broker.cli.views.live import live_handoffs

    if watch and (output.document or output.form == "name"):
        raise typer.BadParameter("--watch shows tables: see `restow events --follow -o json`")
    with connection.client() as client:

        def look() -> Any:
            return admin_json.handoffs_json(client.handoffs(state, limit, beginning))

        value = look()
        if not watch:
            show = partial(admin_tables.show_handoffs, tenants=connection.all_tenants)
            output.answer(value, show, _names("handoffs", "handoff_id"))
            say_hidden(client, output)
            return
        say_hidden(client, output)
        with ExitStack() as screen:
            for number in looks(WATCH_S):  # Ctrl-C is heard before the first character is shown
                if not number:
                    live = live_handoffs(output.form == "wide", connection.all_tenants)
                    update = screen.enter_context(live)
                update(shown_values(look() if number else value))


@connects
def leases(
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="At most so many.")] = 20,
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Whose pages P keeps, for how long still, and what they wait for; the shortest first."""
    from restow.broker.cli.handoff_ids import say_hidden
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.leases_json(client.handoffs(limit=MAX_LISTED), limit)
        show = partial(admin_tables.show_leases, tenants=connection.all_tenants)
        output.answer(value, show, _names("leases", "handoff_id"))
        say_hidden(client, output)


@connects
def handoff(handoff_id: HandoffArgument, *, connection: TenantConnection, output: Output) -> None:
    """One handoff and everything that happened to it."""
    from restow.broker.cli.handoff_ids import find_handoff
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        tenant, whole = find_handoff(connection, client, handoff_id)
    with connection.client_of(tenant) as client:
        value = admin_json.handoff_json(client.handoff(whole))
    output.answer(value, admin_tables.show_handoff, lambda one: [one["handoff_id"]])


def _names(of: str, name: str) -> Callable[[Any], Iterable[str]]:
    return lambda value: (one[name] for one in value[of])
