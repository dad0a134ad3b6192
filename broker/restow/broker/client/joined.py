"""What several brokers answer, as one answer. Each function takes answers by address.

Lists say of each thing which broker told of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

SUMS = (
    *("engines", "agents", "handoffs_live", "plans", "bytes_read", "handoffs_quarantined"),
    *("handoffs_checked", "digest_mismatches"),
)
COUNTS = ("done", "failed", "cancelled", "bytes")
MAX_INT64 = (1 << 63) - 1


def status(answers: Mapping[str, pb.GetStatusResponse]) -> pb.GetStatusResponse:
    """Counts together, the lives of all, and all else of the first; it drains if all do."""
    whole = pb.GetStatusResponse()
    whole.CopyFrom(next(iter(answers.values())))
    several = list(answers.values())
    _add(whole, several, SUMS)
    whole.broker_epoch = ",".join(one.broker_epoch for one in several)
    whole.ClearField("membership")
    whole.draining = all(one.draining for one in several)
    whole.requires_content = all(one.requires_content for one in several)
    del whole.ended[:], whole.steps[:], whole.pairs[:]
    whole.ended.extend(_states(one.ended for one in several))
    steps = zip_longest(*(reversed(one.steps) for one in several))
    whole.steps.extend(reversed([_step(filter(None, one)) for one in steps]))
    whole.pairs.extend(_pairs(several))
    whole.pairs_left_out = sum(one.pairs_left_out for one in several)
    return whole


def tenants(answers: Mapping[str, pb.ListTenantsResponse]) -> pb.ListTenantsResponse:
    """Each tenant once, with what it has at all of them."""
    found: dict[str, list[pb.TenantInfo]] = {}
    for answer in answers.values():
        for one in answer.tenants:
            found.setdefault(one.tenant, []).append(one)
    whole = pb.ListTenantsResponse(listed=next(iter(answers.values())).listed)
    for tenant, parts in sorted(found.items()):
        told = whole.tenants.add(tenant=tenant, ended=_states(one.ended for one in parts))
        _add(told, parts, ("engines", "handoffs_live", "handoffs_quarantined", "bytes_read"))
    return whole


def engines(answers: Mapping[str, pb.ListEnginesResponse]) -> pb.ListEnginesResponse:
    """All, by tenant and id."""
    found = _told(answers, "engines")
    found.sort(key=lambda one: (one.tenant, one.engine_id))
    return pb.ListEnginesResponse(engines=found)


def agents(answers: Mapping[str, pb.ListAgentsResponse]) -> pb.ListAgentsResponse:
    """All, by tenant, engine and rank."""
    found = _told(answers, "agents")
    found.sort(key=lambda one: (one.tenant, one.engine_id, one.rank))
    return pb.ListAgentsResponse(agents=found)


def holdings(answers: Mapping[str, pb.ListHoldingsResponse]) -> pb.ListHoldingsResponse:
    """All, by tenant and id; what a tenant's take, together."""
    found = _told(answers, "engines")
    found.sort(key=lambda one: (one.tenant, one.engine_id))
    rooms: dict[str, list[pb.TenantHoldings]] = {}
    for answer in answers.values():
        for one in answer.tenants:
            rooms.setdefault(one.tenant, []).append(one)
    whole = pb.ListHoldingsResponse(engines=found)
    for tenant, parts in sorted(rooms.items()):
        told = whole.tenants.add(tenant=tenant)
        _add(told, parts, ("hashes", "bytes", "limit_bytes", "forgotten"))
    return whole


def handoffs(answers: Mapping[str, pb.ListHandoffsResponse], limit: int) -> pb.ListHandoffsResponse:
    """As each of them lists: under way, then the newest ends; a publication before deliveries."""
    groups: list[list[pb.HandoffInfo]] = []
    for address, answer in answers.items():
        for one in answer.handoffs:
            one.broker = address
            if groups and _is_delivery_of(one, groups[-1][0]):
                groups[-1].append(one)
            else:
                groups.append([one])
    groups.sort(key=lambda group: _order(group[0]))
    found = [one for group in groups for one in group]
    left_out = sum(one.left_out for one in answers.values()) + max(0, len(found) - limit)
    return pb.ListHandoffsResponse(handoffs=found[:limit], left_out=left_out)


