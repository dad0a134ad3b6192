"""Memory of other processes that is mapped and copied by a device, which here is a late stand-in.

The driver of these tests shares "device" memory as POSIX shared memory, so bytes really pass
between two processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from agent_harness.nixl_source import known_bytes
from agent_harness.processes import READY, Child, child
from agent_harness.reader_scene import FakeTransport
from agent_harness.waiting import until
from restow.agents.binding.copies import Copies, Grid
from restow.agents.binding.reads import Descriptors
from restow.agents.copying.copier import run_copies
from restow.agents.memory.cuda import HANDLE_BYTES, CudaDriver
from restow.agents.memory.errors import (
    CopyFailedError,
    OrderInvalidError,
    PeerLostError,
    ReadDeadlineError,
    ReadFailedError,
    RegionInvalidError,
)
from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace
from restow.agents.memory.shared_memory import SharedMemory, mappable
from restow.agents.reading import same_device
from restow.agents.reading.host_memory import HostMark, HostMemory, HostRanges
from restow.agents.reading.lane import MAPPED, NIXL, Known, Read
from restow.agents.reading.reader import Reader
from restow.agents.reading.same_device import SameDevice
from restow.broker.layout import DType
from restow.v1 import agent_link_pb2 as pb

NAME = "P.0-abc"
UUID = bytes(range(16))
AREA_BYTES = (1 << 20, 3 << 18)
SIZE_BYTES = sum(AREA_BYTES)
GAP_BYTES = 4096
POISON = 0xA5
HERE, THERE = MemoryPlace(MemoryKind.CUDA, 0), MemoryPlace(MemoryKind.CUDA, 3)


class SharingDriver(CudaDriver):
    """A driver of one device, whose allocations are POSIX shared memory."""

    def __init__(self, *own: SharedMemory, uuids: tuple[bytes, ...] = (UUID,)) -> None:
        self.mapped = list(own)
        self._between: list[mmap.mmap] = []
        self.uuids = list(uuids)

    def device_uuids(self) -> list[bytes]:
        return self.uuids

    def allocation(self, address: int, device_id: int) -> tuple[int, int]:
        for memory in self.mapped:
            if memory.address <= address < memory.address + memory.size_bytes:
                return memory.address, memory.size_bytes
        raise RegionInvalidError(f"nothing is allocated at {address}")

    def export(self, address: int, device_id: int) -> bytes:
        (memory,) = (memory for memory in self.mapped if memory.address == address)
        return memory.name.encode().ljust(HANDLE_BYTES, b"\0")

    def open(self, ipc_handle: bytes, device_id: int) -> int:
        # Leave gaps, so that two areas do not lie as far apart as in their owner.
        self._between.append(mmap.mmap(-1, 1 << 20 << len(self._between)))
        self.mapped.append(SharedMemory.attach(ipc_handle.rstrip(b"\0").decode()))
        return self.mapped[-1].address

    def close(self, address: int, device_id: int) -> None:
        (memory,) = (memory for memory in self.mapped if memory.address == address)
        self.mapped.remove(memory)
        memory.close()


def _serve(pipe: Connection, shows: str) -> None:
    """Serve two areas of known bytes until the pipe ends; a message wipes the mark.

    The areas lie in the middle of an allocation each, the second at lower addresses.
    """
    with contextlib.ExitStack() as stack:
        size_bytes = max(AREA_BYTES) + 2 * GAP_BYTES
        shared = [stack.enter_context(SharedMemory.create(size_bytes)) for _ in AREA_BYTES]
        shared.sort(key=lambda memory: -memory.address)
        known, areas, end = known_bytes(SIZE_BYTES), [], 0
        for area_bytes, memory in zip(AREA_BYTES, shared, strict=True):
            begin, end = end, end + area_bytes
            memory.buffer[GAP_BYTES : GAP_BYTES + area_bytes] = known[begin:end].data
            areas.append((memory.address + GAP_BYTES, area_bytes, THERE))
        driver = SharingDriver(*shared, uuids=(b"x" * 16, b"y" * 16, b"z" * 16, UUID))
        host = (1 << 40, 4096, HOST)
        shown = mappable([areas[0], host, areas[1]], driver)
        if shows == "an area behind its allocation":
            shown.areas[0].page_stride_bytes += GAP_BYTES + 1
        elif shows == "areas without addresses":
            del shown.addresses[:]
        elif shows == "memory that does not exist":
            shown.areas[0].cuda.ipc_handle = b"restow-mem-none".ljust(HANDLE_BYTES, b"\0")
        elif shows == "memory of another device":
            shown.areas[1].cuda.device_uuid = b"x" * 16
        elif shows == "areas on each other":
            shown.addresses[1] = shown.addresses[0] + 1
        elif shows == "nothing":
            shown.Clear()
        mark = HostMark(NAME, HostRanges.of([]), shown)
        pipe.send(READY)
        pipe.send((mark.show().encoded(), [address for address, _, _ in areas]))
        with contextlib.suppress(EOFError):
            pipe.recv()
            mark.wipe()
            pipe.send("done")
            pipe.recv()


class LateCopy:
    """Copies that a device makes when the test says so, or when they are waited for."""

    def __init__(self, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> None:
        one, uint8 = np.ones(1, np.int64), np.full(1, int(DType.UINT8), np.int64)
        self.length = length
        self._grid = Grid(src, dst, length, one, one, uint8, uint8)
        self.is_done = self.is_broken = False

    def go(self) -> None:
        if not self.is_done:
            run_copies(Copies((self._grid,)), torch.device("cpu"))
        self.is_done = True

    def has_ended(self) -> bool:
        if self.is_broken:
            raise CopyFailedError("CUDA error: an illegal memory access was encountered")
        return self.is_done

    def wait(self) -> None:
        self.go()


class Scene:
    """Poisoned memory here, and a process on the same device whose memory is known."""

    def __init__(self, source: Child) -> None:
        self.source = source
        shown, self.areas = source.receive()
        memory = HostMemory.decoded(shown)
        assert memory is not None
        self.known = Known(b"metadata", memory)
        self.data = np.full(SIZE_BYTES, POISON, np.uint8)
        self.base = self.data.ctypes.data
        self.driver = SharingDriver()
        self.copies: list[LateCopy] = []
        self.transport = self.transport_at(HERE)

    def transport_at(self, place: MemoryPlace, uuids: tuple[bytes, ...] = (UUID,)) -> SameDevice:
        self.driver.uuids = list(uuids)
        own = HostRanges.of([(self.base, len(self.data), place)], place)
        return SameDevice(place, own, self._copy, self.driver)

    def _copy(self, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> LateCopy:
        self.copies.append(LateCopy(src, dst, length))
        return self.copies[-1]

    def read(self, src: np.ndarray, dst: np.ndarray, length: np.ndarray) -> Read:
        """Return the read of pieces; ``src`` counts the bytes of both areas."""
        first_bytes, (first, second) = AREA_BYTES[0], self.areas
        at = np.where(src < first_bytes, first + src, second + src - first_bytes)
        return Read(NAME, Descriptors(at, self.base + dst, length), THERE, HERE)

    def one(self, src: int = 0, dst: int = 0, length: int = 100) -> Read:
        return self.read(*(np.array([number]) for number in (src, dst, length)))

    def at(self, address: int, length: int) -> Read:
        """Return the read of one piece at an address of the peer."""
        return Read(NAME, Descriptors.single(address, self.base, length), THERE, HERE)

    def begun(self, transport: SameDevice) -> bool:
        """Return whether a transport takes a read, after it looked at the peer."""
        transport.prepare(NAME, self.known)
        return transport.takes(self.one())

    def untouched(self) -> bool:
        return bool((self.data == POISON).all())


@pytest.fixture
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    async with child(_serve, getattr(request, "param", "all")) as source:
        made = Scene(source)
        yield made
        made.transport.close()
        assert not made.driver.mapped, "memory stays mapped"


def _nothing() -> None:
    """Do nothing: nobody asks for the end of a read."""


async def test_pieces_arrive_when_the_device_is_done_and_nothing_else_changes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scene.begun(scene.transport)
    rng = np.random.default_rng(7)
    known = known_bytes(SIZE_BYTES)
    for count, piece_bytes in ((1, 1 << 30), (2, 5000), (300, 700), (2000, 1 << 30)):
        monkeypatch.setattr(same_device, "PIECE_BYTES", piece_bytes)
        scene.data[:] = POISON
        slot = SIZE_BYTES // count
        length = rng.integers(0, slot, count)
        src, dst = (slot * rng.permutation(count) + rng.integers(0, slot - length) for _ in "sd")
        left = np.where(src < AREA_BYTES[0], AREA_BYTES[0], SIZE_BYTES) - src
        length = np.minimum(length, left)  # a piece is of one area
        read = scene.read(src, dst, length)
        assert scene.transport.takes(read)
        flight = scene.transport.post(read, _nothing)
        assert not scene.transport.poll(flight)
        assert scene.untouched()
        assert scene.copies[-1].length.max(initial=0) <= piece_bytes
        scene.copies[-1].go()
        assert scene.transport.poll(flight)
        scene.transport.release(flight)
        expected = np.full_like(scene.data, POISON)
        for begin, end, size in zip(src, dst, length, strict=True):
            expected[end : end + size] = known[begin : begin + size]
        assert (scene.data == expected).all(), count


async def test_only_what_is_mapped_is_taken(scene: Scene) -> None:
    assert scene.begun(scene.transport)
    for begin, size in zip(scene.areas, AREA_BYTES, strict=True):
        for first, length in ((0, size), (size - 1, 1)):
            assert scene.transport.takes(scene.at(begin + first, length))
        for first, length in ((0, size + 1), (size - 1, 2), (-1, 2), (-1, 1), (size, 1)):
            assert not scene.transport.takes(scene.at(begin + first, length))
    assert not scene.transport.takes(replace(scene.one(), src=HOST))
    assert not scene.transport.takes(replace(scene.one(), dst=HOST))
    assert not scene.transport.takes(replace(scene.one(), peer="somebody"))


async def test_nothing_lands_outside_of_the_memory_registered_here(scene: Scene) -> None:
    assert scene.begun(scene.transport)
    for dst in (-1, len(scene.data) - 99):
        with pytest.raises(ReadFailedError, match="outside"):
            scene.transport.post(scene.one(0, dst, 100), _nothing)
    assert not scene.copies


@pytest.mark.parametrize(
    "scene",
    [
        "nothing",
        "an area behind its allocation",
        "areas without addresses",
        "memory that does not exist",
        "memory of another device",
        "areas on each other",
    ],
    indirect=True,
)
async def test_a_peer_that_can_not_be_mapped_whole_is_left_to_others(scene: Scene) -> None:
    assert not scene.begun(scene.transport_at(HERE, (UUID, b"x" * 16)))
    assert not scene.driver.mapped


async def test_only_memory_of_the_same_device_is_mapped(scene: Scene) -> None:
    other = MemoryPlace(MemoryKind.CUDA, 1)
    elsewhere = scene.transport_at(other, (UUID, b"x" * 16))
    elsewhere.prepare(NAME, scene.known)
    assert not elsewhere.takes(replace(scene.one(), dst=other))
    unseen = scene.transport_at(HERE, (b"x" * 16,))
    assert not scene.begun(unseen)
    assert not scene.driver.mapped
    there = scene.transport_at(other, (b"x" * 16, UUID))
    there.prepare(NAME, scene.known)
    assert there.takes(replace(scene.one(), dst=other))
    there.close()


async def test_a_peer_of_another_name_or_without_a_mark_is_not_mapped(scene: Scene) -> None:
    scene.transport.prepare("somebody", scene.known)
    assert not scene.transport.takes(replace(scene.one(), peer="somebody"))
    scene.transport.prepare("nobody", Known(b"metadata"))
    assert not scene.transport.takes(replace(scene.one(), peer="nobody"))
    assert not scene.driver.mapped


@pytest.mark.parametrize("how", ["wiped", "killed"])
async def test_a_peer_that_is_gone_before_the_last_byte_spoils_the_read(
    how: str, scene: Scene
) -> None:
    assert scene.begun(scene.transport)
    flight = scene.transport.post(scene.one(), _nothing)
    if how == "killed":
        await scene.source.kill()
    else:
        scene.source.tell("wipe")
        assert scene.source.receive() == "done"
    assert not scene.transport.poll(flight), "the copy has not ended"
    scene.copies[0].go()
    with pytest.raises(PeerLostError):
        scene.transport.poll(flight)


async def test_a_device_that_fails_fails_the_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scene.begun(scene.transport)
    flight = scene.transport.post(scene.one(), _nothing)
    scene.copies[0].is_broken = True
    with pytest.raises(ReadFailedError, match="illegal memory access"):
        scene.transport.poll(flight)
    scene.transport.release(flight)

    def fail(*_: np.ndarray) -> LateCopy:
        raise CopyFailedError("CUDA error: out of memory")

    monkeypatch.setattr(scene, "_copy", fail)
    broken = scene.transport_at(HERE)
    assert scene.begun(broken)
    with pytest.raises(ReadFailedError, match="out of memory"):
        broken.post(scene.one(), _nothing)
    broken.close()


async def test_a_late_read_is_not_begun(scene: Scene) -> None:
    assert scene.begun(scene.transport)

    def late() -> None:
        raise ReadDeadlineError("late")

    with pytest.raises(ReadDeadlineError):
        scene.transport.post(scene.one(), late)
    assert not scene.copies


async def test_a_copy_that_is_given_up_has_ended_when_it_is_released(scene: Scene) -> None:
    assert scene.begun(scene.transport)
    flight = scene.transport.post(scene.one(), _nothing)
    scene.transport.release(flight)
    assert scene.copies[0].is_done
    scene.transport.release(flight)


async def test_a_forgotten_peer_is_unmapped_and_may_come_back(scene: Scene) -> None:
    assert scene.begun(scene.transport)
    assert len(scene.driver.mapped) == 2
    scene.transport.forget(NAME)
    assert not scene.driver.mapped
    assert not scene.transport.takes(scene.one())
    scene.transport.forget(NAME)
    assert scene.begun(scene.transport)


async def test_in_a_reader_late_copies_end_before_a_read_that_missed_its_grant(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("restow.agents.reading.reader.POLL_S", 0.0)
    nixl, now_s = FakeTransport(), 0.0
    nixl.copies = True
    reader = Reader(lambda: [scene.transport, nixl], clock=lambda: now_s)
    reader.add_peer(NAME, b"metadata", scene.known.host_memory)
    outside = Read(NAME, Descriptors.single(1, scene.base, 1), THERE, HERE)
    await reader.read([outside], 10.0)
    task = asyncio.create_task(reader.read([scene.one()], 10.0))
    await until(lambda: bool(scene.copies))
    now_s = 11.0
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    scene.copies[0].go()
    with pytest.raises(ReadDeadlineError):
        await task
    assert (reader.counts[MAPPED].reads, reader.counts[NIXL].reads) == (1, 0)
    assert len(nixl.posted) == 1
    reader.close()


@pytest.mark.parametrize(
    "behind",
    [b"\xff" * 8, (1 << 40).to_bytes(8, "little"), (3).to_bytes(8, "little") + b"\xff\xff\xff"],
    ids=["less than no bytes", "too many bytes", "bytes that are no message"],
)
def test_what_can_not_be_mappable_memory_is_refused(behind: bytes) -> None:
    memory = HostMark(NAME, HostRanges.of([(4096, 4096, HOST)])).show()
    at = memory.mark_address + len(memory.mark)
    written = np.array([1, 4096, 8192]).tobytes() + behind
    with pytest.raises(OrderInvalidError):
        memory.mappable(lambda address, size: written[address - at :][:size])


def test_a_process_of_an_earlier_release_shows_nothing_to_map() -> None:
    # It wrote nothing behind its ranges, and the rest of its mapping is zeroes.
    memory = HostMark(NAME, HostRanges.of([(4096, 4096, HOST)])).show()
    at = memory.mark_address + len(memory.mark)
    written = np.array([1, 4096, 8192]).tobytes() + bytes(4096)
    assert memory.mappable(lambda address, size: written[address - at :][:size]) == (
        pb.MappableMemory()
    )
