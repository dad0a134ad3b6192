"""The operator's view of a broker."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from restow.broker.client.channel import CHANNEL_OPTIONS, broker_address
from restow.broker.client.credentials import Credentials
from restow.broker.client.errors import from_rpc_error
from restow.v1 import admin_pb2 as pb
from restow.v1 import admin_pb2_grpc, broker_pb2

Response = TypeVar("Response")


class AdminClient:
    """Blocking calls of `restow.v1.Admin`.

    Every call raises `BrokerCallError` with the broker's refusal, or `BrokerUnreachableError`.
    """

    def __init__(
        self,
        broker: str | None = None,
        timeout_s: float = 5.0,
        tenant: str | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Connect lazily; ``tenant`` None is that of the identity, or the broker's default one.

        ``credentials`` None: those of the environment. Raises a `TrustError` of theirs.
        """
        self.address = broker_address(broker)
        credentials = credentials or Credentials.of()
        self._secure = credentials.secure
        self._channel = (
            grpc.secure_channel(self.address, credentials.for_channel(), options=CHANNEL_OPTIONS)
            if credentials.secure
            else grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        )
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = (("restow-tenant", tenant),) if tenant is not None else ()

    def __enter__(self) -> Self:
        """Use as a context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the channel."""
        self.close()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def status(self) -> pb.GetStatusResponse:
        """Figures of the whole broker."""
        return self._call(self._stub.GetStatus, pb.GetStatusRequest())

    def engines(self) -> list[pb.EngineInfo]:
        """The registered engines."""
        return list(self._call(self._stub.ListEngines, pb.ListEnginesRequest()).engines)

    def agents(self) -> list[pb.AgentInfo]:
        """The connected agents."""
        return list(self._call(self._stub.ListAgents, pb.ListAgentsRequest()).agents)

    def handoffs(self, state: str | None = None, limit: int = 0) -> pb.ListHandoffsResponse:
        """Handoffs, of one state if that is given. Raises `ValueError` for an unknown state."""
        number = broker_pb2.HandoffState.Value(f"HANDOFF_STATE_{state or 'UNSPECIFIED'}")
        request = pb.ListHandoffsRequest(state=number, limit=limit)
        return self._call(self._stub.ListHandoffs, request)

    def handoff(self, handoff_id: str) -> pb.GetHandoffResponse:
        """One handoff with its timeline."""
        return self._call(self._stub.GetHandoff, pb.GetHandoffRequest(handoff_id=handoff_id))

    def costs(self) -> pb.ListCostsResponse:
        """What reading and copying costs, by pair of hosts."""
        return self._call(self._stub.ListCosts, pb.ListCostsRequest())

    def _call(self, method: Callable[..., Response], request: Any) -> Response:
        try:
            return method(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.address, self._secure) from None
