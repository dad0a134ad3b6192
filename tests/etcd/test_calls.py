"""The calls do what etcd's own documentation says, against a real one of three members."""

from __future__ import annotations

import asyncio

import pytest

from etcd_harness.cluster import EtcdCluster
from restow.broker.registry.etcd_access import LeaseGoneError
from restow.broker.registry.etcd_client import EtcdClient
from restow.etcd import rpc_pb2


def absent(key: bytes) -> rpc_pb2.Compare:
    return rpc_pb2.Compare(target=rpc_pb2.Compare.CREATE, key=key, create_revision=0)


def write(key: bytes, value: bytes, lease: int = 0) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value, lease=lease))


def read(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))


def remove(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))


async def test_a_key_is_made_once_and_made_again_later(client: EtcdClient, prefix: bytes) -> None:
    key = prefix + b"a"
    first = await client.txn([absent(key)], [write(key, b"1")], [read(key)])
    second = await client.txn([absent(key)], [write(key, b"2")], [read(key)])
    assert (first.succeeded, second.succeeded) == (True, False)
    (found,) = second.responses[0].response_range.kvs
    assert (found.value, found.create_revision) == (b"1", first.header.revision)
    await client.put(key, b"3")
    (found,) = (await client.range(prefix, prefix + b"\xff")).kvs
    assert (found.value, found.create_revision) == (b"3", first.header.revision)
    assert found.mod_revision > found.create_revision
    await client.txn([], [remove(key)])
    again = await client.txn([absent(key)], [write(key, b"4")])
    assert again.succeeded
    assert again.header.revision > found.mod_revision


async def test_a_lease_that_is_not_kept_alive_takes_its_keys_along(
    client: EtcdClient, prefix: bytes
) -> None:
    granted = await client.grant(1)
    assert granted.TTL >= 1
    assert await client.keep_alive(granted.ID) == granted.TTL
    await client.txn([], [write(prefix + one, b"", granted.ID) for one in (b"a", b"b")])
    async with asyncio.timeout(30.0):
        while len((await client.range(prefix, prefix + b"\xff")).kvs) == 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert not (await client.range(prefix, prefix + b"\xff")).kvs  # both at once
    with pytest.raises(LeaseGoneError):
        await client.keep_alive(granted.ID)
    with pytest.raises(LeaseGoneError):
        await client.put(prefix + b"a", b"", granted.ID)
    with pytest.raises(LeaseGoneError):
        await client.txn([], [write(prefix + b"a", b"", granted.ID)])


async def test_a_lease_that_is_revoked_ends_at_once(client: EtcdClient, prefix: bytes) -> None:
    granted = await client.grant(600)
    await client.put(prefix, b"", granted.ID)
    await client.revoke(granted.ID)
    await client.revoke(granted.ID)
    assert not (await client.range(prefix)).kvs


async def test_members_say_who_leads(etcd: EtcdCluster, client: EtcdClient) -> None:
    statuses = await client.statuses()
    assert [one.endpoint for one in statuses] == list(etcd.endpoints)
    assert [one.leads for one in statuses].count(True) == 1
    assert all(one.has_leader and one.version.startswith("3.") for one in statuses)
