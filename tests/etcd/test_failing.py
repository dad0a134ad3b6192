"""What a client meets when members of a real etcd die, stand still or were never there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from etcd_harness.cluster import EtcdCluster, client_of, running_etcd
from forked.ports import free_port
from restow.broker.registry.etcd_access import (
    EtcdAccess,
    EtcdError,
    EtcdNoLeaderError,
    EtcdTooOldError,
    EtcdUnreachableError,
)
from restow.broker.registry.etcd_client import EtcdClient, Patience
from restow.etcd import rpc_pb2, rpc_pb2_grpc

HASTY = Patience(call_s=2.0, try_s=0.6)


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped"])
async def test_calls_go_on_when_the_leader_is_lost(tmp_path: Path, stopped: bool) -> None:
    async with running_etcd(tmp_path, 3, 50, 500) as etcd, client_of(etcd) as client:
        lease = (await client.grant(60)).ID
        await client.put(b"k1", b"", lease)
        leader = await etcd.leader(client)
        leader.stop() if stopped else leader.kill()
        await client.put(b"k2", b"", lease)
        assert await client.keep_alive(lease) >= 60
        found = await client.range(b"k", b"l")
        assert [one.key for one in found.kvs] == [b"k1", b"k2"]
        leader.go_on()


async def test_any_one_member_may_be_lost_and_come_back(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd, client_of(etcd) as client:
        for number, member in enumerate(etcd.members):
            member.kill()
            await client.put(b"k", str(number).encode())
            etcd.start(member)
            await etcd.ready(EtcdAccess((member.endpoint,)))
        (found,) = (await client.range(b"k")).kvs
        assert found.value == b"2"
        assert found.version >= 3  # a call whose answer is late is made again


async def test_what_is_lost_is_told_apart(tmp_path: Path) -> None:
    async with running_etcd(tmp_path) as etcd, client_of(etcd, HASTY) as client:
        first, *others = etcd.members
        for one in others:
            one.kill()
        async with client_of(etcd) as patient:

            async def leaderless() -> None:
                while any(one.has_leader for one in await patient.statuses()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(leaderless(), 30.0)

        async def errors() -> set[type]:
            calls = client.put(b"k", b""), client.range(b"k"), client.keep_alive(1)
            return {type(one) for one in await asyncio.gather(*calls, return_exceptions=True)}

        assert await errors() == {EtcdNoLeaderError}
        first.kill()
        assert await errors() == {EtcdUnreachableError}
        etcd.start()
        await etcd.ready(EtcdAccess(etcd.endpoints))
        await client.put(b"k", b"")


async def test_nobody_there_says_so(tmp_path: Path) -> None:
    access = EtcdAccess((f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"))
    async with client_of(access, HASTY) as client:
        with pytest.raises(EtcdUnreachableError, match="no etcd answers"):
            await client.statuses()
        with pytest.raises(EtcdUnreachableError, match="no etcd answers"):
            await client.grant(2)


class OldMaintenance(rpc_pb2_grpc.MaintenanceServicer):
    """Says what an etcd of 3.3 does: none can be had here."""

    async def Status(
        self, request: rpc_pb2.StatusRequest, context: object
    ) -> rpc_pb2.StatusResponse:
        return rpc_pb2.StatusResponse(version="3.3.27", leader=1)


@contextlib.asynccontextmanager
async def grpc_server(*, old: bool) -> AsyncIterator[EtcdAccess]:
    server = grpc.aio.server()
    if old:
        rpc_pb2_grpc.add_MaintenanceServicer_to_server(OldMaintenance(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield EtcdAccess((f"127.0.0.1:{port}",))
    finally:
        await server.stop(0)


async def test_an_old_one_and_something_else_are_refused() -> None:
    async with grpc_server(old=True) as access, client_of(access) as client:
        with pytest.raises(EtcdTooOldError, match=r"release 3\.3\.27"):
            await client.statuses()
    async with grpc_server(old=False) as access, client_of(access) as client:
        with pytest.raises(EtcdTooOldError, match="no etcd"):
            await client.statuses()
        with pytest.raises(EtcdTooOldError, match="no etcd"):
            await client.range(b"k")


async def test_a_call_that_etcd_does_not_like_is_an_error_of_its_own(
    etcd: EtcdCluster, client: EtcdClient
) -> None:
    with pytest.raises(EtcdError, match="key is not provided"):
        await client.put(b"", b"")
