"""Metrics of who is away, of what is refused, of the broker's own work, and of its certificate."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from broker.certificates import DAY, DOMAIN, Authority
from broker.fakes import P_BLOCKS, POSITION, broker, engine, model_layout, pair
from broker.guarded import channel_of, error_of, guarded, register
from broker.pages import Key, key, metrics
from broker.trust.test_trust_files import replace
from restow.broker.client import BrokerCallError, EngineSession
from restow.broker.server.base.outbox import MAX_BATCH, EngineOutbox
from restow.broker.server.serve import RunningBroker
from restow.broker.server.services.admin_service import broker_status
from restow.v1 import broker_pb2 as pb
from restow.v1 import broker_pb2_grpc

WAIT_S = 20.0
DAY_S = DAY.total_seconds()


async def until(running: RunningBroker, expected: dict[Key, float]) -> dict[Key, float]:
    """Wait until the metrics contain ``expected``, and return all metrics."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await metrics(running)
            if expected.items() <= found.items():
                return found


async def test_agents_that_are_away_are_not_counted_as_there(shown: RunningBroker) -> None:
    async with pair(shown.address, 2, 1) as both:
        found = await metrics(shown)
        assert (found[key("agents")], found[key("agents_away")]) == (3, 0)
        await both.p_agents[1].drop()
        await until(shown, {key("agents"): 2, key("agents_away"): 1, key("engines_ready"): 1})
        for tenant in (None, "default"):
            assert broker_status(shown.hub, tenant).agents == 2


async def test_sessions_are_counted(shown: RunningBroker) -> None:
    async with pair(shown.address, 1, 1):
        await until(shown, {key("sessions"): 2})
    await until(shown, {key("sessions"): 0})


async def test_refused_calls_are_counted_by_reason(authority: Authority) -> None:
    stranger = authority.client("https://somebody.example")
    agent = authority.client(f"{DOMAIN}/tenant/a/agent/p")
    async with (
        guarded(authority, http_listen="127.0.0.1:0") as running,
        channel_of(running.address, stranger) as unknown,
        channel_of(running.address, agent) as known,
    ):
        found = await metrics(running)
        for reason in ("UNAUTHENTICATED", "FORBIDDEN"):
            assert found[key("calls_refused_total", reason=reason)] == 0
        for channel in (unknown, unknown, known):
            await error_of(register(channel))
        await until(
            running,
            {
                key("calls_refused_total", reason="UNAUTHENTICATED"): 2,
                key("calls_refused_total", reason="FORBIDDEN"): 1,
            },
        )


async def test_what_a_quota_refuses_is_counted_once_by_what_there_is_too_much_of() -> None:
    async with (
        broker(http_listen="127.0.0.1:0", tenant_max_live=1, tenant_max_engines=2) as running,
        pair(running.address, 1, 1) as both,
    ):
        for quota in ("engines", "handoffs", "bytes", "calls"):
            assert (await metrics(running))[key("quota_refusals_total", quota=quota)] == 0
        both.p.publish("first", P_BLOCKS, POSITION)
        with pytest.raises(BrokerCallError):
            await both.p.publish("second", P_BLOCKS, POSITION)
        one = pb.RequestRequest(engine=both.d.ref, demand=pb.Demand(handoff_id="third"))
        with pytest.raises(grpc.aio.AioRpcError):
            await broker_pb2_grpc.BrokerStub(both.channel).Request(one)
        with pytest.raises(BrokerCallError):
            async with EngineSession("more", "1", model_layout(), running.address):
                pass
        await until(
            running,
            {
                key("quota_refusals_total", quota="handoffs"): 2,
                key("quota_refusals_total", quota="engines"): 1,
                key("refused_total", reason="QUOTA_EXCEEDED"): 2,
                key("calls_refused_total", reason="QUOTA_EXCEEDED"): 2,
            },
        )


async def test_words_of_agents_that_are_refused_are_counted_too(shown: RunningBroker) -> None:
    async with engine(shown.address, "p") as (_, (agent,)):
        await agent.fence("x" * 300)
        await until(shown, {key("refused_total", reason="ARGUMENT_INVALID"): 1})


async def test_a_loop_that_is_held_up_lags(shown: RunningBroker) -> None:
    late_s, now_s = 0.0, shown.hub.now_s
    shown.hub.now_s = lambda: now_s() + late_s
    # No tick comes between these two lines, as it may while metrics are asked for.
    before = sum(shown.hub.loop_lag.counts)
    late_s = 3.0  # as if something had kept the loop for so long, between two ticks
    async with asyncio.timeout(WAIT_S):
        while (found := await metrics(shown))[key("loop_lag_seconds_count")] < before + 2:
            pass
    count = found[key("loop_lag_seconds_count")]
    assert found[key("loop_lag_seconds_bucket", le="2.0")] == count - 1
    assert found[key("loop_lag_seconds_sum")] > 2.9


async def test_messages_that_nobody_takes_are_queued(shown: RunningBroker) -> None:
    async with engine(shown.address, "p") as (session, _):
        found = await metrics(shown)
        for stream in ("engine", "agent"):
            assert found[key("queued_messages", stream=stream)] == 0
        (of_engine,) = shown.hub.engines
        streams, slow = shown.hub.engines, EngineOutbox(pb.SessionResponse, 2 * MAX_BATCH)
        taken, streams[of_engine] = streams[of_engine], slow
        for _ in range(MAX_BATCH + 3):
            slow.open().events.add()
        assert (await metrics(shown))[key("queued_messages", stream="engine")] == MAX_BATCH + 3
        await slow.take()
        assert (await metrics(shown))[key("queued_messages", stream="engine")] == 3
        streams[of_engine] = taken
        assert session.layout_digest


async def test_planning_and_measuring_are_timed(shown: RunningBroker) -> None:
    found = await metrics(shown)
    counts = "planning_seconds_count", "measuring_seconds_count"
    assert [found[key(one)] for one in counts] == [0, 0]
    async with pair(shown.address, 1, 1, ("host-p", "host-d")) as both:
        await both.hand_over("one")
        # Once with the default costs, and once with the measured costs.
        await until(shown, {key(name): number for name, number in zip(counts, (2, 1), strict=True)})
        await both.hand_over("two")
    found = await metrics(shown)
    assert [found[key(name)] for name in counts] == [2, 1]
    assert 0 < found[key("planning_seconds_sum")] < 60


async def test_until_when_the_certificate_is_good(authority: Authority) -> None:
    name = key("certificate_end_seconds")
    own = authority.issue(server=True)
    async with broker(http_listen="127.0.0.1:0", **authority.server(own)) as running:
        before_s = (await metrics(running))[name]
        assert time.time() < before_s < time.time() + 2 * DAY_S
        replace(own, authority.issue(server=True, lasts=4 * DAY))
        assert (await metrics(running))[name] == pytest.approx(before_s + 3 * DAY_S, abs=60)
        # One that can't be used replaces none.
        own.key.write_text("half written")
        assert (await metrics(running))[name] == pytest.approx(before_s + 3 * DAY_S, abs=60)


async def test_without_a_certificate_none_ends(shown: RunningBroker) -> None:
    assert key("certificate_end_seconds") not in await metrics(shown)
