"""The hasher alone: memory of several kinds, and the thread that it works on."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from agent_harness.waiting import until
from restow.agents.binding.extents import Extents, one_extent
from restow.agents.binding.pages import RegionTable
from restow.agents.copying.copier import Copier
from restow.agents.copying.hasher import Hasher
from restow.agents.memory.regions import HOST, MemoryKind, MemoryPlace


def test_memory_of_several_kinds_is_hashed_in_the_order_of_the_program() -> None:
    """Regions on two devices and staging in host memory, in turns."""
    gpus = [MemoryPlace(MemoryKind.CUDA, index) for index in range(2)]
    memory = RegionTable(np.array([1000, 5000]), np.array([100, 100]), np.array([10, 10], np.int64))
    hasher = Hasher(memory, gpus, Copier())
    address = np.array([1000, 1500, 5000, 100, 1999, 5999, 6000], np.int64)
    parts = list(hasher._by_place(Extents(address, np.full(7, 1))))
    assert [place for place, _ in parts] == [gpus[0], gpus[1], HOST, gpus[0], gpus[1], HOST]
    assert np.concatenate([part.address for _, part in parts]).tolist() == address.tolist()
    (whole,) = Hasher(memory, gpus[:1] * 2, Copier())._by_place(Extents(address, np.full(7, 1)))
    assert whole[0] == gpus[0]
    assert list(Hasher(memory, gpus, Copier())._by_place(Extents(address[:0], address[:0]))) == []


async def test_the_loop_goes_on_while_much_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def slow(self: Hasher, extents: Extents) -> bytes:
        begun.set()
        assert end.wait(20)
        return b"digest"

    monkeypatch.setattr(Hasher, "_digest", slow)
    copier = Copier()
    hasher = Hasher(RegionTable(*np.zeros((3, 0), np.int64)), (), copier)
    task = asyncio.create_task(hasher.digest(one_extent(4096, 2 << 20)))
    await until(begun.is_set)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "given up while memory is being read"
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    copier.close()
