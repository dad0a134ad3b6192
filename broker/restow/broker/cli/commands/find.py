"""``restow find`` says who holds how much of a prompt's state."""

from __future__ import annotations

import operator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from restow.broker.cli.common.completion import complete_engine
from restow.broker.cli.common.connection import TenantConnection, connects
from restow.broker.cli.common.output import Output
from restow.broker.cli.settings.options import JsonFile
from restow.broker.errors import ChainInvalidError

if TYPE_CHECKING:
    from restow.broker.client import PrefixChain

FORM = {"algorithm": str, "quantum_tokens": int, "hash_bytes": int}
"""How hashes in a file are made."""
FIELDS = {**FORM, "hashes": list, "below_tokens": int, "salt": str, "ends": list}
"""Fields of a chain of hashes in a file."""


@connects
def find(
    prompt: JsonFile,
    engine: Annotated[
        str,
        typer.Option(
            autocompletion=complete_engine, help="An engine of the model that the prompt is for."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="The model, if no --engine is named.")] = "",
    revision: Annotated[str, typer.Option(help="The revision of the weights, with --model.")] = "",
    adapter: Annotated[str, typer.Option(help="The adapter, with --model.")] = "",
    quantisation: Annotated[
        str, typer.Option(help="How the weights are quantised, with --model.")
    ] = "",
    quantum: Annotated[
        int, typer.Option(min=1, help="Tokens from one hash to the next, for token ids.")
    ] = 16,
    limit: Annotated[
        int, typer.Option(min=1, max=100, help="Show at most this many holders.")
    ] = 20,
    *,
    connection: TenantConnection,
    output: Output,
) -> None:
    """Show who holds how much of a prompt's state, so that nobody computes it again.

    PROMPT holds a list of token ids, which are hashed as `chain_of` does, or an object with an
    engine's own hashes: {"algorithm": ..., "quantum_tokens": ..., "hashes": [HEX, ...]}.
    """
    from restow.broker.cli.common.files import read_json
    from restow.broker.cli.views.tables import show_found
    from restow.broker.layout.values import ModelIdentity

    if bool(engine) == bool(model):
        raise typer.BadParameter("name an --engine of the model, or the --model, and not both")
    chain = chain_from(read_json(prompt), quantum)
    identity = ModelIdentity(model, revision, adapter, quantisation) if model else None
    with connection.client() as client:
        (holders,) = client.find([chain], engine_id=engine, model=identity, limit=limit)
    value = {
        "hashes": len(chain.hashes),
        "below_tokens": chain.below_tokens or None,
        "holders": [asdict(holder) for holder in holders],
    }
    output.answer(
        value, show_found, lambda document: (holder["engine_id"] for holder in document["holders"])
    )


def chain_from(value: Any, quantum_tokens: int) -> PrefixChain:
    """Return the chain that a file holds. Raises `ChainInvalidError` if it holds none."""
    from restow.broker.client import HashForm, PrefixChain, chain_of
    from restow.broker.client.engine.chains import MAX_TOKEN_ID

    if isinstance(value, list):
        for token_id in value:
            if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
                raise ChainInvalidError(f"{token_id!r} is no token id: token ids are whole numbers")
        return chain_of(value, quantum_tokens)
    try:
        for name, content in value.items():
            if type(content) is not FIELDS.get(name):
                raise TypeError(f"{name} can't be {content!r}")
        hashes = tuple(bytes.fromhex(text) for text in value["hashes"])
        form = {name: value[name] for name in FORM if name in value}
        form.setdefault("hash_bytes", len(hashes[0]) if hashes else 32)
        ends = tuple(
            (operator.index(at), bytes.fromhex(text)) for at, text in value.get("ends", ())
        )
        below_tokens, salt = value.get("below_tokens", 0), value.get("salt", "")
        return PrefixChain(HashForm(**form), hashes, below_tokens, salt, ends)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ChainInvalidError(
            f"no chain: {error!r}. Write token ids as a list, or an object with algorithm, "
            f"quantum_tokens and hashes in hexadecimal"
        ) from None
