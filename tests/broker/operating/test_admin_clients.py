"""The operator's two clients: one set of calls, and a broker that is away for a moment."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from broker.certificates import Authority
from broker.fakes import Pair, engine, model_layout
from broker.guarded import error_of, guarded, of_tenant, reason_of
from restow.broker.client import AdminClient, AsyncAdminClient, BrokerCallError, Credentials
from restow.broker.errors import RestowError
from restow.broker.layout import digest
from restow.broker.server.serve import RunningBroker
from restow.v1 import admin_pb2 as pb


def calls(client: type) -> dict[str, str]:
    """Return the signatures of a client's public methods, by name."""
    return {
        name: str(inspect.signature(method))
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_have_the_same_calls() -> None:
    assert calls(AdminClient) == calls(AsyncAdminClient)


def test_there_is_a_call_for_every_method() -> None:
    service = pb.DESCRIPTOR.services_by_name["Admin"]
    assert len(calls(AdminClient)) == len(service.methods) + len(
        {"close", "command", "command_status", "find"}
    )


async def test_both_say_the_same(running: RunningBroker, both: Pair) -> None:
    await both.hand_over("one")

    def blocking() -> list[object]:
        with AdminClient(running.address) as client:
            return [
                [one.incarnation for one in client.engines()],
                client.agents(),
                client.handoff("one").timeline,
                client.handoffs("DONE").handoffs[0].handoff_id,
                client.audit().findings,
                client.release("one").state,
                client.set_draining(False),
                client.status().handoffs_live,
            ]

    async with AsyncAdminClient(running.address) as client:
        assert await asyncio.to_thread(blocking) == [
            [one.incarnation for one in await client.engines()],
            await client.agents(),
            (await client.handoff("one")).timeline,
            (await client.handoffs("DONE")).handoffs[0].handoff_id,
            (await client.audit()).findings,
            (await client.release("one")).state,
            await client.set_draining(False),
            (await client.status()).handoffs_live,
        ]
        with pytest.raises(BrokerCallError, match="handoff two is not known") as caught:
            await client.handoff("two")
        assert caught.value.reason == "HANDOFF_UNKNOWN"
        with pytest.raises(ValueError, match="HANDOFF_STATE_NONE"):
            await client.handoffs("NONE")


class Away:
    """A broker that is not there for the first calls."""

    def __init__(self, times: int, status: grpc.StatusCode) -> None:
        self.times, self.code = times, status
        self.heard = 0

    async def status_of(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        self.heard += 1
        if self.heard <= self.times:
            await context.abort(self.code, "away")
        return pb.GetStatusResponse(version="back")


@asynccontextmanager
async def served(away: Away) -> AsyncIterator[str]:
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(
        away.status_of, pb.GetStatusRequest.FromString, pb.GetStatusResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("restow.v1.Admin", {"GetStatus": method})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("times", "status", "heard"),
    [
        (3, grpc.StatusCode.UNAVAILABLE, 4),
        (4, grpc.StatusCode.UNAVAILABLE, 4),
        (1, grpc.StatusCode.PERMISSION_DENIED, 1),
        (1, grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
    ],
)
async def test_a_broker_that_is_away_is_asked_again(
    times: int, status: grpc.StatusCode, heard: int
) -> None:
    """Check that only a call that reached nobody is tried again, and not for ever."""

    def blocking(address: str) -> str:
        with AdminClient(address, credentials=Credentials()) as client:
            return client.status().version

    async def check(blocks: bool) -> None:
        away = Away(times, status)
        async with served(away) as address, AsyncAdminClient(address) as client:
            try:
                version = (
                    await asyncio.to_thread(blocking, address)
                    if blocks
                    else (await client.status()).version
                )
            except RestowError:
                version = ""
        assert away.heard == heard
        assert version == ("back" if times < heard else "")

    await asyncio.gather(check(True), check(False))


async def test_a_layout_is_told_as_it_was_registered(running: RunningBroker, both: Pair) -> None:
    async with AsyncAdminClient(running.address) as client:
        engines = {one.engine_id: one.layout_digest for one in await client.engines()}
        for engine_id, known in engines.items():
            assert digest(await client.layout(engine_id)) == known
        assert await reason_of(client.layout("nobody")) == "ENGINE_UNKNOWN"
    assert len(engines) == len({*engines.values()}) == 2, both


async def test_an_engine_is_told_the_layouts_of_its_tenant_alone(authority: Authority) -> None:
    async with guarded(authority) as running:
        a, b = (of_tenant(authority, one) for one in ("a", "b"))
        async with engine(running.address, "p", credentials=a):
            async with AsyncAdminClient(running.address, credentials=a) as client:
                assert digest(await client.layout("p")) == digest(model_layout())
            async with AsyncAdminClient(running.address, credentials=b) as client:
                refused = await error_of(client.layout("p"))
            assert refused.reason == "ENGINE_UNKNOWN"
