"""What one tenant makes a broker keep within its quota in bytes, in nine ways.

    PYTHONPATH=tests python bench/quota.py [--max-bytes 536870912] [--json FILE]

Each has a broker process of its own: its resident memory, and that of the process in which it
plans, before and after, and the most meanwhile. Buffers of gRPC and of the allocator are in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from control import BROKER
from rows import machine

from restow.broker.layout import DType, Field, Kind, Layout, Model, RankLayout, Region, Shard, Span
from restow.broker.rpc import wire
from restow.broker.rpc.wire_program import PROGRAM_FORM
from restow.v1 import agent_link_pb2, agent_link_pb2_grpc, broker_pb2, broker_pb2_grpc

MIB = 1 << 20
LARGE_BYTES = 14 * MIB
"""Of the 16 MiB that a message may have."""
SHARDS = 60_000
GROUPS = 4
SETTLED_S = 3.0
CALL_S = 120.0
OPTIONS = (("grpc.max_send_message_length", 16 * MIB), ("grpc.use_local_subchannel_pool", 1))
IDS = np.arange(LARGE_BYTES // 4 // GROUPS, dtype="<i4").tobytes()
BLOCKS = [broker_pb2.BlockList(group=f"g{number}", block_ids=IDS) for number in range(GROUPS)]


class Taken(NamedTuple):
    """What a way made a broker's memory grow by, in MiB."""

    way: str
    kept_mib: float
    most_mib: float
    end: str


