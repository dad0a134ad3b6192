"""P, which holds a state, and D, which asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from broker.content.holders import Holder, holder
from broker.fakes import engine
from restow.broker.client import EngineSession
from restow.broker.server.serve import RunningBroker


@pytest_asyncio.fixture
async def p(running: RunningBroker) -> AsyncIterator[Holder]:
    async with holder(running, "p") as one:
        yield one


@pytest_asyncio.fixture
async def d(running: RunningBroker) -> AsyncIterator[EngineSession]:
    async with engine(running.address, "d") as (session, _):
        yield session
