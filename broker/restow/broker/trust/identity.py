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
from dataclasses import dataclass, field
from enum import StrEnum

from restow.broker.errors import WordUnknownError
from restow.broker.words import Worded

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


ANY_ENGINE = "*"
MAX_NAME_LENGTH = 256


class Role(StrEnum):
    """What somebody does."""

    ENGINE = "engine"
    AGENT = "agent"
    ROUTER = "router"
    OPERATOR = "operator"


OF_NO_ENGINE = frozenset({Role.OPERATOR, Role.ROUTER})
NO_ENGINE = "an operator has no engine, nor has a router"


class IdentityInvalidError(ValueError):
    """What can't be an identity. Its text names what is wrong; whoever read it names where."""


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable()


@dataclass(frozen=True, slots=True)
class Right(Worded):
    """One role; of an engine or agent also for which engine id: one, or `ANY_ENGINE`."""

    role: Role
    engine: str = ""

    def __post_init__(self) -> None:
        """Raise `IdentityInvalidError` for an engine that is missing, too long or of no use."""
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
    """Somebody of ``tenant``, who may do what ``rights`` say; None: an operator of all tenants."""

    tenant: str | None
    rights: frozenset[Right]
    shown_by: str = field(default="", compare=False)
    """What it showed, for people: which certificate or which token."""

    def __post_init__(self) -> None:
        """Raise `IdentityInvalidError` for a tenant that no right suits."""
        if not self.rights:
            raise IdentityInvalidError("nothing is allowed")
        if self.tenant is None:
            if self.roles != {Role.OPERATOR}:
                raise IdentityInvalidError("only an operator may do without a tenant")
        elif not _is_name(self.tenant) or self.tenant == "*":
            raise IdentityInvalidError(
                f"a tenant has 1 to {MAX_NAME_LENGTH} printable characters, and is not *"
            )

    def __str__(self) -> str:
        """For people: what it is, of whom, and by what it is known.

        >>> str(Identity(None, frozenset({Right(Role.OPERATOR)}), "certificate ops"))
        'operator of all tenants, by certificate ops'
        """
        whose = "all tenants" if self.tenant is None else f"tenant {self.tenant}"
        known = f", by {self.shown_by}" if self.shown_by else ""
        return f"{' and '.join(sorted(self.roles))} of {whose}{known}"

    @property
    def roles(self) -> frozenset[Role]:
        """All that it is."""
        return frozenset(right.role for right in self.rights)

    def speaks_for(self, role: Role, engine_id: str) -> bool:
        """Whether it may be the engine or the agent of ``engine_id``."""
        return any(
            right.role is role and right.engine in (ANY_ENGINE, engine_id) for right in self.rights
        )
