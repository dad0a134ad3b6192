"""A device works late: launches are over when their event has passed, and the loop goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from restow.agents.copying.copier import Copier
from restow.agents.copying.device_copies import DeviceLaunch, queue_pieces
from restow.agents.memory import cuda
from restow.agents.memory.errors import CopyFailedError
from restow.kernels import RowCall

CUDA = torch.device("cuda", 0)
BROKEN = RuntimeError("CUDA error: an illegal memory access was encountered")


class LateDevice:
    """Stands for a device's stream; it works when `go` is called, or when it is waited for."""

    def __init__(self) -> None:
        self.queue: list[object] = []
        self.done: list[object] = []
        self.looked_at = 0
        self.broken = False

    def go(self, launches: int = 1) -> None:
        """Do the oldest work of the queue."""
        self.done += self.queue[:launches]
        del self.queue[:launches]

    def synchronize(self) -> None:
        self.go(len(self.queue))


class Event:
    """Stands for an event of a device: it has passed when all work before it is done."""

    def __init__(self) -> None:
        self._device: LateDevice | None = None
        self._after = 0

    def record(self, stream: LateDevice) -> None:
        self._device, self._after = stream, len(stream.done) + len(stream.queue)

    def query(self) -> bool:
        device = self._device
        assert device is not None
        device.looked_at += 1
        if device.broken:
            raise BROKEN
        return len(device.done) >= self._after

    def synchronize(self) -> None:
        assert self._device is not None
        self._device.go(self._after - len(self._device.done))


class Rows:
    """Stands for rows on the device, by the name of their launch."""

    def __init__(self, device: LateDevice, name: str) -> None:
        self._device, self._name = device, name

    def launch(self, call: RowCall, staged: int) -> None:
        self._device.queue.append(self._name)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    monkeypatch.setattr(cuda, "_own_stream", lambda _: device)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, **how: zeros(*sizes, **how))
    return device


@pytest.fixture
def copier(late: LateDevice) -> Iterator[Copier]:
    made = Copier(CUDA)
    yield made
    made.close()


def launch(late: LateDevice, name: str) -> DeviceLaunch:
    return DeviceLaunch(Rows(late, name), None, 0)  # type: ignore[arg-type]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_launch_is_over_when_the_device_has_done_it_and_the_loop_goes_on(
    late: LateDevice, copier: Copier
) -> None:
    first = asyncio.create_task(copier.run(launch(late, "first")))
    second = asyncio.create_task(copier.run(launch(late, "second")))
    await turns()
    assert late.queue == ["first", "second"]
    assert not first.done()
    late.go()
    await asyncio.wait_for(first, 5)
    assert not second.done()
    late.go()
    await asyncio.wait_for(second, 5)


async def test_a_device_that_takes_long_is_looked_at_now_and_then(
    late: LateDevice, copier: Copier
) -> None:
    task = asyncio.create_task(copier.run(launch(late, "long")))
    await turns(cuda.QUICK_POLLS + 5)
    looked_at = late.looked_at
    assert looked_at <= cuda.QUICK_POLLS + 2
    await turns(50)
    assert late.looked_at <= looked_at + 2
    late.go()
    await asyncio.wait_for(task, 5)


async def test_who_is_cancelled_waits_for_the_device(late: LateDevice, copier: Copier) -> None:
    # The pages may be given to somebody else when the order is over.
    task = asyncio.create_task(copier.run(launch(late, "copy")))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert late.done == ["copy"]


async def test_a_device_that_breaks_later_fails_its_order(late: LateDevice, copier: Copier) -> None:
    task = asyncio.create_task(copier.run(launch(late, "copy")))
    await turns()
    late.broken = True
    with pytest.raises(CopyFailedError, match="illegal memory access"):
        await task
    assert not late.queue, "nothing is under way any more"


def test_queued_work_has_ended_when_the_device_has_done_it(late: LateDevice) -> None:
    first = cuda.QueuedWork(CUDA, lambda: late.queue.append("first"))
    second = cuda.QueuedWork(CUDA, lambda: late.queue.append("second"))
    assert not first.has_ended()
    late.go()
    assert first.has_ended()
    assert not second.has_ended()
    second.wait()
    assert second.has_ended()
    late.broken = True
    with pytest.raises(CopyFailedError, match="illegal memory access"):
        second.has_ended()


def test_work_whose_launch_fails_is_not_under_way(late: LateDevice) -> None:
    def launch_a_part() -> None:
        late.queue.append("part")
        raise BROKEN

    with pytest.raises(CopyFailedError, match="illegal memory access"):
        cuda.QueuedWork(CUDA, launch_a_part)
    assert late.done == ["part"]


def test_pieces_are_queued_as_single_bytes_of_any_place(late: LateDevice) -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    places = np.array([3, 50, 70]), np.array([60, 0, 31]), np.array([7, 20, 29])
    src, dst, length = places
    work = queue_pieces(
        source.ctypes.data + src, target.ctypes.data + dst, length, torch.device("cpu")
    )
    expected = np.zeros(100, np.uint8)
    for begin, end, size in zip(*places, strict=True):
        expected[end : end + size] = source[begin : begin + size]
    assert (target == expected).all()
    assert work.has_ended()
