"""What operators are told of the whole broker, or of one tenant's part in it."""

from __future__ import annotations

from restow.broker.core.common.traffic import busiest
from restow.broker.server.hub import Hub
from restow.broker.server.services.admin_messages import (
    MAX_INT64,
    pair_traffic,
    state_counts,
    traffic_step,
)
from restow.broker.server.services.fleet_messages import membership_of
from restow.broker.versions import own_version
from restow.v1 import admin_pb2 as pb

MAX_PAIRS = 1000
"""Of engines; an answer has room for them, whatever their names are."""


def broker_status(hub: Hub, tenant: str | None) -> pb.GetStatusResponse:
    """Statistics of one tenant, or of all."""
    directory = hub.directory
    ledger, engines = directory.ledger, directory.members.engines
    status = pb.GetStatusResponse(
        version=own_version(),
        broker_epoch=hub.epoch,
        uptime_s=hub.now_s() - hub.started_s,
        agents=sum(len(one.agents) for one in engines.values() if tenant in (None, one.key.tenant)),
    )
    if tenant is None:
        status.engines = len(engines)
        status.handoffs_live = len(ledger.by_number)
        status.handoffs_quarantined = len(ledger.quarantine)
        status.plans = len(directory.granting.pairs)
        ended, bytes_read = ledger.statistics.by_state, ledger.bytes_read
        checks = ledger.checks
    else:
        held = ledger.tenants.of(tenant)
        status.engines = held.engines
        status.handoffs_live = held.live
        status.handoffs_quarantined = held.quarantined
        ended, bytes_read = held.ended_counts, held.bytes_read
        checks = held.checks
    status.ended.extend(state_counts(ended))
    status.bytes_read = min(bytes_read, MAX_INT64)
    status.handoffs_checked = checks.checked
    status.digest_mismatches = checks.mismatches
    status.draining = directory.granting.draining
    status.requires_content = directory.limits.require_content
    if (report := hub.standing.report()) is not None:
        status.membership.CopyFrom(membership_of(report))
    return status


def add_traffic(
    status: pb.GetStatusResponse, hub: Hub, tenant: str | None, listed: str | None
) -> None:
    """Add the series of one tenant or of all, and pairs of those whose engines are ``listed``."""
    ledger, now_s = hub.directory.ledger, hub.now_s()
    series = ledger.statistics.series
    if tenant is not None:
        series = ledger.tenants.of(tenant).traffic.series
    pairs, status.pairs_left_out = busiest(ledger.tenants.pairs(listed, now_s), MAX_PAIRS)
    status.step_s = series.step_s
    status.steps.extend(map(traffic_step, series.latest(now_s, hub.started_s)))
    status.pairs.extend(map(pair_traffic, pairs))
