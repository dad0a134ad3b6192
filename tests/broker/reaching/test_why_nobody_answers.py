"""A broker that is not reached: the cause is named, where gRPC only says that it failed."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from broker.certificates import DOMAIN, Authority
from broker.fakes import broker, model_layout
from broker.guarded import error_of, guarded
from restow.broker.client import (
    AdminClient,
    AsyncAdminClient,
    BrokerUnreachableError,
    Credentials,
    EngineSession,
)

OPERATOR = f"{DOMAIN}/operator"


async def said(address: str, credentials: Credentials) -> set[str]:
    """Return the last sentence of each kind of client's error, after all that gRPC says."""
    session = EngineSession("e", "1", model_layout(), address, credentials)
    with AdminClient(address, 0.5, credentials=credentials) as blocking:
        async with AsyncAdminClient(address, 0.5, credentials=credentials) as client:
            errors = await asyncio.gather(
                error_of(session.start(0.3)),
                error_of(client.status()),
                error_of(asyncio.to_thread(blocking.status)),
            )
    assert {type(one) for one in errors} == {BrokerUnreachableError}
    return {one.message.rpartition("). ")[2] for one in errors}


async def test_plaintext_against_tls(authority: Authority) -> None:
    async with guarded(authority) as running:
        [words] = await said(running.address, Credentials())
    assert words.startswith("It speaks TLS, but was called in plaintext")
    assert "RESTOW_TLS_CA" in words


async def test_tls_against_plaintext(authority: Authority) -> None:
    async with broker() as running:
        [words] = await said(running.address, Credentials(authority.path))
    assert words.startswith("It speaks plaintext, but was called with TLS")


async def test_a_certificate_that_the_broker_does_not_know(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with guarded(authority) as running:
        [words] = await said(running.address, stranger.client(OPERATOR, authority=authority.path))
        assert words.startswith("It rejects certificate ")
        assert words.endswith("check that an authority of its --client-ca signed it")
        [words] = await said(running.address, Credentials(authority.path))
        assert words.startswith("It requires a client certificate")
        [words] = await said(running.address, authority.client(OPERATOR, authority=stranger.path))
        assert words.startswith("This client rejects its certificate: ")


async def test_a_certificate_of_another_name(authority: Authority) -> None:
    files = authority.server(authority.issue(dns=("broker.example",)))
    async with broker("127.0.0.1:0", **files) as running:
        [words] = await said(running.address, authority.client(OPERATOR))
    assert "IP address mismatch" in words


async def test_nobody(authority: Authority) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
        for credentials in (Credentials(), authority.client(OPERATOR)):
            assert await said(address, credentials) == {"Nothing listens there"}
    [words] = await said("no.such.host.invalid:7350", Credentials())
    assert words == "The name no.such.host.invalid has no address"
