"""What neighbours cost a tenant: handoffs and an operator's status while others load the broker.

First another tenant has large pairs of engines planned, one after another. Then strangers hold
connections, idle or in a TLS handshake that never ends, to a broker that may open few files.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import uvloop

from bench.control.simulated_engines import run_handoffs
from bench.model_sizes import real_models
from bench.processes import running_broker
from bench.report import Put, Row, compared
from broker.fakes import pair
from broker.guarded import ask
from broker.token_house import Served, served
from broker.trust.test_strangers import UNFINISHED_HELLO, connections
from restow.broker.client import AdminClient
from restow.broker.client.connection.channel import open_channel
from restow.broker.families import EngineSettings, build_layout
from restow.broker.layout import Layout
from restow.broker.rpc import wire
from restow.v1 import admin_pb2, admin_pb2_grpc, broker_pb2, broker_pb2_grpc

SUITE = "neighbours"
LARGE = "falcon-h1-34b-like"
LARGE_TENANT = "large"
LARGE_TPS = ((16, 32), (32, 16))
PLANNED_S = 300.0
"""A plan that takes longer counts as refused."""
PER_S = 200
QUIET_S = 3.0
TOKENS = 8192
SLOWEST_GOAL_S = 0.05
STRANGERS = 5000
"""Number of idle connections, and of those that begin a handshake."""
FILES = 1024
"""Number of files that the broker's process may open."""
CONNECTED_GOAL_S = 1.0
STATUS = admin_pb2.GetStatusRequest()


class Large(NamedTuple):
    """An engine without agents: its registration as bytes, and the one message that it sends."""

    engine: broker_pb2.EngineRef
    registration: bytes
    message: broker_pb2.EngineMessage

    @classmethod
    def of(cls, name: str, layout: Layout, message: broker_pb2.EngineMessage) -> Large:
        """Serialize the registration now, so that the load generator need not do it later."""
        engine = broker_pb2.EngineRef(engine_id=name, incarnation="1")
        request = broker_pb2.RegisterEngineRequest(
            engine=engine, layout=wire.layout_to_proto(layout)
        )
        return cls(engine, request.SerializeToString(), message)


def run(put: Put, repeats: int) -> None:
    """Measure tenants beside others that plan, and beside strangers who connect.

    Each of the two has a broker of its own.
    """
    for row in _while_others_plan():
        put(row)
    for row in _while_strangers_connect(repeats):
        put(row)


def _while_others_plan() -> Iterator[Row]:
    with running_broker() as broker:
        address = broker.address
        _took_s, quiet = uvloop.run(
            run_handoffs(address, int(QUIET_S * PER_S), PER_S, TOKENS, PER_S)
        )
        pairs = list(_large_pairs())
        took_s, beside = uvloop.run(_while_planning(address, pairs))
    words = f"{len(pairs)} pairs of {LARGE} planned in {took_s:.1f} s"
    case = f"another tenant's slowest handoff of {len(beside)}, {PER_S} a second"
    slowest = [max(beside)]
    yield compared(SUITE, case, slowest, "budget of 50 ms", [SLOWEST_GOAL_S], goal=1.0, note=words)
    yield compared(SUITE, case, slowest, "the slowest without a load", [max(quiet)], note=words)
    yield compared(
        SUITE,
        "another tenant's handoff, median",
        [statistics.median(beside)],
        "without a load",
        [statistics.median(quiet)],
        note=words,
    )


async def _while_planning(
    address: str, pairs: list[tuple[Large, Large]]
) -> tuple[float, list[float]]:
    """Return the seconds that all plans took, and those of each handoff meanwhile."""
    planned = asyncio.create_task(_plan(address, pairs))
    latencies: list[float] = []
    while not planned.done():
        _took_s, more = await run_handoffs(address, PER_S, PER_S, TOKENS, PER_S)
        latencies += more
    return await planned, latencies


async def _plan(address: str, pairs: list[tuple[Large, Large]]) -> float:
    """Have new large pairs planned for a tenant; return the seconds that this takes."""
    metadata = (("restow-tenant", LARGE_TENANT),)
    begun_s = time.perf_counter()
    async with open_channel(address) as channel:
        broker, admin = broker_pb2_grpc.BrokerStub(channel), admin_pb2_grpc.AdminStub(channel)
        register: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/restow.v1.Broker/RegisterEngine"
        )
        sessions = []
        for engines in pairs:
            plans = (await admin.GetStatus(STATUS)).plans
            for large in engines:
                await register(large.registration, metadata=metadata)
                session = broker.Session(metadata=metadata)
                await session.write(broker_pb2.SessionRequest(engine=large.engine))
                await session.read()
                await session.write(broker_pb2.SessionRequest(messages=[large.message]))
                sessions.append(session)
            async with asyncio.timeout(PLANNED_S):
                while (await admin.GetStatus(STATUS)).plans == plans:  # noqa: ASYNC110 - no events
                    await asyncio.sleep(0.02)
    return time.perf_counter() - begun_s


def _large_pairs() -> Iterator[tuple[Large, Large]]:
    """Yield pairs of unequal TP, each in pages of another length."""
    spec = real_models()[LARGE]
    for number, (page_tokens, tps) in enumerate(itertools.product((16, 32, 64, 128), LARGE_TPS)):
        name = f"h{number}"
        published = broker_pb2.Publication(handoff_id=name, final=False, lease_ms=600_000)
        demand = broker_pb2.Demand(handoff_id=name, timeout_ms=600_000)
        p, d = (build_layout(spec, EngineSettings(tp=tp, page_tokens=page_tokens)) for tp in tps)
        yield (
            Large.of(f"p{number}", p, broker_pb2.EngineMessage(publish=published)),
            Large.of(f"d{number}", d, broker_pb2.EngineMessage(request=demand)),
        )


def _while_strangers_connect(repeats: int) -> Iterator[Row]:
    """Measure an operator who connects and a connected tenant, in turns."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    quiet: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), FILES) as broker:
            began_mib = broker.most_mib()
            uvloop.run(_ask(broker, repeats, quiet))
            with (
                connections(broker.address, STRANGERS),
                connections(broker.address, STRANGERS, sending=UNFINISHED_HELLO),
            ):
                uvloop.run(_ask(broker, repeats, beside))
            taken_mib = broker.most_mib() - began_mib
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    note = f"{STRANGERS} idle, {STRANGERS} half open, {FILES} files; {taken_mib:.0f} MiB in all"
    for case, seconds in beside.items():
        slowest = [max(seconds)]
        goal = [CONNECTED_GOAL_S]
        yield compared(
            SUITE, f"{case}, the slowest", slowest, "budget of 1 s", goal, goal=1.0, note=note
        )
        yield compared(SUITE, case, seconds, "without strangers", quiet[case], note=note)


async def _ask(broker: Served, repeats: int, seconds: dict[str, list[float]]) -> None:
    async with pair(broker.address, 1, 1, credentials=broker.known) as engines:
        for number in range(repeats):
            begun_s = time.perf_counter()
            await engines.hand_over(f"{begun_s}-{number}")
            asked_s = time.perf_counter()
            seconds.setdefault("a handoff", []).append(asked_s - begun_s)
            await ask(broker.address, broker.known, AdminClient.status)
            seconds.setdefault("an operator's status", []).append(time.perf_counter() - asked_s)
