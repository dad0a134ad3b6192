"""An API server that no test shares: Leases are few, and it starts at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from kubernetes_harness.server import ApiServer, api_of, running_api
from restow.broker.kubernetes.api import LeasesApi


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with running_api(tmp_path) as one:
        yield one


@pytest_asyncio.fixture
async def api(server: ApiServer) -> AsyncIterator[LeasesApi]:
    async with api_of(server) as one:
        yield one
