"""Who makes a call, and for which tenant and engine it may speak."""

from __future__ import annotations

from typing import Any

import grpc

from restow.broker.core.common.keys import EngineKey
from restow.broker.trust.errors import ForbiddenError
from restow.broker.trust.identity import Identity, Role

DEFAULT_TENANT = "default"
ALL_TENANTS = "*"
"""What is named instead of one tenant, where a list is asked for."""
TENANT_KEY = "restow-tenant"
UNREACHED_KEY = "restow-unreached"
NOBODY_ASKED = "unknown: everyone is trusted"


class KnownCall:
    """As much of a call's context as handlers use, and who makes it."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], identity: Identity) -> None:
        """``identity`` makes the call that ``context`` is of."""
        self._context = context
        self.identity = identity
        self._returned: list[Any] = []

    def invocation_metadata(self) -> Any:
        """What the caller sent beside the message."""
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        """Seconds until the caller gives up; None: it waits for ever."""
        remaining: float | None = self._context.time_remaining()
        return remaining

    async def read(self) -> Any:
        """The next message of a stream, or `grpc.aio.EOF`."""
        return self._returned.pop() if self._returned else await self._context.read()

    def put_back(self, message: Any) -> None:
        """Have `read` return a message again."""
        self._returned.append(message)


Context = grpc.aio.ServicerContext[Any, Any] | KnownCall
"""Of a broker that asks nobody who he is, or of one that does."""


def listed_tenant(context: Context) -> str | None:
    """The tenant that a list is asked for; None: all. Raises `ForbiddenError`."""
    named = _named(context)
    return None if scope_of(context) is None and named == [ALL_TENANTS] else tenant_of(context)


def tenant_of(context: Context) -> str:
    """The tenant that a call speaks for.

    Raises `ForbiddenError` if the caller is of one tenant and names another, or all where one is
    to be named.
    """
    named = _named(context)
    own = scope_of(context)
    if own is None:
        if ALL_TENANTS in named:
            raise ForbiddenError(
                f"this can't be of all tenants: name one in metadata {TENANT_KEY}",
                tenant=ALL_TENANTS,
            )
        return named[0] if named else DEFAULT_TENANT
    for other in named:
        if other != own:
            raise ForbiddenError(
                f"this identity is of tenant {own} and may not act for tenant {other[:64]}: leave "
                f"metadata {TENANT_KEY} out, or take an identity of that tenant",
                tenant=own,
            )
    return own


def _named(context: Context) -> list[str]:
    return [str(v) for k, v in context.invocation_metadata() or () if k == TENANT_KEY]


def unreached_of(context: Context) -> str:
    """The broker that a caller was sent to and could not reach; empty: it says of none."""
    named = [str(v) for k, v in context.invocation_metadata() or () if k == UNREACHED_KEY]
    return named[0] if named else ""


def patience_s_of(context: Context, most_s: float) -> float:
    """How long an answer may take so that it still comes in time, ``most_s`` at most."""
    remaining_s = context.time_remaining()
    return most_s if remaining_s is None else min(most_s, 0.8 * remaining_s)


def caller_of(context: Context) -> str:
    """Who makes a call, for the log."""
    return str(context.identity) if isinstance(context, KnownCall) else NOBODY_ASKED


def scope_of(context: Context) -> str | None:
    """The only tenant that a caller may hear of; None: all, as far as it asks for them."""
    return context.identity.tenant if isinstance(context, KnownCall) else None


def engine_key(context: Context, role: Role, engine_id: str) -> EngineKey:
    """The engine that a call is about.

    Raises `ForbiddenError` if the caller may not speak for it in that role, whether there is such
    an engine or not.
    """
    if isinstance(context, KnownCall) and not context.identity.speaks_for(role, engine_id):
        raise ForbiddenError(
            f"this identity may not be the {role} of engine {engine_id[:64]}: it needs one with "
            f"that engine's id, or with *",
            engine=engine_id[:64],
            role=role,
        )
    return EngineKey(tenant_of(context), engine_id)
