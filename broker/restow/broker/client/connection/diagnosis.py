"""Why no broker answers: what a connection made by hand meets, where gRPC only says that it failed.

It is made once a call or a start has failed for good, and takes `PATIENCE_S` at most at each step.
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
"""What a client of HTTP/2 says first, with settings that set nothing."""
_NO_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"}
)


def explained(error: RestowError, address: str, credentials: Credentials) -> RestowError:
    """The error; of a broker that was not reached, with what is the matter, as far as it shows."""
    if not isinstance(error, BrokerUnreachableError) or os.environ.get(OWN):
        return error
    try:
        host, port = host_and_port(address)
    except AddressInvalidError:  # gRPC's own forms
        return error
    words = _look(host, port, credentials)
    if not words:
        return error
    return BrokerUnreachableError(f"{error.message}. {words}", broker=address)


async def explained_soon(error: RestowError, address: str, credentials: Credentials) -> RestowError:
    """The same, beside an event loop."""
    return await asyncio.to_thread(explained, error, address, credentials)


def _look(host: str, port: int, credentials: Credentials) -> str:
    try:
        if credentials.tls_ca is None:
            return _look_without_tls(host, port)
        context = ssl.create_default_context(cafile=credentials.tls_ca)
        if credentials.tls_cert is not None and credentials.tls_key is not None:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key, password="")
        return _look_with_tls(host, port, context, credentials.tls_cert)
    except socket.gaierror:
        return f"No address is known for the name {host}"
    except ConnectionRefusedError:
        return "Nothing listens there"
    except (OSError, ValueError):  # too slow, or gone meanwhile
        return ""


def _look_without_tls(host: str, port: int) -> str:
    """Whether TLS is spoken there."""
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
        "It speaks TLS, and was asked in plaintext: name the authority of its certificate "
        "(--tls-ca, RESTOW_TLS_CA)"
    )


def _look_with_tls(host: str, port: int, context: ssl.SSLContext, shows: Path | None) -> str:
    plaintext = (
        "It speaks plaintext, and was asked with TLS: start it with --tls-cert and --tls-key, or "
        "leave the authority out (--tls-ca, RESTOW_TLS_CA)"
    )
    refusal = (
        "It wants to see a certificate of its clients: give one (--tls-cert and --tls-key)"
        if shows is None
        else f"It does not accept certificate {shows}: is it signed by what its --client-ca names?"
    )
    try:
        return "" if _greet(host, port, context) else refusal
    except ssl.SSLCertVerificationError as error:
        return f"Its certificate is not accepted here: {error.verify_message}"
    except ssl.SSLError as error:
        return plaintext if error.reason in _NO_TLS else refusal
    except ConnectionResetError:
        return plaintext


def _greet(host: str, port: int, context: ssl.SSLContext) -> bool:
    """Shake hands, and say whether the server goes on: it looks at certificates after that."""
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
