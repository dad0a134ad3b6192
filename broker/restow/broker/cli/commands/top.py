"""``restow top`` shows what goes on in a broker, on the whole screen or line by line."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from restow.broker.cli.common.connection import TenantConnection, connects
from restow.broker.cli.common.watching import looks
from restow.broker.printable import shown_values

if TYPE_CHECKING:
    from restow.broker.cli.views.top_view import Look
    from restow.broker.client.admin import AdminClient

LISTED = 1000
"""Handoffs that are asked for at a time: handoffs under way first, then the latest ends."""


@connects
def top(
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, help="Seconds between two looks.")
    ] = 1.0,
    batch: Annotated[
        bool,
        typer.Option("--batch", "-b", help="Print one look after the other, as for a pipe."),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=1, help="With -b: stop after this many looks."),
    ] = None,
    *,
    connection: TenantConnection,
) -> None:
    """Follow a broker: handoffs under way, the last quarter of an hour, leases, slow pairs."""
    with connection.client() as client:
        if batch or not sys.stdout.isatty():
            from restow.broker.cli.views.top_view import put_top

            for _ in looks(every_s, count):
                put_top(look_at(client, connection.all_tenants))
            return
        from restow.broker.cli.views.top_screen import Top

        look = partial(look_at, client, connection.all_tenants)
        look()  # an error of the connection is printed before the screen is taken
        Top(look, every_s, partial(one_handoff, connection)).run()


def one_handoff(connection: TenantConnection, tenant: str, handoff_id: str) -> dict[str, Any]:
    """Ask for one handoff with its timeline. Raises what the client raises."""
    from restow.broker.display.documents import handoff_json

    with connection.client_of(tenant) as client:
        handoff: dict[str, Any] = shown_values(handoff_json(client.handoff(handoff_id)))
    return handoff


def look_at(client: AdminClient, all_tenants: bool = False) -> Look:
    """Ask the broker for all that is shown. Raises what the client raises.

    With ``all_tenants``, the names of engines have their tenants before them.
    """
    from restow.broker.cli.common.handoff_ids import hidden
    from restow.broker.cli.views.top_view import Look
    from restow.broker.display import documents
    from restow.broker.display.rows import name_tenants

    answer = client.status(traffic=True)
    status = documents.status_json(answer, client.address)
    traffic = documents.traffic_json(answer)
    handoffs = documents.handoffs_json(client.handoffs(limit=LISTED))["handoffs"]
    holdings = documents.holdings_json(client.holdings())["engines"]
    if all_tenants:
        name_tenants([*handoffs, *traffic["pairs"]], "source_engine", "destination_engine")
        name_tenants(holdings, "engine_id")
    return Look(
        shown_values(status | {"membership": documents.membership_json(answer)}),
        shown_values(documents.engines_json(client.engines())["engines"]),
        shown_values(handoffs),
        shown_values(traffic),
        shown_values(holdings),
        hidden(client),
    )
