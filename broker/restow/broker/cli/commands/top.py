"""``restow top`` shows what goes on in a broker, on the whole screen."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from restow.broker.cli.connection import TenantConnection, connects
from restow.broker.printable import shown_values

if TYPE_CHECKING:
    from restow.broker.cli.views.top_tables import Look
    from restow.broker.client.admin import AdminClient

LISTED = 1000
"""Handoffs that are asked for at a time: those under way first, then the latest ends."""


@connects
def top(
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, help="Seconds between two looks.")
    ] = 1.0,
    *,
    connection: TenantConnection,
) -> None:
    """What goes on: live handoffs, bytes a second, the shortest lease, quarantine, slow peers."""
    from restow.broker.cli.views.top_app import Top

    with connection.client() as client:
        look_at(client)  # a broker that is not there is said before the screen is taken
        Top(partial(look_at, client), every_s).run()


def look_at(client: AdminClient) -> Look:
    """Ask the broker for all that is shown. Raises as the client."""
    from restow.broker.cli.views import admin_json
    from restow.broker.cli.views.top_tables import Look

    status = admin_json.status_json(client.status(), client.address)
    engines = admin_json.engines_json(client.engines())["engines"]
    handoffs = admin_json.handoffs_json(client.handoffs(limit=LISTED))["handoffs"]
    return Look(
        time.monotonic(), shown_values(status), shown_values(engines), shown_values(handoffs)
    )
