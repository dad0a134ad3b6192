"""Find what a shell offers at Tab: ids and names from a broker, if it answers at once."""

from __future__ import annotations

from collections.abc import Callable
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
    return _asked(
        ctx,
        lambda client: list(
            dict.fromkeys(
                handoff.handoff_id
                for handoff in client.handoffs(limit=OFFERED, beginning=incomplete).handoffs
            )
        ),
    )


def complete_engine(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ids of engines."""
    names = _asked(ctx, lambda client: [engine.engine_id for engine in client.engines()])
    return [name for name in names if name.startswith(incomplete)]


def complete_pair(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return P:D for each pair of engines of one model, and the word all."""
    from restow.broker.doctor.broker_view import all_pairs

    pairs = _asked(ctx, lambda client: [":".join(pair) for pair in all_pairs(client.engines())])
    return [pair for pair in ("all", *pairs) if pair.startswith(incomplete)]


def complete_tenant(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of tenants that have anything."""
    names = _asked(ctx, lambda client: [info.tenant for info in client.tenants().tenants])
    return [name for name in names if name.startswith(incomplete)]


def complete_reason(incomplete: str) -> list[str]:
    """Return reasons, in lower case if the user began in lower case."""
    from restow.broker.reasons import REASONS

    names = (name.lower() if incomplete.islower() else name for name in sorted(REASONS))
    return [name for name in names if name.startswith(incomplete)]


def _asked(ctx: typer.Context, question: Callable[[AdminClient], list[str]]) -> list[str]:
    from restow.broker.client.admin import AdminClient
    from restow.broker.client.connection.channel import Credentials
    from restow.broker.errors import RestowError

    params = ctx.params
    files = (Path(params[name]) if params.get(name) else None for name in FILES)
    tenant = "*" if params.get("all_tenants") else params.get("tenant")
    try:
        shown = Credentials.of(*files)
        with AdminClient(params.get("broker"), PATIENCE_S, tenant, shown) as client:
            return question(client)
    except RestowError:
        return []
