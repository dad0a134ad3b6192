"""What a client shows to a broker, and by what it knows the broker."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

import grpc

from restow.broker.trust.errors import TokenOverPlaintextError, TrustSettingsError
from restow.broker.trust.key_files import read_authorities, read_key_pair
from restow.broker.trust.reloaded import Stamp, stamp_of
from restow.broker.trust.tokens import read_secret


@dataclass(frozen=True, slots=True)
class Credentials:
    """Names the files by which a client shows who it is, and by what it knows the broker.

    None at all: plaintext, which only a broker without TLS understands. Raises
    `TokenOverPlaintextError` or `TrustSettingsError` for files that make no sense together.
    """

    tls_ca: Path | None = None
    """Authorities that the broker's certificate is checked against; given: TLS is spoken."""
    tls_cert: Path | None = None
    """The client's certificate, for a broker with --client-ca."""
    tls_key: Path | None = None
    """The key of that certificate; both are given or neither."""
    token_file: Path | None = None
    """The client's token, for a broker with --tokens. Read again for every call."""

    def __post_init__(self) -> None:
        """Raise `TokenOverPlaintextError` or `TrustSettingsError` for what makes no sense."""
        if self.token_file is not None and self.tls_ca is None:
            raise TokenOverPlaintextError(
                f"token file {self.token_file} is given without an authority: a token is never "
                f"sent in plaintext; name the file that the broker's certificate is checked "
                f"against (--tls-ca, RESTOW_TLS_CA)",
                file=self.token_file,
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise TrustSettingsError(
                "a client's certificate and its key are given both or not at all (--tls-cert and "
                "--tls-key, RESTOW_TLS_CERT and RESTOW_TLS_KEY)"
            )
        if self.tls_cert is not None and self.tls_ca is None:
            raise TrustSettingsError(
                f"certificate {self.tls_cert} is given without an authority: name the file that "
                f"the broker's certificate is checked against (--tls-ca, RESTOW_TLS_CA)"
            )

    @classmethod
    def of(
        cls,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        token_file: str | Path | None = None,
    ) -> Credentials:
        """Return credentials of what is given; each that is not comes from the environment.

        ``tls_ca`` from RESTOW_TLS_CA, ``tls_cert`` from RESTOW_TLS_CERT, ``tls_key`` from
        RESTOW_TLS_KEY, ``token_file`` from RESTOW_TOKEN_FILE. Raises `TokenOverPlaintextError` or
        `TrustSettingsError`.
        """
        given = (tls_ca, tls_cert, tls_key, token_file)
        names = [field.name for field in fields(cls)]
        found = (
            value or os.environ.get("RESTOW_" + name.upper())
            for name, value in zip(names, given, strict=True)
        )
        return cls(*(Path(value) if value else None for value in found))

    @property
    def secure(self) -> bool:
        """Whether TLS is spoken."""
        return self.tls_ca is not None

    def stamp(self) -> Stamp:
        """Return what changes when certificates are renewed: then channels are opened anew."""
        return stamp_of([one for one in (self.tls_ca, self.tls_cert, self.tls_key) if one])

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return what a secure channel of gRPC's is opened with, of all but the token.

        Raises `KeyFileError`, `TokenFileError`, and `TrustSettingsError` unless `secure`.
        """
        if self.tls_ca is None:
            raise TrustSettingsError("there is no authority: these credentials are plaintext")
        if self.token_file is not None:
            read_secret(self.token_file)  # What is wrong with it is told now, too.
        authorities = read_authorities(self.tls_ca)
        if self.tls_cert is None or self.tls_key is None:
            return grpc.ssl_channel_credentials(authorities)
        pair = read_key_pair(self.tls_cert, self.tls_key)
        return grpc.ssl_channel_credentials(authorities, pair.key, pair.certificate)
