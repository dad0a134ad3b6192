"""Another server answers at the broker's address for a while: its word is not the broker's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from agent_harness.waiting import WAIT_S, until
from agent_harness.world import RankMemory
from broker.fakes import POSITION, broker, model_layout
from broker.raw_http2 import END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, SETTINGS, frame
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.broker.client import AdminClient, BrokerCallError, EngineSession
from restow.broker.errors import RestowError

NOT_FOUND = b"\x8d"
"""HPACK's word for ``:status: 404``."""
ACK = 1
HANDOFFS = 4
SMALL = AgentSettings(staging_bytes=1 << 20)


class Stranger:
    """What answers in the broker's place, and whom."""

    def __init__(self) -> None:
        self.asked: list[str] = []


@contextlib.asynccontextmanager
async def without_a_route(address: str) -> AsyncIterator[Stranger]:
    """Run a gateway that answers every call with 404."""
    found = Stranger()
    open_: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(len(PREFACE))
            writer.write(frame(SETTINGS, 0, 0))
            while True:
                head = await reader.readexactly(9)
                body = await reader.readexactly(int.from_bytes(head[:3]))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9])
                if kind == HEADERS:
                    found.asked.append("404")
                    writer.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, NOT_FOUND))
                elif kind in (SETTINGS, PING) and not flags & ACK:
                    writer.write(frame(kind, ACK, 0, body if kind == PING else b""))
        open_.discard(writer)
        writer.close()

    host, port = address.rsplit(":", 1)
    server = await asyncio.start_server(answer, host, int(port))
    try:
        yield found
    finally:
        server.close()
        await server.wait_closed()
        for writer in open_:
            writer.close()


class _Asked(grpc.aio.ServerInterceptor):
    def __init__(self, found: Stranger, refuse: Callable[[Any], Awaitable[None]] | None) -> None:
        self._found, self._refuse = found, refuse

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        self._found.asked.append(details.method)
        if self._refuse is None:
            return await continuation(details)

        async def stream(_: Any, context: Any) -> None:
            assert self._refuse is not None
            await self._refuse(context)

        return grpc.stream_stream_rpc_method_handler(stream)


@contextlib.asynccontextmanager
async def of_something_else(
    address: str, refuse: Callable[[Any], Awaitable[None]] | None = None
) -> AsyncIterator[Stranger]:
    """Run a gRPC server of other services."""
    found = Stranger()
    server = grpc.aio.server(interceptors=[_Asked(found, refuse)])
    server.add_insecure_port(address)
    await server.start()
    try:
        yield found
    finally:
        await server.stop(0)


async def _refuse(context: Any) -> None:
    """Refuse with an ErrorInfo as Restow does, but with the reason of another service."""
    info = error_details_pb2.ErrorInfo(reason="API_KEY_INVALID", domain="elsewhere.example")
    detail = any_pb2.Any()
    detail.Pack(info)
    told = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="no key", details=[detail])
    await context.abort_with_status(rpc_status.to_status(told))


def of_another_kind(address: str) -> contextlib.AbstractAsyncContextManager[Stranger]:
    """Run a gRPC server that refuses every call with a reason that Restow does not have."""
    return of_something_else(address, _refuse)


class _Nonsense(grpc.GenericRpcHandler):
    """Answers whatever it is asked with bytes that are no message of the call."""

    def __init__(self, found: Stranger) -> None:
        self._found = found

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        self._found.asked.append(details.method)

        async def stream(_: Any, __: Any) -> AsyncIterator[bytes]:
            yield b"\xff\xff\xff"

        async def unary(_: Any, __: Any) -> bytes:
            # Every other one is a message in which nothing is said.
            return b"\xff\xff\xff" if len(self._found.asked) % 2 else b""

        if details.method.endswith(("/Session", "/Connect")):
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@contextlib.asynccontextmanager
async def of_nonsense(address: str) -> AsyncIterator[Stranger]:
    """Run a gRPC server that answers every call with bytes that are no message of it."""
    found = Stranger()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([_Nonsense(found)])
    server.add_insecure_port(address)
    await server.start()
    try:
        yield found
    finally:
        await server.stop(0)


