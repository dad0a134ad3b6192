"""Runs gathered at the source: read when all are there, given back once whatever happens."""

from __future__ import annotations

import pytest

from core.world import World, ends, kinds, of_kind, reading
from restow.broker.core.common import actions as act
from restow.broker.core.common.events import StagedRun
from restow.broker.core.common.keys import State
from restow.broker.core.common.pair import Gather, PairPlan
from restow.broker.families import EngineSettings, Mamba2Spec, ModelSpec, build_layout
from restow.broker.layout import DType
from restow.broker.planner import Strategy, compile_programs, make_plan


def unstaged(world: World) -> list[int]:
    return [one.agent.rank for one in world.orders(act.SendUnstage)]


def test_a_rank_reads_when_all_its_runs_are_staged() -> None:
    world, p, d, number = reading(2, 2, staged=True)
    assert kinds(world.sent).count("SendStage") == 4
    assert not world.orders(act.SendExecute)
    assert world.stage(p, number, 0, 0) == []
    assert world.find().state is State.STAGING
    (execute,) = of_kind(act.SendExecute, world.stage(p, number, 1, 0))
    assert [run.staged_address for run in execute.sources] == [4096, 8192]
    world.stage(p, number, 0, 1)
    world.stage(p, number, 1, 1)
    assert world.find().state is State.READING
    world.settle(d, number, 0)
    world.settle(d, number, 1)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert unstaged(world) == [0, 1]


def test_doubled_and_unasked_runs_change_nothing() -> None:
    world, p, d, number = reading(1, 2, staged=True)
    world.stage(p, number, 0, 0)
    assert world.stage(p, number, 0, 0) == []
    assert world.stage(p, number, 0, 9) == []
    assert world.stage(d, number, 0, 1) != []
    assert len(world.orders(act.SendExecute)) == 1
    assert world.find().staged == {(0, 0): StagedRun(4096, 128)}


def test_a_rank_that_was_not_told_to_read_can_not_settle() -> None:
    world, p, d, number = reading(staged=True)
    assert world.settle(d, number) == []
    world.stage(p, number)
    world.settle(d, number)
    assert ends(d) == [("DONE", "")]


def test_a_run_that_comes_after_the_end_is_given_back() -> None:
    world, p, d, number = reading(staged=True)
    world.cancel(d)
    assert ends(p) == [("CANCELLED", "CANCELLED")]
    assert unstaged(world) == []
    late = world.stage(p, number)
    assert late == [act.SendUnstage(p.agents[0].key, number)]
    assert world.stage(p, 12345) == [act.SendUnstage(p.agents[0].key, 12345)]


def test_a_run_that_can_not_be_staged_fails_the_handoff() -> None:
    world, p, d, number = reading(2, 2, staged=True)
    world.stage(p, number, 0, 0)
    world.stage(p, number, 1, 0)
    world.stage(p, number, 0, 1)
    world.stage(p, number, 1, 1, "STAGING_FULL")
    assert ends(d) == []
    world.settle(d, number, 0)
    assert ends(p) == ends(d) == [("FAILED", "STAGING_FULL")]
    assert unstaged(world) == [0, 1]


def test_a_run_that_comes_after_the_failure_is_given_back() -> None:
    world, p, d, number = reading(2, 2, staged=True)
    world.stage(p, number, 0, 0)
    world.stage(p, number, 1, 0)
    world.cancel(d)
    assert unstaged(world) == [0, 1]
    assert kinds(world.stage(p, number, 0, 1)) == ["SendUnstage"]
    assert len(world.orders(act.SendExecute)) == 1
    world.settle(d, number, 0)
    assert ends(p) == ends(d) == [("CANCELLED", "CANCELLED")]


def test_staging_that_takes_the_whole_grant_starts_no_read_and_is_repeated() -> None:
    world, p, d, number = reading(staged=True)
    world.now_s += 9.98
    world.stage(p, number)
    assert not world.orders(act.SendExecute)
    assert unstaged(world) == [0]
    world.wait(0.02)
    again = world.find().number
    assert again != number
    world.stage(p, again)
    world.settle(d, again)
    assert ends(p) == ends(d) == [("DONE", "")]


