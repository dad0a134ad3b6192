"""Messages to operators about several brokers."""

from __future__ import annotations

from restow.broker.rpc.status import cut
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.standing import FleetReport
from restow.v1 import admin_pb2 as pb

MAX_BROKERS = 1000


def membership_of(report: FleetReport) -> pb.Membership:
    """Return a broker's state among the others."""
    leadership = report.leadership
    leader = leadership.fleet.leader
    told = pb.Membership(
        address=leadership.address,
        fleet=report.name,
        brokers=len(report.brokers),
        let_in=leadership.lease is not None,
        leads=bool(leadership.epoch),
        leader=leadership.leader,
        expected=report.expected,
        warnings=[cut(warning) for warning in report.warnings],
    )
    if leadership.leader:
        told.epoch = leadership.epoch or (0 if leader is None else leader.epoch)
    elif report.leaderless_s:
        told.leaderless_s = report.leaderless_s
    if leadership.lease is not None:
        told.lease_s = leadership.lease.length_s
        told.unanswered_s = report.now_s - leadership.lease.sent_s
        still_s = leadership.still_s(report.now_s)
        if still_s is not None and leadership.epoch:
            told.still_s = still_s
    if report.trouble is not None:
        told.trouble_reason = report.trouble.reason
        told.trouble = cut(report.trouble.message)
    return told


def brokers_of(hub: Hub) -> pb.ListBrokersResponse:
    """Return all brokers of the fleet, and the standing of this broker."""
    told, report = pb.ListBrokersResponse(), hub.standing.report()
    if report is None:
        return told
    told.membership.CopyFrom(membership_of(report))
    own, leader = report.leadership.address, report.leadership.leader
    for address in sorted(report.brokers)[:MAX_BROKERS]:
        told.brokers.add(address=address, asked=address == own, leads=address == leader)
    return told
