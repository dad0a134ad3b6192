"""A fleet's keys in etcd.

They lie below ``/restow/FLEET/``. ``leader`` has the address and epoch of the leader, under its
lease. ``brokers/ADDRESS``, quoted as in a URL, exists while the lease of that broker lives.
``epoch`` is the highest epoch, and is never deleted.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

from restow.broker.registry.etcd_access import EtcdError, LeaseGoneError
from restow.broker.registry.etcd_client import EtcdClient
from restow.broker.registry.registry import (
    TRIES,
    AddressTakenError,
    Fleet,
    Leader,
    LeaseEndedError,
    written_address,
)
from restow.etcd import rpc_pb2

PREFIX = "/restow/"
MAX_EPOCH = 1 << 62


class _FleetKeys(NamedTuple):
    """All keys of a fleet, at one revision of etcd."""

    fleet: Fleet
    leader_lease: int
    epoch_revision: int
    """The revision that last wrote the epoch. 0: the epoch was never written."""


class EtcdRegistry:
    """Implements `Registry` for one broker."""

    look_every_s = 0.1

    def __init__(self, client: EtcdClient, fleet: str) -> None:
        """Use the keys of ``fleet``."""
        self._client = client
        self._prefix = f"{PREFIX}{fleet}/"
        self._leader_key, self._epoch_key = (self._key(name) for name in ("leader", "epoch"))
        self._address, self._lease = "", 0

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}{name}".encode()

    def _broker_key(self, address: str) -> bytes:
        return self._key(f"brokers/{quote(address, safe='')}")

    async def join(self, address: str, lease_s: float) -> float:
        """Make a lease, and the broker's key. Raises `AddressTakenError` and `EtcdError`."""
        granted = await self._client.grant(max(1, math.ceil(lease_s)))
        self._address, self._lease = address, granted.ID
        try:
            await self._put_broker()
        except AddressTakenError:
            with contextlib.suppress(EtcdError):
                await self._client.revoke(granted.ID)
            raise
        return float(granted.TTL)

    async def _put_broker(self) -> None:
        """Write the broker's key, unless it is there. Raises `AddressTakenError`."""
        key = self._broker_key(self._address)
        with self._lease_errors():
            done = await self._client.txn(
                [_is_new(key)], [_put(key, self._address, self._lease)], [_read(key)]
            )
        holders = [] if done.succeeded else done.responses[0].response_range.kvs
        if holders and holders[0].lease != self._lease:
            raise AddressTakenError(self._address)

    async def keep_alive(self) -> float:
        """Renew the lease, and return its length in seconds."""
        with self._lease_errors():
            return float(await self._client.keep_alive(self._lease))

    async def look(self) -> Fleet:
        """Read all keys of the fleet; write the broker's own key again if somebody deleted it."""
        keys = await self._read()
        if self._lease and self._address not in keys.fleet.brokers:
            await self._put_broker()
            keys = await self._read()
        return keys.fleet

    async def lead(self, epoch: int) -> Leader:
        """Write the leader's key if there is none, with a new epoch."""
        for _ in range(TRIES):
            keys = await self._read()
            if keys.fleet.leader is not None:  # perhaps by this call, whose answer was lost
                return keys.fleet.leader
            if leader := await self._write(keys, epoch, _is_new(self._leader_key)):
                return leader
        raise EtcdError(f"other brokers change {self._leader_key.decode()} again and again")

    async def raise_epoch(self, epoch: int) -> Leader:
        """Write the leader's key again with a higher epoch, if the key is this broker's."""
        for _ in range(TRIES):
            keys = await self._read()
            leader = keys.fleet.leader
            if leader is None:
                return await self.lead(epoch)
            if not leader.mine or leader.epoch > epoch:
                return leader
            if raised := await self._write(keys, epoch, self._is_ours(self._leader_key)):
                return raised
        raise EtcdError(f"other brokers change {self._leader_key.decode()} again and again")

    async def _write(self, keys: _FleetKeys, above: int, allowed: rpc_pb2.Compare) -> Leader | None:
        """Write leader and epoch together. Return None if a key has changed since it was read."""
        epoch = max(keys.fleet.epoch, above) + 1
        if epoch >= MAX_EPOCH:
            raise EtcdError(f"epoch {epoch} is too high: somebody wrote or named a wrong epoch")
        same = rpc_pb2.Compare(
            target=rpc_pb2.Compare.MOD, key=self._epoch_key, mod_revision=keys.epoch_revision
        )
        said = json.dumps({"address": self._address, "epoch": epoch})
        with self._lease_errors():
            done = await self._client.txn(
                [allowed, same],
                [_put(self._leader_key, said, self._lease), _put(self._epoch_key, str(epoch))],
            )
        return Leader(self._address, epoch, mine=True) if done.succeeded else None

    async def release(self) -> None:
        """Delete the leader's key if the key is this broker's."""
        await self._client.txn([self._is_ours(self._leader_key)], [_delete(self._leader_key)])

    async def leave(self) -> None:
        """End the lease and delete all keys under it. May be repeated."""
        lease, self._lease = self._lease, 0
        if lease:
            await self._client.revoke(lease)

    def _is_ours(self, key: bytes) -> rpc_pb2.Compare:
        return rpc_pb2.Compare(target=rpc_pb2.Compare.LEASE, key=key, lease=self._lease)

    async def _read(self) -> _FleetKeys:
        """Read the fleet. Raises `EtcdError` for a value that no broker writes."""
        begin = self._prefix.encode()
        response = await self._client.range(begin, _end_of(begin))
        leader, leader_lease, epoch, epoch_revision = None, 0, 0, 0
        brokers = set[str]()
        for entry in response.kvs:
            if entry.key == self._leader_key:
                leader, leader_lease = self._leader(entry), entry.lease
            elif entry.key == self._epoch_key:
                epoch = _epoch(entry.value.decode(errors="replace"), entry.key)
                epoch_revision = entry.mod_revision
            else:
                address = written_address(entry.value)
                if address and entry.lease and entry.key == self._broker_key(address):
                    brokers.add(address)
        return _FleetKeys(Fleet(leader, frozenset(brokers), epoch), leader_lease, epoch_revision)

    def _leader(self, entry: rpc_pb2.KeyValue) -> Leader:
        try:
            said = json.loads(entry.value)
            address = written_address(str(said["address"]).encode())
            epoch = _epoch(said["epoch"], entry.key)
        except (ValueError, KeyError, TypeError):
            address, epoch = "", 0
        if not address or not epoch or not entry.lease:
            raise _not_ours(entry.key)
        mine = bool(self._lease) and entry.lease == self._lease
        return Leader(address, epoch, mine)

    @contextlib.contextmanager
    def _lease_errors(self) -> Iterator[None]:
        """Raise `LeaseEndedError` where etcd says that the lease is gone."""
        try:
            yield
        except LeaseGoneError:
            raise LeaseEndedError(
                "the broker's lease at etcd has ended", lease=self._lease
            ) from None


def _epoch(said: object, key: bytes) -> int:
    try:
        epoch = int(str(said))
    except ValueError:
        epoch = 0
    if not 0 < epoch < MAX_EPOCH:
        raise _not_ours(key)
    return epoch


def _not_ours(key: bytes) -> EtcdError:
    return EtcdError(
        f"key {key.decode(errors='replace')} in etcd has a value that no broker writes: what else "
        f"writes there? Delete the key, and a broker writes it again"
    )


def _end_of(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with ``prefix``.

    >>> _end_of(b"/restow/")
    b'/restow0'
    """
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _is_new(key: bytes) -> rpc_pb2.Compare:
    created = rpc_pb2.Compare.CREATE
    return rpc_pb2.Compare(target=created, key=key, create_revision=0)


def _put(key: bytes, value: str, lease: int = 0) -> rpc_pb2.RequestOp:
    request = rpc_pb2.PutRequest(key=key, value=value.encode(), lease=lease)
    return rpc_pb2.RequestOp(request_put=request)


def _read(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=key))


def _delete(key: bytes) -> rpc_pb2.RequestOp:
    return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
