"""A real broker on a free port, and agents that say what the test has them say."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import grpc

from agent_harness.waiting import until
from restow.broker.client import Credentials, EngineSession, HandoffEnded
from restow.broker.client.connection.brokers import Brokers
from restow.broker.client.connection.channel import RenewedChannel, open_channel
from restow.broker.client.connection.errors import from_rpc_error
from restow.broker.errors import RestowError
from restow.broker.families import (
    AttentionSpec,
    EngineSettings,
    Mamba2Spec,
    ModelSpec,
    build_layout,
)
from restow.broker.layout import DType, Layout
from restow.broker.rpc import wire_program
from restow.broker.server.base.settings import BrokerSettings
from restow.broker.server.serve import RunningBroker, running_broker
from restow.v1 import agent_link_pb2 as link
from restow.v1 import agent_link_pb2_grpc

PAGES = 4096
POSITION = 40
P_BLOCKS = {"attention": [1, 2, 3], "state": [4]}


class UnusedBlocks(Mapping[str, list[int]]):
    """Blocks of D's, other ones each time: no two of its open demands may name the same."""

    def __init__(self) -> None:
        self._taken = 0

    def __getitem__(self, group: str) -> list[int]:
        first = 11 + self._taken % (PAGES - 16)
        self._taken += 3
        return list(range(first, first + len(P_BLOCKS[group])))

    def __iter__(self) -> Iterator[str]:
        return iter(P_BLOCKS)

    def __len__(self) -> int:
        return len(P_BLOCKS)


D_BLOCKS = UnusedBlocks()


def model_layout(tp: int = 1, name: str = "m", ssm_dtype: DType = DType.FLOAT32) -> Layout:
    """Return the layout of a hybrid model with one layer of each kind."""
    dtype = DType.BFLOAT16
    layers = (Mamba2Spec(0, 8, 16, 16, 2, 4, dtype, ssm_dtype), AttentionSpec(1, 2, 16, dtype))
    model = ModelSpec(name, layers, revision="v1")
    return build_layout(model, EngineSettings(tp=tp, page_tokens=16))


@contextlib.asynccontextmanager
async def broker(listen: str = "127.0.0.1:0", **more: Any) -> AsyncIterator[RunningBroker]:
    async with running_broker(BrokerSettings(listen=listen, **more)) as running:
        yield running


class FakeAgent:
    """One rank's agent. Keeps the orders; settles at once unless told otherwise."""

    def __init__(
        self, session: EngineSession, layout: Layout, rank: int, pages: int, address: str = ""
    ) -> None:
        """Be the agent of a rank; ``address``: the broker's, if the session has another one."""
        self.hello = link.Hello(
            engine=session.ref,
            rank=rank,
            agent_name=f"{session.ref.engine_id}/{rank}/{secrets.token_hex(4)}",
            nixl_metadata=b"metadata",
            regions=[
                link.RegionMemory(
                    name=r.name,
                    base_address=(1 + at) << 40,
                    page_count=pages,
                    page_stride_bytes=r.page_stride_bytes,
                )
                for one in layout.ranks
                if one.rank == rank
                for at, r in enumerate(one.regions)
            ],
            staging_bytes=1 << 20,
            program_form=wire_program.PROGRAM_FORM,
        )
        self.address = address or session.address
        self._channel = RenewedChannel(Brokers(self.address), session._stream._credentials)
        self.answers: Callable[[link.AgentOrder], list[link.AgentMessage]] = answer_at_once
        self.orders: list[link.AgentOrder] = []
        self.end: RestowError | None = None
        self.ended = asyncio.Event()
        self._heard = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(self) -> FakeAgent:
        """Say Hello, and wait for the welcome."""
        self._call = agent_link_pb2_grpc.AgentLinkStub(await self._channel.channel()).Connect()
        await self.say(link.AgentMessage(hello=self.hello))
        self._reader = asyncio.create_task(self._read())
        await self.order("welcome")
        return self

    async def say(self, *messages: link.AgentMessage) -> None:
        async with self._writing:
            await self._call.write(link.ConnectRequest(messages=messages))

    async def fence(self, handoff_id: str) -> None:
        await self.say(link.AgentMessage(fenced=link.Fenced(handoff_id=handoff_id)))

    async def order(self, kind: str) -> Any:
        """Return the first order of a kind as soon as it has come. Raises the end of the stream."""
        async with self._heard:
            await self._heard.wait_for(lambda: self.ended.is_set() or self.has(kind))
        if not self.has(kind) and self.end is not None:
            raise self.end
        return getattr(next(one for one in self.orders if one.WhichOneof("body") == kind), kind)

    def has(self, kind: str) -> bool:
        return any(one.WhichOneof("body") == kind for one in self.orders)

    async def drop(self) -> None:
        """Break the stream as a killed process would."""
        if self._call is not None:
            self._call.cancel()
            await self._channel.close()
            await self.ended.wait()

    async def _read(self) -> None:
        waiting: deque[link.AgentMessage] = deque()
        try:
            async for response in self._call:
                for order in response.orders:
                    self.orders.append(order)
                    waiting += self.answers(order)
                if waiting:
                    await self.say(*waiting)
                    waiting.clear()
                async with self._heard:
                    self._heard.notify_all()
        except grpc.aio.AioRpcError as error:
            self.end = from_rpc_error(error, self.address)
        except asyncio.CancelledError:
            pass
        finally:
            self.ended.set()
            async with self._heard:
                self._heard.notify_all()