class Tenant:
    """One that registers engines and lets agents in, and keeps every stream and call open."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.broker = broker_pb2_grpc.BrokerStub(channel)
        self.link = agent_link_pb2_grpc.AgentLinkStub(channel)
        self.kept: list[object] = []

    async def engine(self, name: str, layout: Layout, life: str = "1") -> broker_pb2.EngineRef:
        """Register it."""
        ref = broker_pb2.EngineRef(engine_id=name, incarnation=life)
        request = broker_pb2.RegisterEngineRequest(engine=ref, layout=wire.layout_to_proto(layout))
        await self.broker.RegisterEngine(request, timeout=CALL_S)
        return ref

    async def say(
        self, ref: broker_pb2.EngineRef, batches: list[list[broker_pb2.EngineMessage]]
    ) -> None:
        """Say all this on a session, whose answers are read."""
        session = self.broker.Session()
        await session.write(broker_pb2.SessionRequest(engine=ref))
        await session.read()
        self._read_on(session)
        for messages in batches:
            await session.write(broker_pb2.SessionRequest(messages=messages))

    async def agent(self, ref: broker_pb2.EngineRef, rank: int, said: list[list[str]]) -> None:
        """Let one in with metadata as long as a message may be; ``said`` are fences."""
        size_bytes = LARGE_BYTES if not said else 1000
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
                for names in said
            ),
        ):
            await stream.write(agent_link_pb2.ConnectRequest(messages=messages))

    def _read_on(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        async def read() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await stream.read() is not grpc.aio.EOF:
                    pass

        self.kept += [stream, asyncio.ensure_future(read())]


def _layout(ranks: int = 1, groups: int = 1, shards: int = 1, tag: str = "") -> Layout:
    """A region a group and rank, with so many shards of 64 bytes."""
    names = [
        (group, f"f{tag}.{group}.{one}", one) for group in range(groups) for one in range(shards)
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
                        f"r{group}", one * 64, (4, 2), 4,
                    )
                    for group, name, one in names
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
    """60 publications of 14 MiB of ids."""
    ref = await tenant.engine("p", _layout(groups=GROUPS))
    await tenant.say(ref, [[_published(f"h{number}", blocks=BLOCKS)] for number in range(60)])


async def empty_publications(tenant: Tenant) -> None:
    """60,000 publications of nothing, with long names."""
    ref = await tenant.engine("p", _layout(groups=GROUPS))
    names = ((f"{batch}.{one}" + "x" * 240 for one in range(500)) for batch in range(120))
    await tenant.say(ref, [[_published(name) for name in batch] for batch in names])


async def agents(tenant: Tenant) -> None:
    """100 agents with metadata of 14 MiB."""
    for number in range(10):
        ref = await tenant.engine(f"p{number}", _layout(ranks=10))
        for rank in range(10):
            await tenant.agent(ref, rank, [])


async def early_agents(tenant: Tenant) -> None:
    """60 agents with metadata of 14 MiB, whose engines never come."""
    for number in range(60):
        ref = broker_pb2.EngineRef(engine_id=f"w{number}", incarnation="1")
        await tenant.agent(ref, 0, [])


async def layouts(tenant: Tenant) -> None:
    """10 layouts of 60,000 shards."""
    for number in range(10):
        await tenant.engine(f"p{number}", _layout(shards=SHARDS, tag=str(number)))


async def lives(tenant: Tenant) -> None:
    """One engine, 12 times with another layout of 60,000 shards, and a handoff of each life."""
    for number in range(12):
        ref = await tenant.engine("p", _layout(shards=SHARDS, tag=str(number)), str(number))
        await tenant.say(ref, [[_published(f"h{number}")]])


async def calls(tenant: Tenant) -> None:
    """60 calls that wait for a state, with 14 MiB of ids."""
    ref = await tenant.engine("d", _layout(groups=GROUPS))
    for number in range(60):
        demand = broker_pb2.Demand(handoff_id=f"h{number}", timeout_ms=60_000, blocks=BLOCKS)
        request = broker_pb2.RequestRequest(engine=ref, demand=demand)
        tenant.kept.append(asyncio.ensure_future(tenant.broker.Request(request)))
        await asyncio.sleep(0.05)


async def fences(tenant: Tenant) -> None:
    """60 early fences with names of 14 MiB, and 60,000 with names of 200 wide characters."""
    ref = await tenant.engine("p", _layout())
    large = [[f"{number}" + "y" * LARGE_BYTES] for number in range(60)]
    wide = [[f"{batch}.{one}" + "é\U0001f600" * 100 for one in range(500)] for batch in range(120)]
    await tenant.agent(ref, 0, large + wide)


async def refusals(tenant: Tenant) -> None:
    """500 handoffs with 250 refused publications each."""
    ref = await tenant.engine("p", _layout(groups=GROUPS))
    batches = []
    for number in range(500):
        odd = [
            _published(
                f"h{number}", blocks=[broker_pb2.BlockList(group=f"{one}" + "\U0001f600" * 240)]
            )
            for one in range(250)
        ]
        batches.append([_published(f"h{number}"), *odd])
    await tenant.say(ref, batches)


Way = Callable[[Tenant], Awaitable[None]]
WAYS: tuple[Way, ...] = (
    publications, empty_publications, agents, early_agents, layouts, lives, calls, fences, refusals,
)  # fmt: skip


def _resident_mib(process: int) -> float:
    """Of a process and its children."""
    total = 0.0
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    for one in (process, *map(int, children)):
        with contextlib.suppress(FileNotFoundError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024


@contextlib.asynccontextmanager
async def _watched(process: int, most: list[float]) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            most[0] = max(most[0], _resident_mib(process))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


async def measure(way: Way, max_bytes: int) -> Taken:
    """Do it to a broker that has already served an engine."""
    limits = ("--tenant-max-bytes", str(max_bytes), "--tenant-max-live", "100000")
    process = await asyncio.create_subprocess_exec(
        *BROKER,
        *limits,
        "--tenant-max-engines",
        "100",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        line = await process.stdout.readline() if process.stdout else b""
        address = line.decode().split()[-1]
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            tenant = Tenant(channel)
            ref = await tenant.engine("first", _layout())
            await tenant.broker.UnregisterEngine(broker_pb2.UnregisterEngineRequest(engine=ref))
            await asyncio.sleep(SETTLED_S)
            before = _resident_mib(process.pid)
            most, end = [before], "all was said"
            async with _watched(process.pid, most):
                try:
                    await way(tenant)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                    end = str(getattr(error, "details", lambda: "its stream was ended")())
                await asyncio.sleep(SETTLED_S)
            after = _resident_mib(process.pid)
            for one in tenant.kept:
                one.cancel()  # type: ignore[attr-defined]
            futures = [one for one in tenant.kept if isinstance(one, asyncio.Future)]
            await asyncio.gather(*futures, return_exceptions=True)
        return Taken(way.__name__, after - before, most[0] - before, end)
    finally:
        process.terminate()
        await process.wait()


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-bytes", type=int, default=512 * MIB, help="the quota (512 MiB)")
    parser.add_argument("--way", choices=[way.__name__ for way in WAYS], action="append")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    about, taken = machine(), []
    print(f"quota of {options.max_bytes / MIB:.0f} MiB; kept and at most, in MiB", file=sys.stderr)
    for way in WAYS:
        if options.way and way.__name__ not in options.way:
            continue
        one = asyncio.run(measure(way, options.max_bytes))
        taken.append(one)
        words = (way.__doc__ or "").strip()
        print(f"{one.kept_mib:8.0f} {one.most_mib:8.0f}  {words} ({one.end[:80]})", flush=True)
    if options.json:
        rows = [one._asdict() for one in taken]
        found = {"machine": about, "max_bytes": options.max_bytes, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
