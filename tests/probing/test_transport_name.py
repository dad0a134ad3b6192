"""Real agents say over which of UCX's transports one reads from the other."""

from __future__ import annotations

import asyncio
import contextlib
from multiprocessing.connection import Connection

import numpy as np
import pytest

from agent_harness.handover import destination_memory
from agent_harness.processes import READY, child
from agent_harness.source_main import serve_source
from agent_harness.world import make_case
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.errors import ReadFailedError
from restow.agents.memory.regions import HOST
from restow.agents.probing.transport_name import OneRead, find_transport
from restow.agents.reading.nixl_transport import NixlTransport
from restow.broker.client import AsyncAdminClient, EngineSession
from restow.broker.client.connection.errors import BrokerCallError
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker

CASE = "wide"


@pytest.mark.parametrize(
    ("transports", "device"), [("tcp", "tcp/"), ("cma,tcp", "cma/memory")], ids=["tcp", "cma"]
)
async def test_it_is_the_one_that_ucx_was_left(
    transports: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    case = make_case(CASE)
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(
            running_broker(BrokerSettings(listen="127.0.0.1:0"))
        )
        enter = stack.enter_async_context
        await enter(EngineSession("P", "life-1", case.source, broker.address))
        await enter(EngineSession("D", "life-1", case.destination, broker.address))
        await enter(child(serve_source, CASE, broker.address))
        own = destination_memory(case)[0]
        agent = AsyncAgent(broker.address, "D", "life-1", 0, own.regions, AgentSettings(8 << 20))
        await agent.start()
        stack.push_async_callback(agent.close)
        admin = await enter(AsyncAdminClient(broker.address))
        found = await admin.probe_pair("P", "D")
        assert (found.reason, found.detail) == ("", "")
        assert found.transport.startswith(device)
        words = {
            "tcp": "software emulation",
            "cma,tcp": "zero-copy",
        }
        assert found.method == words[transports]
        with pytest.raises(BrokerCallError, match="engine Q is not registered") as error:
            await admin.probe_pair("P", "Q")
        assert error.value.reason == "ENGINE_UNKNOWN"


def hold(pipe: Connection) -> None:
    """Serve memory to readers, until the pipe ends."""
    held, transport = np.zeros(1 << 20, np.uint8), NixlTransport("holder")
    transport.register(held.ctypes.data, held.nbytes, HOST)
    pipe.send(READY)
    pipe.send((transport.name, held.ctypes.data, transport.metadata()))
    with contextlib.suppress(EOFError):
        while not pipe.poll(0.002):
            transport.progress()
        pipe.recv()


async def test_a_peer_that_stands_still_is_waited_for_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with child(hold) as holder:
        name, address, metadata = holder.receive()
        holder.freeze()
        one = OneRead(name, address, 1 << 20, HOST, HOST, within_s=1.0)
        with pytest.raises(ReadFailedError, match="READ_DEADLINE: the read from agent holder"):
            await asyncio.to_thread(find_transport, one, metadata)
        holder.thaw()
        found = await asyncio.to_thread(find_transport, one, metadata)
        assert found.transport.startswith("tcp/")
