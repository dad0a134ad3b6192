"""``restow top`` shows what goes on in a broker, on the whole screen or line by line."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from restow.broker.cli.connection import TenantConnection, connects
from restow.broker.cli.watching import looks
from restow.broker.printable import shown_values

if TYPE_CHECKING:
    from restow.broker.cli.views.top.tables import Look
    from restow.broker.client.admin import AdminClient

LISTED = 1000
"""Handoffs that are asked for at a time: those under way first, then the latest ends."""


@connects
def top(
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, help="Seconds between two looks.")
    ] = 1.0,
    batch: Annotated[
        bool,
        typer.Option("--batch", "-b", help="Print one look after the other, as into a pipe."),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=1, help="With -b: end after so many looks."),
    ] = None,
    *,
    connection: TenantConnection,
) -> None:
    """What goes on: live handoffs, the last quarter of an hour, the shortest lease, slow pairs."""
    with connection.client() as client:
        if batch or not sys.stdout.isatty():
            from restow.broker.cli.views.top.text import put_top

            before = None
            for _ in looks(every_s, count):
                now = look_at(client, connection.all_tenants)
                put_top(before, now)
                before = now
            return
        from restow.broker.cli.views.top.app import Top

        look = partial(look_at, client, connection.all_tenants)
        look()  # a broker that is not there is said before the screen is taken
        Top(look, every_s, partial(one_handoff, connection)).run()


def one_handoff(connection: TenantConnection, tenant: str, handoff_id: str) -> dict[str, Any]:
    """Ask for one handoff with its timeline. Raises as the client."""
    from restow.broker.cli.views import admin_json

    with connection.client_of(tenant) as client:
        found: dict[str, Any] = shown_values(admin_json.handoff_json(client.handoff(handoff_id)))
    return found


def look_at(client: AdminClient, all_tenants: bool = False) -> Look:
    """Ask the broker for all that is shown. Raises as the client.

    ``all_tenants``: names of engines have their tenants before them.
    """
    from restow.broker.cli.handoff_ids import hidden
    from restow.broker.cli.views import admin_json
    from restow.broker.cli.views.prefix_views import holdings_json
    from restow.broker.cli.views.top.tables import Look

    answer = client.status(traffic=True)
    status = admin_json.status_json(answer, client.address)
    engines = admin_json.engines_json(client.engines())["engines"]
    handoffs = admin_json.handoffs_json(client.handoffs(limit=LISTED))["handoffs"]
    holdings = holdings_json(client.holdings())["engines"]
    if all_tenants:
        for one in handoffs:
            for side in ("source_engine", "destination_engine"):
                one[side] = one[side] and f"{one['tenant']}/{one[side]}"
        for one in holdings:
            one["engine_id"] = f"{one['tenant']}/{one['engine_id']}"
    return Look(
        time.monotonic(),
        shown_values(status),
        shown_values(engines),
        shown_values(handoffs),
        hidden(client),
        shown_values(admin_json.traffic_json(answer)),
        all_tenants,
        shown_values(holdings),
    )
