"""Find out why no broker answers, by connecting directly where gRPC only reports a failure.

It runs once a call or a start has failed for good, and takes up to `PATIENCE_S` for each step.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from typing import NamedTuple

from restow.broker.addresses import host_and_port
from restow.broker.client.connection.channel import Credentials
from restow.broker.client.connection.errors import OWN, BrokerUnreachableError
from restow.broker.errors import AddressInvalidError, RestowError

PATIENCE_S = 1.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""First bytes of an HTTP/2 client, with empty settings."""
_NO_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"}
)


def explained(error: RestowError, address: str, credentials: Credentials) -> RestowError:
    """Return the error; if no broker was reached, add what a connection attempt shows."""
    if not isinstance(error, BrokerUnreachableError) or os.environ.get(OWN):
        return error
    try:
        host, port = host_and_port(address)
    except AddressInvalidError:  # an address that only gRPC understands
        return error
    words = _advise(host, port, credentials)
    if not words:
        return error
    return BrokerUnreachableError(f"{error.message}. {words}", broker=address)


async def explained_soon(error: RestowError, address: str, credentials: Credentials) -> RestowError:
    """Return what `explained` does, without blocking the event loop."""
    return await asyncio.to_thread(explained, error, address, credentials)


def _advise(host: str, port: int, credentials: Credentials) -> str:
    try:
        shown = try_tls(host, port, credentials)
    except socket.gaierror:
        return f"The name {host} has no address"
    except ConnectionRefusedError:
        return "Nothing listens there"
    except (OSError, ValueError):  # too slow, or gone in the meantime
        return ""
    if not credentials.secure:
        return (
            "It speaks TLS, but was called in plaintext: name the authority of its certificate "
            "(--tls-ca, RESTOW_TLS_CA)"
            if shown.speaks_tls
            else ""
        )
    if not shown.speaks_tls:
        return (
            "It speaks plaintext, but was called with TLS: start it with --tls-cert and --tls-key, "
            "or omit the authority (--tls-ca, RESTOW_TLS_CA)"
        )
    if shown.why_rejected:
        return f"This client rejects its certificate: {shown.why_rejected}"
    if shown.goes_on:
        return ""
    if credentials.tls_cert is None:
        return "It requires a client certificate: name it (--tls-cert and --tls-key)"
    return (
        f"It rejects certificate {credentials.tls_cert}: check that an authority of its "
        f"--client-ca signed it"
    )


class TlsShown(NamedTuple):
    """What an attempt to speak TLS shows of a server."""

    speaks_tls: bool
    goes_on: bool = False
    """Whether the server continues after the handshake, since it checks certificates afterwards."""
    why_rejected: str = ""
    """Why the server's certificate is not accepted here."""


def try_tls(host: str, port: int, credentials: Credentials) -> TlsShown:
    """Shake hands with a server, whether or not ``credentials`` are for TLS; it blocks.

    Raises `OSError` for a server that does not answer, and for files that cannot be used.
    """
    if credentials.tls_ca is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context = ssl.create_default_context(cafile=credentials.tls_ca)
        if credentials.tls_cert is not None and credentials.tls_key is not None:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key, password="")
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), PATIENCE_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as secured,
        ):
            try:
                secured.sendall(_PREFACE)
                return TlsShown(True, bool(secured.recv(1)))
            except (TimeoutError, BrokenPipeError) as error:
                return TlsShown(True, isinstance(error, TimeoutError))
    except ssl.SSLCertVerificationError as error:
        return TlsShown(True, why_rejected=error.verify_message)
    except ssl.SSLError as error:
        return TlsShown(error.reason not in _NO_TLS)
    except ConnectionResetError:
        return TlsShown(False)
