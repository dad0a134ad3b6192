"""How brokers reach etcd, and the errors of its calls.

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
    """A call to etcd failed. By itself, this class has etcd's own words; subclasses name causes."""


class EtcdUnreachableError(EtcdError, reason="ETCD_UNREACHABLE"):
    """No member of etcd answers in time. The call may still have taken or take effect."""


class EtcdNoLeaderError(EtcdError, reason="ETCD_NO_LEADER"):
    """Etcd has no leader, and agrees on nothing until its members elect a leader."""


class EtcdRefusedError(EtcdError, status="PERMISSION_DENIED", reason="ETCD_REFUSED"):
    """Etcd does not know the caller, or does not permit the call."""


class TokenEndedError(EtcdError, reason="ETCD_TOKEN_ENDED"):
    """The token has expired. The next call gets a new token."""


class EtcdTooOldError(EtcdError, status="FAILED_PRECONDITION", reason="ETCD_TOO_OLD"):
    """The release of etcd lacks calls that brokers need."""


class LeaseGoneError(EtcdError, status="NOT_FOUND", reason="ETCD_LEASE_GONE"):
    """The lease has ended, and etcd has deleted its keys."""


class EtcdSettingsError(RestowError, status="FAILED_PRECONDITION", reason="ETCD_SETTINGS_INVALID"):
    """Addresses, files and passwords of etcd do not fit together."""


_TOKEN_ENDED = ("invalid auth token", "revision of auth store is old")
_LEADERLESS = ("no leader", "leader changed", "leader failure", "not leader")
_UNKNOWN_USER = ("authentication failed", "user name is empty", "permission denied")
"""Words in the details of refusals whose code is not specific."""
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    # Codes of calls whose connection broke.
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


def _has(details: str, words: Sequence[str]) -> bool:
    """Return whether the details contain any of the words. Most errors have no other mark."""
    return any(word in details for word in words)


def typed_error(code: grpc.StatusCode, details: str, endpoint: str) -> EtcdError:
    """Return the typed error of a failed call."""
    if _has(details, _LEADERLESS):
        return EtcdNoLeaderError(
            f"etcd at {endpoint} has no leader ({details}): are most of its members there, and do "
            f"they reach each other? Brokers go on when etcd has a leader",
            endpoint=endpoint,
        )
    if _has(details, _TOKEN_ENDED):
        return TokenEndedError(f"etcd at {endpoint} no longer knows the token", endpoint=endpoint)
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
            f"the server at {endpoint} does not know this call ({details}): it is no etcd of "
            f"release 3.4 or later",
            endpoint=endpoint,
        )
    if code in _PASSING:
        return EtcdUnreachableError(
            f"no etcd answers at {endpoint} ({code.name}: {details})", endpoint=endpoint
        )
    return EtcdError(f"etcd at {endpoint} refuses: {code.name}: {details}", endpoint=endpoint)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """The addresses of etcd's members, and how to log in there.

    Raises `AddressInvalidError`, and `EtcdSettingsError` for settings that do not fit together.
    """

    endpoints: tuple[str, ...]
    """``HOST:PORT`` of each member."""
    ca: Path | None = None
    """Authorities of etcd's certificates. None: plaintext."""
    cert: Path | None = None
    """Our certificate. Needs ``key``."""
    key: Path | None = None
    user: str = ""
    """Empty: no login."""
    password_file: Path | None = None
    """A file whose first line is the password. It is read again for each new token."""

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
                f"user {self.user} is given for an etcd that is asked in plaintext: brokers send "
                f"no password in plaintext; name the file that etcd's certificates are checked "
                f"against (--etcd-ca)"
            )

    @classmethod
    def parse(cls, endpoints: str, **files: str | Path | None) -> EtcdAccess:
        """Return the access to ``HOST:PORT,HOST:PORT`` with the given fields.

        >>> EtcdAccess.parse("a:2379, b:2379").endpoints
        ('a:2379', 'b:2379')
        """
        user = files.pop("user", None)
        addresses = tuple(part.strip() for part in endpoints.split(",") if part.strip())
        paths = {name: Path(file) for name, file in files.items() if file is not None}
        return cls(addresses, user=str(user or ""), **paths)

    def credentials(self) -> Credentials:
        """Return the credentials for channels to etcd."""
        return Credentials(self.ca, self.cert, self.key)

    def password(self) -> str:
        """Read the password. Raises `EtcdSettingsError`."""
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
