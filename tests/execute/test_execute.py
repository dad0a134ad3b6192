"""Handoffs between real processes over NIXL, checked byte by byte."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agent_harness.handover import execute_order, part, programs, send_execute, stage
from agent_harness.pair import STAGING_BYTES, apart
from agent_harness.processes import TCP
from agent_harness.world import POISON, Case
from restow.broker.planner import CostModel, Strategy, compile_programs, make_plan
from restow.broker.planner.program import READ_PAGES, Column
from restow.broker.rpc import wire, wire_program
from restow.v1 import agent_link_pb2 as pb
from restow.v1 import program_pb2


async def test_a_program_that_takes_the_name_of_another_is_the_one_that_runs() -> None:
    async with apart("wide", rank=1) as (both, _):
        ways = (Strategy.SLICES, Strategy.WHOLE, Strategy.SLICES)
        for handoff, strategy in enumerate(ways):
            program = replace(programs(both.case, strategy)[1], program_id="one name")
            await both.check_handoff(program, handoff)


async def test_every_byte_arrives_over_tcp() -> None:
    async with apart("big", rank=1, tls=TCP) as (both, _):
        for handoff, strategy in enumerate((Strategy.SLICES, Strategy.WHOLE, Strategy.AUTO)):
            await both.check_handoff(programs(both.case, strategy)[1], handoff)


async def test_a_frozen_source_fails_by_the_deadline_and_nothing_lands_later() -> None:
    async with apart("big", tls=TCP) as (both, source):
        program = programs(both.case, Strategy.SLICES)[0]
        await both.check_handoff(program, 1)
        source.freeze()
        settled = await both.hand_over(program, 2, grant_ms=200)
        assert settled.reason == "READ_DEADLINE"
        assert 200_000 <= settled.elapsed_us < 5_000_000
        both.check_cleared(0)

        before = both.memory[0].data.copy()
        source.thaw()
        for _ in range(50):  # as long as the whole handoff took, while the loop runs
            await asyncio.sleep(0.01)
            assert (both.memory[0].data == before).all(), "bytes landed after the read was settled"


async def test_other_orders_are_served_while_a_read_waits() -> None:
    async with apart("wide", tls=TCP) as (both, source):
        program = programs(both.case, Strategy.SLICES)[0]
        source.freeze()
        destination = await send_execute(both.fake, both.case, program, 1, grant_ms=700)
        destination.send(pb.AgentOrder(execute=pb.Execute(handoff=2, program_id="unknown")))
        assert [(await destination.next()).handoff for _ in range(2)] == [2, 1]


@pytest.mark.parametrize("tls", [TCP, "all"])
@pytest.mark.parametrize("name", ["big", "recompute"])
async def test_a_killed_source_is_a_typed_failure_and_snapshots_are_cleared(
    name: str, tls: str
) -> None:
    # In the case "recompute", windows could not be rebuilt; a killed P could not gather either.
    async with apart(name, tls=tls) as (both, source):
        plan = make_plan(both.case.source, both.case.destination)
        way = Strategy.RECOMPUTE if name == "recompute" else Strategy.SLICES
        program = compile_programs(plan, way, CostModel(seconds_per_stage=1e3))[0]
        await both.check_handoff(program, 1)
        await source.kill()
        settled = await both.hand_over(program, 2, grant_ms=5_000)
        assert settled.reason == "PEER_LOST", settled.detail
        assert settled.elapsed_us < 5_000_000
        both.check_cleared(0)


async def test_a_forgotten_source_ends_the_reads_from_it() -> None:
    async with apart("wide", tls=TCP) as (both, source):
        program = programs(both.case, Strategy.SLICES)[0]
        source.freeze()
        destination = await send_execute(both.fake, both.case, program, 1, grant_ms=30_000)
        for rank in program.src_ranks:
            name = (await both.fake.agent("P", rank)).hello.agent_name
            destination.send(pb.AgentOrder(forget=pb.Forget(agent_name=name)))
        settled = await destination.next()
        assert settled.reason == "PEER_LOST", settled.detail
        assert settled.elapsed_us < 10_000_000


async def test_orders_that_do_not_fit_are_refused_with_a_reason() -> None:
    async with apart("wide") as (both, _):
        case, fake = both.case, both.fake
        packed = programs(case, Strategy.PACK)[0]
        unstaged = await both.execute(packed, 1, {}, hashed=False)
        assert unstaged.reason == "ORDER_INVALID"
        assert "staged 0 bytes" in unstaged.detail

        direct = programs(case, Strategy.SLICES)[0]
        short = Case(**{**vars(case), "dst_ids": {**case.dst_ids, "attention": (1,)}})
        assert (await (await send_execute(fake, short, direct, 2)).next()).reason == "PAGE_COUNT"
        far = Case(**{**vars(case), "dst_ids": {**case.dst_ids, "state": (10_000,)}})
        beyond = await (await send_execute(fake, far, direct, 3)).next()
        assert beyond.reason == "PAGE_OUT_OF_RANGE"

        direct.rows(READ_PAGES)[0, Column.DST_OFFSET_BYTES] = 1 << 40
        outside = await both.execute(direct, 4, {}, hashed=False)
        assert outside.reason == "PROGRAM_INVALID"
        assert "leaves its destination page" in outside.detail


async def test_orders_that_name_a_program_of_another_release_hear_so() -> None:
    async with apart("wide") as (both, _):
        program = programs(both.case, Strategy.SLICES)[0]
        await both.check_handoff(program, 1)
        odd = wire_program.program_to_proto(program)
        odd.steps[0].kind = program_pb2.STEP_KIND_UNSPECIFIED
        destination = await both.fake.agent("D", 0)
        order = execute_order(both.case, program, 2, [])
        destination.send(pb.AgentOrder(program=odd))
        destination.send(pb.AgentOrder(execute=order))
        settled = await destination.next()
        assert settled.reason == "AGENT_RELEASE_DIFFERS", settled.detail
        await both.check_handoff(program, 3)


async def test_staging_waits_in_line_and_is_given_back() -> None:
    # P's pool holds two of the four runs, so the others wait for Unstage.
    async with apart("big") as (both, _):
        case, fake = both.case, both.fake
        program = programs(case, Strategy.PACK)[0]
        (source_rank,) = program.staging_ranks
        source = await fake.agent("P", source_rank)
        first = (await stage(fake, case, program, 1))[source_rank]
        assert first.reason == ""
        fits = STAGING_BYTES // first.bytes
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
    async with apart("wide") as (both, _):
        case, fake = both.case, both.fake
        program = programs(case, Strategy.SLICES)[0]
        destination = await send_execute(fake, case, program, 1, grant_ms=200, write_mark=2)
        both.agents["D", 0].writes_done(1)
        settled = await destination.next()
        assert (settled.handoff, settled.reason) == (1, "READ_NOT_BEGUN")
        assert (both.memory[0].data == POISON).all(), "not even a snapshot is cleared"
        await send_execute(fake, case, program, 2, write_mark=2)
        both.agents["D", 0].writes_done(2)
        settled = await destination.next()
        assert (settled.handoff, settled.reason) == (2, ""), settled.detail
        both.check_whole(0)


async def test_a_read_does_not_begin_when_its_grant_has_nearly_ended() -> None:
    # The read would fail in its midst, whereas a read that has not begun is granted anew.
    async with apart("big", tls=TCP) as (both, source):
        case, fake = both.case, both.fake
        program = programs(case, Strategy.PACK)[0]
        staged = await both.stage(program, 1)
        fits = STAGING_BYTES // min(run.bytes for run in staged.values())
        source.freeze()
        late = fits + 2
        for handoff in range(2, late):
            await send_execute(fake, case, program, handoff, grant_ms=60_000, staged=staged)
        destination = await send_execute(fake, case, program, late, grant_ms=1_000, staged=staged)
        settled = await destination.next()
        assert (settled.handoff, settled.reason) == (late, "READ_NOT_BEGUN")
        assert settled.elapsed_us < 1_000_000
