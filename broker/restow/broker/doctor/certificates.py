"""The client's files of trust, and the broker's certificate: usable, and for how long."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from restow.broker.addresses import host_and_port
from restow.broker.client.connection.credentials import Credentials
from restow.broker.doctor.finding import Finding, bad, ok, warn
from restow.broker.errors import RestowError
from restow.broker.trust.key_files import read_authorities, read_key_pair
from restow.broker.trust.modes import READ_STEP, is_readable_by_all
from restow.broker.trust.tokens import read_secret
from restow.broker.trust.validity import authorities_end, end_of

DAY_S = 86400.0
SOON_S = 7 * DAY_S
ANSWER_S = 5.0
"""So long is waited for the broker to show its certificate."""


def look_at_trust(credentials: Credentials) -> Iterator[Finding]:
    """Nothing, plaintext; else each file."""
    if credentials.tls_ca is None:
        yield warn(
            "trust",
            "plaintext: whoever reaches the broker may do everything",
            "docs/security.md, where others can reach it",
        )
        return
    try:
        read_authorities(credentials.tls_ca)
        if credentials.tls_cert is not None and credentials.tls_key is not None:
            read_key_pair(credentials.tls_cert, credentials.tls_key)
        if credentials.token_file is not None:
            read_secret(credentials.token_file)
    except RestowError as error:
        yield bad("trust", error.message, "mend the file")
        return
    yield ok("trust", f"TLS, the broker checked against {credentials.tls_ca}")
    for secret in (credentials.tls_key, credentials.token_file):
        if secret is not None and is_readable_by_all(secret):
            yield warn(f"secret {secret}", "every user of this host may read it", READ_STEP)
    for path, ends_s in _ends(credentials):
        if ends_s is not None:
            yield judge_end(str(path), ends_s, time.time())


def look_at_shown(address: str, credentials: Credentials) -> Iterator[Finding]:
    """Say how long the certificate is good that a broker shows; nothing if it shows none.

    Why it shows none is found by those who ask the broker something.
    """
    if credentials.tls_ca is None:
        return
    try:
        host, port = host_and_port(address)
        context = ssl.create_default_context(cafile=credentials.tls_ca)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), ANSWER_S) as wire,
            context.wrap_socket(wire, server_hostname=host) as secured,
        ):
            shown = secured.getpeercert()
    except (RestowError, OSError, UnicodeError):  # a name with an empty label can't be encoded
        return
    if shown:
        ends_s = ssl.cert_time_to_seconds(str(shown["notAfter"]))
        yield judge_end("of the broker", ends_s, time.time())


def judge_end(whose: str, ends_s: float, now_s: float) -> Finding:
    """A certificate that is good until ``ends_s``."""
    subject = f"certificate {whose}"
    if ends_s <= now_s:
        return bad(subject, "is not valid now", "issue a new one: it is read again by itself")
    days = (ends_s - now_s) / DAY_S
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
    words = f"is valid until {until}, for {days:.0f} days"
    if ends_s - now_s < SOON_S:
        return warn(subject, words, "issue a new one: it is read again by itself")
    return ok(subject, words)


def _ends(credentials: Credentials) -> Iterator[tuple[Path, float | None]]:
    if credentials.tls_ca is not None:
        yield credentials.tls_ca, authorities_end(credentials.tls_ca)
    if credentials.tls_cert is not None and credentials.tls_key is not None:
        yield credentials.tls_cert, end_of(credentials.tls_cert, credentials.tls_key)
