"""An engine's registration with the broker, which must be repeated when a broker restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import grpc

from restow.broker.client.connection.brokers import Backoff, Brokers
from restow.broker.client.connection.channel import Credentials, RenewedChannel
from restow.broker.client.connection.errors import (
    MAY_PASS,
    BrokerUnreachableError,
    OtherServerError,
    decoded,
    from_rpc_error,
    is_cancelled,
    unreachable,
)
from restow.broker.client.engine.chains import (
    Holders,
    PrefixChain,
    find_request,
    holders_of,
)
from restow.broker.errors import RestowError
from restow.broker.layout import Layout
from restow.broker.logs import get_logger
from restow.broker.rpc import wire
from restow.broker.rpc.sizes import check_size
from restow.broker.trust.errors import TrustError
from restow.broker.versions import own_version
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

REGISTER_S = 20.0
UNREGISTER_TIMEOUT_S = 1.0
_LIFTED_STATUSES = frozenset({*MAY_PASS, "UNAUTHENTICATED", "PERMISSION_DENIED"})


class Registration:
    """The registration of one run of an engine, and its channel. Belongs to one event loop."""

    def __init__(
        self,
        brokers: Brokers,
        credentials: Credentials,
        engine: pb.EngineRef,
        layout: Layout,
        *,
        publishes: bool,
        asks: bool,
        keeps: bool,
    ) -> None:
        """Prepare the registration."""
        self.message = pb.RegisterEngineRequest(
            engine=engine,
            layout=wire.layout_to_proto(layout),
            version=own_version(),
            publishes=publishes,
            asks=asks,
            keeps=keeps,
        )
        self.is_taken = False
        """Whether a broker has registered the engine at least once."""
        self.layout_digest = ""
        """The layout's digest from the broker; empty before the first registration."""
        self._brokers, self._credentials = brokers, credentials
        self._channel = RenewedChannel(brokers, credentials)
        self._log = get_logger("restow.client").bind(engine=engine.engine_id)

    async def say(self, timeout_s: float) -> None:
        """Register with the broker that leads.

        Raises the broker's refusal, and `MessageTooLargeError`.
        """
        check_size("the layout", self.message.ByteSize())
        while True:
            if self._brokers.several and not await self._channel.connects():
                raise self._unreached("not connected")
            stub = broker_pb2_grpc.BrokerStub(await self._channel.channel())
            try:
                response = await stub.RegisterEngine(
                    self.message, timeout=timeout_s, metadata=self._brokers.metadata
                )
            except grpc.aio.AioRpcError as error:
                refusal = self.typed(error)
            else:
                break
            if not self._brokers.refused(refusal):
                raise refusal
        if not decoded(response, self._brokers.current).layout_digest:
            words = "it registered an engine without a layout"
            raise OtherServerError("UNKNOWN", self._brokers.current, words)
        self._brokers.works()
        self.is_taken, self.layout_digest = True, response.layout_digest

    async def stub(self) -> broker_pb2_grpc.BrokerAsyncStub:
        """Return a stub of the present channel, or of a new one. Raises a `TrustError`."""
        return broker_pb2_grpc.BrokerStub(self._channel.present or await self._channel.channel())

    async def find(self, chains: Sequence[PrefixChain], limit: int, timeout_s: float) -> Holders:
        """Ask who holds prefixes of the engine's model.

        Raises `ChainFormError`, `ChainInvalidError`, and as `say` does.
        """
        request = find_request(chains, self.message.engine.engine_id, None, limit)
        stub = await self.stub()
        try:
            return holders_of(await stub.Find(request, timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            raise self.typed(error) from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            # The channel was closed because another broker is tried.
            raise self._unreached("the connection was given up") from None

    async def say_again(self, backoff: Backoff, *, at_once: bool = False) -> None:
        """Register again once this broker or another one answers.

        Raises the broker's refusal if retrying is useless.
        """
        while True:
            if not at_once:
                await asyncio.sleep(backoff.wait_s())
            try:
                while not (found := await self._channel.connects()) and not self._brokers.several:
                    pass
                if found:
                    return await self.say(REGISTER_S)
            except BrokerUnreachableError:
                pass
            except RestowError as error:
                if not _may_be_lifted(error):
                    raise
                self._log.warning(
                    "registration refused for now", reason=error.reason, detail=error.message
                )
            at_once = self._brokers.failed()

    def typed(self, error: grpc.aio.AioRpcError) -> RestowError:
        """Return the typed error of a failed call."""
        return from_rpc_error(error, self._brokers.current, self._credentials.secure)

    async def close(self, take_back: bool = True) -> None:
        """Unregister, if registered and ``take_back`` is true, and close the channel."""
        if take_back and self._channel.present is not None and self.layout_digest:
            request = pb.UnregisterEngineRequest(engine=self.message.engine)
            with contextlib.suppress(grpc.aio.AioRpcError, TrustError):
                stub = await self.stub()
                await stub.UnregisterEngine(request, timeout=UNREGISTER_TIMEOUT_S)
        await self._channel.close()

    def _unreached(self, details: str) -> BrokerUnreachableError:
        return unreachable(self._brokers.current, details, self._credentials.secure)


def _may_be_lifted(error: RestowError) -> bool:
    """Return whether a refusal of a registered engine may be lifted, by time or by somebody."""
    # Only a broker's own refusal is final: a gateway or another server may answer for a while.
    return isinstance(error, TrustError | OtherServerError) or error.status in _LIFTED_STATUSES
