"""Messages to operators about tenants, engines, agents, handoffs, costs, traffic and brokers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from restow.broker.core.common.keys import EngineKey, HostPair, State
from restow.broker.core.common.traffic import PairTally, Tally
from restow.broker.core.engines.account import TenantCounts
from restow.broker.core.engines.agent import AgentRecord
from restow.broker.core.engines.engine import EngineRecord
from restow.broker.core.granting import Granting
from restow.broker.core.handoffs.demand import content_compared
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.core.handoffs.progress import TimeSpan, progress_of, spans_of
from restow.broker.core.handoffs.timeline import in_words
from restow.broker.core.ledger.ends import delivered
from restow.broker.core.probing import HostCosts
from restow.broker.rpc.status import cut
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.outbox import STATE_NUMBERS
from restow.broker.server.base.standing import FleetReport
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

MAX_INT64 = (1 << 63) - 1
MAX_BROKERS = 1000


def state_counts(ended: Mapping[State, int]) -> list[pb.StateCount]:
    """Return how many handoffs ended in each state."""
    return [
        pb.StateCount(state=STATE_NUMBERS[state], count=count)
        for state, count in sorted(ended.items())
    ]


def tenant_info(tenant: str, held: TenantCounts) -> pb.TenantInfo:
    """Return what a tenant has."""
    return pb.TenantInfo(
        tenant=tenant,
        engines=held.engines,
        handoffs_live=held.live,
        handoffs_quarantined=held.quarantined,
        ended=state_counts(held.ended_counts),
        bytes_read=min(held.bytes_read, MAX_INT64),
    )


def engine_info(engine: EngineRecord, now_s: float) -> pb.EngineInfo:
    """Return an engine, with its number of agents."""
    model = engine.layout.model
    return pb.EngineInfo(
        tenant=engine.key.tenant,
        engine_id=engine.key.engine_id,
        incarnation=engine.incarnation,
        model=model.name,
        revision=engine.revision,
        adapter=model.adapter,
        quantisation=model.quantisation,
        layout_digest=engine.layout_digest,
        ranks=engine.ranks,
        agents=len(engine.agents),
        session=engine.has_session,
        replaced=engine.former,
        age_s=now_s - engine.born_s,
        draining=engine.draining,
        open=len(engine.handoffs),
        version=engine.version,
    )


def agent_info(key: EngineKey, rank: int, agent: AgentRecord) -> pb.AgentInfo:
    """Return the agent of an engine's rank."""
    return pb.AgentInfo(
        tenant=key.tenant,
        engine_id=key.engine_id,
        rank=rank,
        agent_name=agent.agent_name,
        regions=len(agent.regions),
        region_bytes=min(agent.region_bytes, MAX_INT64),
        staging_bytes=agent.staging_bytes,
        version=agent.version,
    )


def host_costs(hosts: HostPair, known: HostCosts) -> pb.HostCosts:
    """Return the measured costs between two hosts."""
    return pb.HostCosts(
        source_host=hosts.source_host,
        destination_host=hosts.destination_host,
        costs=None if known.costs is None else pb.Costs(**asdict(known.costs)),
        failure=known.failure,
    )


def handoff_info(handoff: Handoff, granting: Granting, now_s: float) -> pb.HandoffInfo:
    """Return a handoff as it stands."""
    failure = handoff.failure
    state: broker_pb2.HandoffState.ValueType = STATE_NUMBERS[handoff.state]
    info = pb.HandoffInfo(
        tenant=handoff.tenant,
        handoff_id=handoff.handoff_id,
        number=handoff.number,
        state=state,
        source_engine=handoff.source.key.engine_id if handoff.source else "",
        destination_engine=handoff.destination.key.engine_id if handoff.destination else "",
        position_tokens=handoff.publication.position_tokens,
        bytes=handoff.bytes_read,
        reason=failure.reason if failure else "",
        detail=failure.detail if failure else "",
        age_s=now_s - handoff.born_s,
        strategies=handoff.strategies,
        content=content_compared(handoff.publication, handoff.demand),
        readers=handoff.deliveries.readers,
        delivered=delivered(handoff),
    )
    if (offer := handoff.offer) is not None:
        info.prefix_tokens = offer.tokens
        info.offers, info.offers_declined = offer.made, offer.declined
    if handoff.ended:
        info.ended_ago_s = now_s - handoff.ended_s
        if handoff.transfer_s is not None:
            info.transfer_s = handoff.transfer_s
    else:
        info.waits_for = granting.waits_for(handoff)
        if handoff.lease.until_s:
            info.lease_s = handoff.lease.until_s - now_s
        if handoff.lease.patience_until_s:
            info.patience_s = handoff.lease.patience_until_s - now_s
        if (progress := progress_of(handoff)) is not None:
            info.expected_bytes = min(progress.expected_bytes, MAX_INT64)
            info.reading_ranks = progress.ranks
            info.settled_ranks = progress.settled_ranks
    return info


def traffic_step(tally: Tally) -> pb.TrafficStep:
    """Return what ended in a step of time, or between two engines."""
    return pb.TrafficStep(
        done=tally.done,
        failed=tally.failed,
        cancelled=tally.cancelled,
        bytes=min(tally.bytes_read, MAX_INT64),
        p50_s=tally.transfers.quantile(0.5),
        p99_s=tally.transfers.quantile(0.99),
    )


def pair_traffic(pair: PairTally) -> pb.PairTraffic:
    """Return what ended between two engines."""
    return pb.PairTraffic(
        tenant=pair.tenant,
        source_engine=pair.source,
        destination_engine=pair.destination,
        traffic=traffic_step(pair.tally),
        bytes_per_second=pair.tally.bytes_per_s,
    )


def whole_story(handoff: Handoff, granting: Granting, now_s: float) -> pb.GetHandoffResponse:
    """Return a handoff with its timeline and those of its deliveries."""
    return pb.GetHandoffResponse(
        handoff=handoff_info(handoff, granting, now_s),
        timeline=timeline_entries(handoff),
        spans=[timeline_span(span, handoff.born_s) for span in spans_of(handoff, now_s)],
        deliveries=[
            whole_story(delivery, granting, now_s)
            for delivery in handoff.deliveries.by_engine.values()
        ],
    )


def timeline_entries(handoff: Handoff) -> list[pb.TimelineEntry]:
    """Return the events of a handoff, in words."""
    return [
        pb.TimelineEntry(
            at_ms=(at_s - handoff.born_s) * 1000, event=event, detail=in_words(event, detail)
        )
        for at_s, event, detail in handoff.timeline
    ]


def timeline_span(span: TimeSpan, born_s: float) -> pb.TimelineSpan:
    """Return a span of a handoff's timeline."""
    return pb.TimelineSpan(
        kind=span.kind,
        begin_ms=(span.begin_s - born_s) * 1000,
        end_ms=(span.end_s - born_s) * 1000,
        rank=span.rank,
        source_rank=span.src_rank,
        bytes=None if span.bytes_read is None else min(max(span.bytes_read, 0), MAX_INT64),
        over=span.over,
    )


def with_deliveries(handoffs: Iterable[Handoff]) -> Iterator[Handoff]:
    """Yield each publication, followed by its deliveries."""
    for handoff in handoffs:
        yield handoff
        yield from handoff.deliveries.by_engine.values()


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
