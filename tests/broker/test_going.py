"""Engines go, and a real broker forgets them, whether they say so, are killed or come back."""

from __future__ import annotations

import asyncio
import contextlib

from agent_harness.waiting import until
from broker.fakes import broker, engine
from restow.broker.client import EngineSession
from restow.broker.server.serve import RunningBroker


def names(running: RunningBroker) -> set[str]:
    return {key.engine_id for key in running.hub.directory.members.engines}


async def die(session: EngineSession) -> None:
    """End a session as a killed process would: nobody unregisters."""
    for task in (session._runner, session._keeper):
        assert task is not None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await session._channel.close()
    session._stub = None


async def test_a_killed_engine_is_forgotten_and_one_with_a_session_is_not() -> None:
    async with (
        broker(engine_idle_s=0.2) as running,
        engine(running.address, "killed", agents=False) as (killed, _),
        engine(running.address, "alive", agents=False),
    ):
        assert names(running) == {"killed", "alive"}
        await die(killed)
        await until(lambda: names(running) == {"alive"})
