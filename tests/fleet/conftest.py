"""An etcd that no test harms, quick to find a leader, and a fleet of brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from etcd_harness.cluster import EtcdCluster, running_etcd
from fleet_harness.brokers import Fleet, running_fleet


@pytest_asyncio.fixture(scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    folder = tmp_path_factory.mktemp("etcd")
    async with running_etcd(folder, 1, heartbeat_ms=50, election_ms=500) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="session")
async def fleet(
    etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    """Run three brokers, which are all there again at the end of each test."""
    async with running_fleet(tmp_path_factory.mktemp("fleet"), etcd, wired=True) as three:
        yield three
