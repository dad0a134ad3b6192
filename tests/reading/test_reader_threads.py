"""Large reads are posted beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from agent_harness.reader_scene import Scene
from agent_harness.waiting import until
from restow.agents.binding.reads import Descriptors
from restow.agents.memory.errors import (
    AgentClosedError,
    PeerLostError,
    ReadNotBegunError,
)
from restow.agents.memory.regions import HOST
from restow.agents.reading.lane import Read
from restow.agents.reading.reader import LARGE_BYTES

LONG_S = 1000.0


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("restow.agents.reading.reader.POLL_S", 0.0)


@pytest.fixture
async def copying() -> AsyncIterator[Scene]:
    scene = Scene(copies=True)
    yield scene
    for lane in scene.lanes:
        lane.go_on.set()
    scene.reader.close()


def large(peer: str = "a", pieces: int = 8, size_bytes: int = 2 * LARGE_BYTES) -> Read:
    """Return a large read of pieces at addresses that tell them apart."""
    at = np.arange(pieces, dtype=np.int64)
    lengths = np.full(pieces, size_bytes // pieces, np.int64)
    return Read(peer, Descriptors(at << 40, (at + 100) << 40, lengths), HOST, HOST)


async def test_a_large_read_leaves_the_loop_running(copying: Scene) -> None:
    copying.lanes[0].go_on.clear()
    task = asyncio.create_task(copying.reader.read([large()], LONG_S))
    await until(lambda: bool(copying.lanes[0].posted))
    copying.reader.progress()
    await copying.settle()
    assert not task.done()
    copying.lanes[0].go_on.set()
    await task
    assert copying.lanes[0].threads[0] != threading.get_ident()


async def test_a_small_read_stays_on_the_loop(copying: Scene) -> None:
    await copying.reader.read([large(size_bytes=LARGE_BYTES // 2)], LONG_S)
    assert copying.lanes[0].threads == [threading.get_ident()]


async def test_a_peer_that_leaves_while_its_read_is_posted_is_forgotten_later(
    copying: Scene,
) -> None:
    lane = copying.lanes[0]
    lane.go_on.clear()
    task = asyncio.create_task(copying.reader.read([large()], LONG_S))
    await until(lambda: bool(lane.posted))
    copying.reader.forget_peer("a")
    assert "a" in lane.peers
    lane.go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    copying.reader.progress()
    assert "a" not in lane.peers
    with pytest.raises(PeerLostError):
        await copying.reader.read([large()], LONG_S)


async def test_closing_waits_for_a_thread_that_copies(copying: Scene) -> None:
    lane = copying.lanes[0]
    lane.go_on.clear()
    task = asyncio.create_task(copying.reader.read([large()], LONG_S))
    await until(lambda: bool(lane.posted))
    threading.Timer(0.2, lane.go_on.set).start()
    copying.reader.close()
    assert lane.go_on.is_set(), "it did not wait"
    assert lane.closed
    with pytest.raises(AgentClosedError):
        await task


async def test_a_post_that_waited_until_the_end_is_not_made(copying: Scene) -> None:
    lane = copying.lanes[0]
    lane.go_on.clear()
    tasks = [
        asyncio.create_task(copying.reader.read([large(peer)], LONG_S)) for peer in ("a", "b", "b")
    ]
    await until(lambda: bool(lane.posted))
    await copying.settle()
    threading.Timer(0.2, lane.go_on.set).start()
    copying.reader.close()
    for task in tasks:
        with pytest.raises(AgentClosedError):
            await task
    assert len(lane.posted) == 1


async def test_a_post_that_waited_beyond_its_deadline_is_not_made(copying: Scene) -> None:
    lane = copying.lanes[0]
    lane.go_on.clear()
    first = asyncio.create_task(copying.reader.read([large()], LONG_S))
    await until(lambda: bool(lane.posted))
    second = asyncio.create_task(copying.reader.read([large("b")], 101.0))
    await copying.settle()
    copying.now_s = 101.1
    lane.go_on.set()
    await first
    with pytest.raises(ReadNotBegunError):
        await second
    assert [flight.peer for flight in lane.posted] == ["a"]
