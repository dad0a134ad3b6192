"""The calls of `restow.v1.Admin` as values, independent of how they are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from restow.broker.client.connection.channel import channel_options
from restow.broker.client.engine.chains import (
    Holders,
    Prefix,
    PrefixChain,
    find_request,
    holders_of,
)
from restow.broker.client.engine.commands import CommandStatus, command_request, status_of
from restow.broker.client.engine.handoff_futures import state_name
from restow.broker.layout.values import Layout, ModelIdentity
from restow.broker.rpc.wire import layout_from_proto
from restow.broker.state_commands import Verb
from restow.v1 import admin_pb2 as pb
from restow.v1 import broker_pb2

T = TypeVar("T")

RETRIES = {
    "methodConfig": [
        {
            # All these calls may be repeated: a repetition changes nothing. Find is not listed,
            # because a standby answers with the same status.
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
CALL_S = 5.0
"""Time of a call beyond what it waits for."""
PROBE_S = 45.0
"""The broker gives up after 40 s (`Limits.examine_s`)."""


def admin_options(several: bool) -> tuple[tuple[str, int | str], ...]:
    """Return channel options that hide a quick restart of the broker from callers.

    With ``several`` brokers another broker is called instead.
    """
    if several:
        return channel_options()
    return (*channel_options(), ("grpc.service_config", json.dumps(RETRIES)))


@dataclass(frozen=True, slots=True)
class AdminCall(Generic[T]):
    """A call: its method, its request, and the wanted part of its answer."""

    method: str
    request: Message
    pick: Callable[[Any], T]
    least_s: float = 0.0
    """Least time that the call gets, whatever the client's timeout is."""
    of_broker: bool = False
    """Whether it is a call of `restow.v1.Broker`."""


def _whole(response: Any) -> Any:
    return response


def status(traffic: bool = False) -> AdminCall[pb.GetStatusResponse]:
    """Return counts of the whole broker: engines, agents, handoffs and how they ended.

    With ``traffic``, also what ended in the last quarter of an hour.
    """
    return AdminCall("GetStatus", pb.GetStatusRequest(traffic=traffic), _whole)


def tenants() -> AdminCall[pb.ListTenantsResponse]:
    """Return the tenants that have engines or handoffs, with what each holds."""
    return AdminCall("ListTenants", pb.ListTenantsRequest(), _whole)


def engines() -> AdminCall[list[pb.EngineInfo]]:
    """Return the registered engines, by id."""
    return AdminCall(
        "ListEngines",
        pb.ListEnginesRequest(),
        lambda response: list(response.engines),
    )


def layout(engine_id: str) -> AdminCall[Layout]:
    """Return the layout of engine ``engine_id``. Engines of its tenant may call it too.

    Raises `BrokerCallError`, ENGINE_UNKNOWN.
    """
    request = pb.GetLayoutRequest(engine_id=engine_id)
    return AdminCall("GetLayout", request, lambda response: layout_from_proto(response.layout))


def agents() -> AdminCall[list[pb.AgentInfo]]:
    """Return the connected agents, by engine and rank."""
    return AdminCall("ListAgents", pb.ListAgentsRequest(), lambda response: list(response.agents))


def holdings() -> AdminCall[pb.ListHoldingsResponse]:
    """Return the prefixes that engines report, and the memory that they take by tenant."""
    return AdminCall("ListHoldings", pb.ListHoldingsRequest(), _whole)


def find(
    chains: Sequence[PrefixChain],
    *,
    engine_id: str = "",
    model: ModelIdentity | None = None,
    limit: int = 0,
) -> AdminCall[Holders]:
    """Return who holds how much of ``chains``, for ``model`` or the model of ``engine_id``.

    Holders of most tokens come first, at most ``limit``; 0 means the broker's default. The answer
    is a hint. Routers may call it too. Raises `ChainFormError` for chains of several forms, and
    `BrokerCallError`, CHAIN_FORM_DIFFERS, if engines report prefixes but none with this form.
    """
    named = None
    if model is not None:
        named = broker_pb2.ModelName(**asdict(model))
    request = find_request(chains, engine_id, named, limit)
    return AdminCall("Find", request, holders_of, of_broker=True)


def command(
    command_id: str,
    verb: Verb,
    prefix: Prefix,
    store: str,
    *,
    for_s: float = 0.0,
    to_store: str = "",
    timeout_s: float = 30.0,
    wait_s: float = 0.0,
) -> AdminCall[CommandStatus]:
    """Give ``store`` a command about the state of ``prefix``, and return how it stands.

    ``verb`` says what the store is to do. ``command_id`` is new for each command; a repeated call
    changes nothing. A pin lasts ``for_s``. A move needs ``to_store``, unless ``store`` is an engine
    whose replies are to move. The command ends within ``timeout_s``, and the call waits for its end
    up to ``wait_s``. Engines and routers may call it too. Raises `ChainInvalidError`, and
    `BrokerCallError`: COMMAND_CONFLICT, QUOTA_EXCEEDED.
    """
    request = command_request(
        command_id,
        verb,
        prefix,
        store,
        for_s=for_s,
        to_store=to_store,
        timeout_s=timeout_s,
        wait_s=wait_s,
    )
    least_s = wait_s + CALL_S if wait_s else 0.0
    return AdminCall("Command", request, _status, least_s, of_broker=True)


