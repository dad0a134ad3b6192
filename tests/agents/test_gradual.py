"""A source gathers part by part for who follows, and gives no memory back that it still writes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from agent_harness.handover import programs
from agent_harness.waiting import WAIT_S, until
from agent_harness.world import Case, RankMemory, make_case
from restow.agents import gathering, parts
from restow.agents.binding import Blocks, Tokens
from restow.agents.copier import Copier
from restow.agents.copying import PreparedCopies
from restow.agents.gathering import Gathering
from restow.agents.memory import HostStaging, region_table
from restow.agents.orders import StagedRun, StageOrder, StagePart
from restow.agents.parts import GIVEN_UP, Parts
from restow.agents.pieces import Copies
from restow.agents.program_check import CheckedProgram
from restow.agents.spreading import BUSY_READS
from restow.broker import wire
from restow.broker.errors import RestowError
from restow.broker.planner import Strategy

STAGING_BYTES = 1 << 20
PART_BYTES = 256


class Held:
    """Every part waits until it is let through."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.through = threading.Semaphore(0)
        self._right = Parts.prepared_gather

    def prepared(
        self, of: Parts, copies: Sequence[Copies], device: torch.device
    ) -> list[PreparedCopies]:
        return [self._held(one) for one in self._right(of, copies, device)]

    def _held(self, copies: PreparedCopies) -> PreparedCopies:
        def pieces() -> None:
            self.begun.set()
            assert self.through.acquire(timeout=WAIT_S), "nobody lets it through"
            copies()

        return PreparedCopies(max(1, copies.rows), copies.device, pieces)


class Source:
    """Rank 0 of P, and what it told."""

    def __init__(self) -> None:
        self.case: Case = make_case("wide")
        layout = self.case.source.ranks[0]
        self.memory = RankMemory(layout, self.case.src_ids)
        fields = {field.name: field for field in self.case.source.model.fields}
        self.memory.write(fields, self.case.tokens)
        regions = self.memory.regions
        self.staging = HostStaging(STAGING_BYTES)
        self.copier = Copier()
        self.gathering = Gathering(
            0,
            region_table(regions),
            [region.place for region in regions],
            self.staging,
            self.copier,
        )
        self.told: list[StagedRun] = []
        self.program = next(
            one for one in programs(self.case, Strategy.PACK).values() if 0 in one.staging_ranks
        )

    async def stage(self, handoff: int = 1, *, followed: bool = True, hashed: bool = False) -> None:
        order = StageOrder(
            handoff,
            (StagePart("program", self.program.dst_rank),),
            Blocks(wire.blocks_from_proto(wire.block_lists(self.case.src_ids))),
            Tokens(0, self.case.tokens),
            hashed,
            followed,
        )
        await self.gathering.stage(order, [CheckedProgram(self.program)], self._tell)

    async def _tell(self, runs: Sequence[StagedRun]) -> None:
        self.told += runs

    def counted(self) -> int:
        """How many parts it says are complete."""
        (run,) = self.told
        assert run.progress is not None
        return self._bytes(run.progress.address, 1)[0]

    def gathered(self) -> bytes:
        (run,) = self.told
        return self._bytes(run.address, run.length_bytes)

    def _bytes(self, address: int, length_bytes: int) -> bytes:
        begin = address - self.staging.address
        return bytes(memoryview(self.staging._mapping)[begin : begin + length_bytes])


@pytest.fixture
async def source(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Source]:
    monkeypatch.setattr(parts, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(gathering, "WORTHWHILE_BYTES", 1)
    one = Source()
    yield one
    one.copier.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    one = Held()
    monkeypatch.setattr(Parts, "prepared_gather", lambda *how: one.prepared(*how))
    return one


async def test_what_is_counted_is_complete(source: Source, held: Held) -> None:
    await source.stage(followed=False)
    whole = source.gathered()
    source.gathering.unstage(1)
    source.told.clear()
    source.staging._mapping[:] = bytes(STAGING_BYTES)

    task = asyncio.create_task(source.stage())
    await until(held.begun.is_set)
    (run,) = source.told
    count = Parts(0, run.length_bytes, PART_BYTES).count
    assert (source.counted(), count > 3) == (0, True)
    for number in range(1, count + 1):
        held.through.release()
        await until(partial(_has_counted, source, number))
        end = min(number * PART_BYTES, len(whole))
        assert source.gathered()[:end] == whole[:end]
    await task
    assert source.gathered() == whole


def _has_counted(source: Source, number: int) -> bool:
    return source.counted() == number


@pytest.mark.parametrize("cancelled", [False, True])
async def test_memory_is_given_back_when_nothing_writes_it(
    source: Source, held: Held, cancelled: bool
) -> None:
    task = asyncio.create_task(source.stage())
    await until(held.begun.is_set)
    if cancelled:
        task.cancel()
    source.gathering.unstage(1)
    await asyncio.sleep(0.02)
    assert source.gathering.free_bytes < STAGING_BYTES, "it is written to"
    held.through.release()
    await until(task.done, WAIT_S / 2)  # no other part is begun
    assert source.gathering.free_bytes == STAGING_BYTES
    assert source.counted() == GIVEN_UP
    assert source.gathering._held == {}


async def test_a_run_that_broke_is_kept_while_it_is_read(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> list[PreparedCopies]:
        raise RestowError("on purpose")

    monkeypatch.setattr(Parts, "prepared_gather", broken)
    with pytest.raises(RestowError):
        await source.stage()
    assert source.counted() == GIVEN_UP
    assert source.gathering.free_bytes < STAGING_BYTES
    source.gathering.unstage(1)
    assert source.gathering.free_bytes == STAGING_BYTES


async def test_who_asks_again_is_told_the_same(source: Source) -> None:
    await source.stage()
    await source.stage()
    first, second = source.told
    assert first == second
    source.gathering.reset()
    assert source.gathering.free_bytes == STAGING_BYTES


async def test_nobody_follows_where_no_core_is_idle(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Parts.prepared_gather

    def waiting(*how: Any) -> list[PreparedCopies]:
        time.sleep(0.05)  # as for a core
        return right(*how)

    monkeypatch.setattr(Parts, "prepared_gather", waiting)
    for handoff in range(BUSY_READS + 1):
        await source.stage(handoff)
    followed = [one.progress is not None for one in source.told]
    assert followed == [True] * BUSY_READS + [False]


@pytest.mark.parametrize("why", ["unable", "hashed", "small", "unordered", "no room"])
async def test_others_are_told_when_all_is_there(
    source: Source, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "small":
        monkeypatch.setattr(gathering, "WORTHWHILE_BYTES", 1 << 20)
    elif why == "unordered":
        monkeypatch.setattr(gathering, "COUNTS_IN_ORDER", False)
    elif why == "no room":
        monkeypatch.setattr(gathering, "COUNT_BYTES", STAGING_BYTES)
    await source.stage(followed=why != "unable", hashed=why == "hashed")
    assert [one.progress for one in source.told] == [None]
