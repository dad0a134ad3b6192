"""The calls of `restow.v1.Admin`, told apart from how they are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from restow.broker.client.channel import channel_options
from restow.broker.client.delivery import state_name
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

T = TypeVar("T")

RETRIES = {
    "methodConfig": [
        {
            # Each of them may be repeated: none does more the second time.
            "name": [{"service": "restow.v1.Admin"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
PROBE_S = 45.0
"""The broker gives up after 40 s (`Limits.examine_s`)."""


def admin_options() -> tuple[tuple[str, int | str], ...]:
    """As `channel_options`; a broker that starts again is not noticed, if it is quick."""
    return (*channel_options(), ("grpc.service_config", json.dumps(RETRIES)))


@dataclass(frozen=True, slots=True)
class AdminCall(Generic[T]):
    """One call: its method, what is said, and what of the answer is wanted."""

    method: str
    request: Message
    pick: Callable[[Any], T]
    least_s: float = 0.0
    """How long it may take at least, whatever patience is usual."""


def _whole(response: Any) -> Any:
    return response


def status(traffic: bool = False) -> AdminCall[pb.GetStatusResponse]:
    """Statistics of the whole broker; ``traffic``: with what ended in the last quarter hour."""
    return AdminCall("GetStatus", pb.GetStatusRequest(traffic=traffic), _whole)


def tenants() -> AdminCall[pb.ListTenantsResponse]:
    """The tenants that have engines or handoffs."""
    return AdminCall("ListTenants", pb.ListTenantsRequest(), _whole)


def engines() -> AdminCall[list[pb.EngineInfo]]:
    """The registered engines."""
    return AdminCall("ListEngines", pb.ListEnginesRequest(), lambda found: list(found.engines))


def agents() -> AdminCall[list[pb.AgentInfo]]:
    """The connected agents."""
    return AdminCall("ListAgents", pb.ListAgentsRequest(), lambda found: list(found.agents))


def handoffs(
    state: str | None = None, limit: int = 0, beginning: str = "", ended_within_s: float = 0.0
) -> AdminCall[pb.ListHandoffsResponse]:
    """Handoffs: of one state, whose ids begin so, that ended lately, where that is given.

    Raises `ValueError` for an unknown state.
    """
    request = pb.ListHandoffsRequest(
        state=broker_pb2.HandoffState.Value(f"HANDOFF_STATE_{state or 'UNSPECIFIED'}"),
        limit=limit,
        beginning=beginning,
        ended_within_s=ended_within_s,
    )
    return AdminCall("ListHandoffs", request, _whole)


def handoff(handoff_id: str) -> AdminCall[pb.GetHandoffResponse]:
    """One handoff with its timeline."""
    return AdminCall("GetHandoff", pb.GetHandoffRequest(handoff_id=handoff_id), _whole)


def costs() -> AdminCall[pb.ListCostsResponse]:
    """What reading and copying costs, by pair of hosts."""
    return AdminCall("ListCosts", pb.ListCostsRequest(), _whole)


def probe_pair(source: str, destination: str) -> AdminCall[pb.ProbePairResponse]:
    """How an agent of one engine reads from one of another's."""
    request = pb.ProbePairRequest(source_engine=source, destination_engine=destination)
    return AdminCall("ProbePair", request, _whole, PROBE_S)


def audit() -> AdminCall[pb.AuditBrokerResponse]:
    """Everything that must not be, of all tenants."""
    return AdminCall("AuditBroker", pb.AuditBrokerRequest(), _whole)


def release(handoff_id: str) -> AdminCall[pb.HandoffInfo]:
    """Give a handoff up."""
    request = pb.ReleaseHandoffRequest(handoff_id=handoff_id)
    return AdminCall("ReleaseHandoff", request, lambda found: found.handoff)


def drain_engine(engine_id: str, draining: bool = True) -> AdminCall[int]:
    """Have an engine take nothing new, or again. How many handoffs of its have not ended."""
    request = pb.DrainEngineRequest(engine_id=engine_id, draining=draining)
    return AdminCall("DrainEngine", request, lambda found: found.open)


def forget_engine(engine_id: str) -> AdminCall[int]:
    """Forget an engine that is gone. How many handoffs ended with it."""
    request = pb.ForgetEngineRequest(engine_id=engine_id)
    return AdminCall("ForgetEngine", request, lambda found: found.ended)


def abandon(handoff_id: str) -> AdminCall[str]:
    """Give up what nobody has asked for: how it ended, or the state that it is left in."""
    request = pb.AbandonHandoffRequest(handoff_id=handoff_id)
    return AdminCall("AbandonHandoff", request, lambda found: state_name(found.state))


def set_draining(draining: bool) -> AdminCall[int]:
    """Grant nothing any more, or again. How many are granted and not ended."""
    request = pb.SetDrainingRequest(draining=draining)
    return AdminCall("SetDraining", request, lambda found: found.granted)
