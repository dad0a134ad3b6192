"""The outbox: batches grow by themselves, order is kept, and a slow reader loses its stream."""

from __future__ import annotations

import asyncio

import pytest

from restow.broker.errors import EngineReplacedError, QueueFullError
from restow.broker.server.base import outbox as module
from restow.broker.server.base.outbox import MAX_BATCH, Outbox


def put(outbox: Outbox[list[int]], *numbers: int) -> None:
    for number in numbers:
        outbox.open().append(number)


async def drain(outbox: Outbox[list[int]]) -> list[int]:
    taken: list[int] = []
    while (batch := await outbox.take()) is not None:
        taken += batch
    return taken


async def test_what_has_queued_up_leaves_as_one_batch() -> None:
    outbox: Outbox[list[int]] = Outbox(list, 10_000)
    put(outbox, 1, 2, 3)
    assert await outbox.take() == [1, 2, 3]
    put(outbox, 4)
    assert await outbox.take() == [4]


async def test_a_taken_batch_is_not_written_to_any_more() -> None:
    outbox: Outbox[list[int]] = Outbox(list, 10_000)
    put(outbox, 1)
    batch = await outbox.take()
    put(outbox, 2)
    assert batch == [1]


async def test_a_waiting_taker_is_woken() -> None:
    outbox: Outbox[list[int]] = Outbox(list, 10_000)
    taker = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taker.done()
    put(outbox, 1)
    assert await taker == [1]


async def test_batches_are_bounded_and_in_order() -> None:
    outbox: Outbox[list[int]] = Outbox(list, 100 * MAX_BATCH)
    put(outbox, *range(3 * MAX_BATCH + 1))
    outbox.close()
    sizes = []
    numbers: list[int] = []
    while (batch := await outbox.take()) is not None:
        sizes.append(len(batch))
        numbers += batch
    assert sizes == [MAX_BATCH] * 3 + [1]
    assert numbers == list(range(3 * MAX_BATCH + 1))


async def test_large_messages_make_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BATCH_BYTES", 100)
    outbox: Outbox[list[int]] = Outbox(list, 100 * MAX_BATCH)
    for number, size_bytes in enumerate([60, 40, 1, 99, 500, 0]):
        outbox.open(size_bytes).append(number)
    outbox.close()
    batches = []
    while (batch := await outbox.take()) is not None:
        batches.append(batch)
    assert batches == [[0, 1], [2, 3], [4], [5]]


async def test_what_is_queued_is_heard_before_the_end() -> None:
    outbox: Outbox[list[int]] = Outbox(list, 10_000)
    put(outbox, 1)
    outbox.close(EngineReplacedError("gone"))
    outbox.close()
    put(outbox, 2)
    assert await outbox.take() == [1]
    for _ in range(2):
        with pytest.raises(EngineReplacedError):
            await outbox.take()


async def test_a_slow_reader_loses_its_stream_and_no_memory_grows() -> None:
    lost: list[bool] = []
    outbox: Outbox[list[int]] = Outbox(list, 2 * MAX_BATCH, on_full=lambda: lost.append(True))
    put(outbox, *range(3 * MAX_BATCH))
    assert not lost
    put(outbox, *range(10 * MAX_BATCH))
    assert lost == [True]
    # What follows a gap could be misunderstood: nothing more is heard but the reason.
    with pytest.raises(QueueFullError):
        await drain(outbox)


async def test_small_queues_still_hold_a_batch() -> None:
    outbox: Outbox[list[int]] = Outbox(list, 1)
    put(outbox, *range(MAX_BATCH))
    outbox.close()
    assert len(await drain(outbox)) == MAX_BATCH


async def test_a_reader_that_lets_too_many_bytes_pile_up_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH_BYTES", 100)
    monkeypatch.setattr(module, "MAX_QUEUE_BYTES", 1000)
    lost: list[bool] = []
    outbox: Outbox[list[int]] = Outbox(list, 10**6, on_full=lambda: lost.append(True))
    for number in range(30):  # what is taken is no burden any more
        outbox.open(90).append(number)
        assert await outbox.take() == [number]
    for number in range(12):
        outbox.open(90).append(number)
    assert not lost
    outbox.open(90).append(12)
    assert lost == [True]
    with pytest.raises(QueueFullError):
        await outbox.take()
