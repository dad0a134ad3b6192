"""The hasher alone, and the thread that it works on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_harness.waiting import until
from restow.agents.binding.extents import Extents, one_extent
from restow.agents.copying.copier import Copier, Hasher
from restow.agents.memory.regions import HOST


async def test_the_loop_goes_on_while_much_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def slow(self: Hasher, extents: Extents) -> bytes:
        begun.set()
        assert end.wait(20)
        return b"digest"

    monkeypatch.setattr(Hasher, "_digest", slow)
    copier = Copier()
    hasher = Hasher(HOST, copier)
    task = asyncio.create_task(hasher.digest(one_extent(4096, 2 << 20)))
    await until(begun.is_set)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "given up while memory is being read"
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    copier.close()
