"""Runs that are read while they are gathered, between real processes over NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from agent_harness.fake_broker import FakeBroker
from agent_harness.gradual_source import serve_gradually
from agent_harness.handover import (
    destination_memory,
    hand_over,
    programs,
    send_execute,
    stage,
)
from agent_harness.processes import child
from agent_harness.world import RankMemory, make_case
from restow.agents.async_agent import AsyncAgent
from restow.agents.copying import PreparedCopies
from restow.agents.errors import CopyFailedError
from restow.agents.parts import Parts
from restow.agents.settings import AgentSettings
from restow.broker.planner import Strategy
from restow.broker.planner.program import Program
from restow.v1 import agent_link_pb2 as pb

STAGING_BYTES = 8 << 20


class Stage:
    """A case whose P is a process that gathers part by part, and one rank of D."""

    def __init__(self, name: str, fake: FakeBroker, rank: int) -> None:
        self.case, self.fake, self.rank = make_case(name), fake, rank
        self.memory: RankMemory = destination_memory(self.case)[rank]
        model = self.case.destination.model
        self.fields = {field.name: field for field in (*model.fields, *model.inputs)}
        self.agent = AsyncAgent(
            fake.address,
            "D",
            "life-1",
            rank,
            self.memory.regions,
            AgentSettings(staging_bytes=STAGING_BYTES),
        )

    def program(self, strategy: Strategy) -> Program:
        self.memory.poison()
        return programs(self.case, strategy)[self.rank]

    def check_whole(self) -> None:
        """Every byte is the state's or still poison."""
        wrong = np.flatnonzero(
            self.memory.data != self.memory.expected(self.fields, self.case.tokens)
        )
        assert not len(wrong), f"{len(wrong)} wrong bytes, the first at {wrong[0]}"

    def check_cleared(self) -> None:
        """No snapshot is left."""
        mask = self.memory.cleared(self.fields, self.case.tokens)
        assert mask.any()
        assert not self.memory.data[mask].any(), "a failed handoff left a snapshot behind"

    async def sources(self, program: Program) -> list[Any]:
        return [await self.fake.agent("P", rank) for rank in program.staging_ranks]

    async def unstage(self, program: Program, handoff: int) -> None:
        for source in await self.sources(program):
            source.send(pb.AgentOrder(unstage=pb.Unstage(handoff=handoff)))


@contextlib.asynccontextmanager
async def on_stage(
    name: str, *how: object, rank: int = 1, tls: str | None = None
) -> AsyncIterator[Stage]:
    async with (
        FakeBroker() as fake,
        child(serve_gradually, name, fake.address, *how, tls=tls),
    ):
        stage = Stage(name, fake, rank)
        await stage.agent.start()
        try:
            yield stage
        finally:
            await stage.agent.close()


async def broken_off(stage_: Stage, handoff: int, grant_ms: int = 10_000) -> Any:
    """A handoff of which P says early where its runs are; what D says of its end."""
    program = stage_.program(Strategy.PACK)
    staged = await stage(stage_.fake, stage_.case, program, handoff, followed=True)
    assert all(run.HasField("progress") for run in staged.values())
    destination = await send_execute(stage_.fake, stage_.case, program, handoff, grant_ms, staged)
    return await destination.next()


