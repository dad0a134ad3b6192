"""What a peer shows of itself may be malformed: the process that dies of it is no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from agent_harness.processes import READY, Child, child
from agent_harness.waiting import until
from restow.agents.async_agent import AsyncAgent
from restow.agents.errors import AgentClosedError, MetadataRefusedError
from restow.agents.memory.regions import HOST, RegionMemory
from restow.agents.probing.peer_trial import PeerTrial
from restow.agents.reading.nixl_transport import NixlTransport
from restow.agents.settings import AgentSettings
from restow.v1 import agent_link_pb2 as pb

SIZE_BYTES = 1 << 20
KIND_OF_MEMORY = b"nixlSDList|t\x04\0\0\0\0\0\0\0"
"""What stands before the kind of memory that a list of ranges is of, an index of four bytes."""


def _serve(pipe: Connection) -> None:
    """An agent that can be read, until the pipe ends."""
    data = np.ones(SIZE_BYTES, np.uint8)
    transport = NixlTransport("source")
    transport.register(data.ctypes.data, len(data), HOST)
    pipe.send(READY)
    pipe.send((transport.name, transport.metadata(), data.ctypes.data))
    while not pipe.poll(0.001):
        transport.progress()


def _decode(pipe: Connection) -> None:
    """D's agent: it is told of a peer, reads from it, and says how that ended."""
    asyncio.run(_take_and_answer(pipe))


async def _take_and_answer(pipe: Connection) -> None:
    data = np.zeros(4096, np.uint8)
    region = RegionMemory("r", data.ctypes.data, 1, len(data))
    settings = AgentSettings(staging_bytes=4 * SIZE_BYTES, host_reads=False)
    agent = AsyncAgent("127.0.0.1:9", "D", "life", 0, [region], settings)
    said: list[pb.AgentMessage] = []
    agent._link.send = said.append  # type: ignore[method-assign, assignment]
    pipe.send(READY)
    with contextlib.suppress(EOFError):
        while True:
            peer, metadata, address = await asyncio.to_thread(pipe.recv)
            agent.take(pb.AgentOrder(peer=pb.Peer(agent_name=peer, nixl_metadata=metadata)))
            probe = pb.Probe(number=1, bytes=SIZE_BYTES, agent_name=peer, address=address)
            agent.take(pb.AgentOrder(probe=probe))
            await until(lambda: bool(said))
            while said[0].probed.reason == "READ_NOT_BEGUN":  # a busy machine starts slowly
                said.clear()
                agent.take(pb.AgentOrder(probe=probe))
                await until(lambda: bool(said))
            probed = said.pop().probed
            pipe.send((probed.reason, probed.detail))
    await agent.close()


@pytest.fixture
async def source() -> AsyncIterator[Child]:
    async with child(_serve) as running:
        yield running


def _of_kind(metadata: bytes, kind: bytes) -> bytes:
    before, found, after = metadata.partition(KIND_OF_MEMORY)
    assert found, "NIXL writes its metadata in another way now"
    return before + found + kind + after[len(kind) :]


async def test_metadata_that_kills_who_loads_it_kills_no_engine(source: Child) -> None:
    peer, metadata, address = source.receive()
    killing = _of_kind(metadata, b"\0\0\0\x7f")
    async with child(_decode) as engine:
        for _ in range(2):
            engine.tell((peer, killing, address))
            reason, detail = engine.receive()
            assert reason == "METADATA_REFUSED"
            assert "ends the process that loads it" in detail
            engine.tell((peer, metadata, address))
            assert engine.receive() == ("", "")


async def test_what_is_no_metadata_of_this_peer_is_refused_and_spoils_nothing(
    source: Child,
) -> None:
    peer, metadata, _ = source.receive()
    trial = PeerTrial()
    await trial.load(peer, metadata)
    for bad, why in (
        (b"no metadata at all", "can't be loaded"),
        (metadata[:-1], "can't be loaded"),
        (metadata.replace(b"source-", b"\xff\xffurce-"), "can't be loaded"),
        (metadata.replace(b"source-", b"forged-"), "is of agent forged-"),
    ):
        with pytest.raises(MetadataRefusedError, match=why):
            await trial.load(peer, bad)
        await trial.load(peer, metadata)
    trial.close()
    trial.close()


async def test_a_process_that_died_meanwhile_is_replaced(source: Child) -> None:
    peer, metadata, _ = source.receive()
    trial = PeerTrial()
    await trial.load(peer, metadata)
    assert trial._process is not None
    trial._process.kill()
    await trial.load(peer, metadata)
    trial.close()


async def test_closing_ends_a_trial_that_stands_still(source: Child) -> None:
    peer, metadata, _ = source.receive()
    trial = PeerTrial()
    trial.begin()
    waiting = asyncio.create_task(trial.load(peer, metadata))
    await until(lambda: trial._process is not None)
    trial.close()
    with pytest.raises(AgentClosedError):
        await waiting
    with pytest.raises(AgentClosedError):
        await trial.load(peer, metadata)
    assert trial._process is None
