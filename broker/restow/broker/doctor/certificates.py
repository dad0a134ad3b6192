"""The client's files of trust: usable, and for how long."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from restow.broker.client.credentials import Credentials
from restow.broker.doctor.finding import Finding, bad, ok, warn
from restow.broker.errors import RestowError
from restow.broker.trust.key_files import read_authorities, read_key_pair
from restow.broker.trust.tokens import read_secret

DAY_S = 86400.0
SOON_S = 7 * DAY_S


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
    for path, ends_s in _ends(credentials):
        yield judge_end(path, ends_s, time.time())


def judge_end(path: Path, ends_s: float | None, now_s: float) -> Finding:
    """A certificate that is good until ``ends_s``; None: it is not good now."""
    subject = f"certificate {path}"
    if ends_s is None or ends_s <= now_s:
        return bad(subject, "is not valid now", "issue a new one: it is read again by itself")
    days = (ends_s - now_s) / DAY_S
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_s))
    words = f"is valid until {until}, for {days:.0f} days"
    if ends_s - now_s < SOON_S:
        return warn(subject, words, "issue a new one: it is read again by itself")
    return ok(subject, words)


def _ends(credentials: Credentials) -> Iterator[tuple[Path, float | None]]:
    if credentials.tls_ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(credentials.tls_ca)
        ends = [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs()]
        if ends:
            yield credentials.tls_ca, min(ends)
    if credentials.tls_cert is not None and credentials.tls_key is not None:
        yield credentials.tls_cert, own_end(credentials.tls_cert, credentials.tls_key)


def own_end(certificate: Path, key: Path) -> float | None:
    """Until when a certificate is good, in seconds since 1970; None: it is not good now.

    Python's ssl tells that of a peer alone: so it is shown to itself.
    """
    asked, showing = (
        ssl.SSLContext(kind) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    showing.check_hostname, showing.verify_mode = False, ssl.CERT_NONE
    asked.verify_mode = ssl.CERT_REQUIRED
    asked.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asked.load_verify_locations(certificate)
    for context in (asked, showing):
        context.load_cert_chain(certificate, key, password="")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = asked.wrap_bio(to_server, to_client, server_side=True)
    client = showing.wrap_bio(to_client, to_server)
    try:
        for _ in range(4):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
    except ssl.SSLCertVerificationError:
        return None
    shown = server.getpeercert()
    return None if not shown else ssl.cert_time_to_seconds(str(shown["notAfter"]))
