"""These functions find what a shell offers at Tab: words of a broker, if it answers at once."""

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
    """Return ids of handoffs: those under way, then the latest ends."""
    return _asked(
        ctx,
        lambda client: list(
            dict.fromkeys(
                one.handoff_id
                for one in client.handoffs(limit=OFFERED, beginning=incomplete).handoffs
            )
        ),
    )


def complete_engine(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return ids of engines."""
    names = _asked(ctx, lambda client: [one.engine_id for one in client.engines()])
    return [name for name in names if name.startswith(incomplete)]


def complete_pair(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return P:D of engines of one model, and all."""
    from restow.broker.doctor.broker_view import all_pairs

    pairs = _asked(ctx, lambda client: [":".join(two) for two in all_pairs(client.engines())])
    return [pair for pair in ("all", *pairs) if pair.startswith(incomplete)]


def complete_tenant(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of tenants that have anything."""
    names = _asked(ctx, lambda client: [one.tenant for one in client.tenants().tenants])
    return [name for name in names if name.startswith(incomplete)]


def complete_reason(incomplete: str) -> list[str]:
    """Return reasons, in the case in which one was begun."""
    from restow.broker.reasons import REASONS

    names = (name.lower() if incomplete.islower() else name for name in sorted(REASONS))
    return [name for name in names if name.startswith(incomplete)]


def _asked(ctx: typer.Context, question: Callable[[AdminClient], list[str]]) -> list[str]:
    from restow.broker.client.admin import AdminClient
    from restow.broker.client.connection.channel import Credentials
    from restow.broker.errors import RestowError

    given = ctx.params
    files = (Path(given[name]) if given.get(name) else None for name in FILES)
    tenant = "*" if given.get("all_tenants") else given.get("tenant")
    try:
        shown = Credentials.of(*files)
        with AdminClient(given.get("broker"), PATIENCE_S, tenant, shown) as client:
            return question(client)
    except RestowError:
        return []
