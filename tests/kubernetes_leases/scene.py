"""Brokers' memberships over Leases of an API server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from etcd.scene import Broker
from kubernetes_harness.server import ApiServer, api_of
from restow.broker.kubernetes.registry import KubernetesRegistry
from restow.broker.owners.registry import Registry
from restow.broker.owners.timing import Timing
from restow.broker.server.fleet.membership import seconds_awake_or_not

FLEET = "blue"


def with_leases(server: ApiServer, address: str, timing: Timing, call_s: float = 10.0) -> Broker:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Registry]:
        async with api_of(server, call_s) as api:
            yield KubernetesRegistry(api, FLEET, seconds_awake_or_not)

    return Broker(opened, address, timing)
