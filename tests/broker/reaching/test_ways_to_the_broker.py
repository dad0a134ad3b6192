"""Addresses of a broker, proxies in the environment, and names that move."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import cast

import pytest

from broker.fakes import broker, engine
from restow.broker.addresses import checked_http, checked_target, host_and_port
from restow.broker.client import AdminClient, AsyncAdminClient, BrokerUnreachableError
from restow.broker.client.connection.channel import broker_address
from restow.broker.client.connection.errors import way_note
from restow.broker.errors import AddressInvalidError
from restow.broker.server.serve import RunningBroker

NOWHERE = "http://127.0.0.1:9"
NAME = "broker.moving.example"


@pytest.mark.parametrize(
    ("address", "form"),
    [
        ("broker.example", "write broker.example:7350"),
        ("10.0.0.7", "write 10.0.0.7:7350"),
        ("7351", "write 127.0.0.1:7351"),
        ("::1", "write [::1]:7350"),
        ("[::1]", "write [::1]:7350"),
        ("::1:7351", "write [::1]:7351"),
        ("2001:db8::5", "write [2001:db8::5]:7350"),
        ("http://broker.example:7351/", "write broker.example:7351"),
        ("https://broker.example", "write broker.example:7350"),
        ("127.0.0.1:99999", "write 127.0.0.1:7350"),
        (f"127.0.0.1:{'9' * 5000}", "write 127.0.0.1:7350"),
        ("127.0.0.1:http", "write 127.0.0.1:7350"),
        ("127.0.0.1:", "write 127.0.0.1:7350"),
        (":7350", "it has no host"),
        ("[broker]:7350", "write HOST:7350"),
        ("a b:7350", "write HOST:7350"),
        ("127.0.0.1:0", "port 0"),
    ],
)
def test_an_address_that_is_none_is_told_how_to_be_one(
    address: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTOW_BROKER", address)
    with pytest.raises(AddressInvalidError) as caught:
        AdminClient()
    assert form in caught.value.message
    assert repr(address) in caught.value.message


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:http"])
def test_an_address_for_metrics_is_told_the_port_of_metrics(address: str) -> None:
    with pytest.raises(AddressInvalidError, match=r"write (nonsense|127\.0\.0\.1):9464$"):
        checked_http(address)


@pytest.mark.parametrize(
    "address",
    ["localhost:7350", "[::1]:7350", "[fe80::1%eth0]:7350", "unix:/run/b.sock", "dns:///b:7350"],
)
def test_an_address_stays_as_it_is(address: str) -> None:
    assert checked_target(address) == broker_address(address) == address


def test_an_ipv6_address_loses_its_brackets() -> None:
    assert host_and_port("[2001:db8::5]:0") == ("2001:db8::5", 0)


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "no_grpc_proxy", "RESTOW_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("proxied")
async def test_proxies_of_the_web_are_not_used(running: RunningBroker) -> None:
    async with engine(running.address, "e"):
        async with AsyncAdminClient(running.address) as client:
            assert [one.engine_id for one in await client.engines()] == ["e"]
        with AdminClient(running.address) as client:
            assert (await asyncio.to_thread(client.status)).engines == 1


@pytest.mark.usefixtures("proxied")
def test_it_is_said_that_they_are_not_used() -> None:
    with (
        AdminClient("127.0.0.1:9", timeout_s=0.5) as client,
        pytest.raises(BrokerUnreachableError) as caught,
    ):
        client.status()
    for words in (way_note(), caught.value.message):
        assert "http_proxy is ignored, set RESTOW_PROXY=http://HOST:PORT" in words
    assert not way_note({})


@contextlib.asynccontextmanager
async def connect_proxy(asked: list[str]) -> AsyncIterator[str]:
    """Run an HTTP proxy that connects its clients to the host they ask for."""

    async def relay(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                target.write(data)
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(request.splitlines()[0])
        host, port = host_and_port(request.split()[1])
        there, back = await asyncio.open_connection(host, port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(relay(reader, back), relay(there, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())


async def test_a_proxy_that_is_meant_is_used(
    running: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    async with connect_proxy(asked) as proxy:
        monkeypatch.setenv("RESTOW_PROXY", proxy)
        async with AsyncAdminClient(running.address) as client:
            assert (await client.status()).engines == 0
        assert asked == [f"CONNECT {running.address} HTTP/1.1"]
        assert proxy.removeprefix("http://") in way_note()


def test_a_password_of_a_proxy_is_not_shown() -> None:
    assert way_note({"RESTOW_PROXY": "http://me:secret@proxy:3128"}).endswith(", proxy:3128")


def test_a_proxy_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTOW_PROXY", "proxy:3128")
    with pytest.raises(AddressInvalidError, match="http://HOST:PORT"):
        AdminClient()


class NameServer(asyncio.DatagramProtocol):
    """Answers every question with one IPv4 address, if that is what is asked for."""

    def __init__(self, address: str) -> None:
        self.address = address

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, source: tuple[str | None, int]) -> None:
        end = data.index(b"\0", 12) + 5
        is_ipv4 = struct.unpack("!H", data[end - 4 : end - 2])[0] == 1
        header = data[:2] + struct.pack("!5H", 0x8400, 1, int(is_ipv4), 0, 0)
        numbers = bytes(int(one) for one in self.address.split("."))
        answer = struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4) + numbers if is_ipv4 else b""
        self.transport.sendto(header + data[12:end] + answer, source)


async def test_an_address_that_moves_under_its_name_is_found() -> None:
    # By itself gRPC would look the name up again only after 30 s.
    loop = asyncio.get_running_loop()
    endpoint = await loop.create_datagram_endpoint(
        lambda: NameServer("127.0.0.1"), ("127.0.0.1", 0)
    )
    transport, names = endpoint
    name_port = transport.get_extra_info("sockname")[1]
    try:
        async with contextlib.AsyncExitStack() as first, contextlib.AsyncExitStack() as rest:
            running = await first.enter_async_context(broker())
            port = running.address.rpartition(":")[2]
            target = f"dns://127.0.0.1:{name_port}/{NAME}:{port}"
            await rest.enter_async_context(engine(target, "e", agents=False))
            names.address = "127.0.0.2"
            await first.aclose()
            moved = await rest.enter_async_context(broker(f"127.0.0.2:{port}"))
            async with AsyncAdminClient(moved.address) as client, asyncio.timeout(15):
                while not await client.engines():  # noqa: ASYNC110 - the broker tells no events
                    await asyncio.sleep(0.05)
    finally:
        transport.close()
