"""The caller of each call, and the tenant and engine for which it may act."""

from __future__ import annotations

from typing import Any

import grpc

from restow.broker.client.connection.brokers import UNREACHED_KEY
from restow.broker.core.common.keys import EngineKey
from restow.broker.trust.errors import ForbiddenError
from restow.broker.trust.identity import Identity, Role

DEFAULT_TENANT = "default"
ALL_TENANTS = "*"
"""Names all tenants, for calls that return a list."""
TENANT_KEY = "restow-tenant"
NOBODY_ASKED = "unknown: everyone is trusted"


class KnownCall:
    """The part of a call's context that handlers use, with the caller's identity."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], identity: Identity) -> None:
        """Wrap ``context``, whose caller is ``identity``."""
        self._context = context
        self.identity = identity
        self._returned: list[Any] = []

    def invocation_metadata(self) -> Any:
        """Return the metadata of the call."""
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller gives up; None if it waits for ever."""
        remaining: float | None = self._context.time_remaining()
        return remaining

    async def read(self) -> Any:
        """Return the next message of a stream, or `grpc.aio.EOF`."""
        return self._returned.pop() if self._returned else await self._context.read()

    def put_back(self, message: Any) -> None:
        """Make `read` return a message again."""
        self._returned.append(message)


Context = grpc.aio.ServicerContext[Any, Any] | KnownCall
"""Context of a broker that trusts every caller, or of a broker that identifies them."""


def listed_tenant(context: Context) -> str | None:
    """Return the tenant whose list is asked for; None for all. Raises `ForbiddenError`."""
    named = _named(context)
    return None if scope_of(context) is None and named == [ALL_TENANTS] else tenant_of(context)


def tenant_of(context: Context) -> str:
    """Return the tenant that a call acts for.

    Raises `ForbiddenError` if the caller belongs to a tenant and names another, or names all
    tenants where a single tenant is needed.
    """
    named = _named(context)
    own = scope_of(context)
    if own is None:
        if ALL_TENANTS in named:
            raise ForbiddenError(
                f"this call needs a single tenant: name it in metadata {TENANT_KEY}",
                tenant=ALL_TENANTS,
            )
        return named[0] if named else DEFAULT_TENANT
    for tenant in named:
        if tenant != own:
            raise ForbiddenError(
                f"this identity belongs to tenant {own} and may not act for tenant {tenant[:64]}: "
                f"omit metadata {TENANT_KEY}, or use an identity of that tenant",
                tenant=own,
            )
    return own


def _named(context: Context) -> list[str]:
    return [str(v) for k, v in context.invocation_metadata() or () if k == TENANT_KEY]


def unreached_of(context: Context) -> str:
    """Return the broker that the caller was sent to and could not reach; empty if none."""
    named = [str(v) for k, v in context.invocation_metadata() or () if k == UNREACHED_KEY]
    return named[0] if named else ""


def patience_s_of(context: Context, most_s: float) -> float:
    """Return how long an answer may take and still arrive in time, at most ``most_s``."""
    remaining_s = context.time_remaining()
    return most_s if remaining_s is None else min(most_s, 0.8 * remaining_s)


def caller_of(context: Context) -> str:
    """Return the caller's identity, for the log."""
    return str(context.identity) if isinstance(context, KnownCall) else NOBODY_ASKED


def scope_of(context: Context) -> str | None:
    """Return the only tenant whose data the caller may see; None for all."""
    return context.identity.tenant if isinstance(context, KnownCall) else None


def engine_key(context: Context, role: Role, engine_id: str) -> EngineKey:
    """Return the key of the engine that a call is about.

    Raises `ForbiddenError` if the caller may not act for the engine in that role, whether or not
    the engine exists.
    """
    if isinstance(context, KnownCall) and not context.identity.speaks_for(role, engine_id):
        raise ForbiddenError(
            f"this identity may not be the {role} of engine {engine_id[:64]}: use an identity "
            f"with that engine's id, or with *",
            engine=engine_id[:64],
            role=role,
        )
    return EngineKey(tenant_of(context), engine_id)
