"""Find what a shell offers at Tab: ids and names from a broker, if it answers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from restow.broker.client.admin import AdminClient


PATIENCE_S = 1.0
OFFERED = 100
FILES = ("tls_ca", "tls_cert", "tls_key", "token_file")


def complete_handoff(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ids of handoffs: handoffs under way, then the latest ends."""

    def ids(client: AdminClient) -> Iterable[str]:
        listed = client.handoffs(limit=OFFERED, beginning=incomplete).handoffs
        return dict.fromkeys(handoff.handoff_id for handoff in listed)

    return _asked(ctx, incomplete, ids)


def complete_engine(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ids of engines."""
    return _asked(ctx, incomplete, lambda client: [engine.engine_id for engine in client.engines()])


def complete_pair(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return P:D for each pair of engines of one model, and the word all."""
    from restow.broker.doctor.broker_view import all_pairs

    pairs = _asked(ctx, incomplete, lambda client: map(":".join, all_pairs(client.engines())))
    return ["all", *pairs] if "all".startswith(incomplete) else pairs


def complete_tenant(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of tenants that have anything."""
    return _asked(
        ctx, incomplete, lambda client: [info.tenant for info in client.tenants().tenants]
    )


def complete_reason(incomplete: str) -> list[str]:
    """Return reasons, in lower case if the user began in lower case."""
    from restow.broker.reasons import REASONS

    names = (name.lower() if incomplete.islower() else name for name in sorted(REASONS))
    return [name for name in names if name.startswith(incomplete)]


def _asked(
    ctx: typer.Context, incomplete: str, question: Callable[[AdminClient], Iterable[str]]
) -> list[str]:
    """Return the words of an answer that begin like the incomplete word."""
    from restow.broker.client.admin import AdminClient
    from restow.broker.client.connection.channel import Credentials
    from restow.broker.errors import RestowError

    params = ctx.params
    files = (Path(params[name]) if params.get(name) else None for name in FILES)
    tenant = "*" if params.get("all_tenants") else params.get("tenant")
    try:
        shown = Credentials.of(*files)
        with AdminClient(params.get("broker"), PATIENCE_S, tenant, shown) as client:
            return [word for word in question(client) if word.startswith(incomplete)]
    except RestowError:
        return []
