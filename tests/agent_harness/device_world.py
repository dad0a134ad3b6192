"""The world of `agent_harness.world` in the memory of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from agent_harness.processes import READY
from agent_harness.world import POISON, RankMemory, make_case
from restow.agents import Agent, CudaRegion, DaemonAgent, MemoryKind, RegionMemory
from restow.broker.layout import RankLayout

DEVICE = torch.device("cuda", 0)
KIND = MemoryKind(DEVICE.type)
SKIPPED_BYTES = 4096  # regions do not begin where the allocator's memory does


class DeviceMemory:
    """A rank's regions on the GPU; ``host`` is what was last there."""

    def __init__(self, layout: RankLayout, ids: Mapping[str, tuple[int, ...]]) -> None:
        self.host = RankMemory(layout, ids)
        whole = torch.full((SKIPPED_BYTES + self.host.size_bytes,), POISON, dtype=torch.uint8)
        self._whole = whole.to(DEVICE)
        self.bytes = self._whole[SKIPPED_BYTES:]

    @property
    def regions(self) -> list[RegionMemory]:
        address = self.bytes.data_ptr() - self.host.data.ctypes.data
        return [
            replace(region, base_address=region.base_address + address, kind=KIND, device_id=0)
            for region in self.host.regions
        ]

    def up(self) -> None:
        """Copy from host to device; the copy is done on return."""
        self.bytes.copy_(torch.from_numpy(self.host.data))
        torch.cuda.synchronize()

    def down(self) -> RankMemory:
        """Copy from device to host."""
        torch.from_numpy(self.host.data).copy_(self.bytes)
        return self.host


def serve_device_source(
    pipe: Connection, case_name: str, broker: str, socket: str | None = None
) -> None:
    """Serve all ranks of a case's source on the GPU; with a socket, through the daemon there."""
    case = make_case(case_name)
    fields = {field.name: field for field in case.source.model.fields}
    memories = {rank.rank: DeviceMemory(rank, case.src_ids) for rank in case.source.ranks}
    agents: list[Agent | DaemonAgent] = []
    for rank, memory in memories.items():
        memory.host.write(fields, case.tokens)
        memory.up()
        if socket is None:
            agents.append(Agent(broker, "P", "life-1", rank, memory.regions, 8 << 20))
        else:
            shared = [CudaRegion.of(region) for region in memory.regions]
            agents.append(DaemonAgent(socket, "P", "life-1", rank, shared))
    for agent in agents:
        agent.start()
    pipe.send(READY)
    with contextlib.suppress(EOFError):
        pipe.recv()
    for agent in agents:
        agent.close()
