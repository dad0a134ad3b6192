"""Large pairs are planned in another process, with the plan that a thread would make."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children

import pytest

from agent_harness.waiting import until
from broker.fakes import Pair, broker, engine, model_layout, pair
from restow.broker.core.common.pair import PairOutcome, PairPlan, PairRefused
from restow.broker.layout import Layout
from restow.broker.planner import Strategy
from restow.broker.rpc import wire
from restow.broker.server.base import hub as hubs
from restow.broker.server.base import planning
from restow.broker.server.base.planning import Planner, PlanningProcess, plan_pair
from restow.broker.server.serve import RunningBroker
from restow.broker.server.services.checked_messages import CheckedLayouts

NAMES = ((1, "m"), (2, "m"), (2, "other"))
HOW = (Strategy.AUTO, False, None)


def known(layout: Layout) -> Layout:
    """Return the layout as the broker has it."""
    return CheckedLayouts().of(wire.layout_to_proto(layout))[0]


def same(one: PairOutcome, other: PairOutcome) -> bool:
    assert isinstance(one, PairPlan)
    assert isinstance(other, PairPlan)
    ids = [{rank: p.program_id for rank, p in plan.programs.items()} for plan in (one, other)]
    rows = [
        [step.rows.tobytes() for p in plan.programs.values() for step in p.steps]
        for plan in (one, other)
    ]
    return ids[0] == ids[1] and rows[0] == rows[1] and one.sources == other.sources


def test_the_process_makes_the_plan_that_a_thread_makes_and_ends_when_it_is_closed() -> None:
    source, destination, other = (known(model_layout(tp, name)) for tp, name in NAMES)
    process = PlanningProcess()
    try:
        made = process.plan(source.encoded, destination.encoded, *HOW)
        assert same(made, plan_pair(source, destination, *HOW))
        refused = process.plan(source.encoded, other.encoded, *HOW)
        assert isinstance(refused, PairRefused)
        expected = plan_pair(source, other, *HOW)
        assert isinstance(expected, PairRefused)
        assert (refused.error.reason, refused.error.message, refused.error.subject) == (
            expected.error.reason,
            expected.error.message,
            expected.error.subject,
        )
        # One that dies costs the plan that it was at, and the next one finds another.
        assert process._process is not None
        process._process.kill()
        process._process.join()
        broken = process.plan(source.encoded, destination.encoded, *HOW)
        assert isinstance(broken, PairRefused)
        assert "the planning process has ended" in broken.error.message
        assert same(process.plan(source.encoded, destination.encoded, *HOW), made)
    finally:
        process.close()
    assert not active_children()
    assert isinstance(process.plan(source.encoded, destination.encoded, *HOW), PairRefused)


async def test_a_large_pair_is_planned_in_the_process_and_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_thread(*_: object) -> PairOutcome:
        raise AssertionError

    monkeypatch.setattr(planning, "LARGE_SHARDS", 3)
    monkeypatch.setattr(hubs, "plan_pair", in_thread)
    async with broker() as running, pair(running.address) as both:
        assert running.hub.planner._starting is not None
        await both.hand_over("h")
        # Another one may have planned the pair ahead, and ends.
        await until(lambda: len(active_children()) == 1)
    assert not active_children()


def test_nothing_is_planned_ahead_once_the_planner_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "LARGE_SHARDS", 3)
    layout, free = known(model_layout()), threading.Event()

    async def outcomes() -> list[PairOutcome]:
        planner = Planner()

        async def ahead() -> PairOutcome:
            return await planner.plan("a", plan_pair, layout, layout, *HOW, ahead=True)

        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            threads.submit(free.wait)
            waiting = asyncio.create_task(ahead())
            await asyncio.sleep(0)  # it waits for a thread
            planner.close()
            free.set()
            return [await waiting, await ahead()]

    for outcome in asyncio.run(outcomes()):
        assert isinstance(outcome, PairRefused)
        assert "the broker is stopping" in outcome.error.message


async def test_small_pairs_start_no_process(running: RunningBroker, both: Pair) -> None:
    async with engine(running.address, "e"):
        await both.hand_over("h")
        assert running.hub.planner._starting is None
        assert running.hub.planner._process._process is None


async def test_a_tenant_has_one_pair_planned_at_a_time_and_others_do_not_wait_for_it() -> None:
    planner = Planner()
    layout = model_layout()
    going = threading.Event()
    begun: list[str] = []

    def slow(*_: object) -> PairOutcome:
        begun.append("slow")
        assert going.wait(10)
        return plan_pair(layout, layout, *HOW)

    def quick(*_: object) -> PairOutcome:
        begun.append("quick")
        return plan_pair(layout, layout, *HOW)

    mine = [asyncio.create_task(planner.plan("a", slow, layout, layout, *HOW)) for _ in range(3)]
    await until(lambda: begun == ["slow"])
    other = await planner.plan("b", quick, layout, layout, *HOW)
    assert isinstance(other, PairPlan)
    assert begun == ["slow", "quick"]
    going.set()
    await asyncio.gather(*mine)
    assert begun == ["slow", "quick", "slow", "slow"]
    assert not planner._turns
    planner.close()
