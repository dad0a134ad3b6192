"""Handoffs between real processes over NIXL, checked byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from agent_harness.fake_broker import FakeBroker
from agent_harness.handover import (
    destination_memory,
    execute_order,
    hand_over,
    part,
    programs,
    send_execute,
    stage,
)
from agent_harness.processes import TCP, Child, child
from agent_harness.source_main import serve_source
from agent_harness.world import POISON, Case, RankMemory, make_case
from laws.strategies import SENDING
from restow.agents.link.async_agent import AsyncAgent
from restow.agents.link.settings import AgentSettings
from restow.agents.memory.regions import MemoryPlace
from restow.agents.reading.nixl_transport import NixlTransport
from restow.broker.layout import Field
from restow.broker.planner import CostModel, Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_PAGES
from restow.broker.rpc import wire, wire_program
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import program_pb2

QUARANTINE_S = 0.4


class Stage:
    """A case on the stage: the broker's lines are the test's, P is a process, D is here."""

    def __init__(self, name: str, fake: FakeBroker, source: Child) -> None:
        self.case: Case = make_case(name)
        self.fake, self.source = fake, source
        self.memory: dict[int, RankMemory] = destination_memory(self.case)
        self.agents: dict[int, AsyncAgent] = {}

    @property
    def fields(self) -> dict[str, Field]:
        model = self.case.destination.model
        return {field.name: field for field in (*model.fields, *model.inputs)}

    async def enter(self, rank: int) -> None:
        """Start a rank of D."""
        agent = self.agents[rank] = AsyncAgent(
            self.fake.address,
            "D",
            "life-1",
            rank,
            self.memory[rank].regions,
            AgentSettings(staging_bytes=8 << 20, quarantine_s=QUARANTINE_S),
        )
        await agent.start()

    def check_whole(self, rank: int) -> None:
        """Check that every byte is the state's or still poison."""
        memory = self.memory[rank]
        wrong = np.flatnonzero(memory.data != memory.expected(self.fields, self.case.tokens))
        assert not len(wrong), f"{len(wrong)} wrong bytes, the first at {wrong[0]}"

    def check_cleared(self, rank: int) -> None:
        """Check that snapshots are zero, and that padding and guards are untouched."""
        memory = self.memory[rank]
        mask = memory.cleared(self.fields, self.case.tokens)
        assert mask.any()
        assert not memory.data[mask].any(), "a failed handoff left a snapshot behind"
        untouched = memory.expected(self.fields, self.case.tokens) == POISON
        assert (memory.data[untouched & ~mask] == POISON).all()


@contextlib.asynccontextmanager
async def on_stage(name: str, tls: str | None = None) -> AsyncIterator[Stage]:
    async with (
        FakeBroker() as fake,
        child(serve_source, name, fake.address, tls=tls) as source,
    ):
        stage = Stage(name, fake, source)
        try:
            yield stage
        finally:
            for agent in stage.agents.values():
                await agent.close()


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("wide", SENDING),
        ("cast", tuple(one for one in SENDING if one is not Strategy.SLICES)),
        ("recompute", (Strategy.RECOMPUTE, Strategy.PACK)),
    ],
)
async def test_every_byte_arrives_and_no_other_changes(
    name: str, strategies: tuple[Strategy, ...]
) -> None:
    async with on_stage(name) as stage:
        handoff = 0
        for rank in stage.memory:
            await stage.enter(rank)
        for strategy in strategies:
            for rank, program in programs(stage.case, strategy).items():
                handoff += 1
                stage.memory[rank].poison()
                settled = await hand_over(stage.fake, stage.case, program, handoff)
                assert (settled.handoff, settled.reason) == (handoff, ""), settled.detail
                assert settled.bytes > 0
                stage.check_whole(rank)
        for agent in stage.agents.values():
            assert not agent.figures.gather.used_bytes
            assert not agent.figures.scatter.used_bytes


async def test_a_program_that_takes_the_name_of_another_is_the_one_that_runs() -> None:
    async with on_stage("wide") as stage:
        await stage.enter(1)
        ways = (Strategy.SLICES, Strategy.WHOLE, Strategy.SLICES)
        for handoff, strategy in enumerate(ways):
            stage.memory[1].poison()
            program = replace(programs(stage.case, strategy)[1], program_id="one name")
            settled = await hand_over(stage.fake, stage.case, program, handoff)
            assert settled.reason == "", settled.detail
            stage.check_whole(1)


async def test_every_byte_arrives_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", TCP)
    async with on_stage("big", tls=TCP) as stage:
        await stage.enter(1)
        for handoff, strategy in enumerate((Strategy.SLICES, Strategy.WHOLE, Strategy.AUTO)):
            stage.memory[1].poison()
            program = programs(stage.case, strategy)[1]
            settled = await hand_over(stage.fake, stage.case, program, handoff)
            assert settled.reason == "", settled.detail
            stage.check_whole(1)


