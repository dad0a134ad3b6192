"""The law of the reader, with a transport whose reads end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agent_harness.reader_scene import QUARANTINE_S, FakeTransport, Scene, one_byte
from agent_harness.waiting import until
from restow.agents.memory.errors import (
    AgentClosedError,
    PeerLostError,
    ReadDeadlineError,
    ReadFailedError,
    ReadNotBegunError,
)
from restow.agents.reading.lane import Flight, Known, Read
from restow.agents.reading.reader import RETIRED_S, Reader


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("restow.agents.reading.reader.POLL_S", 0.0)
    return Scene()


async def test_a_read_is_done_when_all_its_parts_are(scene: Scene) -> None:
    task = await scene.begin("a", "b")
    scene.lanes[0].ends["a"] = None
    await scene.settle()
    assert not task.done()
    scene.lanes[0].ends["b"] = None
    await task


async def test_after_its_deadline_a_read_is_waited_for_and_then_late(scene: Scene) -> None:
    task = await scene.begin("a")
    await scene.be_late()
    assert not task.done(), "it may still write"
    scene.lanes[0].ends["a"] = None
    with pytest.raises(ReadDeadlineError):
        await task
    assert not scene.reader._retired
    assert not scene.lanes[0].closed


async def test_the_other_parts_are_waited_for_when_one_fails(scene: Scene) -> None:
    task = await scene.begin("a", "b")
    scene.lanes[0].ends["a"] = ReadFailedError("broke")
    await scene.settle()
    assert not task.done()
    scene.lanes[0].ends["b"] = None
    with pytest.raises(ReadFailedError):
        await task


async def test_what_no_transport_should_raise_is_heard_when_nothing_flies_any_more(
    scene: Scene,
) -> None:
    # A device may break while a thread is bound to it.
    odd = RuntimeError("CUDA error: an illegal memory access was encountered")
    flying = await scene.begin("a")
    right = scene.lanes[0].post

    def second_breaks(read: Read, check: Callable[[], None]) -> Flight:
        if read.peer == "b":
            raise odd
        return right(read, check)

    scene.lanes[0].post = second_breaks  # type: ignore[method-assign]
    task = asyncio.create_task(scene.reader.read([one_byte("a"), one_byte("b")], 1000.0))
    await until(lambda: len(scene.lanes[0].posted) == 2)
    await scene.settle()
    assert not task.done(), "the first of its reads may still write"
    scene.lanes[0].ends["a"] = None
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await task
    await flying
    assert scene.reader.counts["fake"].errors == 1


async def test_a_read_of_which_nothing_is_known_any_more_ends_with_its_lane(scene: Scene) -> None:
    task = await scene.begin("a", deadline_s=1000.0)
    scene.lanes[0].ends["a"] = RuntimeError("CUDA error: unspecified launch failure")
    await scene.settle()
    assert not task.done(), "it may still write"
    scene.now_s += QUARANTINE_S + 0.1
    with pytest.raises(RuntimeError, match="launch failure"):
        await task
    assert scene.lanes[0].closed


async def test_a_read_that_never_ends_costs_its_lane_but_no_other_read(scene: Scene) -> None:
    stuck = await scene.begin("a")
    healthy = await scene.begin("b", deadline_s=1000.0)
    await scene.be_late()
    scene.now_s += QUARANTINE_S + 0.1
    await scene.settle()
    assert len(scene.reader._retired) == 1
    assert not stuck.done(), "the lane still flies, so it may still write"
    new = await scene.begin("a", deadline_s=1000.0)
    assert len(scene.lanes) == 2
    assert [flight.peer for flight in scene.lanes[1].posted] == ["a"]

    scene.lanes[0].ends["b"] = None
    await healthy
    with pytest.raises(ReadDeadlineError):
        await stuck
    assert scene.lanes[0].closed
    assert not scene.reader._retired
    scene.lanes[1].ends["a"] = None
    await new


async def test_a_long_read_beside_one_that_never_ends_fails_as_late_when_the_lane_closes(
    scene: Scene,
) -> None:
    stuck = await scene.begin("a")
    long = await scene.begin("b", deadline_s=1000.0)
    await scene.be_late()
    scene.now_s += QUARANTINE_S + 0.1
    await scene.settle()
    scene.now_s += RETIRED_S
    await scene.settle()
    assert not stuck.done()
    scene.now_s += 0.1
    ended = await asyncio.gather(stuck, long, return_exceptions=True)
    assert [type(error) for error in ended] == [ReadDeadlineError] * 2
    assert scene.lanes[0].closed


async def test_two_stuck_reads_on_one_lane_end_together(scene: Scene) -> None:
    first, second = await scene.begin("a"), await scene.begin("b")
    await scene.be_late()
    scene.now_s += QUARANTINE_S + 0.1
    ended = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(error) for error in ended] == [ReadDeadlineError] * 2
    assert scene.lanes[0].closed


async def test_a_broken_connection_is_made_anew(scene: Scene) -> None:
    task = await scene.begin("a")
    scene.lanes[0].ends["a"] = PeerLostError("gone")
    with pytest.raises(PeerLostError):
        await task
    scene.lanes[0].ends["a"] = None
    await (await scene.begin("a"))
    assert scene.lanes[0].added.count("a") == 2


async def test_a_peer_is_forgotten_when_its_last_read_has_ended(scene: Scene) -> None:
    task = await scene.begin("a")
    scene.reader.forget_peer("a")
    await scene.settle()
    assert "a" in scene.lanes[0].peers
    scene.lanes[0].ends["a"] = None
    with pytest.raises(PeerLostError):
        await task
    assert "a" not in scene.lanes[0].peers
    with pytest.raises(PeerLostError, match="not known"):
        await scene.reader.read([one_byte("a")], 1000.0)


async def test_closing_ends_a_read_that_is_well(scene: Scene) -> None:
    task = await scene.begin("a", deadline_s=1000.0)
    scene.reader.close()
    with pytest.raises(AgentClosedError):
        await task
    assert scene.lanes[0].closed


async def test_nothing_is_posted_after_the_deadline(scene: Scene) -> None:
    with pytest.raises(ReadNotBegunError):
        await scene.reader.read([one_byte("a")], 99.0)
    assert not scene.lanes[0].posted


async def test_reads_are_counted_and_those_of_closed_lanes_stay(scene: Scene) -> None:
    good = await scene.begin("b")
    scene.lanes[0].ends["b"] = None
    await good
    broken = await scene.begin("a")
    scene.lanes[0].ends["a"] = ReadFailedError("broke")
    with pytest.raises(ReadFailedError):
        await broken
    counts = scene.reader.counts["fake"]
    assert (counts.reads, counts.read_bytes, counts.errors) == (1, 1, 1)
    assert (scene.reader.lanes, scene.reader.lanes_given_up) == (1, 0)

    del scene.lanes[0].ends["a"]
    stuck = await scene.begin("a")
    await scene.be_late()
    scene.now_s += QUARANTINE_S + 0.1
    with pytest.raises(ReadDeadlineError):
        await stuck
    assert (scene.reader.lanes, scene.reader.lanes_given_up) == (0, 1)
    counts = scene.reader.counts["fake"]
    assert (counts.reads, counts.read_bytes, counts.errors) == (1, 1, 2)
    again = await scene.begin("b", deadline_s=1000.0)
    scene.lanes[1].ends["b"] = None
    await again
    assert scene.reader.counts["fake"].reads == 2
    scene.reader.close()
    assert scene.reader.counts["fake"].reads == 2


async def test_counts_never_fall_while_a_lane_ends(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another thread may ask at any time: an engine's counters must not go back.
    good = await scene.begin("b")
    scene.lanes[0].ends["b"] = None
    await good
    seen: list[int] = []

    def look(_: object) -> None:
        seen.append(scene.reader.counts["fake"].reads)

    monkeypatch.setattr(type(scene.lanes[0]), "close", look)
    stuck = await scene.begin("a")
    await scene.be_late()
    scene.now_s += QUARANTINE_S + 0.1
    with pytest.raises(ReadDeadlineError):
        await stuck
    again = await scene.begin("b", deadline_s=1000.0)
    scene.lanes[1].ends["b"] = None
    await again
    monkeypatch.setattr(scene.reader._threads, "shutdown", lambda: look(None))
    scene.reader.close()
    assert seen == [1, 2, 2]
    assert scene.reader.counts["fake"].reads == 2


async def test_a_peer_is_tried_when_it_is_added_and_its_first_read_waits_for_that() -> None:
    tried: list[str] = []
    passed = asyncio.Event()

    async def try_peer(peer: str, metadata: bytes) -> None:
        tried.append(peer)
        await passed.wait()

    lane = FakeTransport()
    lane.copies = True
    reader = Reader(lambda: [lane], QUARANTINE_S, lambda: 0.0, try_peer)
    reader.add_peer("a", b"metadata")
    await until(lambda: tried == ["a"])
    read = asyncio.create_task(reader.read([one_byte("a")], 1000.0))
    for _ in range(5):  # let every task take its turn
        await asyncio.sleep(0)
    assert not lane.posted
    passed.set()
    await read
    await reader.read([one_byte("a")], 1000.0)
    assert tried == ["a"]
    reader.add_peer("a", b"other metadata")
    await reader.read([one_byte("a")], 1000.0)
    assert tried == ["a", "a"]


async def test_a_peer_that_passed_its_trial_is_connected_before_it_is_read(scene: Scene) -> None:
    scene.reader.add_peer("new", b"metadata")
    await until(lambda: "new" in scene.lanes[0].added)
    task = await scene.begin("new")
    assert scene.lanes[0].added.count("new") == 1
    scene.lanes[0].ends["new"] = None
    await task
    scene.reader.forget_peer("new")
    assert "new" not in scene.lanes[0].peers


async def test_a_peer_that_can_not_be_connected_fails_its_first_read(scene: Scene) -> None:
    prepare, tried = scene.lanes[0].prepare, list[str]()

    def fails(peer: str, known: Known) -> None:
        if peer == "new":
            tried.append(peer)
            raise PeerLostError("its host is gone")

    scene.lanes[0].prepare = fails  # type: ignore[method-assign]
    scene.reader.add_peer("new", b"metadata")
    await until(lambda: tried == ["new"])
    with pytest.raises(PeerLostError, match="its host is gone"):
        await scene.reader.read([one_byte("new")], 101.0)
    scene.lanes[0].prepare = prepare  # type: ignore[method-assign]
    task = await scene.begin("new")
    scene.lanes[0].ends["new"] = None
    await task


async def test_a_peer_that_is_gone_before_its_trial_ends_is_not_connected(scene: Scene) -> None:
    scene.reader.add_peer("gone", b"metadata")
    scene.reader.forget_peer("gone")
    await scene.settle()
    task = await scene.begin("a")
    scene.lanes[0].ends["a"] = None
    await task
    assert "gone" not in scene.lanes[0].added


async def test_a_trial_that_failed_before_a_read_is_made_again() -> None:
    outcomes: list[Exception | None] = [PeerLostError("not yet", agent="a"), None]

    async def try_peer(peer: str, metadata: bytes) -> None:
        if (failure := outcomes.pop(0)) is not None:
            raise failure

    lane = FakeTransport()
    lane.copies = True
    reader = Reader(lambda: [lane], QUARANTINE_S, lambda: 0.0, try_peer)
    reader.add_peer("a", b"metadata")
    await until(lambda: len(outcomes) == 1)
    for _ in range(5):  # let every task take its turn
        await asyncio.sleep(0)
    await reader.read([one_byte("a")], 1000.0)
    assert lane.posted
