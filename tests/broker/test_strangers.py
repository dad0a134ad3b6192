"""Strangers in front of a real broker: what they can take of its memory, its files and its time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.certificates import Authority
from broker.fakes import Pair, broker, pair
from broker.guarded import ask, channel_of
from broker.raw_http2 import MESSAGE_BYTES, raw_connection
from restow.broker.client import AdminClient, Credentials
from restow.broker.client.channel import open_channel
from restow.broker.client.errors import BrokerUnreachableError, from_rpc_error
from restow.broker.server import first_messages, guard, serve
from restow.broker.server.strangers import Strangers
from restow.broker.trust.identity import Role
from restow.broker.trust.tokens import new_token

MOST_MIB = 64
FILES = 1024
UNFINISHED_HELLO = b"\x16\x03\x01\x40\x00\x01\x00\x3c\x00"
"""The beginning of a long record that begins a handshake of TLS."""


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may have all files open that it may ask for."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@dataclass(frozen=True)
class Served:
    """A broker in a process of its own; with TLS it knows its callers by tokens."""

    process: subprocess.Popen[str]
    address: str
    http: str
    known: Credentials

    def most_mib(self) -> float:
        """The most memory that it has had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def house(folder: Path) -> tuple[dict[str, Any], Credentials]:
    """Settings of a broker, and credentials of an operator who is an engine and agents too."""
    authority = Authority(folder)
    own = authority.issue(server=True)
    secret, entry = new_token([Role.OPERATOR, Role.ENGINE, Role.AGENT], "a", "*")
    tokens, token = folder / "tokens.json", folder / "token"
    tokens.write_text(json.dumps([entry]))
    token.write_text(secret)
    for path in (tokens, token):
        path.chmod(0o600)
    settings = {"tls_cert": own.certificate, "tls_key": own.key, "tokens": tokens}
    return settings, Credentials(authority.path, token_file=token)


@contextlib.contextmanager
def served(folder: Path, soft: int = 0, hard: int = 0, *, tls: bool = True) -> Iterator[Served]:
    """``soft`` and ``hard``: how many files its process may have open."""
    settings, known = house(folder) if tls else ({}, Credentials())
    command = [sys.executable, "-m", "restow.broker.cli.main", "serve"]
    command += ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    for name, path in settings.items():
        command += ["--" + name.replace("_", "-"), str(path)]
    if soft:
        # The shell has the limits set before the broker is there.
        limits = f"ulimit -Sn {soft} && ulimit -Hn {hard or soft} && exec "
        command = ["bash", "-c", limits + '"$@"', "bash", *command]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        address, http = (process.stdout.readline().split()[-1] for _ in range(2))
        yield Served(process, address, http.removesuffix("/metrics"), known)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


async def is_served(one: Served, both: Pair, name: str) -> None:
    """Engines that are there, an operator who comes and a probe get what they ask for."""
    await both.hand_over(name)
    async with asyncio.timeout(20):
        while not await answers(one):
            pass
    assert await asyncio.to_thread(probe, one) == 200


async def answers(one: Served) -> bool:
    """Whether an operator gets an answer; he comes too early while all connections are taken."""
    try:
        return (await ask(one.address, one.known, AdminClient.status)).engines == 2
    except BrokerUnreachableError:
        return False


def probe(one: Served) -> int:
    with urllib.request.urlopen(f"{one.http}/readyz", timeout=10) as answer:  # noqa: S310
        return int(answer.status)


