"""``restow brokers`` shows who shares pools out, and who owns which."""

from __future__ import annotations

from restow.broker.cli.connection import Connection, connects
from restow.broker.cli.output import Output


@connects
def brokers(*, connection: Connection, output: Output) -> None:
    """The brokers, who owns which pool since when, and what pools carry at the one that is asked.

    Of several addresses the first broker is asked that answers.
    """
    from restow.broker.cli.views.fleet_views import brokers_json, show_brokers

    with connection.client() as client:
        value = brokers_json(client.brokers())
    output.answer(value, show_brokers, lambda one: (each["address"] for each in one["brokers"]))
