"""``restow brokers`` shows the brokers of a fleet, and which of them leads."""

from __future__ import annotations

from restow.broker.cli.common.connection import Connection, connects
from restow.broker.cli.common.output import Output


@connects
def brokers(*, connection: Connection, output: Output) -> None:
    """Show the brokers of a fleet, which of them leads, and the state of the asked broker."""
    from restow.broker.cli.views.fleet_views import brokers_json, show_brokers

    with connection.client() as client:
        value = brokers_json(client.brokers())
    output.answer(
        value, show_brokers, lambda document: (broker["address"] for broker in document["brokers"])
    )
