"""Find out why no broker answers, by connecting directly where gRPC only reports a failure.

It runs once a call or a start has failed for good, and takes up to `PATIENCE_S` for each step.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

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
        if credentials.tls_ca is None:
            return _advise_plaintext_client(host, port)
        context = ssl.create_default_context(cafile=credentials.tls_ca)
        if credentials.tls_cert is not None and credentials.tls_key is not None:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key, password="")
        return _advise_tls_client(host, port, context, credentials.tls_cert)
    except socket.gaierror:
        return f"The name {host} has no address"
    except ConnectionRefusedError:
        return "Nothing listens there"
    except (OSError, ValueError):  # too slow, or gone in the meantime
        return ""


def _advise_plaintext_client(host: str, port: int) -> str:
    """Return advice for a client without TLS, if the server speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _greet(host, port, context)
    except ssl.SSLError as error:
        if error.reason in _NO_TLS:
            return ""
    except ConnectionResetError:
        return ""
    return (
        "It speaks TLS, but was called in plaintext: name the authority of its certificate "
        "(--tls-ca, RESTOW_TLS_CA)"
    )


def _advise_tls_client(host: str, port: int, context: ssl.SSLContext, shows: Path | None) -> str:
    plaintext = (
        "It speaks plaintext, but was called with TLS: start it with --tls-cert and --tls-key, or "
        "omit the authority (--tls-ca, RESTOW_TLS_CA)"
    )
    refusal = (
        "It requires a client certificate: name it (--tls-cert and --tls-key)"
        if shows is None
        else f"It rejects certificate {shows}: check that an authority of its --client-ca signed it"
    )
    try:
        return "" if _greet(host, port, context) else refusal
    except ssl.SSLCertVerificationError as error:
        return f"This client rejects its certificate: {error.verify_message}"
    except ssl.SSLError as error:
        return plaintext if error.reason in _NO_TLS else refusal
    except ConnectionResetError:
        return plaintext


def _greet(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Shake hands; return whether the server continues, since it checks certificates afterwards."""
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), PATIENCE_S) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        try:
            secured.sendall(_PREFACE)
            return bool(secured.recv(1))
        except (TimeoutError, BrokenPipeError) as error:
            return isinstance(error, TimeoutError)
