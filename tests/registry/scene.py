"""Two kinds of registry, each with what somebody else may do to it."""

from __future__ import annotations

import contextlib
import time
from typing import Self

from etcd_harness.cluster import EtcdCluster, client_of
from kubernetes_harness.server import NAMESPACE, ApiServer
from restow.broker.registry.etcd import EtcdRegistry
from restow.broker.registry.etcd_client import EtcdClient
from restow.broker.registry.kubernetes import KubernetesRegistry


class AtEtcd:
    """A fleet at etcd."""

    def __init__(self, cluster: EtcdCluster, fleet: str) -> None:
        self._cluster, self._fleet = cluster, fleet
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.client: EtcdClient = await self._stack.enter_async_context(client_of(self._cluster))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def opened(self) -> EtcdRegistry:
        """Return the registry as a single broker has it."""
        return EtcdRegistry(self.client, self._fleet)

    async def _delete(self, name: str, end: str = "") -> None:
        from restow.etcd import rpc_pb2

        request = rpc_pb2.DeleteRangeRequest(
            key=f"/restow/{self._fleet}/{name}".encode(), range_end=end.encode()
        )
        await self.client.txn([], [rpc_pb2.RequestOp(request_delete_range=request)])

    async def delete_leader(self) -> None:
        """Delete the record of who leads."""
        await self._delete("leader")

    async def delete_all(self) -> None:
        """Delete everything, as if etcd were set up anew."""
        await self._delete("", f"/restow/{self._fleet}0")


class AtKubernetes:
    """A fleet at Kubernetes' Leases."""

    def __init__(self, server: ApiServer, fleet: str) -> None:
        self._server, self._fleet = server, fleet
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def opened(self) -> KubernetesRegistry:
        made = KubernetesRegistry(
            NAMESPACE, self._fleet, time.monotonic, account=self._server.account, call_s=10.0
        )
        self._stack.push_async_callback(made.close)
        return made

    async def delete_leader(self) -> None:
        self._server.leases.delete(f"restow-{self._fleet}", {})

    async def delete_all(self) -> None:
        for one in self._server.leases.listed({})["items"]:
            self._server.leases.delete(one["metadata"]["name"], {})


Scene = AtEtcd | AtKubernetes
"""A registry that brokers join, and that somebody else writes to."""
