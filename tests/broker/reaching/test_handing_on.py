"""A broker that hands a pool on has its engines yet: it opens no stream for them any more."""

from __future__ import annotations

import grpc
import pytest
from restow.broker.server.fleet.standing import Alone

from broker.fakes import broker, engine
from restow.broker.client.connection.channel import open_channel
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.errors import OwnerUnknownError
from restow.broker.layout.values import Pool
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc


class HandingOn(Alone):
    """As of a broker that has asked for a pool to be released, and has not heard that it is."""

    among_others = True

    def check(self, pool: Pool) -> None:
        raise OwnerUnknownError("no broker owns it at the moment", model=pool.model.name)


async def test_no_session_opens_while_the_pool_is_handed_on() -> None:
    async with broker() as running, engine(running.address, "p", agents=False) as (session, _):
        running.hub.standing = HandingOn()
        channel = open_channel(running.address)
        stub: broker_pb2_grpc.BrokerAsyncStub = broker_pb2_grpc.BrokerStub(channel)
        try:
            call = stub.Session()
            await call.write(pb.SessionRequest(engine=session.ref))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert from_rpc_error(caught.value, running.address).reason == "OWNER_UNKNOWN"
            assert session.is_open
        finally:
            await channel.close()
