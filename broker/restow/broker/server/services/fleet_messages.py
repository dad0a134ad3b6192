"""Messages to operators about several brokers and their pools."""

from __future__ import annotations

from dataclasses import astuple

from restow.broker.core.directory import Directory
from restow.broker.layout.values import Pool
from restow.broker.rpc.status import cut
from restow.broker.server.base.hub import Hub
from restow.broker.server.fleet.report import FleetReport, PoolReport
from restow.v1 import admin_pb2 as pb

MAX_POOLS = 1000
MAX_BROKERS = 1000
NOBODYS = PoolReport("", 0, None)


def membership_of(report: FleetReport) -> pb.Membership:
    """Return a broker's state among the others."""
    told = pb.Membership(
        address=report.address,
        fleet=report.fleet,
        brokers=report.count,
        pools_owned=report.owned,
        let_in=report.let_in,
    )
    if report.lease is not None:
        told.lease_s = report.lease.length_s
        told.unanswered_s = report.lease.unanswered_s
        if report.lease.still_s is not None:
            told.still_s = report.lease.still_s
    if report.trouble is not None:
        told.trouble_reason = report.trouble.reason
        told.trouble = cut(report.trouble.message)
    return told


def brokers_and_pools(hub: Hub, tenant: str | None) -> pb.ListBrokersResponse:
    """Return all brokers, and the pools of one tenant or of all."""
    told, report = pb.ListBrokersResponse(), hub.standing.report()
    owned = {} if report is None else report.pools
    if report is not None:
        told.membership.CopyFrom(membership_of(report))
        for address in sorted(report.members)[:MAX_BROKERS]:
            age_s = report.members[address]
            told.brokers.add(address=address, asked=address == report.address, age_s=age_s)
    alone = PoolReport("", 0, None, own=True) if report is None else NOBODYS
    found = [
        (pool, owned.get(pool, alone))
        for pool in owned.keys() | hub.directory.members.pools.keys()
        if tenant in (None, pool.tenant)
    ]
    found.sort(key=lambda item: (not item[1].own, item[0].tenant, astuple(item[0].model)))
    told.pools.extend(pool_info(hub.directory, *item) for item in found[:MAX_POOLS])
    told.pools_left_out = max(0, len(found) - MAX_POOLS)
    return told


def pool_info(directory: Directory, pool: Pool, known: PoolReport) -> pb.PoolInfo:
    """Return a pool, with what this broker has of it."""
    engines = directory.members.pools.get(pool, {}).values()
    model = pool.model
    return pb.PoolInfo(
        tenant=pool.tenant,
        model=model.name,
        revision=model.revision,
        adapter=model.adapter,
        quantisation=model.quantisation,
        owner=known.owner,
        epoch=known.epoch,
        age_s=known.age_s,
        own=known.own,
        leaving=known.leaving,
        engines=len(engines),
        agents=sum(len(engine.agents) for engine in engines),
        handoffs_live=len(directory.live_in(pool)),
    )
