"""Strangers in front of a real broker: what they can take of its memory, its files and its time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.fakes import Pair, broker, pair
from broker.guarded import ask, channel_of, error_of, reason_of
from broker.raw_http2 import raw_connection
from broker.token_house import Served, house, served
from restow.broker.client import AdminClient, Credentials
from restow.broker.client.connection.errors import BrokerUnreachableError
from restow.broker.server.gate import guard
from restow.broker.server.gate.strangers import Strangers

MOST_MIB = 64
FILES = 1024
UNFINISHED_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3c\x00"
"""The beginning of a long record that begins a handshake of TLS."""


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open as many files as its hard limit allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def is_served(one: Served, both: Pair, name: str) -> None:
    """Check that engines, an operator who connects now and a probe get what they ask for."""
    await both.hand_over(name)
    async with asyncio.timeout(20):
        while not await answers(one):
            pass
    assert await asyncio.to_thread(probe, one) == 200


async def answers(one: Served) -> bool:
    """Return whether an operator gets an answer, which fails while all connections are taken."""
    try:
        return (await ask(one.address, one.known, AdminClient.status)).engines == 2
    except BrokerUnreachableError:
        return False


def probe(one: Served) -> int:
    with urllib.request.urlopen(f"{one.http}/readyz", timeout=10) as answer:  # noqa: S310
        return int(answer.status)


@contextlib.contextmanager
def connections(address: str, count: int, *, sending: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open ``count`` connections that send nothing but ``sending``."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection((host, int(port)), 10))
            with contextlib.suppress(ConnectionError):  # ended already
                one.sendall(sending)
            opened.append(one)
        yield opened


async def test_strangers_messages_are_not_kept(tmp_path: Path) -> None:
    # Strangers open a hundred streams, each with 15 of the 16 MiB of a message.
    paths = [
        "/restow.v1.Broker/Session",
        "/restow.v1.Broker/RegisterEngine",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    ]

    def attack() -> None:
        for path in paths:
            with raw_connection(one.address) as connection:
                connection.send_messages(connection.begin(path, 100), 1.0)

    with served(tmp_path) as one:
        async with pair(one.address, 1, 1, credentials=one.known) as both:
            before = one.most_mib()
            await asyncio.to_thread(attack)
            assert one.most_mib() - before < MOST_MIB
            await is_served(one, both, "next")


@pytest.mark.parametrize("hard", [4 * FILES, FILES])
async def test_connections_of_strangers_shut_nobody_out(
    tmp_path: Path, many_files: None, hard: int
) -> None:
    # Strangers open more connections than files allowed; half begin a handshake without an end.
    hello = UNFINISHED_HELLO + bytes(15_000)
    with served(tmp_path, FILES, hard) as one:
        async with pair(one.address, 1, 1, credentials=one.known) as both:
            before = one.most_mib()
            with (
                connections(one.address, 1200),
                connections(one.address, 1200, sending=hello),
                connections(one.http.removeprefix("http://"), 200),
            ):
                await is_served(one, both, "beside")
            assert one.most_mib() - before < MOST_MIB


async def test_connections_where_everybody_is_trusted(tmp_path: Path, many_files: None) -> None:
    with served(tmp_path, FILES, tls=False) as one:
        async with pair(one.address, 1, 1) as both:
            with (
                connections(one.address, 1200),
                connections(one.http.removeprefix("http://"), 200),
            ):
                await is_served(one, both, "beside")


async def test_callers_are_not_remembered_where_nobody_looks_for_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(Strangers, "admitted", lambda _, context: heard.append(context.peer()))
    for listen in (f"unix:{tmp_path / 'broker'}", "127.0.0.1:0"):
        assert not heard
        async with broker(listen) as running, pair(running.address) as both:
            await both.hand_over("h")
    assert heard


def test_an_address_of_few_connections_keeps_them() -> None:
    # The newest connections of each address stay, however many another address opens.
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listening.getsockname()

        def opened(source: str) -> socket.socket:
            client = socket.create_connection(address, 10, (source, 0))
            stack.enter_context(listening.accept()[0])
            return stack.enter_context(client)

        few, many = opened("127.0.0.2"), [opened("127.0.0.1") for _ in range(10)]
        strangers = Strangers(100, 4)
        strangers.look(address[1])
        assert strangers.ended == 7
        assert [not ended(one) for one in (few, *many)] == [True] + 7 * [False] + 3 * [True]
        strangers.look(address[1])
        assert strangers.ended == 7


def ended(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False


async def test_a_stranger_hears_of_the_broker_s_health(tmp_path: Path) -> None:
    # A stranger hears of the broker as a whole, for nothing of the request is read; a known caller
    # hears of each service.
    settings, known = house(tmp_path)
    request = health_pb2.HealthCheckRequest(service="there.is.None")
    async with broker(**settings) as running:
        async with channel_of(running.address, Credentials(known.tls_ca)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(request)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watches = [stub.Watch(request) for _ in range(guard.MAX_WATCHING)]
            for watch in watches:
                heard = await watch.read()
                assert heard.status == health_pb2.HealthCheckResponse.SERVING
            assert await reason_of(stub.Watch(request).read()) == "QUOTA_EXCEEDED"
            for watch in watches:
                watch.cancel()
        async with channel_of(running.address, known) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            caught = await error_of(stub.Check(request))
            assert caught.status == "NOT_FOUND"
            heard = await stub.Watch(request).read()
            assert heard.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_a_refused_caller_is_told_why_whatever_it_sends(tmp_path: Path) -> None:
    settings, known = house(tmp_path)
    stranger = Credentials(known.tls_ca)
    async with broker(**settings) as running, channel_of(running.address, stranger) as channel:
        register: Any = channel.unary_unary("/restow.v1.Broker/RegisterEngine")
        for size in (0, 20_000, 15 << 20):
            assert await reason_of(register(bytes(size))) == "UNAUTHENTICATED"
