"""Fences and write marks wait for a device, and no event loop waits with them."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from agent_harness.one_rank import embedded, embedded_on
from agent_harness.waiting import WAIT_S, until
from restow.agents import MemoryKind, RegionMemory
from restow.agents.execute.fences import ENDED_S, Fences, WriteMarks
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.memory.errors import AgentClosedError, CudaUnavailableError, ReadNotBegunError


class HeldEvent:
    """An event that comes to pass when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.waited_for = threading.Event()
        self.passed = threading.Event()

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.passed.wait(WAIT_S)
        if self._error is not None:
            raise self._error


async def test_a_fence_waits_for_its_event_and_for_no_other() -> None:
    said: list[str] = []
    fences = Fences(lambda handoff_id, _: said.append(handoff_id))
    slow, quick = HeldEvent(), HeldEvent()
    fences.fence("slow", slow)
    fences.fence("quick", quick)
    fences.fence("at once", None)
    assert said == ["at once"]
    await until(slow.waited_for.is_set)
    quick.passed.set()
    await until(lambda: "quick" in said)
    assert "slow" not in said
    slow.passed.set()
    await until(lambda: "slow" in said)


async def test_work_that_failed_and_work_that_was_given_up_are_not_fenced() -> None:
    said: list[str] = []
    fences = Fences(lambda handoff_id, _: said.append(handoff_id))
    failed, given_up, last = HeldEvent(RuntimeError("illegal address")), HeldEvent(), HeldEvent()
    fences.fence("failed", failed)
    fences.fence("given up", given_up)
    failed.passed.set()
    await until(given_up.waited_for.is_set)
    fences.cancel()
    given_up.passed.set()
    last.passed.set()
    fences.fence("last", last)
    await until(lambda: said == ["last"])


async def test_what_has_ended_a_moment_ago_is_fenced_again_for_another_broker_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    said: list[str] = []
    fences = Fences(lambda handoff_id, _: said.append(handoff_id))
    for name in ("open", "ended"):
        fences.fence(name, None)
    fences.forget("ended")
    fences.forget("never said")
    said.clear()
    fences.say_again(anew=False)
    assert said == ["open"]
    fences.say_again(anew=True)
    assert said == ["open", "open", "ended"]
    fences.forget("ended")
    now_s += ENDED_S + 0.1
    said.clear()
    fences.say_again(anew=True)
    assert said == ["open"]


async def test_an_embedded_agent_works_from_any_thread_and_waits_for_events() -> None:
    with pytest.raises(AgentClosedError):
        embedded_on("127.0.0.1:1").fence("h")
    async with embedded() as (agent, stream):
        event = HeldEvent()
        await asyncio.to_thread(agent.fence, "after the event", event)
        agent.fence("before it")
        assert (await stream.next()).handoff_id == "before it"
        assert event.waited_for.wait(WAIT_S)
        event.passed.set()
        assert (await stream.next()).handoff_id == "after the event"
        await asyncio.to_thread(agent.close)
        await asyncio.wait_for(stream.over.wait(), WAIT_S)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
async def test_gpu_memory_without_a_gpu_is_refused_by_name() -> None:
    region = RegionMemory("r", 4096, 4, 1024, MemoryKind.CUDA, 0)
    with pytest.raises(CudaUnavailableError, match="CUDA device 0, but this process sees 0"):
        AsyncAgent("127.0.0.1:1", "E", "life-1", 3, [region])


async def test_leading_tokens_are_said_once_and_the_whole_again() -> None:
    said: list[tuple[str, int]] = []
    fences = Fences(lambda *words: said.append(words))
    fences.fence("a", None, 512)
    fences.fence("b", None, 512)
    fences.fence("b", None)
    fences.say_again()
    assert said == [("a", 512), ("b", 512), ("b", 0), ("b", 0)]


async def test_a_mark_is_reached_when_its_event_or_a_later_one_has_passed() -> None:
    marks, event = WriteMarks(), HeldEvent()
    await marks.reach(0, 0.0)  # of a demand without a mark
    first, second, third = (asyncio.create_task(marks.reach(mark, WAIT_S)) for mark in (1, 2, 3))
    marks.done(2, event)
    await until(event.waited_for.is_set)
    assert not first.done()
    event.passed.set()
    await asyncio.gather(first, second)
    assert not third.done()
    marks.done(3, None)
    marks.done(1, None)  # an earlier one changes nothing
    await third
    assert marks.reached == 3


async def test_a_mark_that_is_not_reached_in_time_leaves_the_read_unbegun() -> None:
    marks, failed = WriteMarks(), HeldEvent(RuntimeError("illegal address"))
    marks.done(1, failed)
    failed.passed.set()
    with pytest.raises(ReadNotBegunError, match="before mark 1 are done"):
        await marks.reach(1, 0.05)
    waits = asyncio.create_task(marks.reach(1, WAIT_S))
    await until(lambda: bool(marks._waiting))
    marks.release()
    with pytest.raises(ReadNotBegunError, match="stream that sent the order has ended"):
        await waits
