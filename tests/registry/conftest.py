"""An etcd that no test harms, and an API server of Kubernetes for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from etcd_harness.cluster import EtcdCluster, running_etcd
from kubernetes_harness.server import ApiServer, running_api
from registry.scene import AtEtcd, AtKubernetes, Scene


@pytest_asyncio.fixture(scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    folder = tmp_path_factory.mktemp("etcd")
    async with running_etcd(folder, 1, heartbeat_ms=50, election_ms=500) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    async with running_api(tmp_path) as one:
        for name, value in one.environ.items():
            monkeypatch.setenv(name, value)
        yield one


@pytest_asyncio.fixture(params=["etcd", "kubernetes"])
async def scene(
    request: pytest.FixtureRequest, etcd: EtcdCluster, server: ApiServer, tmp_path: Path
) -> AsyncIterator[Scene]:
    fleet = tmp_path.name.lower().replace("_", "-")
    made: Scene = AtEtcd(etcd, fleet) if request.param == "etcd" else AtKubernetes(server, fleet)
    async with made:
        yield made
