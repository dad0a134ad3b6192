"""`find_handoff` finds the one handoff whose id, or whose id's beginning, somebody typed."""

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
    """Return tenant and whole id of a handoff: of that id, or else of the one that begins so.

    Raises `HandoffUnknownError` or `HandoffAmbiguousError`.
    """
    if not given:  # every id begins so
        raise typer.BadParameter("an empty id names no handoff", param_hint="ID")
    listed = client.handoffs(limit=100, beginning=given)
    exact = [one for one in listed.handoffs if one.handoff_id == given]
    if listed.left_out and not exact and not connection.all_tenants:
        # Not asked first: the broker logs a call that names what it does not know.
        try:
            exact = [client.handoff(given).handoff]
        except RestowError as error:
            if error.reason != HandoffUnknownError.reason:
                raise
    # A publication has its deliveries below it, under the same id.
    found = {(one.tenant, one.handoff_id): one for one in reversed(exact or listed.handoffs)}
    like = list(reversed(found.values()))
    if len(like) == 1:
        return like[0].tenant or connection.tenant, like[0].handoff_id
    if not like:
        others = hidden(client)
        raise HandoffUnknownError(
            f"handoff {given} is not known here, nor one whose id begins so"
            f"{f'; {others}' if others else ''}",
            handoff=given,
        )
    several = connection.all_tenants and len({one.tenant for one in like}) > 1
    ids = [f"{one.tenant}/{one.handoff_id}" if several else one.handoff_id for one in like[:NAMED]]
    count = len(like) + (0 if exact else listed.left_out)
    raise HandoffAmbiguousError(
        f"{given} is {'the id' if exact else 'a beginning of the ids'} of {count} handoffs: "
        f"{', '.join(ids)}{', ...' if count > len(ids) else ''}; "
        f"{'name one with --tenant' if exact else 'type more of it'}",
        handoff=given,
    )


def hidden(client: AdminClient) -> str:
    """Return words on the tenants of which an operator of all is shown nothing; empty: none."""
    try:
        held = client.tenants()
    except RestowError:  # an older broker, or one that went away just now
        return ""
    others = [one.tenant for one in held.tenants if one.tenant != held.listed]
    if not held.listed or not others:
        return ""
    named = ", ".join(others[:NAMED]) + (", ..." if len(others) > NAMED else "")
    which = "another tenant has" if len(others) == 1 else f"{len(others)} other tenants have"
    return f"tenant {held.listed} alone: {which} engines or handoffs too ({named}): --tenant, or -A"


def say_hidden(client: AdminClient, output: Output) -> None:
    """Tell an operator of all tenants on stderr of which nothing is shown, beside a table."""
    words = "" if output.document or output.form == "name" else hidden(client)
    if words:
        sys.stderr.write(f"{words}\n")
