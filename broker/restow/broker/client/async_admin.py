"""The operator's view of a broker, on an event loop."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar

import grpc

from restow.broker.client import admin_calls as calls
from restow.broker.client.admin_calls import ADMIN_OPTIONS, AdminCall
from restow.broker.client.channel import broker_address
from restow.broker.client.credentials import Credentials
from restow.broker.client.errors import from_rpc_error
from restow.v1 import admin_pb2 as pb
from restow.v1 import admin_pb2_grpc

T = TypeVar("T")


class AsyncAdminClient:
    """`AdminClient` with ``await``.

    Each is tried again while the broker is away, for a moment. Raises
    `BrokerCallError` with the broker's refusal, or `BrokerUnreachableError`.
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
            grpc.aio.secure_channel(self.address, credentials.for_channel(), options=ADMIN_OPTIONS)
            if credentials.secure
            else grpc.aio.insecure_channel(self.address, options=ADMIN_OPTIONS)
        )
        self._stub = admin_pb2_grpc.AdminStub(self._channel)
        self._timeout_s = timeout_s
        self._metadata = (("restow-tenant", tenant),) if tenant is not None else ()

    async def __aenter__(self) -> Self:
        """Use as a context."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the channel."""
        await self.close()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def status(self) -> pb.GetStatusResponse:
        """Statistics of the whole broker."""
        return await self._do(calls.status())

    async def engines(self) -> list[pb.EngineInfo]:
        """The registered engines."""
        return await self._do(calls.engines())

    async def agents(self) -> list[pb.AgentInfo]:
        """The connected agents."""
        return await self._do(calls.agents())

    async def handoffs(self, state: str | None = None, limit: int = 0) -> pb.ListHandoffsResponse:
        """Handoffs, of one state if that is given. Raises `ValueError` for an unknown state."""
        return await self._do(calls.handoffs(state, limit))

    async def handoff(self, handoff_id: str) -> pb.GetHandoffResponse:
        """One handoff with its timeline."""
        return await self._do(calls.handoff(handoff_id))

    async def costs(self) -> pb.ListCostsResponse:
        """What reading and copying costs, by pair of hosts."""
        return await self._do(calls.costs())

    async def probe_pair(self, source: str, destination: str) -> pb.ProbePairResponse:
        """How an agent of one engine reads from one of another's; takes seconds."""
        return await self._do(calls.probe_pair(source, destination))

    async def audit(self) -> pb.AuditBrokerResponse:
        """Everything that must not be, of all tenants."""
        return await self._do(calls.audit())

    async def release(self, handoff_id: str) -> pb.HandoffInfo:
        """Give a handoff up. May be repeated."""
        return await self._do(calls.release(handoff_id))

    async def set_draining(self, draining: bool) -> int:
        """Grant nothing any more, or again. How many are granted and not ended. May be repeated."""
        return await self._do(calls.set_draining(draining))

    async def _do(self, call: AdminCall[T]) -> T:
        method = getattr(self._stub, call.method)
        try:
            patience_s = max(self._timeout_s, call.least_s)
            answer = await method(call.request, timeout=patience_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self.address, self._secure) from None
        return call.pick(answer)
