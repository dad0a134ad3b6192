"""Check the etcd that says which broker leads: its members, leases and keys."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from restow.broker.doctor.local import Finding, bad, ok, warn
from restow.broker.errors import RestowError
from restow.broker.registry.etcd import PREFIX
from restow.broker.registry.etcd_access import EtcdAccess
from restow.broker.registry.etcd_client import EtcdClient, MemberStatus, Patience
from restow.etcd import rpc_pb2

LEASE_S = 2
"""The usual length of a broker's lease."""
PATIENT = Patience(call_s=5.0, try_s=2.0)


async def look_at_etcd(access: EtcdAccess, fleet: str) -> AsyncIterator[Finding]:
    """Check that each member answers and has a leader, and that brokers may write to it."""
    led = False
    for endpoint in access.endpoints:
        try:
            async with _client(replace(access, endpoints=(endpoint,))) as client:
                (status,) = await client.statuses()
        except RestowError as error:
            yield _failed(f"etcd {endpoint}", error)
        else:
            led = led or status.has_leader
            yield judge_member(status)
    if led:
        try:
            async with _client(access) as client:
                yield await _lease_and_key(client, f"{PREFIX}{fleet}/doctor/")
        except RestowError as error:
            yield _failed("etcd's leases", error)


def judge_member(status: MemberStatus) -> Finding:
    """Check that a member has a leader and can write."""
    subject, words = f"etcd {status.endpoint}", f"release {status.version}"
    if not status.has_leader:
        return bad(
            subject,
            f"{words}, and it knows no leader: it agrees on nothing",
            "do most of its members run, and do they reach each other?",
        )
    if status.errors:
        return bad(
            subject,
            f"{words}, and it says: {'; '.join(status.errors)}",
            "with NOSPACE it writes nothing: compact, defragment, then `etcdctl alarm disarm`",
        )
    return ok(subject, f"{words}, {'leads' if status.leads else 'is led'}")


def judge_lease(granted_s: float, took_s: float) -> Finding:
    """Compare the lease that etcd granted with the `LEASE_S` that was asked for."""
    words = f"{LEASE_S} s are granted as {granted_s:g} s, with a key in {took_s * 1000:.0f} ms"
    if granted_s > LEASE_S:
        return warn(
            "etcd's leases",
            f"{words}: when the leader dies, another broker leads that much later",
            "shorten the --election-timeout of etcd (500 ms, with --heartbeat-interval 50)",
        )
    return ok("etcd's leases", words)


async def _lease_and_key(client: EtcdClient, prefix: str) -> Finding:
    """Do what a broker does: take a lease, write a key under it, and end both."""
    began_s = time.monotonic()
    lease = await client.grant(LEASE_S)
    key = f"{prefix}{secrets.token_hex(8)}".encode()
    try:
        put = rpc_pb2.PutRequest(key=key, value=b"doctor", lease=lease.ID)
        await client.txn([], [rpc_pb2.RequestOp(request_put=put)])
        await client.range(key)
        took_s = time.monotonic() - began_s
    finally:
        await client.revoke(lease.ID)
    return judge_lease(float(lease.TTL), took_s)


def _failed(subject: str, error: RestowError) -> Finding:
    return bad(subject, error.message, f"`restow reasons {error.reason}`")


@contextlib.asynccontextmanager
async def _client(access: EtcdAccess) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(access, PATIENT)
    try:
        yield client
    finally:
        await client.close()