def answer_at_once(order: link.AgentOrder) -> list[link.AgentMessage]:
    """Return what an agent answers whose reads and gathers take no time."""
    body = order.WhichOneof("body")
    if body == "execute":
        settled = link.Settled(handoff=order.execute.handoff, bytes=100)
        settled.compared = order.execute.digest != link.DIGEST_KIND_UNSPECIFIED
        return [link.AgentMessage(settled=settled)]
    if body == "probe" and order.probe.name_transport:
        named = link.Probed(number=order.probe.number, transport="tcp/eth0", method="zero-copy")
        return [link.AgentMessage(probed=named)]
    if body == "probe":
        reading = link.ReadCosts(seconds_per_descriptor=2e-6, read_bytes_per_second=7e9)
        probed = link.Probed(
            number=order.probe.number,
            address=4096,
            bytes=order.probe.bytes,
            copying=link.CopyCosts(
                seconds_per_launch=1e-4,
                seconds_per_copy=1e-6,
                seconds_per_element=4e-9,
                copy_bytes_per_second=5e9,
            ),
            reading=reading if order.probe.agent_name else None,
        )
        return [link.AgentMessage(probed=probed)]
    number = order.stage.handoff
    digest = bytes(16) if order.stage.digest else b""
    return [
        link.AgentMessage(
            staged=link.Staged(
                handoff=number,
                dst_rank=part.dst_rank,
                address=4096,
                bytes=64,
                digest=digest,
            )
        )
        for part in order.stage.parts
    ]


def silent(order: link.AgentOrder) -> list[link.AgentMessage]:
    """Return no answer, for an agent that never answers."""
    return []


@contextlib.asynccontextmanager
async def engine(
    address: str,
    name: str,
    tp: int = 1,
    *,
    layout: Layout | None = None,
    pages: int = PAGES,
    agents: bool = True,
    host: str = "",
    credentials: Credentials | None = None,
    **more: Any,
) -> AsyncIterator[tuple[EngineSession, list[FakeAgent]]]:
    """Run an engine's session and its agents."""
    layout = layout or model_layout(tp)
    life = secrets.token_hex(4)
    async with EngineSession(name, life, layout, address, credentials, **more) as session:
        fakes = [
            FakeAgent(session, layout, rank, pages) for rank in range(len(layout.ranks)) if agents
        ]
        for fake in fakes:
            fake.hello.host = host
            await fake.connect()
        try:
            yield session, fakes
        finally:
            for fake in fakes:
                await fake.drop()


@contextlib.asynccontextmanager
async def pair(
    address: str,
    p_tp: int = 2,
    d_tp: int = 1,
    hosts: tuple[str, str] = ("", ""),
    credentials: Credentials | None = None,
    names: tuple[str, str] = ("p", "d"),
) -> AsyncIterator[Pair]:
    """Run P and D, with all their agents."""
    async with (
        engine(address, names[0], p_tp, host=hosts[0], credentials=credentials) as source,
        engine(address, names[1], d_tp, host=hosts[1], credentials=credentials) as destination,
        open_channel(address, credentials or Credentials()) as channel,
    ):
        yield Pair(*source, *destination, channel)


class Pair:
    """P and D."""

    def __init__(
        self,
        p: EngineSession,
        p_agents: list[FakeAgent],
        d: EngineSession,
        d_agents: list[FakeAgent],
        channel: grpc.aio.Channel,
    ) -> None:
        self.p, self.p_agents, self.d, self.d_agents = p, p_agents, d, d_agents
        self.channel = channel

    async def published(self, name: str, **more: Any) -> asyncio.Future[HandoffEnded]:
        """Publish a whole state and have all ranks fence it; return the future of P's pages."""
        released = self.p.publish(name, P_BLOCKS, POSITION, **more)
        for agent in self.p_agents:
            await agent.fence(name)
        return released

    async def hand_over(self, name: str) -> None:
        """Hand over a state, which proves that nothing before it did harm."""
        released = await self.published(name)
        ended = await self.d.request(name, D_BLOCKS)
        assert ended.done, ended
        assert await released == ended


async def heard(running: RunningBroker, handoff_id: str, asked: bool = False) -> None:
    """Wait until the broker has P's publication, or with ``asked`` D's demand.

    Messages of others may overtake it.
    """
    live = running.hub.directory.ledger.by_number
    await until(
        lambda: any(
            one.handoff_id == handoff_id and (one.destination if asked else one.source) is not None
            for one in live.values()
        )
    )
