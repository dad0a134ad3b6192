"""Calls of one tenant: how many are read and open at once, and what a crowded server says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from broker.fakes import broker, pair
from broker.guarded import channel_of, error_of, reason_of
from broker.raw_http2 import MESSAGE_BYTES, raw_connection
from broker.token_house import house
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.server import serve
from restow.broker.server.gate import guard as first_messages


async def test_first_messages_of_a_tenant_are_read_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tenant that completes no first message has few of them kept, and they end with an error.
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
            caught = await error_of(late.read())
        error = caught
        assert (error.status, error.reason) == ("DEADLINE_EXCEEDED", "FIRST_MESSAGE_LATE")
        async with pair(running.address, 1, 1, credentials=known) as both:
            await both.hand_over("next")


async def test_calls_of_one_tenant_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tenant may have some calls for each possible connection; when one ends there is room.
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
        error = await error_of(status(b""))
        assert (error.reason, error.subject["what"]) == ("QUOTA_EXCEEDED", "calls")
        await calls[0].done_writing()
        assert await calls[0].code() is grpc.StatusCode.OK
        await status(b"")


async def test_a_call_without_a_message(tmp_path: Path) -> None:
    settings, known = house(tmp_path)
    async with broker(**settings) as running, channel_of(running.address, known) as channel:
        status: Any = channel.stream_unary("/restow.v1.Admin/GetStatus")
        assert await reason_of(status(iter(()))) == "ARGUMENT_INVALID"


async def test_a_server_that_is_crowded_is_asked_again() -> None:
    """Check that a refusal of gRPC itself, which lasts a moment, ends no session."""

    async def never(_: object, context: object) -> None:
        await asyncio.get_running_loop().create_future()

    handlers: dict[str, Any] = {"RegisterEngine": grpc.unary_unary_rpc_method_handler(never)}
    server = grpc.aio.server(maximum_concurrent_rpcs=1)
    server.add_registered_method_handlers("restow.v1.Broker", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            register: Any = channel.unary_unary("/restow.v1.Broker/RegisterEngine")
            calls = [asyncio.ensure_future(register(b"")) for _ in range(2)]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=10)
            crowded = done.pop().exception()
            large = await error_of(register(bytes(17 << 20)))
    finally:
        await server.stop(None)
    assert isinstance(crowded, grpc.aio.AioRpcError)
    assert crowded.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc_error(crowded, "here").reason == "BROKER_UNREACHABLE"
    assert large.reason == "RESOURCE_EXHAUSTED"
