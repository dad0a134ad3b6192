"""``restow release``, ``drain`` and ``check`` do something to a broker, or have it do something."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from restow.broker.cli.connection import Connection, TenantConnection, connects
from restow.broker.cli.options import JsonOption
from restow.broker.cli.output import FOUND, answer, print_json
from restow.broker.printable import shown

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
POLL_S = 0.2


def _agreed(words: str, yes: bool) -> None:
    """Say what will be done, and have it agreed to. Ends the command where nobody agrees."""
    if not yes:
        typer.confirm(f"{shown(words)} Go on?", abort=True, err=True)


@connects
def release(
    handoff_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the handoff.")],
    yes: YesOption = False,
    *,
    connection: TenantConnection,
    as_json: JsonOption = False,
) -> None:
    """Give a handoff up: D is told that it has no state, and P gets its pages back."""
    from restow.broker.cli.views import admin_json, admin_tables

    with connection.client() as client:
        before = client.handoff(handoff_id)
        told = admin_json.handoff_json(before)
        if told["state"] not in admin_json.ENDS:
            sides = [told[side] or "nobody" for side in ("source_engine", "destination_engine")]
            _agreed(
                f"Handoff {handoff_id} is {told['state']}, from {sides[0]} to {sides[1]}. It will "
                f"end CANCELLED, and the request that waits for it computes its prompt anew or "
                f"fails.",
                yes,
            )
            client.release(handoff_id)
        value = admin_json.handoff_json(client.handoff(handoff_id))
    answer(value, as_json, admin_tables.show_handoff)


@connects
def drain(
    off: Annotated[bool, typer.Option("--off", help="Grant again what waits.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the reads under way have ended.")
    ] = False,
    yes: YesOption = False,
    *,
    connection: Connection,
    as_json: JsonOption = False,
) -> None:
    """Have the broker grant nothing any more, as before it is stopped; or, with --off, again."""

    if off and wait:
        raise typer.BadParameter("--off grants again: there is nothing to wait for")
    with connection.client() as client:
        if not off:
            _agreed(
                f"The broker {client.address} will grant no handoff until `restow drain --off` or "
                f"its restart; those that wait do so until their leases or patience end.",
                yes,
            )
        granted = client.set_draining(not off)
        while wait and granted:
            time.sleep(POLL_S)
            granted = client.set_draining(True)
    if as_json:
        print_json({"draining": not off, "granted": granted})
    else:
        done = "grants again" if off else "grants nothing any more"
        typer.echo(f"The broker {done}; {granted} handoffs are granted and have not ended.")


@connects
def check(*, connection: Connection, as_json: JsonOption = False) -> None:
    """Have the broker look for anything in it that must not be. Exits with 4 if there is any."""

    with connection.client() as client:
        found = client.audit()
    if as_json:
        print_json({"findings": list(found.findings), "handoffs": found.handoffs})
    elif not found.findings:
        typer.echo(f"All is well: {found.handoffs} handoffs, their engines, agents and quotas.")
    else:
        for words in found.findings:
            typer.secho(shown(words), fg="red")
        typer.echo("It is a fault of Restow: keep this, and the broker's log.")
    if found.findings:
        raise typer.Exit(FOUND)
