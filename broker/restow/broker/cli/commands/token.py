"""``restow token`` makes a token for a client of a broker with ``--tokens``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from restow.broker.cli.common.output import print_json
from restow.broker.cli.settings.options import JsonOption
from restow.broker.trust.identity import Role


def token(
    role: Annotated[
        list[Role],
        typer.Option(
            "--role", help="What the holder does. For an engine with its own agents, give both."
        ),
    ],
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant", help="Tenant of the holder. Without it: an operator of all tenants."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help="Id of the holder's engine, or * for any.", show_default=False
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the token to a new file that only you may read, and print the entry alone.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token, shown this once, and the entry that the broker's tokens file needs.

    That file is a JSON list of entries, and holds no secret.
    """
    from restow.broker.cli.common.files import write_secret
    from restow.broker.trust.identity import IdentityInvalidError
    from restow.broker.trust.tokens import new_token

    try:
        secret, entry = new_token(role, tenant, engine)
    except IdentityInvalidError as error:
        raise typer.BadParameter(str(error)) from None
    if out is not None:
        write_secret(out, secret)
    if as_json:
        print_json({"entry": entry} if out is not None else {"token": secret, "entry": entry})
    elif out is not None:
        typer.echo(json.dumps(entry))
    else:
        typer.echo("token, shown this once; keep it where only its user can read it:")
        typer.echo(f"  {secret}")
        typer.echo("entry of the JSON list that `restow serve --tokens` names:")
        typer.echo(f"  {json.dumps(entry)}")
