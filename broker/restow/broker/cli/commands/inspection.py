"""``restow status``, ``engines``, ``agents``, ``handoffs`` and others show what a broker holds."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Annotated, Literal

import typer

from restow.broker.cli.connection import Connection, TenantConnection, connects
from restow.broker.cli.options import JsonOption
from restow.broker.cli.output import answer
from restow.broker.printable import shown_values

StateOption = Annotated[
    Literal["WAITING", "READY", "STAGING", "READING", "DONE", "FAILED", "EXPIRED", "CANCELLED"]
    | None,
    typer.Option(case_sensitive=False, help="Only those in this state."),
]
MAX_LIMIT = 100_000
MAX_LISTED = 10_000
"""As many handoffs as a broker lists at once; those under way come first."""
WATCH_S = 1.0


@connects
def status(*, connection: Connection, as_json: JsonOption = False) -> None:
    """Statistics of the whole broker; to an operator of one tenant, of that tenant."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.status_json(client.status(), client.address)
    answer(value, as_json, admin_tables.show_status)


@connects
def engines(*, connection: TenantConnection, as_json: JsonOption = False) -> None:
    """The registered engines: are all their agents connected, is a session open?"""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.engines_json(client.engines())
    answer(value, as_json, admin_tables.show_engines)


@connects
def agents(*, connection: TenantConnection, as_json: JsonOption = False) -> None:
    """The connected agents and the memory that they registered."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.agents_json(client.agents())
    answer(value, as_json, admin_tables.show_agents)


@connects
def costs(*, connection: Connection, as_json: JsonOption = False) -> None:
    """What reading and copying costs between hosts, by which ways of travelling are chosen."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.costs_json(client.costs())
    answer(value, as_json, admin_tables.show_costs)


@connects
def handoffs(
    state: StateOption = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="At most so many.")] = 20,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show them anew every second, until Ctrl-C.")
    ] = False,
    *,
    connection: TenantConnection,
    as_json: JsonOption = False,
) -> None:
    """Handoffs, those under way first, then the newest ends."""
    from restow.broker.cli.views import admin_json, admin_tables

    if watch and as_json:
        raise typer.BadParameter("--json prints one document: leave --watch out")
    with connection.client() as client:
        value = admin_json.handoffs_json(client.handoffs(state, limit))
        if not watch:
            answer(value, as_json, admin_tables.show_handoffs)
            return
        live = admin_tables.live_handoffs(shown_values(value))
        with _interruption() as interrupted, live as update:
            while not interrupted.wait(WATCH_S):
                value = admin_json.handoffs_json(client.handoffs(state, limit))
                update(shown_values(value))


@connects
def leases(
    limit: Annotated[int, typer.Option(min=1, max=MAX_LIMIT, help="At most so many.")] = 20,
    *,
    connection: TenantConnection,
    as_json: JsonOption = False,
) -> None:
    """Whose pages P keeps, for how long still, and what they wait for; the shortest first."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.leases_json(client.handoffs(limit=MAX_LISTED), limit)
    answer(value, as_json, admin_tables.show_leases)


@contextlib.contextmanager
def _interruption() -> Iterator[threading.Event]:
    """Yield what Ctrl-C sets. Raised amid a call of gRPC, KeyboardInterrupt can get lost."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@connects
def handoff(
    handoff_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the handoff.")],
    *,
    connection: TenantConnection,
    as_json: JsonOption = False,
) -> None:
    """One handoff and everything that happened to it."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        value = admin_json.handoff_json(client.handoff(handoff_id))
    answer(value, as_json, admin_tables.show_handoff)