async def test_a_frozen_source_fails_by_the_deadline_and_nothing_lands_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP)
    async with on_stage("big", tls=TCP) as stage:
        await stage.enter(0)
        program = programs(stage.case, Strategy.SLICES)[0]
        assert (await hand_over(stage.fake, stage.case, program, 1)).reason == ""
        stage.source.freeze()
        stage.memory[0].poison()
        settled = await hand_over(stage.fake, stage.case, program, 2, grant_ms=200)
        assert settled.reason == "READ_DEADLINE"
        assert 200_000 <= settled.elapsed_us < 5_000_000
        stage.check_cleared(0)

        settled_bytes = stage.memory[0].data.copy()
        stage.source.thaw()
        await _fails_to_change(stage.memory[0], settled_bytes)


async def _fails_to_change(memory: RankMemory, before: np.ndarray) -> None:
    """Watch the memory for as long as the whole handoff took, while the loop runs."""
    for _ in range(50):
        await asyncio.sleep(0.01)
        assert (memory.data == before).all(), "bytes landed after the read was settled"


async def test_other_orders_are_served_while_a_read_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP)
    async with on_stage("wide", tls=TCP) as stage:
        await stage.enter(0)
        program = programs(stage.case, Strategy.SLICES)[0]
        stage.source.freeze()
        destination = await send_execute(stage.fake, stage.case, program, 1, grant_ms=700)
        destination.send(pb.AgentOrder(execute=pb.Execute(handoff=2, program_id="unknown")))
        assert [(await destination.next()).handoff for _ in range(2)] == [2, 1]