@contextlib.contextmanager
def connections(address: str, count: int, *, sending: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many that say no more than that."""
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
    """A hundred streams, each with 15 of 16 MiB of a message."""
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
    """More than there may be files; half of them begin a handshake that never ends."""
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


def test_an_address_of_few_connections_keeps_them() -> None:
    """The newest of each address stay, however many another one opens."""
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
    """As a whole, for nothing that it says is read; a caller who is known hears of each service."""
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
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Watch(request).read()
            assert from_rpc_error(caught.value, "here").reason == "QUOTA_EXCEEDED"
            for watch in watches:
                watch.cancel()
        async with channel_of(running.address, known) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(request)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            heard = await stub.Watch(request).read()
            assert heard.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_first_messages_of_a_tenant_are_read_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sends none to its end has few of them kept, and ends as an error."""
    monkeypatch.setattr(first_messages, "AT_ONCE", 4)
    settings, known = house(tmp_path)
    assert known.token_file is not None
    bearer = "authorization", f"Bearer {known.token_file.read_text()}"

    def attack(address: str) -> int:
        with raw_connection(address) as connection:
            streams = connection.begin("/restow.v1.Broker/RegisterEngine", 40, bearer)
            return connection.send_messages(streams, 3.0)

    async with broker(**settings) as running:
        sent = await asyncio.to_thread(attack, running.address)
        # Of the other 36, what gRPC takes ahead.
        assert sent <= 4 * MESSAGE_BYTES + 40 * (16 << 10)
        monkeypatch.setattr(first_messages, "WAIT_S", 0.5)
        async with channel_of(running.address, known) as channel:
            late: Any = channel.stream_stream("/restow.v1.Broker/Session")()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late.read()
        error = from_rpc_error(caught.value, "here")
        assert (error.status, error.reason) == ("DEADLINE_EXCEEDED", "FIRST_MESSAGE_LATE")
        async with pair(running.address, 1, 1, credentials=known) as both:
            await both.hand_over("next")


async def test_calls_of_one_tenant_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has some for each connection that there may be; as soon as one ends there is room."""
    monkeypatch.setattr(serve, "CALLS_FOR_CONNECTION", 1)
    settings, known = house(tmp_path)
    async with (
        broker(**settings, max_connections=16) as running,
        channel_of(running.address, known) as channel,
    ):
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        reflect: Any = channel.stream_stream(path)
        status: Any = channel.unary_unary("/restow.v1.Admin/GetStatus")
        calls = []
        for _ in range(16):
            calls.append(reflect())
            await calls[-1].write(b"")
            await calls[-1].read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(b"")
        error = from_rpc_error(caught.value, "here")
        assert (error.reason, error.subject["what"]) == ("QUOTA_EXCEEDED", "calls")
        await calls[0].done_writing()
        assert await calls[0].code() is grpc.StatusCode.OK
        await status(b"")


async def test_a_call_without_a_message(tmp_path: Path) -> None:
    settings, known = house(tmp_path)
    async with broker(**settings) as running, channel_of(running.address, known) as channel:
        status: Any = channel.stream_unary("/restow.v1.Admin/GetStatus")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(iter(()))
        assert from_rpc_error(caught.value, "here").reason == "ARGUMENT_INVALID"


def register_with(channel: grpc.aio.Channel) -> Callable[[bytes], Awaitable[object]]:
    call: Any = channel.unary_unary("/restow.v1.Broker/RegisterEngine")
    return cast(Callable[[bytes], Awaitable[object]], call)


async def test_a_refused_caller_is_told_why_whatever_it_sends(tmp_path: Path) -> None:
    settings, known = house(tmp_path)
    stranger = Credentials(known.tls_ca)
    async with broker(**settings) as running, channel_of(running.address, stranger) as channel:
        for size in (0, 20_000, 15 << 20):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await register_with(channel)(bytes(size))
            assert from_rpc_error(caught.value, "here").reason == "UNAUTHENTICATED"


async def test_a_server_that_is_crowded_is_asked_again() -> None:
    """What gRPC itself refuses for a moment ends no session."""

    async def never(_: object, context: object) -> None:
        await asyncio.get_running_loop().create_future()

    handlers: dict[str, Any] = {"RegisterEngine": grpc.unary_unary_rpc_method_handler(never)}
    server = grpc.aio.server(maximum_concurrent_rpcs=1)
    server.add_registered_method_handlers("restow.v1.Broker", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            register = register_with(channel)
            calls = [asyncio.ensure_future(register(b"")) for _ in range(2)]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=10)
            crowded = done.pop().exception()
            with pytest.raises(grpc.aio.AioRpcError) as large:
                await register(bytes(17 << 20))
    finally:
        await server.stop(None)
    assert isinstance(crowded, grpc.aio.AioRpcError)
    assert crowded.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc_error(crowded, "here").reason == "BROKER_UNREACHABLE"
    assert from_rpc_error(large.value, "here").reason == "RESOURCE_EXHAUSTED"