@pytest.mark.parametrize(
    "outcome", ["done", "failed", "cancelled", "deadline", "p lost", "d lost", "p gone"]
)
def test_staged_runs_are_released_exactly_once(outcome: str) -> None:
    world, p, d, number = reading(2, 2, staged=True)
    world.stage_all(p, number, 2)
    world.renew(p, lease_s=60.0)
    if outcome == "cancelled":
        world.cancel(p)
    elif outcome == "p lost":
        world.disconnect(p, 1)
    elif outcome == "d lost":
        world.disconnect(d, 1)
    elif outcome == "p gone":
        world.unregister(p)
    if outcome != "deadline":
        world.settle(d, number, 0, "TRANSFER_FAILED" if outcome == "failed" else "")
        world.settle(d, number, 1)
    world.wait(31)
    assert len(p.told) == 1
    assert not world.directory.ledger.live
    gone = {"p lost": [0]}
    assert unstaged(world) == gone.get(outcome, [0, 1])


@pytest.mark.parametrize("back", [True, False], ids=["the same agent", "another agent"])
@pytest.mark.parametrize("settled", [True, False])
def test_an_agent_on_a_new_stream_is_not_told_to_give_back(back: bool, settled: bool) -> None:
    world, p, d, number = reading(2, 2, staged=True)
    world.stage_all(p, number, 2)
    name = p.agents[0].agent_name if back else ""
    world.disconnect(p, 0)
    if settled:
        world.settle(d, number, 0)
        world.settle(d, number, 1)
    world.connect(p, 0, name=name)
    if not settled:
        world.settle(d, number, 0)
        world.settle(d, number, 1)
    assert unstaged(world) == [1]


def test_a_state_is_interleaved_for_all_its_readers_at_once() -> None:
    mamba = Mamba2Spec(0, 4, 2, 2, 2, 4, DType.BFLOAT16, DType.BFLOAT16)
    two, four = (build_layout(ModelSpec("m", (mamba,)), EngineSettings(tp=tp)) for tp in (2, 4))
    for strategy, gathers in (
        (Strategy.INTERLEAVE, (Gather(0, (0, 1)), Gather(1, (2, 3)))),
        (Strategy.PACK, (Gather(0, (0,)), Gather(0, (1,)), Gather(1, (2,)), Gather(1, (3,)))),
        (Strategy.SLICES, ()),
    ):
        assert PairPlan.of(compile_programs(make_plan(two, four), strategy)).gathers == gathers


def test_one_order_names_all_readers_and_each_reads_when_its_run_is_staged() -> None:
    world, p, d, number = reading(1, 2, staged=True, together=True)
    (order,) = world.orders(act.SendStage)
    assert [part.dst_rank for part in order.parts] == [0, 1]
    assert len({part.program_id for part in order.parts}) == 2
    assert len(world.orders(act.SendProgram)) == 2
    world.stage_all(p, number, 2)
    world.settle_all(d, number)
    assert ends(p) == ends(d) == [("DONE", "")]
    assert unstaged(world) == [0]


def test_an_agent_is_sent_a_program_once_and_named_it_in_every_order() -> None:
    world, p, d, _ = reading(staged=True)
    world.begin(p, d, "again")
    (program,) = world.orders(act.SendProgram)
    assert not program.hashed
    assert [part.program_id for one in world.orders(act.SendStage) for part in one.parts] == [
        program.program.gather_id(0)
    ] * 2


@pytest.mark.parametrize(
    ("address", "size_bytes", "possible"),
    [
        *((address, 0, True) for address in (-4096, 0, 4096)),
        *((0, 1, False), (-4096, 64, False), (4096, -64, False), (0, -1, False)),
        *((1, 2**63 - 1, True), (2, 2**63 - 1, False), (2**63 - 1, 1, True), (2**63, 1, False)),
    ],
)
def test_a_run_where_no_memory_can_be_is_read_by_nobody(
    address: int, size_bytes: int, possible: bool
) -> None:
    world, p, d, number = reading(staged=True)
    agent, reports, run = p.agents[0], world.directory.reports, StagedRun(address, size_bytes)
    world.run(lambda now_s: reports.staged(p.record, agent, number, 0, run, None, now_s))
    if possible:
        assert world.find().state is State.READING
    else:
        assert not world.orders(act.SendExecute)
        assert ends(p) == ends(d) == [("FAILED", "ARGUMENT_INVALID")]
