"""The operator's view of a broker."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import grpc

from restow.broker.client.channel import CHANNEL_OPTIONS, broker_address
from restow.broker.client.errors import from_rpc_error
from restow.v1 import admin_pb2 as pb
from restow.v1 import admin_pb2_grpc, broker_pb2


class AdminClient:
    """Blocking calls of `restow.v1.Admin`. Every call raises the broker's typed refusal."""

    def __init__(self, broker: str | None = None, timeout_s: float = 5.0) -> None:
        """Connect lazily."""
        self.address = broker_address(broker)
        self._channel = grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        """Use as a context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the channel; a gRPC error leaves as the typed one."""
        self._channel.close()
        if isinstance(error, grpc.RpcError):
            raise from_rpc_error(error, self.address) from None

    def status(self) -> pb.GetStatusResponse:
        """Figures of the whole broker."""
        return self._stub.GetStatus(pb.GetStatusRequest(), timeout=self._timeout_s)

    def engines(self) -> list[pb.EngineInfo]:
        """The registered engines."""
        request = pb.ListEnginesRequest()
        return list(self._stub.ListEngines(request, timeout=self._timeout_s).engines)

    def agents(self) -> list[pb.AgentInfo]:
        """The connected agents."""
        request = pb.ListAgentsRequest()
        return list(self._stub.ListAgents(request, timeout=self._timeout_s).agents)

    def handoffs(self, state: str | None = None, limit: int = 0) -> pb.ListHandoffsResponse:
        """Handoffs, of one state if that is given."""
        number = broker_pb2.HandoffState.Value(f"HANDOFF_STATE_{state or 'UNSPECIFIED'}")
        request = pb.ListHandoffsRequest(state=number, limit=limit)
        return self._stub.ListHandoffs(request, timeout=self._timeout_s)

    def handoff(self, handoff_id: str) -> pb.GetHandoffResponse:
        """One handoff with its timeline."""
        request = pb.GetHandoffRequest(handoff_id=handoff_id)
        return self._stub.GetHandoff(request, timeout=self._timeout_s)
