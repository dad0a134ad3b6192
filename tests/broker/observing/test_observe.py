"""Metrics and probes of a broker, over HTTP, beside real handoffs."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.fakes import (
    D_BLOCKS,
    P_BLOCKS,
    PAGES,
    POSITION,
    broker,
    engine,
    model_layout,
    pair,
    silent,
)
from broker.pages import fetch, key, metrics
from restow.broker.client import AdminClient, BrokerCallError
from restow.broker.core.common.keys import State
from restow.broker.core.ledger.statistics import BOUNDS_S, OTHER, Phase
from restow.broker.errors import ListenError
from restow.broker.server.serve import RunningBroker
from restow.v1 import agent_link_pb2 as link

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "operators.md"
DASHBOARD = ROOT / "docker" / "grafana" / "restow.json"


async def answer(running: RunningBroker, path: str, method: str = "GET") -> tuple[int, str]:
    """Return the status and the body of a page."""
    found = await fetch(running, path, method)
    return found.status, found.body


async def test_an_empty_broker_shows_zeros(shown: RunningBroker) -> None:
    found = await metrics(shown)
    for name in ("engines", "engines_ready", "agents", "plans", "draining", "handoffs_quarantined"):
        assert found[key(name)] == 0
    for state in ("WAITING", "READY", "STAGING", "READING"):
        assert found[key("handoffs", state=state)] == 0
    assert found[key("handoffs_ended_total", state="DONE", reason="")] == 0
    assert found["process_resident_memory_bytes", frozenset()] > 1e6
    for phase in Phase:
        assert found[key("handoff_phase_seconds_count", phase=phase)] == 0


async def test_handoffs_are_counted_by_how_they_end_and_timed(shown: RunningBroker) -> None:
    async with pair(shown.address, 2, 1) as both:
        for number in range(3):
            await both.hand_over(f"good-{number}")
        both.p.publish("waits-for-d", P_BLOCKS, POSITION)
        refused = await both.d.request("nobody-publishes-it", D_BLOCKS, timeout_ms=60)
        assert refused.reason == "NOT_PUBLISHED"
        async with engine(shown.address, "lonely", layout=model_layout(1), agents=False):
            found = await metrics(shown)
    assert (found[key("engines")], found[key("engines_ready")], found[key("agents")]) == (3, 2, 3)
    assert found[key("handoffs", state="WAITING")] == 1
    assert found[key("handoffs_ended_total", state="DONE", reason="")] == 3
    assert found[key("handoffs_ended_total", state="EXPIRED", reason="NOT_PUBLISHED")] == 1
    assert found[key("read_bytes_total")] == 300
    counts = {phase: found[key("handoff_phase_seconds_count", phase=phase)] for phase in Phase}
    assert counts == {Phase.WAIT: 3, Phase.GRANT: 3, Phase.TRANSFER: 3, Phase.ALL: 4}
    assert 0.06 < found[key("handoff_phase_seconds_sum", phase="all")] < 60


async def test_what_is_refused_is_counted_and_the_handoff_is_not_counted_with_it(
    shown: RunningBroker,
) -> None:
    other = {"attention": [21, 22, 23], "state": [24]}
    async with pair(shown.address, 1, 1) as both:
        assert (await metrics(shown))[key("refused_total", reason="HANDOFF_CONFLICT")] == 0
        await both.hand_over("h")
        for _ in range(2):
            with pytest.raises(BrokerCallError):
                await both.d.request("h", other)
        with pytest.raises(BrokerCallError):
            await both.d.publish("h", P_BLOCKS, POSITION)
        with pytest.raises(BrokerCallError):
            await both.d.request("new", {"attention": [PAGES]})
        found = await metrics(shown)
        story = AdminClient(shown.address)
        told = await asyncio.to_thread(story.handoff, "h")
        story.close()
    refused = {
        labels: value for (name, labels), value in found.items() if name == "restow_refused_total"
    }
    assert {dict(labels)["reason"]: value for labels, value in refused.items()} == {
        "HANDOFF_CONFLICT": 2,
        "HANDOFF_OWNED": 1,
        "PAGE_OUT_OF_RANGE": 1,
    }
    assert found[key("handoffs_ended_total", state="DONE", reason="")] == 1
    said = [one.detail.partition(": ")[0] for one in told.timeline if one.event == "refused"]
    name = both.d.ref.engine_id
    assert said == [f"HANDOFF_CONFLICT to {name}"] * 2 + [f"HANDOFF_OWNED to {name}"]


async def test_a_duration_is_in_its_bucket_and_all_above(shown: RunningBroker) -> None:
    durations = shown.hub.directory.ledger.statistics.phases[Phase.TRANSFER]
    for seconds in (0.0005, 0.001, 0.0015, 3.0, 1000.0):
        durations.add(seconds)
    found = await metrics(shown)

    def up_to(bound: str) -> float:
        return found[key("handoff_phase_seconds_bucket", phase="transfer", le=bound)]

    assert [up_to(bound) for bound in ("0.001", "0.002", "2.0", "5.0", "500.0", "+Inf")] == [
        2,
        3,
        3,
        4,
        4,
        5,
    ]
    assert found[key("handoff_phase_seconds_sum", phase="transfer")] == pytest.approx(1003.003)


async def test_what_others_say_is_no_label(shown: RunningBroker) -> None:
    """Check that a reason that an agent made up does not become a label."""

    def invents(order: link.AgentOrder) -> list[link.AgentMessage]:
        if order.WhichOneof("body") != "execute":
            return []
        settled = link.Settled(handoff=order.execute.handoff, reason="MY_OWN", detail="words")
        return [link.AgentMessage(settled=settled)]

    async with pair(shown.address, 1, 1) as both:
        both.d_agents[0].answers = invents
        await both.published("invented")
        ended = await both.d.request("invented", D_BLOCKS)
        assert ended.reason == "MY_OWN"
        found = await metrics(shown)
    assert found[key("handoffs_ended_total", state="FAILED", reason=OTHER)] == 1
    assert not any("MY_OWN" in value for _, labels in found for _, value in labels)


async def test_names_are_after_the_conventions(shown: RunningBroker) -> None:
    _, _, body = await fetch(shown, "/metrics")
    families = {
        family.name: family
        for family in text_string_to_metric_families(body)
        if family.name.startswith("restow_")
    }
    assert len(families) > 10
    for name, family in families.items():
        assert re.fullmatch(r"restow(_[a-z]+)+", name)
        assert family.documentation.endswith(".")
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == f"{name}_total"
            assert set(sample.labels) <= {
                "state",
                "reason",
                "phase",
                "quota",
                "stream",
                "le",
                "version",
                "verb",
                "outcome",
            }
    assert families["restow_handoff_phase_seconds"].type == "histogram"
    assert list(BOUNDS_S) == sorted(BOUNDS_S)


async def test_probes(shown: RunningBroker) -> None:
    assert await answer(shown, "/healthz") == (200, "ok\n")
    assert await answer(shown, "/readyz") == (200, "ok\n")
    async with pair(shown.address, 1, 1) as both:
        both.d_agents[0].answers = silent
        await both.published("under way")
        reading = both.d.request("under way", D_BLOCKS, timeout_ms=5_000)
        await both.d_agents[0].order("execute")
        draining = asyncio.create_task(shown.hub.drain())
        await asyncio.sleep(0)
        assert await answer(shown, "/readyz") == (503, "draining\n")
        assert await answer(shown, "/healthz") == (200, "ok\n")
        assert (await metrics(shown))[key("draining")] == 1
        draining.cancel()
        reading.cancel()


async def test_what_is_not_there_is_said(shown: RunningBroker) -> None:
    assert (await fetch(shown, "/etc/passwd"))[0] == 404
    assert (await fetch(shown, "/metrics/.."))[0] == 404
    assert (await fetch(shown, "/metrics", "POST"))[0] == 405
    assert await answer(shown, "/healthz", "HEAD") == (200, "")


async def test_an_address_in_use_is_an_error(shown: RunningBroker) -> None:
    assert shown.http_address is not None
    with pytest.raises(ListenError, match="can't show metrics on"):
        async with broker(http_listen=shown.http_address):
            pass


async def test_by_default_nothing_is_shown(running: RunningBroker) -> None:
    assert running.http_address is None
    assert running.hub.directory.ledger.statistics.by_state[State.DONE] == 0


async def test_the_page_lists_what_there_is(shown: RunningBroker) -> None:
    # The page documents the name, kind and labels of each metric.
    async with pair(shown.address, 1, 1) as both:
        await both.hand_over("one")
        _, _, body = await fetch(shown, "/metrics")
    there = {}
    for family in text_string_to_metric_families(body):
        if family.name.startswith("restow_"):
            labels = {name for sample in family.samples for name in sample.labels} - {"le"}
            kind = "info" if family.name == "restow_broker_info" else family.type
            name = f"{family.name}_total" if kind == "counter" else family.name
            there[name] = kind, labels
    page = await asyncio.to_thread(PAGE.read_text)
    rows = re.findall(
        r"^\| `(restow_(?!agent_|store_)\w+)` \| (\w+) \|([^|]*)\|", page, re.MULTILINE
    )
    assert {
        name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    } == there


async def test_the_dashboard_asks_for_what_there_is(shown: RunningBroker) -> None:
    # The dashboard shows every metric and no unknown one, and its panels do not overlap.
    _, _, body = await fetch(shown, "/metrics")
    families = list(text_string_to_metric_families(body))
    found = {sample.name for family in families for sample in family.samples}
    # One that has no sample without a certificate.
    found |= {family.name for family in families if not family.samples}
    board = json.loads(await asyncio.to_thread(DASHBOARD.read_text))
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\b(?:restow_(?!agent_|store_)|process_)\w+", target["expr"])
    }
    assert asked <= found
    told = {name for name in found if name.startswith("restow_")}
    told -= {name for name in told if re.search(r"_(info|count|sum)$", name)}
    assert told <= asked
    # Bytes in powers of 1024, as pages and commands tell them ("bytes" is such a unit in Grafana).
    units = set(re.findall(r'"unit": "(\w+)"', json.dumps(board)))
    assert not units & {"Bps", "KBs", "MBs", "GBs", "decbytes"}
    assert {"bytes", "binBps"} <= units
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
