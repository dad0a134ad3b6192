"""What a peer shows of itself may be malformed: the process that dies of it is no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from agent_harness.nixl_source import SIZE_BYTES, serve_known_bytes
from agent_harness.processes import READY, TCP, Child, child
from agent_harness.waiting import until
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.errors import AgentClosedError, AgentError, PeerLostError
from restow.agents.memory.regions import HOST, RegionMemory
from restow.agents.probing import peer_trial
from restow.agents.probing.peer_trial import PLACE_BYTES, PeerTrial, malformed
from restow.agents.reading.nixl_transport import NixlTransport
from restow.v1 import agent_link_pb2 as pb

KIND_OF_MEMORY = b"nixlSDList|t\x04\0\0\0\0\0\0\0"
"""What stands before the kind of memory that a list of ranges is of, an index of four bytes."""


def _decode(pipe: Connection, is_form_checked: bool = True) -> None:
    """Run D's agent: it is told of a peer, reads from the peer, and says how the read ended."""
    if not is_form_checked:
        peer_trial.malformed = lambda metadata: ""
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
            probed = pb.Probed(reason="READ_NOT_BEGUN")
            while probed.reason == "READ_NOT_BEGUN":  # on a busy machine a process starts slowly
                agent.take(pb.AgentOrder(probe=probe))
                await until(lambda: bool(said) and not agent._tasks)
                probed = said.pop().probed
            pipe.send((probed.reason, probed.detail))
    await agent.close()


@pytest.fixture
async def source() -> AsyncIterator[Child]:
    async with child(serve_known_bytes) as running:
        yield running


def _of_kind(metadata: bytes, kind: bytes) -> bytes:
    before, found, after = metadata.partition(KIND_OF_MEMORY)
    assert found, "NIXL writes its metadata in another way now"
    return before + found + kind + after[len(kind) :]


@pytest.mark.parametrize("is_form_checked", [True, False])
async def test_metadata_that_kills_who_loads_it_kills_no_engine(
    is_form_checked: bool, source: Child
) -> None:
    peer, metadata, address = source.receive()
    killing = _of_kind(metadata, b"\0\0\0\x7f")
    async with child(_decode, is_form_checked) as engine:
        for _ in range(2):
            engine.tell((peer, killing, address))
            reason, detail = engine.receive()
            assert reason == "METADATA_REFUSED"
            why = "malformed" if is_form_checked else "kills the process that loads it"
            assert why in detail
            engine.tell((peer, metadata, address))
            assert engine.receive() == ("", "")


@pytest.mark.parametrize("tls", ["all", TCP])
def test_the_form_is_that_of_nixl_and_of_nothing_else(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    transport = NixlTransport("source")
    data = np.zeros(1 << 16, np.uint8)
    assert malformed(transport.metadata()) == ""
    for offset in range(0, len(data), 8192):
        transport.register(data.ctypes.data + offset, 4096, HOST)
        metadata = transport.metadata()
        assert malformed(metadata) == ""
    for size_bytes in range(len(metadata)):
        assert malformed(metadata[:size_bytes])
    assert malformed(metadata + b"\0")
    key = metadata.index(data.ctypes.data.to_bytes(8, "little")) + PLACE_BYTES
    for at, changed in ((0, b"\xff" * 8), (8, b"\x09"), (8, b"\xd0"), (9, b"\xff")):
        begin = key + at
        assert "remote key" in malformed(
            metadata[:begin] + changed + metadata[begin + len(changed) :]
        )
    assert "kind" in malformed(_of_kind(metadata, b"\5\0\0\0"))
    transport.close()


async def test_what_is_no_metadata_of_this_peer_is_refused_and_spoils_nothing(
    source: Child,
) -> None:
    peer, metadata, _ = source.receive()
    trial = PeerTrial(metadata)
    await trial.load(peer, metadata)
    for bad, why in (
        (b"no metadata at all", "malformed"),
        (metadata[:-1], "malformed"),
        (metadata.replace(b"source-", b"\xff\xffurce-"), "can't be connected"),
        (metadata.replace(b"source-", b"forged-"), "names agent forged-"),
    ):
        with pytest.raises(AgentError, match=why):
            await trial.load(peer, bad)
        await trial.load(peer, metadata)
    await trial.close()
    await trial.close()


async def test_a_process_that_died_is_replaced_and_a_peer_that_is_gone_is_not_refused(
    source: Child,
) -> None:
    peer, metadata, _ = source.receive()
    trial = PeerTrial(metadata)
    await trial.load(peer, metadata)
    assert trial._process is not None
    trial._process.kill()
    await trial.load(peer, metadata)
    await source.kill()
    with contextlib.suppress(PeerLostError):  # over TCP the read finds out
        await trial.load(peer, metadata)
    await trial.close()


async def test_closing_ends_a_trial_that_stands_still(source: Child) -> None:
    peer, metadata, _ = source.receive()
    trial = PeerTrial(metadata)
    trial.begin()
    waiting = asyncio.create_task(trial.load(peer, metadata))
    await until(lambda: trial._process is not None)
    await trial.close()
    with pytest.raises(AgentClosedError):
        await waiting
    with pytest.raises(AgentClosedError):
        await trial.load(peer, metadata)
    assert trial._process is None
