"""A broker, P and D for a test; and a test in whose background something went wrong has failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from broker.certificates import Authority
from broker.fakes import Pair, broker, pair
from restow.broker.logs import TOLD
from restow.broker.server.serve import RunningBroker


@pytest_asyncio.fixture
async def running() -> AsyncIterator[RunningBroker]:
    """Run a broker with the usual settings."""
    async with broker() as started:
        yield started


@pytest_asyncio.fixture
async def both(running: RunningBroker) -> AsyncIterator[Pair]:
    """Run a P of two ranks and a D at the broker of ``running``."""
    async with pair(running.address) as connected:
        yield connected


@pytest_asyncio.fixture
async def shown() -> AsyncIterator[RunningBroker]:
    """Run a broker that shows metrics, probes and the status page."""
    async with broker(
        http_listen="127.0.0.1:0", status_page=True, http_hosts="Status.example, b"
    ) as started:
        yield started


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Return an authority that issues certificates to a broker and its callers."""
    return Authority(tmp_path_factory.mktemp("authority"))


Logged = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Return a function that returns the values of all log lines of an event."""
    caplog.set_level(logging.INFO, logger="restow")

    def of(event: str) -> list[dict[str, Any]]:
        told = [vars(one)[TOLD] for one in caplog.records if TOLD in vars(one)]
        return [values for name, values in told if name == event]

    return of


@pytest.fixture(autouse=True)
async def nothing_unhandled(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Check that no task dies unheard, and that gRPC reports no unexpected error of a servicer.

    What Restow itself logs is said on purpose.
    """
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    # gRPC's poller serves all loops of a process. On a busy machine it hands the last event of a
    # blocking client to whichever loop runs, after that client has closed its own (`SETTLE_S`).
    late = [one for one in unhandled if "PollerCompletionQueue" in one["message"]]
    assert [str(one["exception"]) for one in late] == ["Event loop is closed"] * len(late)
    assert not [one for one in unhandled if one not in late]
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert not [one for one in errors if not one.name.startswith("restow.")]
