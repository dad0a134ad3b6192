"""An etcd of three members that no test harms."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from etcd_harness.cluster import EtcdCluster, client_of, running_etcd
from restow.broker.registry.etcd_client import EtcdClient


@pytest_asyncio.fixture(scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def client(etcd: EtcdCluster) -> AsyncIterator[EtcdClient]:
    async with client_of(etcd) as one:
        yield one
