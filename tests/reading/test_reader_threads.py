"""Large reads: posted beside the event loop, and shared out where threads copy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from agent_harness.reader_scene import QUARANTINE_S, Scene, by_nixl
from agent_harness.waiting import until
from restow.agents.binding.descriptors import Descriptors
from restow.agents.errors import (
    AgentClosedError,
    PeerLostError,
    ReadDeadlineError,
    ReadFailedError,
    ReadNotBegunError,
    TransportFailedError,
)
from restow.agents.memory.regions import HOST
from restow.agents.reading.nixl_reads import NixlReads
from restow.agents.reading.reader import LARGE_BYTES, SHARE_BYTES, Reader
from restow.agents.reading.transport import Read

LONG_S = 1000.0


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("restow.agents.reading.reader.POLL_S", 0.0)


@pytest.fixture
def copying() -> Iterator[Scene]:
    scene = Scene(threads=2, copies=True)
    yield scene
    for lane in scene.lanes:
        lane.go_on.set()
    scene.reader.close()


def large(peer: str = "a", pieces: int = 8, size_bytes: int = 2 * SHARE_BYTES) -> Read:
    """Pieces at addresses that tell them apart."""
    at = np.arange(pieces, dtype=np.int64)
    lengths = np.full(pieces, size_bytes // pieces, np.int64)
    return Read(peer, Descriptors(at << 40, (at + 100) << 40, lengths), HOST, HOST)


async def widened(scene: Scene) -> None:
    """After one large read from ``a`` the second lane has been opened."""
    await scene.reader.read([large()], LONG_S)
    await until(lambda: len(scene.lanes) == 2)


def watched(scene: Scene) -> list[tuple[float, float]]:
    """What shared reads teach from now on."""
    seen: list[tuple[float, float]] = []
    scene.reader._spreading.saw = lambda *read: seen.append(read)  # type: ignore[method-assign]
    return seen


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
    assert copying.reader.lanes == 1


async def test_what_a_thread_copies_is_shared_out_next_time(copying: Scene) -> None:
    await widened(copying)
    assert len(copying.lanes[0].pieces) == 1
    read = large(pieces=3, size_bytes=3 * SHARE_BYTES)
    await copying.reader.read([read], LONG_S)
    assert copying.reader.lanes == 2
    parts = [copying.lanes[0].pieces[1], copying.lanes[1].pieces[0]]
    for part, expected in zip(parts, read.descriptors.split(2), strict=True):
        np.testing.assert_array_equal(part.src_address, expected.src_address)
        np.testing.assert_array_equal(part.dst_address, expected.dst_address)
        np.testing.assert_array_equal(part.length_bytes, expected.length_bytes)


async def test_a_read_too_small_for_two_is_not_shared_out(copying: Scene) -> None:
    await widened(copying)
    await copying.reader.read([large(size_bytes=2 * SHARE_BYTES - 8)], LONG_S)
    assert not copying.lanes[1].pieces


async def test_what_is_to_be_read_alone_is_not_shared_out_and_teaches_nothing(
    copying: Scene,
) -> None:
    await widened(copying)
    seen = watched(copying)
    await copying.reader.read([large()], LONG_S, alone=True)
    assert not copying.lanes[1].pieces
    assert not seen
    await copying.reader.read([large()], LONG_S)
    assert len(seen) == 1


async def test_a_shared_read_teaches_once_what_all_its_threads_did(copying: Scene) -> None:
    """The post of each lane takes 5 ms of its thread; both together run for longer than either."""
    await widened(copying)
    await copying.reader.read([large("b")], LONG_S)
    for lane in copying.lanes:
        lane.post_s = 0.005
    seen = watched(copying)
    await copying.reader.read([large(), large("b")], LONG_S)
    ((ran_s, elapsed_s),) = seen
    assert ran_s >= 4 * 0.005, "two peers, on two lanes"
    assert elapsed_s >= 2 * 0.005


async def test_a_read_that_failed_teaches_nothing(copying: Scene) -> None:
    await widened(copying)
    seen = watched(copying)
    copying.lanes[1].refusal = ReadFailedError("broke")
    with pytest.raises(ReadFailedError):
        await copying.reader.read([large()], LONG_S)
    assert not seen


async def test_one_thread_opens_no_further_lane() -> None:
    scene = Scene(threads=1, copies=True)
    for _ in range(2):
        await scene.reader.read([large()], LONG_S)
    assert len(scene.lanes) == 1
    scene.reader.close()


async def test_reads_that_the_network_carries_are_not_shared_out() -> None:
    scene = Scene(threads=2, copies=False)
    scene.lanes[0].ends["a"] = None
    for _ in range(2):
        await scene.reader.read([large()], LONG_S)
    assert len(scene.lanes) == 1
    scene.reader.close()


async def test_only_peers_that_are_known_to_be_copied_are_shared_out(copying: Scene) -> None:
    await widened(copying)
    await copying.reader.read([large("b")], LONG_S)
    assert not copying.lanes[1].pieces


async def test_a_share_that_never_ends_costs_its_lane_alone(copying: Scene) -> None:
    await widened(copying)
    await copying.reader.read([large()], LONG_S)
    copying.lanes[1].copies = False
    task = asyncio.create_task(copying.reader.read([large()], 101.0))
    await until(lambda: len(copying.lanes[1].posted) == 2)
    await copying.settle()
    copying.now_s = 101.1
    await copying.settle()
    assert not task.done(), "it may still write"
    copying.now_s += QUARANTINE_S + 0.1
    with pytest.raises(ReadDeadlineError):
        await task
    assert [lane.closed for lane in copying.lanes] == [False, True]


async def test_a_peer_that_leaves_while_its_read_is_posted_is_forgotten_later(
    copying: Scene,
) -> None:
    lane = copying.lanes[0]
    lane.go_on.clear()
    task = asyncio.create_task(copying.reader.read([large()], LONG_S))
    await until(lambda: bool(lane.posted))
    copying.reader.forget_peer("a")
    assert lane.peers == ["a"]
    lane.go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    copying.reader.progress()
    assert lane.peers == []
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


async def test_a_lane_that_can_not_be_opened_is_done_without() -> None:
    scene = Scene(threads=2, copies=True)
    unopened = [by_nixl(scene.lanes[0])]

    def open_lane() -> list[NixlReads]:
        if not unopened:
            raise TransportFailedError("no more")
        return [unopened.pop()]

    scene.reader = Reader(open_lane, threads=2)
    scene.reader.add_peer("a", b"metadata")
    for _ in range(3):
        await scene.reader.read([large()], float("inf"))
        await scene.settle()
    assert scene.reader.lanes == 1
    assert len(scene.lanes[0].pieces) == 3
    scene.reader.close()
