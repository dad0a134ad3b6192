"""Tokens: secrets that callers send, and the broker's list of their owners.

The list is JSON without secrets: ``[{"sha256": "...", "tenant": "a", "roles": ["engine", "agent"],
"engine": "*"}]``. An operator without a tenant is an operator of all tenants.
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
"""A recognizable prefix for people and programs that look for leaked secrets."""
SECRET_BYTES = 32
_KEYS = frozenset({"sha256", "tenant", "role", "roles", "engine"})


@dataclass(frozen=True, slots=True)
class Token:
    """The digest of a token, and its owner."""

    sha256: bytes
    identity: Identity


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The tokens that a broker knows."""

    known: tuple[Token, ...]

    def find(self, secret: str) -> Identity | None:
        """Return the owner of a token, in the same time for all tokens, known or not."""
        digest = digest_of(secret)
        owner = None
        for token in self.known:
            if hmac.compare_digest(token.sha256, digest):
                owner = token.identity
        return owner


def digest_of(secret: str) -> bytes:
    """Return the SHA-256; tokens have 256 random bits, so a slow hash would add nothing."""
    return hashlib.sha256(secret.encode()).digest()


def new_token(roles: Sequence[Role], tenant: str | None, engine: str) -> tuple[str, dict[str, Any]]:
    """Create a secret and its entry in the broker's list. Raises `IdentityInvalidError`."""
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    entry: dict[str, Any] = {"sha256": digest_of(secret).hex()}
    if tenant is not None:
        entry["tenant"] = tenant
    entry["roles"] = [role.value for role in roles]
    if engine:
        entry["engine"] = engine
    _entry(entry)
    return secret, entry


def read_tokens(path: Path) -> KnownTokens:
    """Read the broker's list. Raises `TokensFileError` that names the wrong entry only."""
    refuse_writable("tokens file", path, TokensFileError)
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise _invalid_list(path, f"can't be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        # The parser's message may quote the text.
        raise _invalid_list(path, "is no JSON") from None
    if not isinstance(value, list):
        raise _invalid_list(path, "is no JSON list")
    known: list[Token] = []
    for number, entry in enumerate(value, 1):
        try:
            known.append(_entry(entry))
        except IdentityInvalidError as error:
            raise _invalid_list(path, f"entry {number}: {error}", entry=number) from None
    if len({token.sha256 for token in known}) < len(known):
        raise _invalid_list(path, "lists a token twice")
    return KnownTokens(tuple(known))


def read_secret(path: Path) -> str:
    """Read a caller's token without surrounding white space. Raises `TokenFileError`."""
    refuse_writable("token file", path, TokenFileError)
    try:
        secret = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise TokenFileError(
            f"token file {path} can't be read ({error.strerror}): `restow token` makes a token",
            file=path,
        ) from None
    except ValueError:
        secret = ""
    if not secret or not secret.isprintable() or " " in secret:
        raise TokenFileError(
            f"token file {path} holds no token (a single line of ASCII): `restow token` makes "
            f"a token",
            file=path,
        )
    return secret


def _entry(entry: object) -> Token:
    if not isinstance(entry, Mapping):
        raise IdentityInvalidError("it is no JSON object")
    if len(entry.keys() - _KEYS):
        raise IdentityInvalidError(f"it has keys other than {', '.join(sorted(_KEYS))}")
    if ("role" in entry) == ("roles" in entry):
        raise IdentityInvalidError("it needs either role or roles")
    names = entry["roles"] if "roles" in entry else [entry["role"]]
    if not isinstance(names, list) or not all(name in list(Role) for name in names):
        raise IdentityInvalidError(f"roles are some of {', '.join(Role)}")
    tenant, engine = entry.get("tenant"), entry.get("engine", "")
    if not isinstance(engine, str) or ("tenant" in entry and not isinstance(tenant, str)):
        raise IdentityInvalidError("tenant and engine must be texts")
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
        raise IdentityInvalidError(
            "sha256 must be 64 hexadecimal digits (the digest, not the token)"
        )
    return digest


def _invalid_list(path: Path, what: str, **subject: object) -> TokensFileError:
    return TokensFileError(
        f"tokens file {path}: {what}; `restow token` prints entries", file=path, **subject
    )
