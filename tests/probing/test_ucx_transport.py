"""Real agents say over which of UCX's transports one reads from the other."""

from __future__ import annotations

import asyncio

import pytest

from agent_harness.live import live
from agent_harness.nixl_source import SIZE_BYTES, serve_known_bytes
from agent_harness.processes import child
from broker.fakes import broker
from restow.agents.memory.errors import ReadFailedError
from restow.agents.memory.regions import HOST
from restow.agents.probing.ucx_transport import OneRead, find_transport
from restow.broker.client import AsyncAdminClient
from restow.broker.client.connection.errors import BrokerCallError


@pytest.mark.parametrize(
    ("transports", "device", "method"),
    [("tcp", "tcp/", "software emulation"), ("cma,tcp", "cma/memory", "zero-copy")],
    ids=["tcp", "cma"],
)
async def test_it_is_the_one_that_ucx_was_left(
    transports: str, device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    async with broker() as running, live("wide", running.address) as both:
        both.memory = {0: both.memory[0]}
        await both.start_agents()
        async with AsyncAdminClient(running.address) as admin:
            found = await admin.probe_pair("P", "D")
            with pytest.raises(BrokerCallError, match="engine Q is not registered") as error:
                await admin.probe_pair("P", "Q")
    assert (found.reason, found.detail) == ("", "")
    assert found.transport.startswith(device)
    assert found.method == method
    assert error.value.reason == "ENGINE_UNKNOWN"


async def test_a_peer_that_stands_still_is_waited_for_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with child(serve_known_bytes) as holder:
        name, metadata, address = holder.receive()
        holder.freeze()
        one = OneRead(name, address, SIZE_BYTES, HOST, HOST, within_s=1.0)
        with pytest.raises(ReadFailedError, match="READ_DEADLINE: the read from agent source"):
            await asyncio.to_thread(find_transport, one, metadata)
        holder.thaw()
        found = await asyncio.to_thread(find_transport, one, metadata)
        assert found.transport.startswith("tcp/")
