"""Until when certificates are good. Python's ssl tells that of a peer alone: so one is shown one.

OpenSSL looks at what a certificate is for before it looks at the time, so each is shown as a
server's and as a client's.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from restow.broker.trust.errors import KeyFileError

_NOT_YET, _NOT_ANY_MORE = 9, 10
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and ..._HAS_EXPIRED."""
_TURNS = 4


def end_of(certificate: Path, key: Path) -> float | None:
    """Until when, in seconds since 1970; None: it can't be told.

    Raises `KeyFileError` if it is not valid now.
    """
    for as_server in (True, False):
        try:
            return _shown(certificate, key, as_server)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in (_NOT_YET, _NOT_ANY_MORE):
                when = "has expired" if error.verify_code == _NOT_ANY_MORE else "is not valid yet"
                raise KeyFileError(
                    f"certificate {certificate} {when}: issue a new one, or set this host's clock",
                    file=certificate,
                ) from None
    return None


def authorities_end(authorities: Path) -> float | None:
    """When the first of them ends; None: it can't be told."""
    return min(_ends(authorities), default=None)


def last_end(authorities: Path) -> float | None:
    """When the last of them ends; None: it can't be told."""
    return max(_ends(authorities), default=None)


def _ends(authorities: Path) -> list[float]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authorities)
    return [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs()]


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
