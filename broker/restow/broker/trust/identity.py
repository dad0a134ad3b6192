"""Identities in certificates, as SPIFFE URIs.

    spiffe://DOMAIN/restow/tenant/TENANT/engine/ENGINE     ENGINE: an id, or * for any
    spiffe://DOMAIN/restow/tenant/TENANT/agent/ENGINE
    spiffe://DOMAIN/restow/tenant/TENANT/router
    spiffe://DOMAIN/restow/tenant/TENANT/operator
    spiffe://DOMAIN/restow/operator                        of all tenants

A certificate may have several URIs, for an engine that embeds its agents; all must name the same
tenant. Other URIs are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from restow.broker.errors import WordUnknownError
from restow.broker.words import Worded

SCHEME = "spiffe://"
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+|\*")
_SHOWN = 200


def identity_of(uris: Iterable[str]) -> Identity | None:
    """Return the identity that a certificate's URIs name; None if no URI is for Restow.

    Raises `IdentityInvalidError` for a malformed URI of Restow, and for URIs of several tenants.
    """
    pairs = [_read(uri) for uri in uris if _is_ours(uri)]
    if not pairs:
        return None
    tenants = {tenant for tenant, _ in pairs}
    if len(tenants) > 1:
        raise IdentityInvalidError("its URIs name several tenants, or a tenant and all tenants")
    return Identity(tenants.pop(), frozenset(right for _, right in pairs))


def _is_ours(uri: str) -> bool:
    return uri.startswith(SCHEME) and uri.removeprefix(SCHEME).split("/")[1:2] == ["restow"]


def _read(uri: str) -> tuple[str | None, Right]:
    domain, _, *segments = uri.removeprefix(SCHEME).split("/")
    if all(_SEGMENT.fullmatch(segment) for segment in (domain, *segments)):
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


ANY_ENGINE = "*"
MAX_NAME_LENGTH = 256


class Role(StrEnum):
    """The roles of callers."""

    ENGINE = "engine"
    AGENT = "agent"
    ROUTER = "router"
    OPERATOR = "operator"


OF_NO_ENGINE = frozenset({Role.OPERATOR, Role.ROUTER})
NO_ENGINE = "operators and routers have no engine"


class IdentityInvalidError(ValueError):
    """An identity is invalid. The text says why; the reader adds the file or certificate."""


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable()


@dataclass(frozen=True, slots=True)
class Right(Worded):
    """A role; for an engine or agent also its engine id, or `ANY_ENGINE`."""

    role: Role
    engine: str = ""

    def __post_init__(self) -> None:
        """Raise `IdentityInvalidError` for a missing, invalid or superfluous engine id."""
        try:
            Worded.__post_init__(self)
        except WordUnknownError as error:
            raise IdentityInvalidError(error.message) from None
        if self.role in OF_NO_ENGINE:
            if self.engine:
                raise IdentityInvalidError(NO_ENGINE)
        elif not _is_name(self.engine):
            raise IdentityInvalidError(
                f"an {self.role} needs the id of its engine, of 1 to {MAX_NAME_LENGTH} printable "
                f"characters, or {ANY_ENGINE}"
            )


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller of ``tenant`` with ``rights``; a tenant of None: an operator of all tenants."""

    tenant: str | None
    rights: frozenset[Right]
    shown_by: str = field(default="", compare=False)
    """The certificate or token that the caller presented, in words."""

    def __post_init__(self) -> None:
        """Raise `IdentityInvalidError` for a tenant that does not fit the rights."""
        if not self.rights:
            raise IdentityInvalidError("it has no rights")
        if self.tenant is None:
            if self.roles != {Role.OPERATOR}:
                raise IdentityInvalidError("only an operator may have no tenant")
        elif not _is_name(self.tenant) or self.tenant == "*":
            raise IdentityInvalidError(
                f"a tenant must have 1 to {MAX_NAME_LENGTH} printable characters, and must not be *"
            )

    def __str__(self) -> str:
        """Describe the identity for people: roles, tenant, and what the caller presented.

        >>> str(Identity(None, frozenset({Right(Role.OPERATOR)}), "certificate ops"))
        'operator of all tenants, by certificate ops'
        """
        scope = "all tenants" if self.tenant is None else f"tenant {self.tenant}"
        known = f", by {self.shown_by}" if self.shown_by else ""
        return f"{' and '.join(sorted(self.roles))} of {scope}{known}"

    @property
    def roles(self) -> frozenset[Role]:
        """Return all roles."""
        return frozenset(right.role for right in self.rights)

    def speaks_for(self, role: Role, engine_id: str) -> bool:
        """Return whether the caller may act as the engine or agent of ``engine_id``."""
        return any(
            right.role is role and right.engine in (ANY_ENGINE, engine_id) for right in self.rights
        )