@pytest.mark.parametrize("tls", [None, "tcp,self"])
@pytest.mark.parametrize("part_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("name", ["wide", "cast", "stages"])
async def test_every_byte_arrives_and_no_other_changes(
    name: str, part_bytes: int, tls: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    async with on_stage(name, part_bytes, tls=tls) as stage_:
        for handoff, strategy in enumerate((Strategy.PACK, Strategy.INTERLEAVE)):
            read = []
            for followed in (False, True):
                program = stage_.program(strategy)
                number = 2 * handoff + followed
                settled = await hand_over(
                    stage_.fake, stage_.case, program, number, followed=followed
                )
                assert settled.reason == "", settled.detail
                stage_.check_whole()
                read.append(settled.bytes)
            assert read[0] == read[1]
        # Whoever saw the end of a run read nothing that was still being written.
        assert stage_.agent._executor.free_staging_bytes == (STAGING_BYTES, STAGING_BYTES)


async def test_a_slow_source_is_waited_for() -> None:
    async with on_stage("wide", 256, 0.05) as stage_:
        program = stage_.program(Strategy.PACK)
        staged = await stage(stage_.fake, stage_.case, program, 1, followed=True)
        counts = [-(-one.bytes // one.progress.part_bytes) for one in staged.values()]
        assert max(counts) > 3
        destination = await send_execute(stage_.fake, stage_.case, program, 1, 30_000, staged)
        settled = await destination.next()
        assert settled.reason == "", settled.detail
        stage_.check_whole()


async def test_a_source_that_breaks_midway_fails_both_sides() -> None:
    async with on_stage("wide", 256, 0.05, 2) as stage_:
        settled = await broken_off(stage_, 1)
        assert settled.reason == "READ_FAILED", settled.detail
        assert "gave up gathering" in settled.detail
        stage_.check_cleared()
        for source in await stage_.sources(stage_.program(Strategy.PACK)):
            told = await source.next()
            assert (told.reason, told.detail) == ("COPY_FAILED", "it broke on purpose")


def slowed(monkeypatch: pytest.MonkeyPatch, scatter: Callable[[], None]) -> None:
    """Have D do this before it scatters a part."""
    right = Parts.prepared_scatter

    def prepared(of: Parts, copies: Any, device: Any) -> list[PreparedCopies]:
        def slow(one: PreparedCopies) -> PreparedCopies:
            def pieces() -> None:
                scatter()
                one()

            return PreparedCopies(max(1, len(one)), device, pieces)

        return [slow(one) for one in right(of, copies, device)]

    monkeypatch.setattr(Parts, "prepared_scatter", prepared)


async def test_what_can_not_be_scattered_fails_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise CopyFailedError("it broke on purpose")

    slowed(monkeypatch, broken)
    async with on_stage("wide", 256) as stage_:
        settled = await broken_off(stage_, 1)
        assert (settled.reason, settled.detail) == ("COPY_FAILED", "it broke on purpose")
        stage_.check_cleared()
        free = stage_.agent._executor.free_staging_bytes
        assert free == (STAGING_BYTES, STAGING_BYTES)


async def test_nothing_is_scattered_after_an_order_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowed(monkeypatch, lambda: time.sleep(0.2))
    async with on_stage("wide", 256, 0.05, 3) as stage_:
        settled = await broken_off(stage_, 1)
        assert settled.reason == "READ_FAILED", settled.detail
        stage_.check_cleared()
        before = stage_.memory.data.copy()
        await asyncio.sleep(1.0)
        assert (stage_.memory.data == before).all(), "bytes landed after the end"


async def test_what_is_not_wanted_any_more_is_given_up() -> None:
    async with on_stage("wide", 256, 0.3) as stage_:
        program = stage_.program(Strategy.PACK)
        reading = asyncio.create_task(broken_off(stage_, 1))
        await asyncio.sleep(0.2)
        await stage_.unstage(program, 1)
        settled = await reading
        assert settled.reason == "READ_FAILED", settled.detail
        stage_.check_cleared()


async def test_a_grant_ends_though_a_source_gathers_on() -> None:
    async with on_stage("wide", 256, 30.0) as stage_:
        settled = await broken_off(stage_, 1, grant_ms=300)
        assert settled.reason == "READ_DEADLINE", settled.detail
        assert 300_000 <= settled.elapsed_us < 5_000_000
        stage_.check_cleared()


async def test_orders_to_follow_that_can_not_be_are_refused() -> None:
    async with on_stage("wide", 256) as stage_:
        program = stage_.program(Strategy.PACK)
        staged = await stage(stage_.fake, stage_.case, program, 1, followed=True)
        fake, case = stage_.fake, stage_.case

        async def refused(change: Any, hashed: bool = False) -> Any:
            spoiled = {
                rank: pb.Staged.FromString(x.SerializeToString()) for rank, x in staged.items()
            }
            for one in spoiled.values():
                change(one)
            destination = await send_execute(fake, case, program, 2, 10_000, spoiled, hashed)
            return await destination.next()

        for field, value in (("address", 0), ("address", -1), ("part_bytes", 0), ("part_bytes", 1)):
            settled = await refused(lambda one, f=field, v=value: setattr(one.progress, f, v))
            assert settled.reason == "ORDER_INVALID", (field, value, settled.detail)
            assert "can't be" in settled.detail

        def hash_it(one: pb.Staged) -> None:
            one.digest = bytes(16)

        settled = await refused(hash_it, hashed=True)
        assert (settled.reason, "followed" in settled.detail) == ("ORDER_INVALID", True)
        settled = await refused(lambda one: setattr(one.progress, "address", 4096))
        assert settled.reason == "READ_FAILED", settled.detail


async def test_a_digest_is_of_a_complete_run() -> None:
    async with on_stage("wide", 256) as stage_:
        program = stage_.program(Strategy.PACK)
        staged = await stage(stage_.fake, stage_.case, program, 1, hashed=True, followed=True)
        assert staged
        assert not any(run.HasField("progress") for run in staged.values())


async def test_who_can_not_follow_is_answered_when_all_is_there() -> None:
    async with on_stage("wide", 256) as stage_:
        program = stage_.program(Strategy.PACK)
        staged = await stage(stage_.fake, stage_.case, program, 1)
        assert staged
        assert not any(run.HasField("progress") for run in staged.values())
