"""Products are made beside the event loop, and are over when whoever waits for them goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from agent_harness.waiting import WAIT_S
from restow.agents.copying import copier
from restow.agents.copying.copier import Copier
from restow.broker.layout.rows import Int64s
from restow.broker.planner.program import ProjectColumn, no_rows

CPU = torch.device("cpu")


class Held:
    """Stands for a product that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.over = (threading.Event() for _ in range(3))

    def __call__(self, rows: Int64s, device: torch.device) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S), "the loop stood still"
        self.over.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    stand_in = Held()
    monkeypatch.setattr(copier, "run_projections", stand_in)
    return stand_in


@pytest.fixture
def copies() -> Iterator[Copier]:
    one = Copier()
    yield one
    one.close()


async def test_the_loop_goes_on_meanwhile(held: Held, copies: Copier) -> None:
    asyncio.get_running_loop().call_soon(held.go.set)
    await copies.project(no_rows(ProjectColumn), CPU)
    assert held.over.is_set()


async def test_a_cancelled_product_is_waited_for(held: Held, copies: Copier) -> None:
    task = asyncio.create_task(copies.project(no_rows(ProjectColumn), CPU))
    assert await asyncio.to_thread(held.begun.wait, WAIT_S)
    task.cancel()
    asyncio.get_running_loop().call_soon(held.go.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.over.is_set()


async def test_one_that_is_cancelled_again_is_still_waited_for(held: Held, copies: Copier) -> None:
    """An order is taken back, and then the agent's stream breaks."""
    task = asyncio.create_task(copies.project(no_rows(ProjectColumn), CPU))
    assert await asyncio.to_thread(held.begun.wait, WAIT_S)
    loop = asyncio.get_running_loop()
    for _ in range(2):
        task.cancel()
        for _ in range(3):  # until it has heard of it
            await asyncio.sleep(0)
    loop.call_soon(held.go.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.over.is_set()
