"""What a broker is told to share pools out by."""

from __future__ import annotations

import sys

import pytest
from pydantic import ValidationError

from agent_harness.waiting import until
from kubernetes_harness.server import NAMESPACE, ApiServer
from restow.broker.errors import ExtraMissingError
from restow.broker.kubernetes.leases import member_name
from restow.broker.registry.kubernetes_access import KubernetesRefusedError, KubernetesSettingsError
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import running_broker

HERE = "127.0.0.1:0"
WITHIN_S = 60.0


async def begin(**settings: str) -> None:
    async with running_broker(BrokerSettings(listen=HERE, **settings)):  # type: ignore[arg-type]
        pass


async def test_etcd_and_leases_exclude_each_other() -> None:
    with pytest.raises(KubernetesSettingsError, match="give --etcd or --kubernetes-leases"):
        await begin(etcd="127.0.0.1:1", kubernetes_leases=NAMESPACE)


async def test_outside_of_a_pod_that_is_said() -> None:
    with pytest.raises(KubernetesSettingsError, match="KUBERNETES_SERVICE_HOST"):
        await begin(kubernetes_leases=NAMESPACE)


async def test_without_aiohttp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith("restow.broker.kubernetes.") and name.endswith(("api", "registry")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ExtraMissingError, match=r"restow\[kubernetes\]"):
        await begin(kubernetes_leases=NAMESPACE)


async def test_an_account_that_may_not_is_told_at_once(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    server.may.clear()
    with pytest.raises(KubernetesRefusedError, match="needs a Role"):
        await begin(kubernetes_leases=NAMESPACE, kubernetes_account=str(server.account))


def test_a_namespace_is_a_name() -> None:
    with pytest.raises(ValidationError):
        BrokerSettings(kubernetes_leases="a/b")


async def test_a_broker_joins_and_leaves(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    settings = BrokerSettings(
        listen=HERE, kubernetes_leases=NAMESPACE, kubernetes_account=server.account
    )
    async with running_broker(settings) as broker:
        assert broker.fleet is not None
        fleet = broker.fleet
        await until(lambda: fleet.report().let_in, WITHIN_S)
        assert server.leases.get(member_name("default", broker.address))
        assert broker.fleet.fleet.endswith("/default")
        await broker.drain()
    labels = {"restow/kind": "member"}
    assert server.leases.listed(labels)["items"] == []