STRANGERS = pytest.mark.parametrize(
    "stranger", [without_a_route, of_something_else, of_another_kind, of_nonsense]
)


@STRANGERS
async def test_sessions_and_agents_outlive_it_with_all_that_was_said_meanwhile(
    stranger: Callable[[str], contextlib.AbstractAsyncContextManager[Stranger]],
) -> None:
    layout = model_layout(1)
    lost: list[RestowError] = []
    async with contextlib.AsyncExitStack() as stack:
        async with broker() as first:
            address = first.address
            p, d = (
                EngineSession(name, "life-1", layout, address, on_lost=lost.append)
                for name in ("p", "d")
            )
            agents = []
            for session in (p, d):
                stack.push_async_callback(session.close)
                await session.start()
            for name in ("p", "d"):
                memory = RankMemory(layout.ranks[0], {"attention": (3 * HANDOFFS,), "state": (9,)})
                agent = AsyncAgent(address, name, "life-1", 0, memory.regions, SMALL)
                stack.push_async_callback(agent.close)
                await agent.start(WAIT_S)
                agents.append(agent)
            p.publish("before", _blocks(0), POSITION)
            agents[0].fence("before")
        async with stranger(address) as there:
            await until(lambda: len(there.asked) >= 12)
            ends, asked = [], [d.request("before", _blocks(0))]
            for number in range(1, HANDOFFS):
                ends.append(p.publish(f"h{number}", _blocks(number), POSITION))
                agents[0].fence(f"h{number}")
                asked.append(d.request(f"h{number}", _blocks(number)))
            seen = len(there.asked)
            await until(lambda: len(there.asked) >= seen + 4)
        async with broker(listen=address):
            async with asyncio.timeout(WAIT_S):
                assert all([(await one).done for one in (*asked, *ends)])
            assert not lost
            await stack.aclose()


def _blocks(number: int) -> dict[str, list[int]]:
    return {"attention": list(range(3 * number, 3 * number + 3)), "state": [1 + number]}


@STRANGERS
async def test_who_was_never_let_in_is_told_at_once_what_is_wrong(
    stranger: Callable[[str], contextlib.AbstractAsyncContextManager[Stranger]],
) -> None:
    async with broker() as running:
        address = running.address
    memory = RankMemory(model_layout(1).ranks[0], {"attention": (3,), "state": (1,)})
    agent = AsyncAgent(address, "p", "life-1", 0, memory.regions, SMALL)
    async with stranger(address):
        session = EngineSession("p", "life-1", model_layout(1), address)
        for starting in (session.start(WAIT_S), agent.start(WAIT_S)):
            with pytest.raises(
                BrokerCallError, match="does not answer as a Restow broker"
            ) as caught:
                await starting
            assert caught.value.reason == "OTHER_SERVER"
            assert caught.value.subject == {"broker": address}
        if stranger is not of_nonsense:  # which knows an answer without engines, too
            with AdminClient(address) as client, pytest.raises(BrokerCallError) as refused:
                await asyncio.to_thread(client.engines)
            assert refused.value.reason == "OTHER_SERVER"
    await agent.close()


async def test_an_agent_that_begins_beside_its_engine_waits_for_the_broker() -> None:
    # In vLLM's workers the agent begins so too: nobody waits for it.
    layout = model_layout(1)
    async with broker() as running:
        address = running.address
    memory = RankMemory(layout.ranks[0], {"attention": (3,), "state": (1,)})
    agent = AsyncAgent(address, "p", "life-1", 0, memory.regions, SMALL)
    async with without_a_route(address) as there:
        agent.begin()
        await until(lambda: len(there.asked) >= 3)
    async with broker(listen=address), EngineSession("p", "life-1", layout, address):
        await until(lambda: agent.figures.connected == 1)
    await agent.close()
