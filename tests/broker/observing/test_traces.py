"""Traces of handoffs, as a collector hears of them over OTLP."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from broker.collector import Collector, attributes, collector
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, Pair, broker, pair, silent
from restow.broker.errors import ExtraMissingError
from restow.broker.server.observe import traces
from restow.broker.server.services.checked_messages import known_trace
from restow.v1 import agent_link_pb2 as link

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@contextlib.asynccontextmanager
async def traced(kept: Collector, ranks: int = 1, ratio: float = 1.0) -> AsyncIterator[Pair]:
    """Run a P of two ranks and a D; when they end, all traces have arrived."""
    async with (
        broker(otlp_endpoint=kept.address, trace_ratio=ratio) as running,
        pair(running.address, 2, ranks) as both,
    ):
        yield both


async def hand_over(both: Pair, name: str, of_p: str = "", of_d: str = "") -> None:
    await both.published(name, trace_parent=of_p)
    ended = await both.d.request(name, D_BLOCKS, trace_parent=of_d)
    assert ended.done, ended


async def test_a_handoff_is_a_part_of_its_requests_trace() -> None:
    begun_ns = time.time_ns()

    def takes_a_while(order: link.AgentOrder) -> list[link.AgentMessage]:
        if order.WhichOneof("body") != "execute":
            return []
        number = order.execute.handoff
        settled = link.Settled(handoff=number, bytes=100, elapsed_us=5_000_000)
        return [link.AgentMessage(settled=settled)]

    async with collector() as kept, traced(kept, ranks=2) as both:
        await hand_over(both, "warm", of_p=SAMPLED)
        for agent in both.d_agents:
            agent.answers = takes_a_while
        await hand_over(both, "h", of_d=SAMPLED)
    assert kept.services == {"restow-broker"}
    assert {span.trace_id.hex() for span in kept.spans} == {TRACE}
    [whole] = [one for one in kept.named("handoff") if attributes(one)["restow.handoff.id"] == "h"]
    assert whole.parent_span_id.hex() == PARENT
    assert attributes(whole) | {"restow.handoff.number": 0} == {
        "restow.handoff.id": "h",
        "restow.handoff.number": 0,
        "restow.tenant": "default",
        "restow.state": "DONE",
        "restow.reason": "",
        "restow.read_bytes": 200,
        "restow.position_tokens": POSITION,
        "restow.source.engine_id": "p",
        "restow.destination.engine_id": "d",
        "gen_ai.request.model": "m",
    }
    assert whole.status.code == Status.STATUS_CODE_UNSET
    phases = [span for span in kept.spans if span.parent_span_id == whole.span_id]
    assert [span.name for span in phases] == ["wait", "grant", "transfer"]
    edges = [phases[0].start_time_unix_nano, *(span.end_time_unix_nano for span in phases)]
    assert edges == sorted(edges)
    assert [span.start_time_unix_nano for span in phases[1:]] == edges[1:3]
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (edges[0], edges[-1])
    assert begun_ns - 1_000_000 < edges[0] <= edges[-1] < time.time_ns() + 1_000_000
    reads = [span for span in kept.spans if span.parent_span_id == phases[2].span_id]
    assert sorted(attributes(span)["restow.rank"] for span in reads) == [0, 1]
    for span in reads:  # whatever an agent says, inside of what the broker knows
        assert span.name == "read"
        assert edges[2] == span.start_time_unix_nano <= span.end_time_unix_nano <= edges[3]
    events = [event.name for event in whole.events]
    assert {"published", "fenced", "ready", "requested", "granted", "settled"} < set(events)
    assert events[-1] == "ended"


@pytest.mark.parametrize("said", ["", "nonsense", "x" * 100_000, f"00-{'0' * 32}-{PARENT}-01"])
async def test_without_a_trace_it_begins_one(said: str) -> None:
    async with collector() as kept, traced(kept) as both:
        await hand_over(both, "one", of_p=said)
        await hand_over(both, "two", of_d=said)
    wholes = kept.named("handoff")
    assert len({whole.trace_id for whole in wholes}) == 2
    assert not any(whole.parent_span_id for whole in wholes)
    assert TRACE not in {whole.trace_id.hex() for whole in wholes}


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_requests_decide_for_themselves_and_the_ratio_for_the_rest(ratio: float) -> None:
    async with collector() as kept, traced(kept, ratio=ratio) as both:
        await hand_over(both, "theirs", of_p=SAMPLED)
        await hand_over(both, "not-theirs", of_p=NOT_SAMPLED)
        await hand_over(both, "nobodys")
    found = {attributes(whole)["restow.handoff.id"] for whole in kept.named("handoff")}
    assert found == ({"theirs", "nobodys"} if ratio else {"theirs"})


async def test_a_failure_is_an_error_and_a_cancellation_is_none() -> None:
    async with collector() as kept, traced(kept) as both:
        late = await both.d.request("late", D_BLOCKS, timeout_ms=30)
        assert late.reason == "NOT_PUBLISHED"
        both.d_agents[0].answers = silent
        given_up = both.p.publish("given-up", P_BLOCKS, POSITION)
        both.p.cancel("given-up", "the request was aborted")
        assert (await given_up).state == "CANCELLED"
    wholes = {attributes(whole)["restow.handoff.id"]: whole for whole in kept.named("handoff")}
    late_one, given_up_one = wholes["late"], wholes["given-up"]
    assert late_one.status.code == Status.STATUS_CODE_ERROR
    assert "nobody published it" in late_one.status.message
    assert attributes(late_one)["restow.reason"] == "NOT_PUBLISHED"
    assert given_up_one.status.code == Status.STATUS_CODE_UNSET
    assert attributes(given_up_one)["restow.state"] == "CANCELLED"
    assert {span.name for span in kept.spans} == {"handoff"}


async def test_a_collector_that_is_away_costs_traces_and_no_more() -> None:
    async with (
        asyncio.timeout(20),
        broker(otlp_endpoint="http://127.0.0.1:9") as running,
        pair(running.address) as both,
    ):
        for number in range(5):
            await hand_over(both, f"h{number}")


async def test_a_collector_that_never_answers_holds_no_end_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traces, "SEND_S", 60)
    async with collector() as kept:
        kept.answers.clear()
        async with (
            asyncio.timeout(20),
            broker(otlp_endpoint=kept.address) as running,
            pair(running.address) as both,
        ):
            await hand_over(both, "h")
        kept.answers.set()


async def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "restow.broker.server.observe.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    with pytest.raises(ExtraMissingError, match=r"opentelemetry.*restow\[trace\]"):
        async with broker(otlp_endpoint="http://127.0.0.1:9"):
            pass


def test_contexts_of_the_standard_are_known_and_nothing_else() -> None:
    assert known_trace(SAMPLED) == SAMPLED
    for other in (
        SAMPLED.upper(),
        f"01-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{SAMPLED}-more",
        f"{SAMPLED}\n",
    ):
        assert known_trace(other) == ""
