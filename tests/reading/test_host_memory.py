"""What an agent shows of its host memory: who may read it, until when, and what is refused."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from restow.agents.binding.reads import Descriptors
from restow.agents.execute.orders import peer_from_proto
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.errors import AgentError
from restow.agents.memory.regions import HOST, RegionMemory
from restow.agents.reading.host_memory import HostMemory, HostRanges
from restow.agents.reading.same_host import HostPeer
from restow.v1 import agent_link_pb2 as pb


def _agent(data: np.ndarray, host_reads: bool) -> AsyncAgent:
    region = RegionMemory("r", data.ctypes.data, 1, len(data))
    settings = AgentSettings(staging_bytes=1 << 20, host_reads=host_reads)
    return AsyncAgent("127.0.0.1:9", "P", "life", 0, [region], settings)


async def test_an_agent_can_be_read_until_it_closes() -> None:
    data = np.arange(4096).astype(np.uint8)
    agent = _agent(data, True)
    shown = HostMemory.decoded((await agent.hello()).host_memory)
    assert shown is not None
    found = np.zeros(4096, np.uint8)
    peer = HostPeer(agent.name, shown, HostRanges.of([(found.ctypes.data, 4096, HOST)]))
    pieces = Descriptors.single(data.ctypes.data, found.ctypes.data, 4096)
    peer.read(pieces, lambda: None)
    assert (found == data).all()
    await agent.close()
    with pytest.raises(AgentError):
        peer.read(pieces, lambda: None)


async def test_an_agent_registers_pages_and_what_it_gathers_in_and_shows_nothing_else() -> None:
    data, weights = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    regions = [
        RegionMemory("r", data.ctypes.data, 2, 2048),
        RegionMemory("w", weights.ctypes.data, 1, 4096, private=True),
    ]
    agent = AsyncAgent("127.0.0.1:9", "P", "life", 0, regions, AgentSettings(1 << 20))
    hello = await agent.hello()
    memory = HostMemory.decoded(hello.host_memory)
    assert memory is not None
    ranges = memory.ranges(ctypes.string_at)
    shown = set(zip(ranges.begin.tolist(), (ranges.end - ranges.begin).tolist(), strict=True))
    gather, scatter = agent._memory.gather, agent._memory.scatter
    assert shown == {(data.ctypes.data, 4096), (gather.address, gather.size_bytes)}
    for address in (data.ctypes.data, gather.address):
        assert address.to_bytes(8, "little") in hello.nixl_metadata
    for address in (weights.ctypes.data, scatter.address):
        assert address.to_bytes(8, "little") not in hello.nixl_metadata
    await agent.close()


async def test_an_agent_that_was_told_so_shows_nothing() -> None:
    agent = _agent(np.zeros(4096, np.uint8), False)
    assert (await agent.hello()).host_memory == b""
    await agent.close()


@pytest.mark.parametrize("tls", ["tcp,self", "^cma"])
async def test_who_forbids_ucx_to_read_processes_forbids_it_all(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    assert not AgentSettings().host_reads
    monkeypatch.setenv("UCX_TLS", "all")
    assert AgentSettings().host_reads


def test_devices_are_mapped_only_if_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value, is_on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("RESTOW_DEVICE_READS", value)
        assert AgentSettings().device_reads == is_on
    monkeypatch.delenv("RESTOW_DEVICE_READS")
    assert not AgentSettings().device_reads


MARK = b"restow host memory 2\0" + bytes(16) + b"a"


@pytest.mark.parametrize(
    "shown",
    [
        b"\xff\xff",
        pb.HostMemory(pid=0, mark_address=4096, mark=MARK).SerializeToString(),
        pb.HostMemory(pid=-7, mark_address=4096, mark=MARK).SerializeToString(),
        pb.HostMemory(pid=7, mark_address=0, mark=MARK).SerializeToString(),
        pb.HostMemory(pid=7, mark_address=2**63, mark=MARK).SerializeToString(),
        pb.HostMemory(pid=7, mark_address=2**63 - 1, mark=MARK).SerializeToString(),
        pb.HostMemory(pid=7, mark_address=4096, mark=bytes(40)).SerializeToString(),
        pb.HostMemory(pid=7, mark_address=4096, mark=MARK[:-1]).SerializeToString(),
        pb.HostMemory(pid=7, mark_address=4096, mark=MARK + bytes(1024)).SerializeToString(),
    ],
    ids=[
        "bytes that are no message",
        "process 0",
        "a negative process",
        "no address",
        "an address of 64 bits",
        "a mark that ends behind all memory",
        "a mark of another kind",
        "a mark of nobody",
        "a mark that is too long",
    ],
)
def test_nonsense_is_refused(shown: bytes) -> None:
    good = pb.HostMemory(pid=7, mark_address=4096, mark=MARK)
    assert HostMemory.decoded(good.SerializeToString()) is not None
    with pytest.raises(AgentError) as caught:
        peer_from_proto(pb.Peer(agent_name="a", host_memory=shown))
    assert caught.value.reason == "ORDER_INVALID"


def test_ranges_hold_what_lies_inside_one_of_them() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        edges = np.sort(rng.choice(np.arange(1, 40), 2 * rng.integers(0, 5), replace=False))
        ranges = HostRanges(*edges.reshape(-1, 2).T)
        begin, size = int(rng.integers(-2, 45)), int(rng.integers(0, 12))
        inside = any(first <= begin and begin + size <= end for first, end in edges.reshape(-1, 2))
        assert ranges.hold(np.array([begin]), np.array([size])) == inside, (edges, begin, size)
