"""Identities in certificates: URIs of SPIFFE's form.

    spiffe://DOMAIN/restow/tenant/TENANT/engine/ENGINE     ENGINE: an id, or * for any
    spiffe://DOMAIN/restow/tenant/TENANT/agent/ENGINE
    spiffe://DOMAIN/restow/tenant/TENANT/router
    spiffe://DOMAIN/restow/tenant/TENANT/operator
    spiffe://DOMAIN/restow/operator                        of all tenants

A certificate may have several, for an engine that embeds its agents; all of one tenant. URIs that
do not begin so are somebody else's and count for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from restow.broker.trust.identity import Identity, IdentityInvalidError, Right, Role

SCHEME = "spiffe://"
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+|\*")
_SHOWN = 200


def identity_of(uris: Iterable[str]) -> Identity | None:
    """The identity that a certificate's URIs name; None if none of them is about Restow.

    Raises `IdentityInvalidError` for one that begins like ours and goes on otherwise, and for two
    tenants.
    """
    found = [_read(uri) for uri in uris if _is_ours(uri)]
    if not found:
        return None
    tenants = {tenant for tenant, _ in found}
    if len(tenants) > 1:
        raise IdentityInvalidError("its URIs name several tenants, or one and all of them")
    return Identity(tenants.pop(), frozenset(right for _, right in found))


def _is_ours(uri: str) -> bool:
    return uri.startswith(SCHEME) and uri.removeprefix(SCHEME).split("/")[1:2] == ["restow"]


def _read(uri: str) -> tuple[str | None, Right]:
    domain, _, *segments = uri.removeprefix(SCHEME).split("/")
    if all(_SEGMENT.fullmatch(one) for one in (domain, *segments)):
        match segments:
            case ["operator"]:
                return None, Right(Role.OPERATOR)
            case ["tenant", tenant, ("operator" | "router") as role]:
                return tenant, Right(Role(role))
            case ["tenant", tenant, ("engine" | "agent") as role, engine]:
                return tenant, Right(Role(role), engine)
    raise IdentityInvalidError(
        f"{uri[:_SHOWN]!r} is none of {SCHEME}DOMAIN/restow/tenant/TENANT/engine/ENGINE, "
        f".../agent/ENGINE, .../router, .../operator and {SCHEME}DOMAIN/restow/operator"
    )
