"""Where etcd is, and how it knows us."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from restow.broker.addresses import checked_target
from restow.broker.client.connection.channel import Credentials
from restow.broker.etcd.errors import EtcdSettingsError
from restow.broker.trust.errors import refuse_writable


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
