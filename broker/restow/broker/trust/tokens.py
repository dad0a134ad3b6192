"""Tokens: secrets that callers send, and the broker's list of what each is good for.

The list is JSON and holds no secret: ``[{"sha256": "...", "tenant": "a", "roles": ["engine",
"agent"], "engine": "*"}]``. An operator without a tenant is one of all tenants.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restow.broker.trust.errors import TokenFileError, TokensFileError, refuse_writable
from restow.broker.trust.identity import (
    NO_ENGINE,
    OF_NO_ENGINE,
    Identity,
    IdentityInvalidError,
    Right,
    Role,
)

PREFIX = "restow_"
"""So that people and programs that look for leaked secrets know one when they see it."""
SECRET_BYTES = 32
_KEYS = frozenset({"sha256", "tenant", "role", "roles", "engine"})


@dataclass(frozen=True, slots=True)
class Token:
    """A token by its digest, and who has it."""

    sha256: bytes
    identity: Identity


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a broker knows."""

    known: tuple[Token, ...]

    def find(self, secret: str) -> Identity | None:
        """Who has the token. Takes as long for each one, and for one that is not known."""
        digest = digest_of(secret)
        found = None
        for token in self.known:
            if hmac.compare_digest(token.sha256, digest):
                found = token.identity
        return found


def digest_of(secret: str) -> bytes:
    """SHA-256. Tokens are drawn from 2**256: there is nothing to slow a guess down for."""
    return hashlib.sha256(secret.encode()).digest()


def new_token(roles: Sequence[Role], tenant: str | None, engine: str) -> tuple[str, dict[str, Any]]:
    """A new secret, and its entry in the broker's list. Raises `IdentityInvalidError`."""
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    entry: dict[str, Any] = {"sha256": digest_of(secret).hex()}
    if tenant is not None:
        entry["tenant"] = tenant
    entry["roles"] = [role.value for role in roles]
    if engine:
        entry["engine"] = engine
    _entry(entry)
    return secret, entry


def read_tokens(path: Path) -> Tokens:
    """The broker's list. Raises `TokensFileError` that names the entry at fault, and no content."""
    refuse_writable("tokens file", path, TokensFileError)
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise _wrong(path, f"can't be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        # What a parser says may quote the text.
        raise _wrong(path, "is no JSON") from None
    if not isinstance(value, list):
        raise _wrong(path, "is no JSON list")
    known: list[Token] = []
    for number, entry in enumerate(value, 1):
        try:
            known.append(_entry(entry))
        except IdentityInvalidError as error:
            raise _wrong(path, f"entry {number}: {error}", entry=number) from None
    if len({token.sha256 for token in known}) < len(known):
        raise _wrong(path, "lists a token twice")
    return Tokens(tuple(known))


def read_secret(path: Path) -> str:
    """A caller's token, without the white space around it. Raises `TokenFileError`."""
    refuse_writable("token file", path, TokenFileError)
    try:
        secret = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise TokenFileError(
            f"token file {path} can't be read ({error.strerror}): `restow token` makes one",
            file=path,
        ) from None
    except ValueError:
        secret = ""
    if not secret or not secret.isprintable() or " " in secret:
        raise TokenFileError(
            f"token file {path} holds no token, which is one line of ASCII: `restow token` makes "
            f"one",
            file=path,
        )
    return secret


def _entry(entry: object) -> Token:
    if not isinstance(entry, Mapping):
        raise IdentityInvalidError("no JSON object")
    if len(entry.keys() - _KEYS):
        raise IdentityInvalidError(f"has keys other than {', '.join(sorted(_KEYS))}")
    if ("role" in entry) == ("roles" in entry):
        raise IdentityInvalidError("needs either role or roles")
    names = entry["roles"] if "roles" in entry else [entry["role"]]
    if not isinstance(names, list) or not all(one in list(Role) for one in names):
        raise IdentityInvalidError(f"roles are some of {', '.join(Role)}")
    tenant, engine = entry.get("tenant"), entry.get("engine", "")
    if not isinstance(engine, str) or ("tenant" in entry and not isinstance(tenant, str)):
        raise IdentityInvalidError("tenant and engine are texts")
    roles = {Role(name) for name in names}
    if engine and roles <= OF_NO_ENGINE:
        raise IdentityInvalidError(NO_ENGINE)
    rights = {Right(role, "" if role in OF_NO_ENGINE else engine) for role in roles}
    digest = _digest(entry.get("sha256"))
    return Token(digest, Identity(tenant, frozenset(rights), f"token sha256 {digest.hex()[:12]}"))


def _digest(text: object) -> bytes:
    try:
        digest = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise IdentityInvalidError("sha256 is 64 hexadecimal digits: the digest, not the token")
    return digest


def _wrong(path: Path, what: str, **subject: object) -> TokensFileError:
    return TokensFileError(
        f"tokens file {path}: {what}; `restow token` prints entries", file=path, **subject
    )
