"""A leader that has let go has its engines yet: it opens no stream for them any more."""

from __future__ import annotations

from broker.fakes import engine
from broker.guarded import reason_of
from restow.broker.client.connection.channel import open_channel
from restow.broker.errors import NoLeaderError
from restow.broker.server.base.standing import Standing
from restow.broker.server.serve import RunningBroker
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc


class LettingGo(Standing):
    """As of a leader that has let go, and does not know who follows."""

    among_others = True

    def check(self) -> None:
        raise NoLeaderError("no broker leads at the moment")


async def test_no_session_opens_while_nobody_leads(running: RunningBroker) -> None:
    async with engine(running.address, "p", agents=False) as (session, _):
        running.hub.standing = LettingGo()
        channel = open_channel(running.address)
        stub: broker_pb2_grpc.BrokerAsyncStub = broker_pb2_grpc.BrokerStub(channel)
        try:
            call = stub.Session()
            await call.write(pb.SessionRequest(engine=session.ref))
            assert await reason_of(call.read()) == "NO_LEADER"
            assert session.is_open
        finally:
            await channel.close()
