"""The service `restow.v1.Admin`, which operators call for the whole broker or a tenant."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain, islice, takewhile

from restow.broker.core.audit import audit
from restow.broker.core.common.keys import EngineKey
from restow.broker.core.common.traffic import busiest
from restow.broker.core.handoffs.handoff import Handoff
from restow.broker.errors import RequestError
from restow.broker.logs import get_logger
from restow.broker.rpc.status import cut
from restow.broker.rpc.wire import check_revision
from restow.broker.server.base.hub import Hub
from restow.broker.server.base.outbox import STATE_NUMBERS
from restow.broker.server.gate.callers import (
    Context,
    caller_of,
    listed_tenant,
    scope_of,
    tenant_of,
)
from restow.broker.server.services.admin_messages import (
    MAX_INT64,
    agent_info,
    brokers_of,
    engine_info,
    handoff_info,
    host_costs,
    membership_of,
    pair_traffic,
    state_counts,
    tenant_info,
    traffic_step,
    whole_story,
    with_deliveries,
)
from restow.broker.server.services.prefix_messages import engine_holdings, tenant_holdings
from restow.broker.trust.errors import ForbiddenError
from restow.broker.versions import own_version
from restow.v1 import admin_pb2 as pb
from restow.v1 import admin_pb2_grpc, layout_pb2

MAX_PAIRS = 1000
"""Most pairs of engines in an answer, which then has room for them whatever their names are."""


def broker_status(hub: Hub, tenant: str | None) -> pb.GetStatusResponse:
    """Return statistics of a tenant, or of all tenants."""
    directory = hub.directory
    ledger, engines = directory.ledger, directory.members.engines
    status = pb.GetStatusResponse(
        version=own_version(),
        broker_epoch=hub.epoch,
        uptime_s=hub.now_s() - hub.started_s,
        agents=sum(
            len(engine.agents) for engine in engines.values() if tenant in (None, engine.key.tenant)
        ),
    )
    if tenant is None:
        status.engines = len(engines)
        status.handoffs_live = len(ledger.by_number)
        status.handoffs_quarantined = len(ledger.quarantine)
        status.plans = len(directory.plans.known)
        ended, bytes_read = ledger.statistics.by_state, ledger.statistics.bytes_read
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
    """Add the traffic of a tenant or of all, and the pairs of tenants that are ``listed``."""
    ledger, now_s = hub.directory.ledger, hub.now_s()
    series = ledger.statistics.series
    if tenant is not None:
        series = ledger.tenants.of(tenant).traffic.series
    pairs, status.pairs_left_out = busiest(ledger.tenants.pairs(listed, now_s), MAX_PAIRS)
    status.step_s = series.step_s
    status.steps.extend(map(traffic_step, series.latest(now_s, hub.started_s)))
    status.pairs.extend(map(pair_traffic, pairs))


DEFAULT_LIMIT, MAX_LIMIT = 100, 10_000
"""Handoffs in an answer, which has room for them whatever their names and details are."""
MAX_FINDINGS = 1000


class AdminService(admin_pb2_grpc.AdminServicer):
    """Shows operators the directory. An operator of a tenant sees nothing of others."""

    def __init__(self, hub: Hub) -> None:
        """Show the hub's directory."""
        self._hub = hub
        self._log = get_logger("restow.broker")

    async def _leading(self) -> None:
        """Return when the broker certainly leads. Raise `NotLeaderError` or `NoLeaderError`."""
        await self._hub.standing.sure()
        self._hub.standing.check()

    def _note(self, event: str, context: Context, **values: object) -> None:
        """Log what an operator did."""
        self._log.info(event, **values, identity=caller_of(context))

    def _info(self, handoff: Handoff) -> pb.HandoffInfo:
        return handoff_info(handoff, self._hub.directory.granting, self._hub.now_s())

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Return statistics of the broker, or of the only tenant that the caller may see."""
        self._hub.standing.check()
        hub, tenant = self._hub, scope_of(context)
        status = broker_status(hub, tenant)
        if request.traffic:
            add_traffic(status, hub, tenant, listed_tenant(context))
        return status

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Context
    ) -> pb.ListTenantsResponse:
        """Return what each tenant holds, for the tenants that the caller may see."""
        self._hub.standing.check()
        own = scope_of(context)
        tenants = self._hub.directory.ledger.tenants
        held = sorted(tenants.holdings.items()) if own is None else [(own, tenants.of(own))]
        return pb.ListTenantsResponse(
            listed=listed_tenant(context) or "",
            tenants=[tenant_info(tenant, holdings) for tenant, holdings in held],
        )

    async def ListEngines(
        self, request: pb.ListEnginesRequest, context: Context
    ) -> pb.ListEnginesResponse:
        """Return the engines of the tenants that are asked for."""
        self._hub.standing.check()
        tenant = listed_tenant(context)
        engines, now_s = self._hub.directory.members.engines, self._hub.now_s()
        return pb.ListEnginesResponse(
            engines=[
                engine_info(engine, now_s)
                for key, engine in sorted(engines.items())
                if tenant in (None, key.tenant)
            ]
        )

    async def GetLayout(
        self, request: pb.GetLayoutRequest, context: Context
    ) -> pb.GetLayoutResponse:
        """Return the layout of an engine of the caller's tenant."""
        self._hub.standing.check()
        members = self._hub.directory.members
        engine = members.find(EngineKey(tenant_of(context), request.engine_id))
        return pb.GetLayoutResponse(
            layout=layout_pb2.Layout.FromString(engine.layout.encoded),
            layout_digest=engine.layout_digest,
        )

    async def ListHoldings(
        self, request: pb.ListHoldingsRequest, context: Context
    ) -> pb.ListHoldingsResponse:
        """Return what engines of the tenants that are asked for say they hold."""
        self._hub.standing.check()
        tenant, directory = listed_tenant(context), self._hub.directory
        prefixes, engines = directory.prefixes, directory.members.engines
        held = sorted(item for item in prefixes.holders.items() if tenant in (None, item[0]))
        return pb.ListHoldingsResponse(
            engines=[
                engine_holdings(teller, holders, engines.get(teller.engine))
                for _, holders in held
                for _, teller in sorted(holders.tellers.items())
            ],
            tenants=[
                tenant_holdings(name, holders, prefixes.limit_bytes) for name, holders in held
            ],
        )

    async def ListAgents(
        self, request: pb.ListAgentsRequest, context: Context
    ) -> pb.ListAgentsResponse:
        """Return the agents of the tenants that are asked for."""
        self._hub.standing.check()
        tenant = listed_tenant(context)
        return pb.ListAgentsResponse(
            agents=[
                agent_info(key, rank, agent)
                for key, engine in sorted(self._hub.directory.members.engines.items())
                if tenant in (None, key.tenant)
                for rank, agent in sorted(engine.agents.items())
            ]
        )

    async def ListHandoffs(
        self, request: pb.ListHandoffsRequest, context: Context
    ) -> pb.ListHandoffsResponse:
        """Return handoffs: live handoffs first, then the most recently ended."""
        self._hub.standing.check()
        if request.limit < 0:
            raise RequestError(f"limit {request.limit} must not be negative", field="limit")
        tenant = listed_tenant(context)
        ledger = self._hub.directory.ledger
        live, ended = reversed(ledger.live.values()), reversed(ledger.ended.values())
        listed = with_deliveries(chain(live, ended))
        if request.ended_within_s > 0:
            since_s = self._hub.now_s() - request.ended_within_s
            late = takewhile(lambda handoff: handoff.ended_s >= since_s, ended)
            both = with_deliveries(chain(live, late))
            listed = (handoff for handoff in both if handoff.ended and handoff.ended_s >= since_s)
        wanted = [
            handoff
            for handoff in listed
            if tenant in (None, handoff.tenant)
            and request.state in (0, STATE_NUMBERS[handoff.state])
            and handoff.handoff_id.startswith(request.beginning)
        ]
        limit = min(request.limit or DEFAULT_LIMIT, MAX_LIMIT)
        return pb.ListHandoffsResponse(
            handoffs=[self._info(handoff) for handoff in islice(wanted, limit)],
            left_out=max(0, len(wanted) - limit),
        )

    async def GetHandoff(
        self, request: pb.GetHandoffRequest, context: Context
    ) -> pb.GetHandoffResponse:
        """Return a handoff with its timeline."""
        self._hub.standing.check()
        handoff = self._hub.directory.ledger.find(tenant_of(context), request.handoff_id)
        return whole_story(handoff, self._hub.directory.granting, self._hub.now_s())

    async def ListBrokers(
        self, request: pb.ListBrokersRequest, context: Context
    ) -> pb.ListBrokersResponse:
        """Return the brokers of the fleet; a standby answers, too."""
        scope_of(context)
        return brokers_of(self._hub)

    async def ListCosts(
        self, request: pb.ListCostsRequest, context: Context
    ) -> pb.ListCostsResponse:
        """Return the costs measured between hosts."""
        self._hub.standing.check()
        hub, tenant = self._hub, scope_of(context)
        return pb.ListCostsResponse(
            hosts=[
                host_costs(hosts, known)
                for hosts, known in sorted(
                    hub.directory.probing.known.items(),
                    key=lambda item: (item[0].source_host, item[0].destination_host),
                )
                if tenant in (None, hosts.tenant)
            ],
            otherwise=pb.Costs(**asdict(hub.costs)),
            fixed=not hub.measures,
        )

    async def ProbePair(
        self, request: pb.ProbePairRequest, context: Context
    ) -> pb.ProbePairResponse:
        """Let an agent of an engine read from an agent of another, and return how it reads."""
        self._hub.standing.check()
        tenant = tenant_of(context)
        examined = await self._hub.examine(
            EngineKey(tenant, request.source_engine), EngineKey(tenant, request.destination_engine)
        )
        return pb.ProbePairResponse(
            source_rank=examined.source_rank,
            destination_rank=examined.destination_rank,
            transport=examined.transport,
            method=examined.method,
            reason=examined.reason,
            detail=examined.detail,
        )

    async def AuditBroker(
        self, request: pb.AuditBrokerRequest, context: Context
    ) -> pb.AuditBrokerResponse:
        """Return every violated invariant."""
        self._hub.standing.check()
        _check_all_tenants(context)
        directory = self._hub.directory
        return pb.AuditBrokerResponse(
            findings=[cut(words) for words in islice(audit(directory), MAX_FINDINGS)],
            handoffs=len(directory.ledger.by_number) + len(directory.ledger.ended),
        )

    async def ReleaseHandoff(
        self, request: pb.ReleaseHandoffRequest, context: Context
    ) -> pb.ReleaseHandoffResponse:
        """Give up a handoff."""
        await self._leading()
        hub = self._hub
        handoff = hub.directory.ledger.find(tenant_of(context), request.handoff_id)
        if not handoff.ended:
            self._note(
                "released by an operator",
                context,
                tenant=handoff.tenant,
                handoff=handoff.handoff_id,
            )
            hub.perform(hub.directory.release(handoff, hub.now_s()))
        return pb.ReleaseHandoffResponse(handoff=self._info(handoff))

    async def SetDraining(
        self, request: pb.SetDrainingRequest, context: Context
    ) -> pb.SetDrainingResponse:
        """Stop or resume granting."""
        await self._leading()
        _check_all_tenants(context)
        hub = self._hub
        self._note("draining set by an operator", context, draining=request.draining)
        hub.perform(hub.directory.granting.drain(request.draining, hub.now_s()))
        return pb.SetDrainingResponse(granted=hub.directory.granted)

    async def DrainEngine(
        self, request: pb.DrainEngineRequest, context: Context
    ) -> pb.DrainEngineResponse:
        """Let an engine take nothing new, or resume."""
        await self._leading()
        members = self._hub.directory.members
        engine = members.find(EngineKey(tenant_of(context), request.engine_id))
        if engine.draining != request.draining:
            self._note(
                "engine's draining set by an operator",
                context,
                tenant=engine.key.tenant,
                engine=request.engine_id,
                draining=request.draining,
            )
        self._hub.perform(members.drain(engine, request.draining, self._hub.now_s()))
        return pb.DrainEngineResponse(open=len(engine.handoffs) + engine.handing_over)

    async def ForgetEngine(
        self, request: pb.ForgetEngineRequest, context: Context
    ) -> pb.ForgetEngineResponse:
        """Remove an engine that is gone."""
        await self._leading()
        hub, members = self._hub, self._hub.directory.members
        engine = members.find(EngineKey(tenant_of(context), request.engine_id))
        ended = len(engine.handoffs)
        hub.perform(members.forget(engine, hub.now_s()))
        self._note(
            "engine forgotten by an operator",
            context,
            tenant=engine.key.tenant,
            engine=request.engine_id,
            ended=ended,
        )
        return pb.ForgetEngineResponse(ended=ended)

    async def ForgetStates(
        self, request: pb.ForgetStatesRequest, context: Context
    ) -> pb.ForgetStatesResponse:
        """Let the stores of a tenant drop the states of a revision."""
        await self._leading()
        check_revision(request.revision)
        tenant = tenant_of(context)
        told = self._hub.directory.offering.forget_states(tenant, request.revision)
        self._hub.perform(told)
        self._note(
            "stores told by an operator to drop states",
            context,
            tenant=tenant,
            revision=request.revision,
            stores=len(told),
        )
        return pb.ForgetStatesResponse(stores=len(told))

    async def AbandonHandoff(
        self, request: pb.AbandonHandoffRequest, context: Context
    ) -> pb.AbandonHandoffResponse:
        """Give up a handoff that no D has asked for."""
        await self._leading()
        hub, tenant = self._hub, tenant_of(context)
        hub.perform(hub.directory.abandon(tenant, request.handoff_id, hub.now_s()))
        state = hub.directory.ledger.find(tenant, request.handoff_id).state
        return pb.AbandonHandoffResponse(state=STATE_NUMBERS[state])


def _check_all_tenants(context: Context) -> None:
    tenant = scope_of(context)
    if tenant is not None:
        raise ForbiddenError(
            f"this call concerns all tenants, but this identity belongs to tenant {tenant}: use "
            f"the identity of an operator of all tenants",
            tenant=tenant,
        )
