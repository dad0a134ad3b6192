"""How much a broker's memory grows when one tenant fills its quota in bytes, in nine ways.

Each way has a broker of its own. Its resident memory, with that of the process in which it plans,
is read before and after, and its peak in between; buffers of gRPC and the allocator are part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench.processes import Broker, running_broker
from bench.report import Put, Row, compared
from restow.broker.layout import DType, Field, Kind, Layout, Model, RankLayout, Region, Shard, Span
from restow.broker.rpc import wire
from restow.broker.rpc.wire_program import PROGRAM_FORM
from restow.v1 import agent_link_pb2, agent_link_pb2_grpc, broker_pb2, broker_pb2_grpc

SUITE = "tenant-memory"
MIB = 1 << 20
QUOTA_MIB = 512
LARGE_BYTES = 14 * MIB
"""Size of a large message; 16 MiB is the limit."""
SHARDS = 60_000
GROUPS = 4
SETTLED_S = 3.0
CALL_S = 120.0
OPTIONS = (("grpc.max_send_message_length", 16 * MIB), ("grpc.use_local_subchannel_pool", 1))
IDS = np.arange(LARGE_BYTES // 4 // GROUPS, dtype="<i4").tobytes()
BLOCKS = [broker_pb2.BlockList(group=f"g{number}", block_ids=IDS) for number in range(GROUPS)]


class Tenant:
    """A tenant that registers engines and connects agents, and keeps all streams and calls open."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.broker = broker_pb2_grpc.BrokerStub(channel)
        self.link = agent_link_pb2_grpc.AgentLinkStub(channel)
        self.open: list[asyncio.Future[Any]] = []
        """Readers of streams, and calls that wait."""

    async def engine(self, name: str, layout: Layout, life: str = "1") -> broker_pb2.EngineRef:
        """Register an engine."""
        ref = broker_pb2.EngineRef(engine_id=name, incarnation=life)
        request = broker_pb2.RegisterEngineRequest(engine=ref, layout=wire.layout_to_proto(layout))
        await self.broker.RegisterEngine(request, timeout=CALL_S)
        return ref

    async def send(
        self, ref: broker_pb2.EngineRef, batches: list[list[broker_pb2.EngineMessage]]
    ) -> None:
        """Send batches on a new session, and read its answers."""
        session = self.broker.Session()
        await session.write(broker_pb2.SessionRequest(engine=ref))
        await session.read()
        self._read_on(session)
        for messages in batches:
            await session.write(broker_pb2.SessionRequest(messages=messages))

    async def agent(
        self, ref: broker_pb2.EngineRef, rank: int, fences: Sequence[Sequence[str]] = ()
    ) -> None:
        """Connect an agent, with large metadata or with small metadata and batches of fences."""
        size_bytes = LARGE_BYTES if not fences else 1000
        hello = agent_link_pb2.Hello(
            engine=ref,
            rank=rank,
            agent_name=f"{ref.engine_id}.{rank}",
            nixl_metadata=os.urandom(size_bytes // 2),
            host_memory=os.urandom(size_bytes // 2),
            staging_bytes=MIB,
            program_form=PROGRAM_FORM,
            regions=[
                agent_link_pb2.RegionMemory(
                    name="r0", base_address=MIB, page_count=MIB, page_stride_bytes=128
                )
            ],
        )
        stream = self.link.Connect()
        self._read_on(stream)
        for messages in (
            [agent_link_pb2.AgentMessage(hello=hello)],
            *(
                [
                    agent_link_pb2.AgentMessage(fenced=agent_link_pb2.Fenced(handoff_id=name))
                    for name in names
                ]
                for names in fences
            ),
        ):
            await stream.write(agent_link_pb2.ConnectRequest(messages=messages))

    def _read_on(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        async def read() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await stream.read() is not grpc.aio.EOF:
                    pass

        self.open.append(asyncio.ensure_future(read()))


def _layout(ranks: int = 1, groups: int = 1, shards: int = 1, tag: str = "") -> Layout:
    """Make a layout with one region per group and rank, and shards of 64 bytes."""
    names = [
        (group, f"f{tag}.{group}.{index}", index)
        for group in range(groups)
        for index in range(shards)
    ]
    fields = tuple(Field(name, Kind.PER_TOKEN, ("head", "dim"), (ranks, 2)) for _, name, _ in names)
    return Layout(
        Model("m" + tag, fields, revision="v1"),
        tuple(
            RankLayout(
                rank,
                tuple(Region(f"r{g}", f"g{g}", 64 * shards + 64, 16) for g in range(groups)),
                tuple(
                    Shard(
                        name, (Span(rank, rank + 1), Span(0, 2)), DType.BFLOAT16,
                        f"r{group}", index * 64, (4, 2), 4,
                    )
                    for group, name, index in names
                ),
            )
            for rank in range(ranks)
        ),
    )  # fmt: skip


def _published(name: str, blocks: Sequence[broker_pb2.BlockList] = ()) -> broker_pb2.EngineMessage:
    publication = broker_pb2.Publication(
        handoff_id=name, final=False, lease_ms=600_000, blocks=blocks
    )
    return broker_pb2.EngineMessage(message_id=1, publish=publication)


async def publications(tenant: Tenant) -> None:
    """Publish 60 states with 14 MiB of ids each."""
    ref = await tenant.engine("p", _layout(groups=GROUPS))
    await tenant.send(ref, [[_published(f"h{number}", blocks=BLOCKS)] for number in range(60)])


async def empty_publications(tenant: Tenant) -> None:
    """Publish 60,000 states without blocks, with long ids."""
    ref = await tenant.engine("p", _layout(groups=GROUPS))
    names = ((f"{batch}.{number}" + "x" * 240 for number in range(500)) for batch in range(120))
    await tenant.send(ref, [[_published(name) for name in batch] for batch in names])


async def agents(tenant: Tenant) -> None:
    """Connect 100 agents with 14 MiB of metadata each."""
    for number in range(10):
        ref = await tenant.engine(f"p{number}", _layout(ranks=10))
        for rank in range(10):
            await tenant.agent(ref, rank)


async def early_agents(tenant: Tenant) -> None:
    """Connect 60 agents with 14 MiB of metadata, whose engines never register."""
    for number in range(60):
        ref = broker_pb2.EngineRef(engine_id=f"w{number}", incarnation="1")
        await tenant.agent(ref, 0)


async def layouts(tenant: Tenant) -> None:
    """Register 10 layouts of 60,000 shards."""
    for number in range(10):
        await tenant.engine(f"p{number}", _layout(shards=SHARDS, tag=str(number)))


async def lives(tenant: Tenant) -> None:
    """Register one engine 12 times with a new layout of 60,000 shards, and publish each time."""
    for number in range(12):
        ref = await tenant.engine("p", _layout(shards=SHARDS, tag=str(number)), str(number))
        await tenant.send(ref, [[_published(f"h{number}")]])


async def calls(tenant: Tenant) -> None:
    """Have 60 calls with 14 MiB of ids wait for a state."""
    ref = await tenant.engine("d", _layout(groups=GROUPS))
    for number in range(60):
        demand = broker_pb2.Demand(handoff_id=f"h{number}", timeout_ms=60_000, blocks=BLOCKS)
        request = broker_pb2.RequestRequest(engine=ref, demand=demand)
        tenant.open.append(asyncio.ensure_future(tenant.broker.Request(request)))
        await asyncio.sleep(0.05)


async def fences(tenant: Tenant) -> None:
    """Send 60 early fences with ids of 14 MiB, and 60,000 with ids of 200 wide characters."""
    ref = await tenant.engine("p", _layout())
    large = [[f"{number}" + "y" * LARGE_BYTES] for number in range(60)]
    wide = [
        [f"{batch}.{number}" + "é\U0001f600" * 100 for number in range(500)] for batch in range(120)
    ]
    await tenant.agent(ref, 0, large + wide)


async def refusals(tenant: Tenant) -> None:
    """Publish 500 states, each with 250 publications that are refused."""
    ref = await tenant.engine("p", _layout(groups=GROUPS))
    batches = []
    for number in range(500):
        odd = [
            _published(
                f"h{number}", blocks=[broker_pb2.BlockList(group=f"{index}" + "\U0001f600" * 240)]
            )
            for index in range(250)
        ]
        batches.append([_published(f"h{number}"), *odd])
    await tenant.send(ref, batches)


Way = Callable[[Tenant], Awaitable[None]]
WAYS: dict[str, Way] = {
    "60 publications of 14 MiB of ids": publications,
    "60,000 empty publications with long ids": empty_publications,
    "100 agents with 14 MiB of metadata": agents,
    "60 early agents with 14 MiB of metadata": early_agents,
    "10 layouts of 60,000 shards": layouts,
    "12 registrations of one engine with 60,000 shards": lives,
    "60 waiting calls with 14 MiB of ids": calls,
    "early fences with long ids": fences,
    "125,000 refused publications": refusals,
}


def run(put: Put, repeats: int) -> None:
    """Measure each way once, whatever ``repeats`` is."""
    for case, way in WAYS.items():
        with _quiet_broker() as broker:
            put(asyncio.run(_measure(case, way, broker)))


def _quiet_broker() -> contextlib.AbstractContextManager[Broker]:
    return running_broker(
        *("--tenant-max-bytes", str(QUOTA_MIB * MIB), "--tenant-max-live", "100000"),
        *("--tenant-max-engines", "100"),
    )


async def _measure(case: str, way: Way, broker: Broker) -> Row:
    """Fill the quota of a broker that has already served an engine."""
    async with grpc.aio.insecure_channel(broker.address, options=OPTIONS) as channel:
        tenant = Tenant(channel)
        ref = await tenant.engine("first", _layout())
        await tenant.broker.UnregisterEngine(broker_pb2.UnregisterEngineRequest(engine=ref))
        await asyncio.sleep(SETTLED_S)
        before = _resident_mib(broker.pid)
        peak, end = [before], "everything was sent"
        async with _watched(broker.pid, peak):
            try:
                await way(tenant)
            except grpc.aio.AioRpcError as error:
                end = str(error.details())
            except asyncio.InvalidStateError:
                end = "the stream was ended"
            await asyncio.sleep(SETTLED_S)
        kept_mib = _resident_mib(broker.pid) - before
        for task in tenant.open:
            task.cancel()
        await asyncio.gather(*tenant.open, return_exceptions=True)
    note = f"at most {peak[0] - before:.0f} MiB; {end[:80]}"
    quota = f"the quota of {QUOTA_MIB} MiB"
    return compared(SUITE, case, [kept_mib], quota, [QUOTA_MIB], note=note, unit="MiB")


def _resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its children."""
    total = 0.0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for process_id in (pid, *map(int, children)):
        with contextlib.suppress(FileNotFoundError):
            lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024


@contextlib.asynccontextmanager
async def _watched(pid: int, peak_mib: list[float]) -> AsyncIterator[None]:
    """Keep the highest resident memory of a process in ``peak_mib``."""

    async def watch() -> None:
        while True:
            peak_mib[0] = max(peak_mib[0], _resident_mib(pid))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
