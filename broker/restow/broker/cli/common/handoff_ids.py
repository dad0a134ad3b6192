"""`find_handoff` finds the handoff whose id, or the beginning of whose id, somebody typed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from restow.broker.errors import HandoffAmbiguousError, HandoffUnknownError, RestowError

if TYPE_CHECKING:
    from restow.broker.cli.common.connection import TenantConnection
    from restow.broker.cli.common.output import Output
    from restow.broker.client.admin import AdminClient


NAMED = 5
"""Ids that an error names."""


def find_handoff(
    connection: TenantConnection, client: AdminClient, given: str
) -> tuple[str | None, str]:
    """Return the tenant and the whole id of the handoff whose id is, or begins with, ``given``.

    Raises `HandoffUnknownError` or `HandoffAmbiguousError`.
    """
    if not given:  # every id begins with an empty text
        raise typer.BadParameter("an empty id names no handoff", param_hint="ID")
    listed = client.handoffs(limit=100, beginning=given)
    exact = [handoff for handoff in listed.handoffs if handoff.handoff_id == given]
    if listed.left_out and not exact and not connection.all_tenants:
        # Ask this last: the broker logs a call that names a handoff that it does not know.
        try:
            exact = [client.handoff(given).handoff]
        except RestowError as error:
            if error.reason != HandoffUnknownError.reason:
                raise
    # A publication has its deliveries below it, under the same id.
    by_id = {
        (handoff.tenant, handoff.handoff_id): handoff
        for handoff in reversed(exact or listed.handoffs)
    }
    like = list(reversed(by_id.values()))
    if len(like) == 1:
        return like[0].tenant or connection.tenant, like[0].handoff_id
    if not like:
        others = hidden(client)
        raise HandoffUnknownError(
            f"handoff {given} is not known here, nor a handoff whose id begins so"
            f"{f'; {others}' if others else ''}",
            handoff=given,
        )
    several = connection.all_tenants and len({handoff.tenant for handoff in like}) > 1
    ids = [
        f"{handoff.tenant}/{handoff.handoff_id}" if several else handoff.handoff_id
        for handoff in like[:NAMED]
    ]
    count = len(like) + (0 if exact else listed.left_out)
    raise HandoffAmbiguousError(
        f"{given} is {'the id' if exact else 'a beginning of the ids'} of {count} handoffs: "
        f"{', '.join(ids)}{', ...' if count > len(ids) else ''}; "
        f"{'name the tenant with --tenant' if exact else 'type more of it'}",
        handoff=given,
    )


def hidden(client: AdminClient) -> str:
    """Return words on the tenants that an operator of all is not shown; empty if there are none."""
    try:
        held = client.tenants()
    except RestowError:  # an older broker, or a broker that went away just now
        return ""
    others = [info.tenant for info in held.tenants if info.tenant != held.listed]
    if not held.listed or not others:
        return ""
    named = ", ".join(others[:NAMED]) + (", ..." if len(others) > NAMED else "")
    which = "another tenant has" if len(others) == 1 else f"{len(others)} other tenants have"
    return f"tenant {held.listed} alone: {which} engines or handoffs too ({named}): --tenant, or -A"


def say_hidden(client: AdminClient, output: Output) -> None:
    """Tell an operator of all tenants on stderr which tenants a table does not show."""
    words = "" if output.document or output.form == "name" else hidden(client)
    if words:
        sys.stderr.write(f"{words}\n")
