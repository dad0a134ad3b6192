"""Certificates, keys and authorities: PEM files, proved usable before anything is served."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from restow.broker.trust.errors import KeyFileError
from restow.broker.trust.modes import refuse_writable
from restow.broker.trust.validity import end_of, last_end


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate, with those that lead to its authority, and its private key. PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    end_s: float | None = None
    """Until when the certificate is good, in seconds since 1970; None: it can't be told."""


def read_key_pair(certificate: Path, key: Path) -> KeyPair:
    """Both files, which belong together and are valid now.

    Raises `KeyFileError` that names the one at fault.
    """
    pair = KeyPair(_read("certificate", certificate), _read("key", key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password, so that nobody is asked for one.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise _unusable(certificate, key, error) from None
    except OSError as error:
        raise _unread("certificate or key", certificate, error) from None
    # The check took the files by their names: between the two they may have been replaced.
    if pair != KeyPair(_read("certificate", certificate), _read("key", key)):
        raise KeyFileError(
            f"certificate {certificate} and key {key} changed while they were read: try again",
            certificate=certificate,
            key=key,
        )
    return replace(pair, end_s=end_of(certificate, key))


def read_authorities(path: Path) -> bytes:
    """Certificates that others are checked against. Raises `KeyFileError`."""
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
            f"authority {path} has expired: nobody is known by it any more", file=path
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