def command_status(command_id: str) -> AdminCall[CommandStatus]:
    """Return how command ``command_id`` stands. Raises `BrokerCallError`, COMMAND_UNKNOWN."""
    request = broker_pb2.GetCommandRequest(command_id=command_id)
    return AdminCall("GetCommand", request, _status, of_broker=True)


def _status(response: Any) -> CommandStatus:
    return status_of(response.status)


def handoffs(
    state: str | None = None, limit: int = 0, beginning: str = "", ended_within_s: float = 0.0
) -> AdminCall[pb.ListHandoffsResponse]:
    """Return handoffs, the newest first.

    Filters, if given: the ``state`` (a word such as "READY"), the ``beginning`` of the id, and an
    end within the last ``ended_within_s`` seconds. Returns at most ``limit``; 0 means the
    broker's default. Raises `ValueError` for an unknown state.
    """
    request = pb.ListHandoffsRequest(
        state=broker_pb2.HandoffState.Value(f"HANDOFF_STATE_{state or 'UNSPECIFIED'}"),
        limit=limit,
        beginning=beginning,
        ended_within_s=ended_within_s,
    )
    return AdminCall("ListHandoffs", request, _whole)


def handoff(handoff_id: str) -> AdminCall[pb.GetHandoffResponse]:
    """Return handoff ``handoff_id`` with its timeline.

    The timeline says, in seconds of the broker's clock, when the handoff was published, fenced,
    requested, granted, staged, settled and ended, as far as it has come. Raises
    `BrokerCallError`, HANDOFF_UNKNOWN.
    """
    return AdminCall("GetHandoff", pb.GetHandoffRequest(handoff_id=handoff_id), _whole)


def brokers() -> AdminCall[pb.ListBrokersResponse]:
    """Return the brokers of the fleet, and the standing of the broker that is asked.

    A standby answers this call, too. The only broker has no ``membership`` in its answer.
    """
    return AdminCall("ListBrokers", pb.ListBrokersRequest(), _whole)


def costs() -> AdminCall[pb.ListCostsResponse]:
    """Return the costs of reading and copying by pair of hosts, as agents measured them."""
    return AdminCall("ListCosts", pb.ListCostsRequest(), _whole)


def probe_pair(source: str, destination: str) -> AdminCall[pb.ProbePairResponse]:
    """Let an agent of ``destination`` read from an agent of ``source``; return how it read.

    No engine's pages are touched. It may take 45 s, whatever the client's ``timeout_s`` is. Raises
    `BrokerCallError`, PAIR_NOT_READY.
    """
    request = pb.ProbePairRequest(source_engine=source, destination_engine=destination)
    return AdminCall("ProbePair", request, _whole, PROBE_S)


def audit() -> AdminCall[pb.AuditBrokerResponse]:
    """Return every violated invariant, of all tenants; a sound broker has none."""
    return AdminCall("AuditBroker", pb.AuditBrokerRequest(), _whole)


def release(handoff_id: str) -> AdminCall[pb.HandoffInfo]:
    """Give handoff ``handoff_id`` up, even if a side waits for it, and return how it ended."""
    request = pb.ReleaseHandoffRequest(handoff_id=handoff_id)
    return AdminCall("ReleaseHandoff", request, lambda response: response.handoff)


def drain_engine(engine_id: str, draining: bool = True) -> AdminCall[int]:
    """Let engine ``engine_id`` take nothing new; with ``draining`` False, let it resume.

    Returns the number of its open handoffs, plus 1 while it hands over its states. Raises
    `BrokerCallError`, ENGINE_UNKNOWN.
    """
    request = pb.DrainEngineRequest(engine_id=engine_id, draining=draining)
    return AdminCall("DrainEngine", request, lambda response: response.open)


def forget_states(revision: str) -> AdminCall[int]:
    """Let the tenant's stores drop the states of ``revision``; return how many were told.

    Raises as every call does, and `BrokerCallError` for an empty text.
    """
    request = pb.ForgetStatesRequest(revision=revision)
    return AdminCall("ForgetStates", request, lambda response: response.stores)


def forget_engine(engine_id: str) -> AdminCall[int]:
    """Forget engine ``engine_id``, which is gone, and return how many handoffs ended with it.

    Raises `BrokerCallError`, ENGINE_CONNECTED or ENGINE_UNKNOWN.
    """
    request = pb.ForgetEngineRequest(engine_id=engine_id)
    return AdminCall("ForgetEngine", request, lambda response: response.ended)


def abandon(handoff_id: str) -> AdminCall[str]:
    """Give handoff ``handoff_id`` up if no D has asked for it.

    Returns the name of its end ("CANCELLED"), or of the state in which it was left.
    """
    request = pb.AbandonHandoffRequest(handoff_id=handoff_id)
    return AdminCall("AbandonHandoff", request, lambda response: state_name(response.state))


def set_draining(draining: bool) -> AdminCall[int]:
    """Stop granting at the broker; with ``draining`` False, resume.

    Returns how many handoffs are granted and have not ended.
    """
    request = pb.SetDrainingRequest(draining=draining)
    return AdminCall("SetDraining", request, lambda response: response.granted)
