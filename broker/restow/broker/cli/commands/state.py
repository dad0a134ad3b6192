"""``restow state`` gives a store commands about the state of a prompt."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from restow.broker.cli.commands.find import chain_from
from restow.broker.cli.common.completion import complete_engine
from restow.broker.cli.common.connection import TenantConnection, connects
from restow.broker.cli.common.output import FOUND, Output
from restow.broker.errors import ChainInvalidError
from restow.broker.state_commands import Outcome, Verb

if TYPE_CHECKING:
    from restow.broker.client import AdminClient, Prefix

UNITS_S = {"s": 1, "m": 60, "h": 3600}


def parse_time(text: str) -> float:
    """Return the seconds of a time such as 90s, 10m or 2h. Raises `typer.BadParameter`."""
    number, unit_s = text[:-1], UNITS_S.get(text[-1:])
    if unit_s is None or not number.isdecimal():
        raise typer.BadParameter(f"{text} is no time: write it like 90s, 10m or 2h")
    return float(int(number) * unit_s)


@connects
def state(
    verb: Annotated[Verb, typer.Argument(help="What the store is to do with the state.")],
    prompt: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A JSON file, as for `restow find`.")
    ],
    store: Annotated[
        str,
        typer.Option(
            "--store",
            "--engine",
            metavar="ID",
            autocompletion=complete_engine,
            help="The store; or the engine whose replies move.",
        ),
    ],
    lasts: Annotated[
        float | None,
        typer.Option(
            "--for", parser=parse_time, metavar="TIME", help="How long a pin lasts, such as 2h."
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="The store to which a store's state moves.",
        ),
    ] = "",
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The state after this many tokens of the prompt. Default: after as many as any "
            "engine or store holds.",
        ),
    ] = None,
    quantum: Annotated[
        int, typer.Option(min=1, help="Tokens from one hash to the next, for token ids.")
    ] = 16,
    wait: Annotated[
        float, typer.Option(min=0, max=600, help="Seconds to wait for the end; 0: do not wait.")
    ] = 30,
    command_id: Annotated[
        str,
        typer.Option(
            "--id",
            help="Id of the command. If it was given before, only its status is shown. Default: a "
            "new random id.",
        ),
    ] = "",
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Have a store prefetch, pin, release, evict or move the state of a prompt.

    With an engine that decodes, move has its replies to the prompt go on at other engines.

    Exits with 4 if the command was refused, or if nobody has the state.
    """
    from restow.broker.cli.common.files import read_json
    from restow.broker.cli.views.tables import show_command

    if (verb is Verb.PIN) != (lasts is not None) or (to and verb is not Verb.MOVE):
        raise typer.BadParameter("pin needs --for, move may have --to, and other verbs neither")
    value = read_json(prompt)
    with connection.client() as client:
        status = client.command(
            command_id or uuid.uuid4().hex,
            verb,
            _prefix(client, value, store, tokens, quantum, verb is Verb.MOVE and not to),
            store,
            for_s=lasts or 0.0,
            to_store=to,
            wait_s=wait,
        )
    output.answer(asdict(status), show_command, lambda document: [document["command_id"]])
    if status.outcome in (Outcome.REFUSED, Outcome.MISSING):
        raise typer.Exit(FOUND)


def _prefix(
    client: AdminClient, value: Any, store: str, tokens: int | None, quantum: int, replies: bool
) -> Prefix:
    """Return the state that is meant; for ``replies`` the end of the last whole quantum.

    Raises `ChainInvalidError` if nobody holds any.
    """
    from restow.broker.client import chain_of

    chain = chain_from(value, quantum)
    if isinstance(value, list) and (len(value) - 1) % quantum:
        # A prompt of a recurrent model leaves a state before its last token.
        chain = chain_of(value, quantum, ends_tokens=[len(value) - 1])
    if tokens is None and replies:
        tokens = len(chain.hashes) * quantum
    if tokens is None:
        (holders,) = client.find([chain], engine_id=store, limit=1)
        if not holders:
            raise ChainInvalidError(
                "nobody holds a state of this prompt: say with --tokens which state is meant"
            )
        tokens = holders[0].tokens
    return chain.prefix(tokens)