@pytest.mark.parametrize("tls", [TCP, "all"])
async def test_a_killed_source_is_a_typed_failure(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    async with on_stage("big", tls=tls) as stage:
        await stage.enter(0)
        program = programs(stage.case, Strategy.SLICES)[0]
        assert (await hand_over(stage.fake, stage.case, program, 1)).reason == ""
        await stage.source.kill()
        settled = await hand_over(stage.fake, stage.case, program, 2, grant_ms=5_000)
        assert settled.reason == "PEER_LOST", settled.detail
        assert settled.elapsed_us < 5_000_000
        stage.check_cleared(0)


@pytest.mark.parametrize("tls", [TCP, "all"])
async def test_windows_that_could_not_be_rebuilt_are_cleared(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    async with on_stage("recompute", tls=tls) as stage:
        await stage.enter(0)
        plan = make_plan(stage.case.source, stage.case.destination)
        unstaged = CostModel(seconds_per_stage=1e3)  # a killed P could not gather
        program = compile_programs(plan, Strategy.RECOMPUTE, unstaged)[0]
        assert (await hand_over(stage.fake, stage.case, program, 1)).reason == ""
        await stage.source.kill()
        settled = await hand_over(stage.fake, stage.case, program, 2, grant_ms=5_000)
        assert settled.reason == "PEER_LOST", settled.detail
        stage.check_cleared(0)


async def test_weights_are_nothing_that_a_peer_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []
    right = NixlTransport.register

    def register(self: NixlTransport, address: int, length_bytes: int, place: MemoryPlace) -> None:
        registered.append(address)
        right(self, address, length_bytes, place)

    monkeypatch.setattr(NixlTransport, "register", register)
    async with on_stage("recompute") as stage:
        await stage.enter(0)
        regions = stage.memory[0].regions
        assert any(region.private for region in regions)
        for region in regions:
            assert (region.base_address in registered) != region.private


async def test_a_forgotten_source_ends_the_reads_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", TCP)
    async with on_stage("wide", tls=TCP) as stage:
        await stage.enter(0)
        program = programs(stage.case, Strategy.SLICES)[0]
        stage.source.freeze()
        destination = await send_execute(stage.fake, stage.case, program, 1, grant_ms=30_000)
        for rank in program.src_ranks:
            name = (await stage.fake.agent("P", rank)).hello.agent_name
            destination.send(pb.AgentOrder(forget=pb.Forget(agent_name=name)))
        settled = await destination.next()
        assert settled.reason == "PEER_LOST", settled.detail
        assert settled.elapsed_us < 10_000_000


async def test_orders_that_do_not_fit_are_refused_with_a_reason() -> None:
    async with on_stage("wide") as stage_:
        case, fake = stage_.case, stage_.fake
        await stage_.enter(0)
        packed = programs(case, Strategy.PACK)[0]
        destination = await send_execute(fake, case, packed, 1)
        unstaged = await destination.next()
        assert unstaged.reason == "ORDER_INVALID"
        assert "staged 0 bytes" in unstaged.detail

        direct = programs(case, Strategy.SLICES)[0]
        short = Case(**{**vars(case), "dst_ids": {**case.dst_ids, "attention": (1,)}})
        assert (await (await send_execute(fake, short, direct, 2)).next()).reason == "PAGE_COUNT"
        far = Case(**{**vars(case), "dst_ids": {**case.dst_ids, "state": (10_000,)}})
        beyond = await (await send_execute(fake, far, direct, 3)).next()
        assert beyond.reason == "PAGE_OUT_OF_RANGE"

        direct.rows(READ_PAGES)[0, 5] = 1 << 40  # DST_OFFSET_BYTES
        outside = await (await send_execute(fake, case, direct, 4)).next()
        assert outside.reason == "PROGRAM_INVALID"
        assert "leaves its destination page" in outside.detail


async def test_orders_that_name_a_program_of_another_release_hear_so() -> None:
    async with on_stage("wide") as stage_:
        await stage_.enter(0)
        program = programs(stage_.case, Strategy.SLICES)[0]
        assert (await hand_over(stage_.fake, stage_.case, program, 1)).reason == ""
        odd = wire_program.program_to_proto(program)
        odd.steps[0].kind = program_pb2.STEP_KIND_UNSPECIFIED
        destination = await stage_.fake.agent("D", 0)
        order = execute_order(stage_.case, program, 2, [])
        destination.send(pb.AgentOrder(program=odd))
        destination.send(pb.AgentOrder(execute=order))
        settled = await destination.next()
        assert settled.reason == "AGENT_RELEASE_DIFFERS", settled.detail
        assert (await hand_over(stage_.fake, stage_.case, program, 3)).reason == ""


async def test_staging_waits_in_line_and_is_given_back() -> None:
    # P's pool holds two of the four runs, so the others wait for Unstage.
    async with on_stage("big") as stage_:
        case, fake = stage_.case, stage_.fake
        program = programs(case, Strategy.PACK)[0]
        (source_rank,) = program.staging_ranks
        source = await fake.agent("P", source_rank)
        first = (await stage(fake, case, program, 1))[source_rank]
        assert first.reason == ""
        fits = (8 << 20) // first.bytes
        order = pb.Stage(
            parts=[part(program, source_rank)],
            src_blocks=wire.block_lists(case.src_ids),
            stop_token=case.tokens,
        )
        for handoff in range(2, fits + 3):
            order.handoff = handoff
            source.send(pb.AgentOrder(stage=order))
        done = [(await source.next()).handoff for _ in range(fits - 1)]
        assert done == list(range(2, fits + 1))
        assert source.silent
        source.send(pb.AgentOrder(unstage=pb.Unstage(handoff=fits + 1)))  # waits no more
        source.send(pb.AgentOrder(unstage=pb.Unstage(handoff=1)))
        served = await source.next()
        assert served.handoff == fits + 2
        assert served.reason == ""


async def test_nothing_is_written_before_the_engines_own_writes_are_done() -> None:
    async with on_stage("wide") as stage_:
        case, fake = stage_.case, stage_.fake
        program = programs(case, Strategy.SLICES)[0]
        await stage_.enter(0)
        destination = await send_execute(fake, case, program, 1, grant_ms=200, write_mark=2)
        stage_.agents[0].writes_done(1)
        settled = await destination.next()
        assert (settled.handoff, settled.reason) == (1, "READ_NOT_BEGUN")
        assert (stage_.memory[0].data == POISON).all(), "not even a snapshot is cleared"
        await send_execute(fake, case, program, 2, write_mark=2)
        stage_.agents[0].writes_done(2)
        settled = await destination.next()
        assert (settled.handoff, settled.reason) == (2, ""), settled.detail
        stage_.check_whole(0)


async def test_a_read_does_not_begin_when_its_grant_has_nearly_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The read would fail in its midst, whereas a read that has not begun is granted anew.
    monkeypatch.setenv("UCX_TLS", TCP)
    async with on_stage("big", tls=TCP) as stage_:
        case, fake = stage_.case, stage_.fake
        program = programs(case, Strategy.PACK)[0]
        await stage_.enter(0)
        staged = await stage(fake, case, program, 1)
        fits = (8 << 20) // min(run.bytes for run in staged.values())
        stage_.source.freeze()
        late = fits + 2
        for handoff in range(2, late):
            await send_execute(fake, case, program, handoff, grant_ms=60_000, staged=staged)
        destination = await send_execute(fake, case, program, late, grant_ms=2_000, staged=staged)
        settled = await destination.next()
        assert (settled.handoff, settled.reason) == (late, "READ_NOT_BEGUN")
        assert settled.elapsed_us < 2_000_000
