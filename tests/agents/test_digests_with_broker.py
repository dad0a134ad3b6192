"""Content digests under the real broker: what is asked of agents, what engines are told."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_harness.live import Live
from agent_harness.waiting import WAIT_S
from broker.fakes import broker
from laws.strategies import SENDING
from restow.agents.execute.gathering import Gathering
from restow.agents.execute.orders import StagedRun
from restow.broker.client.admin import AdminClient
from restow.broker.core.common.pair import DigestMode
from restow.broker.planner import Strategy

pytestmark = pytest.mark.sampled


@contextlib.asynccontextmanager
async def engines(strategy: Strategy, digests: DigestMode, every: int = 64) -> AsyncIterator[Live]:
    """Run both engines in this process."""
    costs = {"seconds_per_stage": 1e-4}
    checked = broker(strategy=strategy, digests=digests, digest_every=every, costs=costs)
    async with checked as running, Live("wide", running.address) as both:
        await both.start_engines()
        await both.start_source_here()
        await both.start_agents()
        yield both


async def told(address: str, handoff_id: str) -> tuple[dict[str, str], tuple[int, int]]:
    """Return a handoff's timeline, and how many handoffs were compared and how many differed."""

    def ask() -> tuple[dict[str, str], tuple[int, int]]:
        with AdminClient(address, WAIT_S) as client:
            status = client.status()
            timeline = client.handoff(handoff_id).timeline
        counts = status.handoffs_checked, status.digest_mismatches
        return {entry.event: entry.detail for entry in timeline}, counts

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("strategy", SENDING)
async def test_a_byte_of_ps_that_changes_after_it_was_hashed_costs_d_its_state(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Gathering._digest
    spoil = False
    spoiled: list[int] = []

    async def then_spoiled(self: Gathering, program: Any, staged: StagedRun, order: Any) -> bytes:
        made = await right(self, program, staged, order)
        if spoil and not spoiled:
            address = staged.address
            if not staged.length_bytes:
                (state,) = both.case.src_ids["state"]
                region = both.source[self._rank].regions[0]
                address = region.base_address + state * region.page_stride_bytes
            ctypes.c_ubyte.from_address(address).value ^= 1
            spoiled.append(address)
        return made

    monkeypatch.setattr(Gathering, "_digest", then_spoiled)
    async with engines(strategy, DigestMode.ALL) as both:
        for name in ("h1", "h2"):  # the second one finds programs known
            await both.check_handoff(name)
        timeline, counts = await told(both.address, "h2")
        assert timeline["checked"] == "D read what P hashed"
        assert counts == (2, 0)
        spoil = True
        ended, released = await both.hand_over("spoiled")
        assert (ended.state, ended.reason) == ("FAILED", "DIGEST_MISMATCH")
        assert not released.done
        timeline, counts = await told(both.address, "spoiled")
        assert "digest_mismatch" in timeline
        assert "checked" not in timeline
        assert counts == (3, 1)
        ctypes.c_ubyte.from_address(spoiled[0]).value ^= 1
        await both.check_handoff("well again")


async def test_some_are_checked_and_the_others_cost_nothing() -> None:
    async with engines(Strategy.SLICES, DigestMode.SAMPLED, every=3) as both:
        checked = 0
        for index in range(24):
            ended, _ = await both.hand_over(f"h{index}")
            assert ended.done
            timeline, counts = await told(both.address, f"h{index}")
            assert ("checked" in timeline) == ("staged" in timeline)
            checked += "checked" in timeline
        assert counts == (checked, 0)
        assert 0 < checked < 24


async def test_where_it_is_off_nobody_is_asked() -> None:
    async with engines(Strategy.SLICES, DigestMode.OFF) as both:
        ended, _ = await both.hand_over("h")
        assert ended.done
        timeline, counts = await told(both.address, "h")
        assert not {"staged", "checked"} & set(timeline)
        assert counts == (0, 0)
