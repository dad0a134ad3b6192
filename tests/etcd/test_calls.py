"""The calls do what etcd's own documentation says, against a real one of three members."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from agent_harness.waiting import until
from etcd_harness.cluster import EtcdCluster
from restow.broker.registry.etcd_access import CompactedError, LeaseGoneError
from restow.broker.registry.etcd_client import EtcdClient
from restow.etcd import rpc_pb2

DELETE = rpc_pb2.Event.DELETE


def absent(key: bytes) -> rpc_pb2.Compare:
    return rpc_pb2.Compare(target=rpc_pb2.Compare.CREATE, key=key, create_revision=0)


def write(key: bytes, value: bytes, lease: int = 0) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=key, value=value, lease=lease))


def read(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))


def remove(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))


async def events(answers: AsyncIterator[rpc_pb2.WatchResponse], count: int) -> list[rpc_pb2.Event]:
    """So many, as they come."""
    found: list[rpc_pb2.Event] = []
    async with asyncio.timeout(30.0):
        async for answer in answers:
            found += answer.events
            if len(found) >= count:
                break
    return found


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
    now = await client.txn([], [write(prefix + one, b"", granted.ID) for one in (b"a", b"b")])
    gone = await events(client.watch(prefix, prefix + b"\xff", now.header.revision + 1), 2)
    assert {one.kv.key for one in gone} == {prefix + b"a", prefix + b"b"}
    assert len({one.kv.mod_revision for one in gone}) == 1  # at once
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


async def test_a_watch_tells_all_from_a_revision_on_in_order(
    client: EtcdClient, prefix: bytes
) -> None:
    first = await client.put(prefix + b"a", b"1")
    await client.put(prefix + b"a", b"2")
    watching = asyncio.create_task(
        events(client.watch(prefix, prefix + b"\xff", first.header.revision), 4)
    )
    await client.put(prefix + b"b", b"3")
    await client.txn([], [remove(prefix + b"a")])
    found = await watching
    assert [one.kv.value for one in found] == [b"1", b"2", b"3", b""]
    assert [one.type == DELETE for one in found] == [False, False, False, True]
    assert [one.kv.mod_revision for one in found] == sorted(one.kv.mod_revision for one in found)


async def test_a_watch_says_that_it_goes_on_where_nothing_happens(
    client: EtcdClient, prefix: bytes
) -> None:
    seen = list[rpc_pb2.WatchResponse]()

    async def collect() -> None:
        async for one in client.watch(prefix, prefix + b"\xff", 0):
            seen.append(one)

    task = asyncio.create_task(collect())
    await until(lambda: len(seen) > 2)
    assert seen[0].created
    assert not any(one.events for one in seen)
    task.cancel()


async def test_changes_that_are_forgotten_are_no_silence(
    etcd: EtcdCluster, client: EtcdClient, prefix: bytes
) -> None:
    first = (await client.put(prefix, b"1")).header.revision
    last = (await client.put(prefix, b"2")).header.revision
    async with grpc.aio.insecure_channel(etcd.endpoints[0]) as channel:
        # A CompactionRequest has one number in its first field, as this has.
        request = rpc_pb2.LeaseGrantRequest(TTL=last).SerializeToString()
        compact: Any = channel.unary_unary("/etcdserverpb.KV/Compact")
        await compact(request)
    with pytest.raises(CompactedError):
        await events(client.watch(prefix, prefix + b"\xff", first), 1)


async def test_members_say_who_leads(etcd: EtcdCluster, client: EtcdClient) -> None:
    statuses = await client.statuses()
    assert [one.endpoint for one in statuses] == list(etcd.endpoints)
    assert [one.leads for one in statuses].count(True) == 1
    assert all(one.has_leader and one.version.startswith("3.") for one in statuses)
