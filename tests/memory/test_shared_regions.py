"""GPU memory handed to another process: what travels, what is refused, and what is closed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agent_harness.fake_broker import FakeBroker
from restow.agents import CudaRegion, DaemonAgent, MemoryKind, RegionMemory, SharedMemory
from restow.agents.daemon.server import AgentDaemon
from restow.agents.memory.cuda import HANDLE_BYTES, CudaDriver, CudaHandle
from restow.agents.memory.errors import AgentError, CudaUnavailableError, RegionInvalidError
from restow.agents.memory.shared_memory import (
    OpenedRegions,
    SharedRegion,
    region_from_proto,
    region_to_proto,
)
from restow.broker.client.connection.errors import BrokerCallError
from restow.v1 import daemon_pb2 as pb

UUIDS = [bytes(range(16)), bytes(range(16, 32))]
BASE, SIZE = 1 << 40, 1 << 20
HANDLE = b"h" * HANDLE_BYTES


class PaperDriver(CudaDriver):
    """A driver of two devices and one allocation of 1 MiB, seen from both processes."""

    def __init__(self, uuids: list[bytes] | None = None) -> None:
        self.uuids = UUIDS if uuids is None else uuids
        self.opened: list[int] = []
        self.fails_after_opening = False

    def device_uuids(self) -> list[bytes]:
        return self.uuids

    def allocation(self, address: int, device_id: int) -> tuple[int, int]:
        if self.fails_after_opening and self.opened:
            raise RegionInvalidError("cuMemGetAddressRange_v2 of the CUDA driver says no")
        return address // BASE * BASE, SIZE

    def export(self, address: int, device_id: int) -> bytes:
        assert address % BASE == 0, "a handle is that of a whole allocation"
        return HANDLE

    def open(self, ipc_handle: bytes, device_id: int) -> int:
        assert ipc_handle == HANDLE
        self.opened.append(device_id)
        return 7 * BASE

    def close(self, address: int, device_id: int) -> None:
        assert address == 7 * BASE
        self.opened.remove(device_id)


def device_region(**changes: object) -> RegionMemory:
    region = RegionMemory("r", BASE + 4096, 10, 1024, MemoryKind.CUDA, 0)
    return replace(region, **changes)  # type: ignore[arg-type]


def handed_over(region: CudaRegion) -> pb.SharedRegion:
    return pb.SharedRegion.FromString(region_to_proto(region).SerializeToString())


def test_a_region_of_a_device_is_the_same_region_elsewhere() -> None:
    # The device may have another number in the other process.
    first = CudaRegion.of(device_region(), PaperDriver())
    weights = device_region(name="s", base_address=BASE + 65536, private=True)
    second = CudaRegion.of(weights, PaperDriver())
    there = PaperDriver(UUIDS[::-1])
    with OpenedRegions([handed_over(first), handed_over(second)], there) as regions:
        assert regions == [
            device_region(base_address=7 * BASE + 4096, device_id=1),
            replace(weights, base_address=7 * BASE + 65536, device_id=1),
        ]
        assert there.opened == [1], "one allocation is opened once"
    assert there.opened == []


def test_host_and_device_memory_may_be_mixed() -> None:
    with SharedMemory.create(4096) as shared:
        host = SharedRegion("h", shared.name, 0, 4, 1024, private=True)
        assert region_from_proto(region_to_proto(host)) == host
        device = CudaRegion.of(device_region(), PaperDriver())
        messages = [region_to_proto(host), region_to_proto(device)]
        with OpenedRegions(messages, PaperDriver()) as regions:
            assert [region.kind for region in regions] == [MemoryKind.HOST, MemoryKind.CUDA]
            assert [region.private for region in regions] == [True, False]


@pytest.mark.parametrize(
    ("offset", "pages", "stride"),
    [(-1, 1, 8), (SIZE, 1, 1), (SIZE - 1023, 1, 1024), (0, 2**62, 2**62), (0, -1, 8), (0, 0, 8)],
)
def test_a_region_outside_of_its_allocation_is_refused_and_nothing_stays_open(
    offset: int, pages: int, stride: int
) -> None:
    driver = PaperDriver()
    good = handed_over(CudaRegion.of(device_region(), driver))
    bad = pb.SharedRegion(
        name="bad", offset_bytes=offset, page_count=pages, page_stride_bytes=stride, cuda=good.cuda
    )
    with pytest.raises(RegionInvalidError, match="region bad"), OpenedRegions([good, bad], driver):
        pytest.fail("opened")
    assert driver.opened == []


def test_the_last_byte_of_an_allocation_may_be_used() -> None:
    region = device_region(base_address=BASE + SIZE - 10_240)
    with OpenedRegions([handed_over(CudaRegion.of(region, PaperDriver()))], PaperDriver()) as (
        one,
    ):
        assert one.base_address + one.length_bytes == 7 * BASE + SIZE


@pytest.mark.parametrize(
    "message",
    [
        pb.SharedRegion(name="bad"),
        pb.SharedRegion(name="bad", shared_memory="x", cuda=pb.CudaAllocation()),
        pb.SharedRegion(name="bad", cuda=pb.CudaAllocation(ipc_handle=HANDLE)),
        pb.SharedRegion(name="bad", cuda=pb.CudaAllocation(ipc_handle=HANDLE + b"h",
                                                           device_uuid=UUIDS[0])),
        pb.SharedRegion(name="bad", cuda=pb.CudaAllocation(ipc_handle=b"", device_uuid=UUIDS[0])),
    ],
    ids=["neither", "both", "no uuid", "long handle", "no handle"],
)  # fmt: skip
def test_messages_that_are_no_memory_are_refused(message: pb.SharedRegion) -> None:
    with pytest.raises(RegionInvalidError):
        OpenedRegions([message], PaperDriver())


def test_a_device_that_is_not_here_is_named() -> None:
    message = handed_over(CudaRegion.of(device_region(), PaperDriver()))
    with (
        pytest.raises(CudaUnavailableError, match=UUIDS[0].hex()),
        OpenedRegions([message], PaperDriver(UUIDS[1:])),
    ):
        pytest.fail("opened")


def test_an_allocation_whose_size_is_unknown_is_closed_again() -> None:
    message = handed_over(CudaRegion.of(device_region(), PaperDriver()))
    driver = PaperDriver()
    driver.fails_after_opening = True
    with pytest.raises(AgentError), OpenedRegions([message], driver):
        pytest.fail("opened")
    assert driver.opened == []


def test_what_can_not_be_exported_is_refused_in_the_engine() -> None:
    with pytest.raises(RegionInvalidError, match="host memory"):
        CudaRegion.of(RegionMemory("r", 4096, 1, 64), PaperDriver())
    with pytest.raises(RegionInvalidError, match="outside of a CUDA allocation"):
        CudaRegion.of(device_region(page_count=2**20), PaperDriver())
    with pytest.raises(CudaUnavailableError, match="no CUDA device 2"):
        CudaRegion.of(device_region(device_id=2), PaperDriver())


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU is present: test_vram.py hands it over"
)
async def test_without_a_gpu_engine_and_daemon_say_so(tmp_path: Path) -> None:
    with pytest.raises(CudaUnavailableError, match="no CUDA driver here"):
        CudaRegion.of(device_region())
    async with FakeBroker() as fake:
        daemon = AgentDaemon(fake.address, tmp_path / "agent.sock")
        await daemon.start()
        try:
            region = CudaRegion("r", CudaHandle(HANDLE, UUIDS[0]), 0, 4, 1024)
            agent = DaemonAgent(tmp_path / "agent.sock", "D", "life-1", 0, [region])
            with pytest.raises(BrokerCallError, match="no CUDA driver here") as caught:
                await asyncio.to_thread(agent.start)
            assert caught.value.reason == "CUDA_UNAVAILABLE"
        finally:
            await daemon.close()
