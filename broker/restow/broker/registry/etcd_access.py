"""How etcd is reached, and why it did not do what it was asked.

No message holds a password or a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from restow.broker.addresses import checked_target
from restow.broker.client.connection.channel import Credentials
from restow.broker.errors import RestowError
from restow.broker.trust.errors import refuse_writable


class EtcdError(RestowError, status="UNAVAILABLE", reason="ETCD_FAILED"):
    """Base of all errors of calls to etcd; by itself: etcd's own words, which name no other one."""


class EtcdUnreachableError(EtcdError, reason="ETCD_UNREACHABLE"):
    """No etcd answers, or none in time: what was asked may have been done, or be done yet."""


class EtcdNoLeaderError(EtcdError, reason="ETCD_NO_LEADER"):
    """An etcd answers and nobody leads it: it can't agree on anything until a leader is found."""


class EtcdRefusedError(EtcdError, status="PERMISSION_DENIED", reason="ETCD_REFUSED"):
    """Who called is not known there, or may not do what was asked."""


class TokenEndedError(EtcdError, reason="ETCD_TOKEN_ENDED"):
    """A token that etcd knows no more: the next call brings another one."""


class EtcdTooOldError(EtcdError, status="FAILED_PRECONDITION", reason="ETCD_TOO_OLD"):
    """Its release lacks what is needed."""


class LeaseGoneError(EtcdError, status="NOT_FOUND", reason="ETCD_LEASE_GONE"):
    """A lease that has ended; its keys are deleted."""


class EtcdSettingsError(RestowError, status="FAILED_PRECONDITION", reason="ETCD_SETTINGS_INVALID"):
    """Settings of endpoints, TLS and passwords that do not go together."""


_TOKEN_ENDED = ("invalid auth token", "revision of auth store is old")
_LEADERLESS = ("no leader", "leader changed", "leader failure", "not leader")
_UNKNOWN_USER = ("authentication failed", "user name is empty", "permission denied")
"""A watch that is refused has no code of its own."""
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # What gRPC says of calls that broke on their way.
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


def _has(details: str, words: Sequence[str]) -> bool:
    """Whether one of the words stands in what etcd says: it has no other name for most errors."""
    return any(word in details for word in words)


def typed_error(code: grpc.StatusCode, details: str, endpoint: str) -> EtcdError:
    """The error that a failed call stands for."""
    if _has(details, _LEADERLESS):
        return EtcdNoLeaderError(
            f"etcd at {endpoint} has no leader ({details}): are most of its members there, and do "
            f"they reach each other? It goes on by itself",
            endpoint=endpoint,
        )
    if _has(details, _TOKEN_ENDED):
        return TokenEndedError(f"etcd at {endpoint} knows the token no more", endpoint=endpoint)
    if _has(details, ("lease not found",)):
        return LeaseGoneError("the lease has ended", endpoint=endpoint)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED) or _has(
        details, _UNKNOWN_USER
    ):
        return EtcdRefusedError(
            f"etcd at {endpoint} refuses the call ({details}): name a user and its password "
            f"(--etcd-user, --etcd-password-file) that may read and write the keys of the brokers",
            endpoint=endpoint,
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return EtcdTooOldError(
            f"what listens at {endpoint} has no such call ({details}): it is no etcd of 3.4 or "
            f"later",
            endpoint=endpoint,
        )
    if code in _PASSING:
        return EtcdUnreachableError(
            f"no etcd answers at {endpoint} ({code.name}: {details})", endpoint=endpoint
        )
    return EtcdError(f"etcd at {endpoint} refuses: {code.name}: {details}", endpoint=endpoint)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Names etcd's members and the files by which they know us.

    Raises `AddressInvalidError`, and `EtcdSettingsError` for what does not go together.
    """

    endpoints: tuple[str, ...]
    """``HOST:PORT`` of each member that may be asked."""
    ca: Path | None = None
    """Authorities that etcd's certificates are checked against; given: TLS is spoken."""
    cert: Path | None = None
    """Our certificate; with ``key``, or neither."""
    key: Path | None = None
    user: str = ""
    """Empty: nobody in particular."""
    password_file: Path | None = None
    """Its first line is the password; read again for each new token."""

    def __post_init__(self) -> None:
        """Raise `AddressInvalidError` or `EtcdSettingsError`."""
        if not self.endpoints:
            raise EtcdSettingsError("no etcd is named: --etcd HOST:PORT,...")
        for endpoint in self.endpoints:
            checked_target(endpoint)
        if (self.cert is None) != (self.key is None):
            raise EtcdSettingsError(
                "a certificate for etcd and its key are given both or not at all "
                "(--etcd-cert, --etcd-key)"
            )
        if self.cert is not None and self.ca is None:
            raise EtcdSettingsError(
                f"certificate {self.cert} is given for an etcd that is asked in plaintext: name "
                f"the file that its certificates are checked against (--etcd-ca)"
            )
        if bool(self.user) != (self.password_file is not None):
            raise EtcdSettingsError(
                "a user of etcd and the file of its password are given both or not at all "
                "(--etcd-user, --etcd-password-file)"
            )
        if self.user and self.ca is None:
            raise EtcdSettingsError(
                f"user {self.user} is given for an etcd that is asked in plaintext: a password is "
                f"never sent so; name the file that etcd's certificates are checked against "
                f"(--etcd-ca)"
            )

    @classmethod
    def parse(cls, endpoints: str, **files: str | Path | None) -> EtcdAccess:
        """Return access of ``HOST:PORT,HOST:PORT`` and what the fields are named by.

        >>> EtcdAccess.parse("a:2379, b:2379").endpoints
        ('a:2379', 'b:2379')
        """
        user = files.pop("user", None)
        found = tuple(one.strip() for one in endpoints.split(",") if one.strip())
        paths = {name: Path(one) for name, one in files.items() if one is not None}
        return cls(found, user=str(user or ""), **paths)

    def credentials(self) -> Credentials:
        """What channels are opened with."""
        return Credentials(self.ca, self.cert, self.key)

    def password(self) -> str:
        """The password. Raises `EtcdSettingsError`."""
        if self.password_file is None:
            return ""
        refuse_writable("password file", self.password_file, EtcdSettingsError)
        try:
            text = self.password_file.read_text()
        except (OSError, UnicodeDecodeError):
            text = ""
        password = text.partition("\n")[0].strip()
        if not password:
            raise EtcdSettingsError(
                f"password file {self.password_file} can't be read, or has nothing in its first "
                f"line: write the password of user {self.user} there"
            )
        return password
