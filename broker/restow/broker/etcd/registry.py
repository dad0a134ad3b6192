"""Members and claims as keys of an etcd.

Below a prefix: ``members/ADDRESS`` and ``pools/TENANT/MODEL/REVISION/ADAPTER/QUANTISATION``, quoted
as in a URL; their values are addresses. A pool's epoch is the revision that made its key.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import astuple, fields
from urllib.parse import quote, unquote

from restow.broker.etcd.client import EtcdClient
from restow.broker.etcd.errors import CompactedError, EtcdError, LeaseGoneError
from restow.broker.layout.values import ModelIdentity, Pool
from restow.broker.owners.claim import Claim
from restow.broker.owners.events import Changed, Seen
from restow.broker.owners.registry import AddressTakenError, Entry, LeaseEndedError
from restow.etcd import rpc_pb2

PREFIX = "/restow/"
_MEMBERS, _POOLS = "members/", "pools/"


class EtcdRegistry:
    """Implements `owners.registry.Registry`."""

    def __init__(self, client: EtcdClient, prefix: str = PREFIX) -> None:
        """Keep all below ``prefix``, which brokers of another fleet may not have."""
        self._client, self._prefix = client, prefix

    async def join(self, address: str, length_s: float) -> Entry:
        """Make a lease and the member's key.

        Raises `AddressTakenError` that names who has the address, `EtcdError`.
        """
        granted = await self._client.grant(max(1, math.ceil(length_s)))
        key = self._member(address)
        with _lease_errors(granted.ID):
            done = await self._client.txn(
                [_made_by(key, 0)], [_put(key, address, granted.ID)], [_read(key)]
            )
        found = [] if done.succeeded else done.responses[0].response_range.kvs
        if found and found[0].lease != granted.ID:
            with contextlib.suppress(EtcdError):
                await self._client.revoke(granted.ID)
            raise AddressTakenError(
                f"another broker advertises {address}, or did a moment ago: give each its own "
                f"--advertise; one that was killed is gone when its lease ends",
                address=address,
            )
        fleet = f"{granted.header.cluster_id:x}{self._prefix}"
        return Entry(granted.ID, float(granted.TTL), fleet)

    async def keep_alive(self, lease: int) -> float:
        """Have a lease begin anew, and return its length in seconds."""
        with _lease_errors(lease):
            return float(await self._client.keep_alive(lease))

    async def claim(self, pool: Pool, address: str, lease: int) -> Claim:
        """Make the pool's key if there is none, and return whose it is now."""
        key = self._pool(pool)
        with _lease_errors(lease):
            done = await self._client.txn(
                [_made_by(key, 0)], [_put(key, address, lease)], [_read(key)]
            )
        if done.succeeded:
            return Claim(address, lease, done.header.revision)
        (found,) = done.responses[0].response_range.kvs
        return _claim(found)

    async def release(self, pool: Pool, epoch: int) -> None:
        """Delete the pool's key if it is of that epoch."""
        key = self._pool(pool)
        await self._client.txn([_made_by(key, epoch)], [_delete(key)])

    async def withdraw(self, address: str, lease: int) -> None:
        """Delete the member's key if it is of that lease."""
        key = self._member(address)
        ours = rpc_pb2.Compare(target=rpc_pb2.Compare.LEASE, key=key, lease=lease)
        await self._client.txn([ours], [_delete(key)])

    async def revoke(self, lease: int) -> None:
        """End a lease, with all keys of it."""
        await self._client.revoke(lease)

    async def watch(self) -> AsyncIterator[Seen | Changed]:
        """Yield all there is, and then each change; it ends with an `EtcdError`."""
        begin, end = self._prefix.encode(), _end_of(self._prefix.encode())
        seen = await self.all()
        yield seen
        revision = seen.revision + 1
        while True:
            with contextlib.suppress(CompactedError):
                async for answer in self._client.watch(begin, end, revision):
                    for changed in self._changes(answer.events):
                        yield changed
                        revision = changed.revision + 1
            seen = await self.all()
            yield seen
            revision = seen.revision + 1

    async def all(self) -> Seen:
        """All there is now."""
        begin = self._prefix.encode()
        found = await self._client.range(begin, _end_of(begin))
        members, claims = set[str](), dict[Pool, Claim]()
        for one in found.kvs:
            match self._named(one.key):
                case Pool() as pool:
                    claims[pool] = _claim(one)
                case str() as address:
                    members.add(address)
        return Seen(found.header.revision, frozenset(members), claims)

    def _changes(self, events: Iterable[rpc_pb2.Event]) -> Iterator[Changed]:
        """By revision; etcd tells those of one revision together."""
        members = defaultdict[int, dict[str, bool]](dict)
        claims = defaultdict[int, dict[Pool, Claim | None]](dict)
        for event in events:
            gone = event.type == rpc_pb2.Event.DELETE
            revision = event.kv.mod_revision
            match self._named(event.kv.key):
                case Pool() as pool:
                    claims[revision][pool] = None if gone else _claim(event.kv)
                case str() as address:
                    members[revision][address] = not gone
        for revision in sorted(members.keys() | claims.keys()):
            yield Changed(revision, members[revision], claims[revision])

    # -- names of keys ----------------------------------------------------------------------------

    def _member(self, address: str) -> bytes:
        return f"{self._prefix}{_MEMBERS}{quote(address, safe='')}".encode()

    def _pool(self, pool: Pool) -> bytes:
        parts = (pool.tenant, *astuple(pool.model))
        return f"{self._prefix}{_POOLS}{'/'.join(quote(one, safe='') for one in parts)}".encode()

    def _named(self, key: bytes) -> Pool | str | None:
        """What a key is of; None: nothing of ours."""
        name = key.decode(errors="replace").removeprefix(self._prefix)
        if name.startswith(_MEMBERS):
            return unquote(name.removeprefix(_MEMBERS))
        tenant, *parts = map(unquote, name.removeprefix(_POOLS).split("/"))
        if name.startswith(_POOLS) and len(parts) == len(fields(ModelIdentity)):
            return Pool(tenant, ModelIdentity(*parts))
        return None


@contextlib.contextmanager
def _lease_errors(lease: int) -> Iterator[None]:
    """Raise `LeaseEndedError` where etcd's client says so."""
    try:
        yield
    except LeaseGoneError:
        raise LeaseEndedError("the broker's lease at etcd has ended", lease=lease) from None


def _claim(found: rpc_pb2.KeyValue) -> Claim:
    return Claim(found.value.decode(errors="replace"), found.lease, found.create_revision)


def _end_of(prefix: bytes) -> bytes:
    """Behind the last key that begins so.

    >>> _end_of(b"/restow/")
    b'/restow0'
    """
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _made_by(key: bytes, revision: int) -> rpc_pb2.Compare:
    """Whether the key was made by that revision; 0: whether it is not there."""
    created = rpc_pb2.Compare.CREATE
    return rpc_pb2.Compare(target=created, key=key, create_revision=revision)


def _put(key: bytes, value: str, lease: int) -> rpc_pb2.RequestOp:
    request = rpc_pb2.PutRequest(key=key, value=value.encode(), lease=lease)
    return rpc_pb2.RequestOp(request_put=request)


def _read(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))


def _delete(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
