"""Copies and products are over when whoever waits for them goes on; products hold no loop up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from agent_harness.waiting import WAIT_S
from restow.agents.binding.copies import Copies, Grid
from restow.agents.copying import copier as copying
from restow.agents.copying.copier import Copier, zero_destinations
from restow.agents.memory import cuda as device
from restow.agents.memory.errors import CopyFailedError
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


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    stand_in = Held()
    monkeypatch.setattr(copying, "run_projections", stand_in)
    return stand_in


@pytest.fixture
def copies() -> Iterator[Copier]:
    one = Copier(CPU)
    yield one
    one.close()


class Stream:
    """Stands for a stream of a device."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_what_was_queued_on_a_device_is_waited_for_where_the_next_launch_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Memory may be given back as soon as the failure is heard of.
    stream = Stream()
    monkeypatch.setattr(device, "_own_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    with (
        pytest.raises(CopyFailedError, match="out of memory"),
        device.finished(torch.device("cuda", 0)),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert stream.waited == 1


@pytest.mark.parametrize("zeroes", [8, 24, 1000])
def test_rows_longer_than_the_zeroes_are_zeroed_to_their_last_element(zeroes: int) -> None:
    memory = np.full(2000, 0xA5, np.uint8)
    begin = memory.ctypes.data + -memory.ctypes.data % 8
    first = begin - memory.ctypes.data
    counts, item = np.array([[1], [13], [100]], np.int64), np.array(DType.FLOAT32, np.int64)
    step = np.array(8, np.int64)
    address = begin + np.array([[0], [16], [400]], np.int64)
    rows = Grid(address, address, counts, step, step, item, item)
    zero_destinations(Copies((rows,)), torch.zeros(zeroes, dtype=torch.uint8))
    wanted = np.full(2000, 0xA5, np.uint8)
    for at, count in ((0, 1), (16, 13), (400, 100)):
        for index in range(count):
            wanted[first + at + 8 * index :][:4] = 0
    assert (memory == wanted).all()


async def test_the_loop_goes_on_meanwhile(held: Held, copies: Copier) -> None:
    asyncio.get_running_loop().call_soon(held.go.set)
    await copies.project(no_rows(ProjectColumn))
    assert held.over.is_set()


async def test_a_product_that_is_cancelled_twice_is_waited_for(held: Held, copies: Copier) -> None:
    # The copy is cancelled twice: an order is taken back, and then the agent's stream breaks.
    task = asyncio.create_task(copies.project(no_rows(ProjectColumn)))
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
