"""Identification of a broker's callers: TLS, with certificates or tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from restow.broker.logs import get_logger
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.gate.guard import Identify, RawContext
from restow.broker.trust.errors import (
    READ_STEP,
    READABLE,
    TrustError,
    TrustSettingsError,
    UnauthenticatedError,
    is_readable_by_all,
)
from restow.broker.trust.identity import Identity, IdentityInvalidError, identity_of
from restow.broker.trust.key_files import KeyPair, Reloaded, read_authorities, read_key_pair
from restow.broker.trust.tokens import KnownTokens, read_tokens

BEARER = "bearer "
NAME_PROPERTY = "x509_common_name"
URI_PROPERTY = "peer_uri"
"""URIs only: among all alternative names of a certificate, a DNS name could look like a URI."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Credentials that a server listens with, and how it identifies callers."""

    credentials: grpc.ServerCredentials
    identify: Identify
    certificate_end_s: Callable[[], float | None]
    """Expiry of the certificate that new connections are shown, in seconds since 1970.

    None if it is not known.
    """


@dataclass(frozen=True, slots=True)
class _Files:
    """The broker's key pair, and the authorities that clients are checked against."""

    pair: KeyPair
    authorities: bytes | None


def trust_of(settings: BrokerSettings) -> Trust | None:
    """Return the trust that the settings ask for; None for plaintext without identification.

    Raises `TrustSettingsError`, `KeyFileError` and `TokensFileError`.
    """
    certificate, key = settings.tls_cert, settings.tls_key
    if certificate is None or key is None:
        _check_plaintext(settings)
        return None
    if settings.client_ca is None and settings.tokens is None:
        raise TrustSettingsError(
            "TLS alone admits everybody: add --client-ca (clients show certificates) or --tokens "
            "(clients send tokens)"
        )
    if settings.client_ca is not None and settings.tokens is not None:
        raise TrustSettingsError(
            "--client-ca and --tokens exclude each other: give the option by which clients are to "
            "be identified"
        )
    log = get_logger("restow.trust")

    def complain(error: TrustError) -> None:
        log.error("files keep their former content", reason=error.reason, detail=error.message)

    files = _files(certificate, key, settings.client_ca, complain)
    credentials = _credentials(files, settings.client_ca is not None)

    def certificate_end_s() -> float | None:
        return files.current().pair.end_s

    if settings.tokens is None:
        return Trust(credentials, by_certificate, certificate_end_s)
    path = settings.tokens
    tokens = Reloaded((path,), lambda: read_tokens(path), complain)
    return Trust(
        credentials, lambda context: by_token(context, tokens.current()), certificate_end_s
    )


def _check_plaintext(settings: BrokerSettings) -> None:
    given = [
        name
        for name in ("tls_cert", "tls_key", "client_ca", "tokens")
        if getattr(settings, name) is not None
    ]
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        raise TrustSettingsError(
            f"{options} without both --tls-cert and --tls-key: nothing would be encrypted and "
            f"nobody identified; give the broker's certificate and its key"
        )


def _files(
    certificate: Path, key: Path, client_ca: Path | None, complain: Callable[[TrustError], None]
) -> Reloaded[_Files]:
    log = get_logger("restow.trust")

    def load() -> _Files:
        pair = read_key_pair(certificate, key)
        if is_readable_by_all(key):
            log.warning(READABLE, file=str(key), next=READ_STEP)
        return _Files(pair, None if client_ca is None else read_authorities(client_ca))

    paths = (certificate, key) if client_ca is None else (certificate, key, client_ca)
    return Reloaded(paths, load, complain)


def _credentials(files: Reloaded[_Files], asks_clients: bool) -> grpc.ServerCredentials:
    """Return credentials that follow their files: each connection gets the last valid content."""
    shown = files.current()

    def fetch() -> Any:
        """Return the next connection's configuration; None if unchanged. Called on any thread."""
        nonlocal shown
        now = files.current()
        if now is shown:
            return None
        shown = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown), fetch, require_client_authentication=asks_clients
    )


def _configuration(files: _Files) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(files.pair.key, files.pair.certificate)], files.authorities
    )


def by_certificate(context: RawContext) -> Identity:
    """Return the identity in the client's certificate. Raises `UnauthenticatedError`."""
    uris = context.auth_context().get(URI_PROPERTY, ())
    try:
        identity = identity_of(uri.decode("utf-8", "replace") for uri in uris)
    except IdentityInvalidError as error:
        raise UnauthenticatedError(f"the client's certificate names nobody: {error}") from None
    if identity is None:
        raise UnauthenticatedError(
            "the client's certificate names nobody: it needs a URI such as "
            "spiffe://DOMAIN/restow/tenant/TENANT/engine/ENGINE among its alternative names"
        )
    names = context.auth_context().get(NAME_PROPERTY, ())
    shown_by = b", ".join(names).decode("utf-8", "replace")
    return replace(identity, shown_by=f"certificate {shown_by}")


def by_token(context: RawContext, tokens: KnownTokens) -> Identity:
    """Return the identity of a call's token. Raises `UnauthenticatedError`."""
    sent = [str(v) for k, v in context.invocation_metadata() or () if k == "authorization"]
    if len(sent) != 1 or not sent[0].lower().startswith(BEARER):
        raise UnauthenticatedError(
            "the call has no token: give the client a token file (RESTOW_TOKEN_FILE)"
        )
    identity = tokens.find(sent[0][len(BEARER) :].strip())
    if identity is None:
        raise UnauthenticatedError(
            "the broker does not know the call's token: `restow token` makes a token, and prints "
            "the line for the broker's tokens file"
        )
    return identity