def costs(answers: Mapping[str, pb.ListCostsResponse]) -> pb.ListCostsResponse:
    """Each pair of hosts once, as the first has it that measured it."""
    several = list(answers.values())
    hosts: dict[tuple[str, str], pb.HostCosts] = {}
    for one in (one for answer in several for one in answer.hosts):
        known = hosts.setdefault((one.source_host, one.destination_host), one)
        if one.HasField("costs") and not known.HasField("costs"):
            hosts[one.source_host, one.destination_host] = one
    fixed = all(one.fixed for one in several)
    found = [one for _, one in sorted(hosts.items())]
    return pb.ListCostsResponse(hosts=found, otherwise=several[0].otherwise, fixed=fixed)


def audit(answers: Mapping[str, pb.AuditBrokerResponse]) -> pb.AuditBrokerResponse:
    """All findings, each with who has it."""
    return pb.AuditBrokerResponse(
        findings=[f"{at}: {words}" for at, one in answers.items() for words in one.findings],
        handoffs=sum(one.handoffs for one in answers.values()),
    )


def states_forgotten(answers: Mapping[str, pb.ForgetStatesResponse]) -> pb.ForgetStatesResponse:
    """Return how many stores all of them have told."""
    return pb.ForgetStatesResponse(stores=sum(one.stores for one in answers.values()))


def abandoned(answers: Mapping[str, pb.AbandonHandoffResponse]) -> pb.AbandonHandoffResponse:
    """What the broker says that knew the handoff; the others say that it is CANCELLED."""
    cancelled = broker_pb2.HANDOFF_STATE_CANCELLED
    return max(answers.values(), key=lambda one: one.state != cancelled)


def _told(answers: Mapping[str, Any], name: str) -> list[Any]:
    found = []
    for address, answer in answers.items():
        for one in getattr(answer, name):
            one.broker = address
            found.append(one)
    return found


def _add(whole: Any, parts: Sequence[Any], names: Iterable[str]) -> None:
    for name in names:
        setattr(whole, name, min(sum(getattr(one, name) for one in parts), MAX_INT64))


def _states(counted: Iterable[Iterable[pb.StateCount]]) -> list[pb.StateCount]:
    counts = Counter[Any]()
    for several in counted:
        for one in several:
            counts[one.state] += one.count
    return [pb.StateCount(state=state, count=count) for state, count in sorted(counts.items())]


def _step(parts: Iterable[pb.TrafficStep]) -> pb.TrafficStep:
    """Counts together. The longest of times: what half did not exceed at each, half did not."""
    several, whole = list(parts), pb.TrafficStep()
    _add(whole, several, COUNTS)
    for name in ("p50_s", "p99_s"):
        if told := [getattr(one, name) for one in several if one.HasField(name)]:
            setattr(whole, name, max(told))
    return whole


def _pairs(several: Iterable[pb.GetStatusResponse]) -> list[pb.PairTraffic]:
    """Each pair once: its pool may have had two owners, one after the other."""
    found: dict[tuple[str, str, str], list[pb.PairTraffic]] = {}
    for one in (one for answer in several for one in answer.pairs):
        key = one.tenant, one.source_engine, one.destination_engine
        found.setdefault(key, []).append(one)
    whole = []
    for parts in found.values():
        most = max(parts, key=lambda one: one.traffic.bytes)
        most.traffic.CopyFrom(_step([one.traffic for one in parts]))
        whole.append(most)
    return sorted(whole, key=lambda one: -one.traffic.bytes)


def _is_delivery_of(one: pb.HandoffInfo, publication: pb.HandoffInfo) -> bool:
    named = (one.tenant, one.handoff_id, one.broker)
    of = (publication.tenant, publication.handoff_id, publication.broker)
    return publication.readers > 0 and not one.readers and named == of


def _order(one: pb.HandoffInfo) -> tuple[bool, float]:
    ended = one.HasField("ended_ago_s")
    return ended, one.ended_ago_s if ended else one.age_s
