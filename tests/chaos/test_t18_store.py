"""T18: a store is killed, stopped and told to end while it keeps, spills and gives."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence

import pytest

from chaos.scene import Scene, prompt, scene
from chaos.test_t17_by_content import ENDS_S, ONE, asks, holders
from chaos_harness.lives import STORE
from restow.agents.store.run_files import NAME as JOURNAL
from restow.broker.client import AsyncAdminClient
from stamped.requests import Prompt

pytestmark = [pytest.mark.sampled, pytest.mark.timeout(240)]
TRIES = 6
MANY = 16
"""States: more than the store has memory for."""
AT_ONCE = 5
"""As many as P has room for."""


@contextlib.asynccontextmanager
async def with_store(tps: tuple[int, int]) -> AsyncIterator[Scene]:
    """Run P and D of these sizes, and a store that is ready."""
    async with scene(tps) as world:
        await start_store(world)
        yield world


async def start_store(world: Scene) -> None:
    """Start a life of the store with the disk of the lives before it; wait until it is ready."""
    world.cluster.start_store()
    async with asyncio.timeout(ENDS_S), AsyncAdminClient(world.cluster.address("b")) as client:
        while not any(  # noqa: ASYNC110 - the broker tells no events
            one.engine_id == STORE and one.session and one.agents == one.ranks
            for one in await client.engines()
        ):
            await asyncio.sleep(0.02)


async def has(world: Scene, one: Prompt = ONE, within_s: float = ENDS_S) -> None:
    """Wait until the broker finds the state at the store."""
    async with asyncio.timeout(within_s):
        while STORE not in await holders(world, one):  # noqa: ASYNC110 - the broker tells no events
            await asyncio.sleep(0.02)


async def finds(world: Scene, states: Sequence[Prompt], count: int) -> None:
    """Wait until the broker finds at least ``count`` of the states at the store."""
    async with asyncio.timeout(ENDS_S):
        while sum([STORE in await holders(world, one) for one in states]) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def keep(world: Scene, one: Prompt = ONE) -> None:
    """Have P compute a state, and evict the state when the store has it."""
    for _ in range(TRIES):  # of some offers P takes its time
        world.cluster.compute(one)
        with contextlib.suppress(TimeoutError):
            await has(world, one, ENDS_S / TRIES)
            break
    await has(world, one)
    world.cluster.evict(one, "P")


def runs_on_disk(world: Scene) -> int:
    """Return the number of states in the store's journal."""
    journal = world.cluster.folder / "disk" / JOURNAL
    return journal.read_text().count('"run":') if journal.exists() else 0


async def is_on_disk(world: Scene, runs: int) -> None:
    """Wait until ``runs`` states are on disk."""
    async with asyncio.timeout(ENDS_S):
        while runs_on_disk(world) < runs:  # noqa: ASYNC110 - the disk tells no events
            await asyncio.sleep(0.01)


async def test_t18_killed_while_it_keeps() -> None:
    async with with_store((1, 2)) as world:
        world.cluster.worker("P.0").stop()  # nothing is fenced meanwhile
        world.cluster.compute(ONE)
        async with asyncio.timeout(ENDS_S), AsyncAdminClient(world.cluster.address("b")) as client:
            while not (await client.status()).handoffs_live:  # noqa: ASYNC110 - the broker tells no events
                await asyncio.sleep(0.02)
        await world.cluster.end_store()
        world.cluster.worker("P.0").go_on()
        world.cluster.evict(None, "P")
        await world.heals()  # P has its pages back
        await start_store(world)
        await keep(world)
        assert await asks(world, "after") == ("DONE", "")
        await world.heals()


async def test_t18_killed_while_it_spills() -> None:
    states = [prompt(f"state {number}") for number in range(MANY)]
    async with with_store((2, 1)) as world:
        for one in states[:AT_ONCE]:
            world.cluster.compute(one)
        await is_on_disk(world, 1)
        await world.cluster.end_store()
        world.cluster.evict(None, "P")
        said = runs_on_disk(world)
        await start_store(world)
        await finds(world, states[:AT_ONCE], said)
        ends = [await asks(world, f"ask {n}", one=one) for n, one in enumerate(states[:AT_ONCE])]
        assert {*ends} <= {("DONE", ""), ("CANCELLED", "NOT_HELD")}
        assert ends.count(("DONE", "")) >= said
        for one in states:  # and goes on, with more than its memory has room for
            await keep(world, one)
        later = [await asks(world, f"later {n}", one=one) for n, one in enumerate(states)]
        assert {*later} == {("DONE", "")}
        await world.heals()


async def test_t18_killed_while_it_gives() -> None:
    async with with_store((1, 1)) as world:
        await keep(world)
        await is_on_disk(world, 1)
        world.cluster.worker("D.0").stop()  # it reads nothing meanwhile
        world.cluster.ask(ONE, "lost")
        await world.cluster.reaches("lost", "READING")
        await world.cluster.end_store()
        world.cluster.worker("D.0").go_on()
        state, _ = await world.ends("lost", "D", ENDS_S)
        assert state == "FAILED"
        await start_store(world)
        await has(world)
        assert await asks(world, "again") == ("DONE", "")
        await world.heals()


async def test_t18_told_to_end_while_it_gives() -> None:
    async with with_store((1, 1)) as world:
        await keep(world)
        await is_on_disk(world, 1)
        world.cluster.worker("D.0").stop()
        world.cluster.ask(ONE, "given")
        await world.cluster.reaches("given", "READING")
        assert await world.cluster.end_store(signal.SIGTERM) == 0
        world.cluster.worker("D.0").go_on()
        await world.ends("given", "D", ENDS_S)  # well or not: what is DONE is compared
        await start_store(world)
        await has(world)
        assert await asks(world, "again") == ("DONE", "")
        await world.heals()


async def test_t18_stands_still_when_it_is_asked() -> None:
    async with with_store((2, 2)) as world:
        await keep(world)
        store = world.cluster.store
        assert store is not None
        store.stop()
        assert await asks(world, "silent") == ("CANCELLED", "NOT_HELD")
        store.go_on()
        assert await asks(world, "awake") == ("DONE", "")
        await world.heals()
