"""Products are made beside the event loop, and are over when whoever waits for them goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from agent_harness.waiting import WAIT_S
from restow.agents.binding.pieces import Copies, Grid
from restow.agents.copying import copier
from restow.agents.copying.copier import LARGE_BYTES, Copier
from restow.agents.copying.prepared_copies import PreparedCopies, prepared_copies
from restow.broker.layout import DType
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


def one_copy(source: torch.Tensor, target: torch.Tensor) -> Copies:
    """All bytes, in one row."""
    src, dst, count, step, dtype = (
        np.array([value], np.int64)
        for value in (source.data_ptr(), target.data_ptr(), len(source), 1, DType.UINT8)
    )
    return Copies((Grid(src, dst, count, step, step, dtype, dtype),))


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


async def test_large_copies_are_prepared_while_something_is_read(
    copies: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = threading.Event()

    def seen(bound: Copies, device: torch.device) -> PreparedCopies:
        prepared = prepared_copies(bound, device)
        ready.set()
        return prepared

    monkeypatch.setattr(copier, "prepared_copies", seen)
    source, target = (torch.zeros(2 * LARGE_BYTES, dtype=torch.uint8) for _ in range(2))
    run = copies.prepare(one_copy(source, target), CPU)
    assert await asyncio.to_thread(ready.wait, WAIT_S)
    source.fill_(7)
    await run()
    assert bool((target == 7).all())


async def test_a_cancelled_product_is_waited_for(held: Held, copies: Copier) -> None:
    task = asyncio.create_task(copies.project(no_rows(ProjectColumn), CPU))
    assert await asyncio.to_thread(held.begun.wait, WAIT_S)
    task.cancel()
    asyncio.get_running_loop().call_soon(held.go.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.over.is_set()
