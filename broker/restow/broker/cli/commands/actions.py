"""``restow release``, ``drain``, ``forget`` and ``check`` have a broker do something."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from restow.broker.cli.commands.inspection import HandoffArgument
from restow.broker.cli.common.connection import Connection, TenantConnection, connects
from restow.broker.cli.common.output import FOUND, Output, print_json
from restow.broker.cli.settings.options import JsonOption
from restow.broker.printable import shown

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Needed in scripts.")]
POLL_S = 0.2


def _agreed(words: str, yes: bool) -> None:
    """Say what will be done, and ask whether to go on. End the command if nobody agrees."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"nothing was done, because there is no terminal to ask on: repeat the command with "
            f"--yes. "
            f"{shown(words)}",
            param_hint="--yes",
        )
    typer.confirm(f"{shown(words)} Go on?", abort=True, err=True)


def _tell(value: object, words: str, as_json: bool) -> None:
    """Print what was done: as JSON, or in words."""
    if as_json:
        print_json(value)
    else:
        typer.echo(shown(words))


@connects
def release(
    handoff_id: HandoffArgument,
    yes: YesOption = False,
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Give a handoff up: D is told that it has no state, and P gets its pages back."""
    from restow.broker.cli.common.handoff_ids import find_handoff
    from restow.broker.cli.views.tables import show_handoff
    from restow.broker.display.documents import ENDS, handoff_json

    with connection.client() as client:
        tenant, whole = find_handoff(connection, client, handoff_id)
    with connection.client_of(tenant) as client:
        before = client.handoff(whole)
        told = handoff_json(before)
        if told["state"] not in ENDS:
            sides = [told[side] or "nobody" for side in ("source_engine", "destination_engine")]
            _agreed(
                f"Handoff {whole} is {told['state']}, from {sides[0]} to {sides[1]}. It will "
                f"end CANCELLED, and the request that waits for it computes its prompt anew or "
                f"fails.",
                yes,
            )
            client.release(whole)
        value = handoff_json(client.handoff(whole))
    output.answer(value, show_handoff, lambda document: [document["handoff_id"]])


@connects
def drain(
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ID",
            help="Drain this engine alone: it takes part in no new handoff, and finishes "
            "those it has.",
        ),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End the draining.")] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Wait until the reads under way have ended; with --engine, until all open "
            "handoffs of the engine have ended.",
        ),
    ] = False,
    yes: YesOption = False,
    *,
    connection: TenantConnection,
    as_json: JsonOption = False,
) -> None:
    """Have the broker grant no handoff any more, before it is stopped; or let one engine leave.

    A broker that is restarted forgets this.
    """
    if off and wait:
        raise typer.BadParameter("--off ends the draining: there is nothing to wait for")
    if connection.tenant is not None and engine is None:
        raise typer.BadParameter(
            "--tenant needs --engine: without an engine, the whole broker is drained"
        )
    drains: Callable[[bool], int]
    with connection.client() as client:
        if engine is not None:
            will = f"Engine {engine} will take part in nothing new until `--off`, and is to go."
            drains = partial(client.drain_engine, engine)
        else:
            will = (
                f"The broker {client.address} will grant no handoff until `restow drain --off` or "
                f"its restart; handoffs that wait do so until their leases or patience end."
            )
            drains = client.set_draining
        if not off:
            _agreed(will, yes)
        left = drains(not off)
        while wait and left:
            time.sleep(POLL_S)
            left = drains(True)
    if engine is not None:
        done = "takes part in handoffs again" if off else "takes part in nothing new any more"
        value = {"engine": engine, "draining": not off, "open": left}
        words = f"Engine {engine} {done}; {left} of its handoffs have not ended."
    else:
        done = "grants again" if off else "grants nothing any more"
        value = {"draining": not off, "granted": left}
        words = f"The broker {done}; {left} handoffs are granted and have not ended."
    _tell(value, words, as_json)


@connects
def forget(
    engine: Annotated[
        str | None, typer.Argument(metavar="[ENGINE]", help="Id of the engine.")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Have all stores drop the states that these weights computed."),
    ] = None,
    yes: YesOption = False,
    *,
    connection: TenantConnection,
    as_json: JsonOption = False,
) -> None:
    """Forget an engine that is gone, at once; or have stores drop the states of a --revision.

    The broker refuses to forget an engine that is connected (ENGINE_CONNECTED).
    """
    if revision is not None and engine is None:
        _agreed(
            f"All stores will drop the states of revision {revision}, in memory and on disk.", yes
        )
        with connection.client() as client:
            stores = client.forget_states(revision)
        words = f"{stores} stores drop the states of revision {revision}."
        _tell({"revision": revision, "stores": stores}, words, as_json)
        return
    if engine is None or revision is not None:
        raise typer.BadParameter("name an ENGINE, or a --revision")
    with connection.client() as client:
        registered = next((info for info in client.engines() if info.engine_id == engine), None)
        if registered is not None and registered.open:
            _agreed(
                f"Engine {engine} has {registered.open} handoffs that have not ended: they will "
                f"end with ENGINE_LOST.",
                yes,
            )
        ended = client.forget_engine(engine)
    words = f"Engine {engine} is forgotten; {ended} handoffs ended with it."
    _tell({"engine": engine, "ended": ended}, words, as_json)


@connects
def check(*, connection: Connection, as_json: JsonOption = False) -> None:
    """Verify the broker's invariants. Exits with 4 if any is broken."""
    with connection.client() as client:
        audit = client.audit()
    findings = list(audit.findings)
    if as_json:
        print_json({"findings": findings, "handoffs": audit.handoffs})
    elif not findings:
        typer.echo(f"All is well: {audit.handoffs} handoffs, their engines, agents and quotas.")
    else:
        for words in findings:
            typer.secho(shown(words), fg="red")
        typer.echo("This is a fault of Restow: keep this output, and the broker's log.")
    if findings:
        raise typer.Exit(FOUND)
