"""Read certificates, keys and authorities, find when they expire, and reload changed files.

Python's ssl reveals the expiry only of a peer's certificate. A handshake in memory therefore
presents the certificate. OpenSSL checks the purpose of a certificate before its dates, so it is
presented both as a server's and as a client's.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from restow.broker.trust.errors import KeyFileError, TrustError, refuse_writable

_NOT_YET, _NOT_ANY_MORE = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and ..._HAS_EXPIRED."""
_TURNS = 4


def end_of(certificate: Path, key: Path) -> float | None:
    """Return when a certificate expires, in seconds since 1970; None if that cannot be found.

    Raises `KeyFileError` if it is not valid now.
    """
    for as_server in (True, False):
        try:
            return _shown(certificate, key, as_server)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (_NOT_YET, _NOT_ANY_MORE):
                when = "has expired" if error.verify_code == _NOT_ANY_MORE else "is not valid yet"
                raise KeyFileError(
                    f"certificate {certificate} {when}: issue a new certificate, or set this "
                    f"host's clock",
                    file=certificate,
                ) from None
    return None


def authorities_end(authorities: Path) -> float | None:
    """Return when the first of the authorities expires; None if that cannot be found."""
    return min(_ends(authorities), default=None)


def last_end(authorities: Path) -> float | None:
    """Return when the last of the authorities expires; None if that cannot be found."""
    return max(_ends(authorities), default=None)


def _ends(authorities: Path) -> list[float]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authorities)
    return [
        ssl.cert_time_to_seconds(str(authority["notAfter"])) for authority in context.get_ca_certs()
    ]


def _shown(certificate: Path, key: Path, as_server: bool) -> float | None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asks, shows = (client, server) if as_server else (server, client)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    asks.verify_mode = ssl.CERT_REQUIRED
    asks.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asks.load_verify_locations(certificate)
    for context in {shows, server}:
        context.load_cert_chain(certificate, key, password="")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(_TURNS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ends[0 if as_server else 1].getpeercert()
    return None if not shown else ssl.cert_time_to_seconds(str(shown["notAfter"]))


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its chain to the authority, and its private key, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    end_s: float | None = None
    """When the certificate expires, in seconds since 1970; None if that cannot be found."""


def read_key_pair(certificate: Path, key: Path) -> KeyPair:
    """Read a certificate and its key, which must belong together and be valid now.

    Raises `KeyFileError` that names the wrong file.
    """
    pair = KeyPair(_read("certificate", certificate), _read("key", key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password keeps OpenSSL from prompting for a password.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise _unusable(certificate, key, error) from None
    except OSError as error:
        raise _unread("certificate or key", certificate, error) from None
    # The check read the files by name, and they may have been replaced since.
    if pair != KeyPair(_read("certificate", certificate), _read("key", key)):
        raise KeyFileError(
            f"certificate {certificate} and key {key} changed while they were read: try again",
            certificate=certificate,
            key=key,
        )
    return replace(pair, end_s=end_of(certificate, key))


def read_authorities(path: Path) -> bytes:
    """Read the certificates that peers' certificates are checked against. Raises `KeyFileError`."""
    content = _read("authority", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise KeyFileError(
            f"authority {path} holds no certificate: it must be PEM, as `openssl x509` writes it",
            file=path,
        ) from None
    last_s = last_end(path)
    if last_s is not None and last_s < time.time():
        raise KeyFileError(
            f"authority {path} has expired, so no certificate is accepted: renew it", file=path
        )
    return content


def _read(what: str, path: Path) -> bytes:
    refuse_writable(what, path, KeyFileError)
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unread(what, path, error) from None


def _unread(what: str, path: Path, error: OSError) -> KeyFileError:
    return KeyFileError(
        f"{what} {path} can't be read ({error.strerror}): is the path right, and may this user "
        f"read it?",
        file=path,
    )


def _unusable(certificate: Path, key: Path, error: ssl.SSLError | ValueError) -> KeyFileError:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        what = f"key {key} is not that of certificate {certificate}"
    else:
        why = (error.reason if isinstance(error, ssl.SSLError) else None) or "no PEM"
        what = f"certificate {certificate} and key {key} can't be used ({why})"
    return KeyFileError(
        f"{what}: give a certificate and its own key, both PEM, the key without a password",
        certificate=certificate,
        key=key,
    )


T = TypeVar("T")

Stamp = tuple[tuple[int, int, int] | None, ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Return a cheap stamp that changes when a file is written or replaced."""
    return tuple(_stamp(path) for path in paths)


class Reloaded(Generic[T]):
    """A value read from files; an unusable new version does not replace the last good value."""

    def __init__(
        self,
        paths: Sequence[Path],
        load: Callable[[], T],
        on_error: Callable[[TrustError], object],
    ) -> None:
        """Load the value; raises as ``load``. Later errors go to ``on_error``, once per change."""
        self._paths, self._load, self._on_error = tuple(paths), load, on_error
        self._stamp = stamp_of(self._paths)
        self._value = load()

    def current(self) -> T:
        """Return the value, reloaded if a file has changed. Thread-safe."""
        stamp = stamp_of(self._paths)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._value = self._load()
            except TrustError as error:
                self._on_error(error)
        return self._value


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
