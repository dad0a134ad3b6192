"""``restow state`` gives a store commands about the state of a prompt."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from restow.broker.cli.commands.find import chain_from
from restow.broker.cli.common.completion import complete_engine
from restow.broker.cli.common.connection import TenantConnection, connects
from restow.broker.cli.common.output import FOUND, Output
from restow.broker.cli.settings.options import JsonFile
from restow.broker.errors import ChainInvalidError
from restow.broker.state_commands import Outcome, Verb

if TYPE_CHECKING:
    from restow.broker.client import AdminClient, Prefix
    from restow.broker.client.engine.commands import CommandStatus

app = typer.Typer(
    no_args_is_help=True,
    help="Prefetch, pin, release, evict or move the state of a prompt at a store.",
)
StoreOption = Annotated[
    str,
    typer.Option("--store", metavar="ID", autocompletion=complete_engine, help="The store."),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The state after this many tokens of the prompt. Default: after as many as any engine "
        "or store holds.",
    ),
]
QuantumOption = Annotated[
    int, typer.Option("--quantum", min=1, help="Tokens from one hash to the next, for token ids.")
]
WaitOption = Annotated[
    float, typer.Option("--wait", min=0, max=600, help="Seconds to wait for the end.")
]
IdOption = Annotated[
    str,
    typer.Option(
        "--id", help="Id of the command, to repeat it without effect. Default: a new random id."
    ),
]


def _prefix(
    client: AdminClient, prompt: Any, store: str, tokens: int | None, quantum: int
) -> Prefix:
    """Return the state that is meant. Raises `ChainInvalidError` if nobody holds any."""
    from restow.broker.client import chain_of

    chain = chain_from(prompt, quantum)
    if isinstance(prompt, list) and (len(prompt) - 1) % quantum:
        # Prompts of recurrent models leave a state before their last token.
        chain = chain_of(prompt, quantum, ends_tokens=[len(prompt) - 1])
    if tokens is None:
        (holders,) = client.find([chain], engine_id=store, limit=1)
        if not holders:
            raise ChainInvalidError(
                "nobody holds a state of this prompt: say with --tokens which state is meant"
            )
        tokens = holders[0].tokens
    return chain.prefix(tokens)


def _give(
    verb: Verb,
    prompt: Any,
    connection: TenantConnection,
    output: Output,
    *,
    store: str,
    tokens: int | None,
    quantum: int,
    wait: float,
    command_id: str,
    **how: Any,
) -> None:
    """Give a command, print how it stands, and exit with 4 if it was not carried out."""
    from restow.broker.cli.common.files import read_json

    with connection.client() as client:
        prefix = _prefix(client, read_json(prompt), store, tokens, quantum)
        name = command_id or uuid.uuid4().hex
        _print(client.command(name, verb, prefix, store, wait_s=wait, **how), output)


def _print(status: CommandStatus, output: Output) -> None:
    from restow.broker.cli.views.tables import show_command

    output.answer(asdict(status), show_command, lambda document: [document["command_id"]])
    if status.outcome in (Outcome.REFUSED, Outcome.MISSING):
        raise typer.Exit(FOUND)


def _seconds(text: str) -> float:
    """Return the seconds of a time such as 90s, 10m or 2h. Raises `typer.BadParameter`."""
    number, unit = text[:-1], {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    if unit is None or not number.isdecimal():
        raise typer.BadParameter(f"{text} is no time: write it like 90s, 10m or 2h")
    return int(number) * unit


def _simple(verb: Verb, words: str) -> Callable[..., None]:
    """Return the command of a verb without options of its own."""

    def command(
        prompt: JsonFile,
        store: StoreOption,
        tokens: TokensOption = None,
        quantum: QuantumOption = 16,
        wait: WaitOption = 30,
        command_id: IdOption = "",
        *,
        connection: TenantConnection,
        output: Output,
    ) -> None:
        how = {"tokens": tokens, "quantum": quantum, "wait": wait, "command_id": command_id}
        _give(verb, prompt, connection, output, store=store, **how)  # type: ignore[arg-type]

    command.__doc__ = words
    return connects(command)


app.command("prefetch")(
    _simple(
        Verb.PREFETCH,
        "Have a store get a state from an engine, or another store, that holds it.",
    )
)
app.command("release")(_simple(Verb.RELEASE, "End all pins of a state at a store."))
app.command("evict")(_simple(Verb.EVICT, "Drop a state from a store's memory and disk."))


@app.command("pin")
@connects
def pin(
    prompt: JsonFile,
    store: StoreOption,
    lasts: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long, such as 90s, 10m or 2h.")
    ],
    tokens: TokensOption = None,
    quantum: QuantumOption = 16,
    wait: WaitOption = 30,
    command_id: IdOption = "",
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Keep a state in a store's memory for a time, whatever else needs the memory."""
    give = partial(_give, Verb.PIN, prompt, connection, output, for_s=_seconds(lasts))
    give(store=store, tokens=tokens, quantum=quantum, wait=wait, command_id=command_id)


@app.command("move")
@connects
def move(
    prompt: JsonFile,
    store: StoreOption,
    to: Annotated[str, typer.Option("--to", metavar="ID", help="The store that gets the state.")],
    tokens: TokensOption = None,
    quantum: QuantumOption = 16,
    wait: WaitOption = 30,
    command_id: IdOption = "",
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Move a state from one store to another: it is dropped when the other store has it."""
    give = partial(_give, Verb.MOVE, prompt, connection, output, to_store=to)
    give(store=store, tokens=tokens, quantum=quantum, wait=wait, command_id=command_id)


@app.command("status")
@connects
def status(
    command_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the command.")],
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Show how a command stands, and how long its pin still lasts."""
    with connection.client() as client:
        _print(client.command_status(command_id), output)
