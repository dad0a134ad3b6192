"""The status page and what it shows, over HTTP and as its documents, beside real handoffs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from broker.content.holders import heard, hold
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine, pair
from broker.pages import fetch
from restow.broker.server.observe.status import Bounds, StatusPage
from restow.broker.server.serve import RunningBroker

HOSTILE = "<img src=x onerror=alert(1)>"
ALWAYS = Bounds(kept_s=0.0)


def look(running: RunningBroker, bounds: Bounds = ALWAYS, **query: str) -> dict[str, Any]:
    """Return what the page draws, in the form in which the broker sends it."""
    found: dict[str, Any] = json.loads(json.dumps(StatusPage(running.hub, bounds).look(query)))
    return found


async def look_until(
    running: RunningBroker, enough: Callable[[dict[str, Any]], bool], bounds: Bounds = ALWAYS
) -> dict[str, Any]:
    """Return the first look that fulfils the condition; events need a while through streams."""
    for _ in range(1000):
        found = look(running, bounds)
        if enough(found):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found)


def figures(seen: dict[str, Any]) -> dict[str, str]:
    return {title: text for title, text, _ in seen["figures"]}


def rows(table: dict[str, Any]) -> list[dict[str, str]]:
    """Return the texts of each row by their titles."""
    return [dict(zip(table["titles"], one["texts"], strict=True)) for one in table["rows"]]


async def test_by_default_no_name_is_told() -> None:
    async with broker(http_listen="127.0.0.1:0") as running:
        for path in ("/", "/status.json", "/handoff.json"):
            status, _, body = await fetch(running, path)
            assert status == 404
            assert "/metrics" in body


async def test_an_empty_house(shown: RunningBroker) -> None:
    status, headers, body = await fetch(shown, "/status.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    found = json.loads(body)
    assert found["engines"] == found["pairs"] == found["lines"] == []
    assert rows(found["under_way"]) == rows(found["ended"]) == []
    assert figures(found) == {
        "engines ready": "0 of 0",
        "agents": "0",
        "under way": "0",
        "quarantine": "0",
        "shortest lease": "-",
        "ended": "-",
        "read": "-",
        **dict.fromkeys(("DONE", "FAILED", "EXPIRED", "CANCELLED"), "0"),
    }
    assert not found["draining"]
    assert found["fleet"] is None, "it is alone"


async def test_what_engines_hold_and_who_is_a_store(shown: RunningBroker) -> None:
    async with (
        engine(shown.address, "p") as (p, _),
        engine(shown.address, "store", on_keep=lambda _: None),
    ):
        hold(p, 6, [2, 4])
        await heard(shown, "p", 2)
        found = {one["name"]: (one["keeps"], one["held"]) for one in look(shown)["engines"]}
        assert found == {
            "p": (False, "holds 96 tokens, 2 snapshots"),
            "store": (True, "holds nothing"),
        }


async def test_engines_their_agents_and_what_is_under_way(shown: RunningBroker) -> None:
    async with pair(shown.address, 2, 1) as both:
        await both.hand_over("one")
        await both.p_agents[1].drop()
        await look_until(shown, lambda now: figures(now)["agents"] == "2")
        both.p.publish("two", P_BLOCKS, POSITION)
        asked = both.d.request("two", D_BLOCKS)
        found = await look_until(
            shown, lambda now: [one["from"] for one in rows(now["under_way"])] == ["p"]
        )
        assert {one["name"]: one["session"] for one in found["engines"]} == {"p": True, "d": True}
        assert {one["name"]: one["agents"] for one in found["engines"]} == {
            "p": [True, False],
            "d": [True],
        }
        assert figures(found)["engines ready"] == "1 of 2"
        assert figures(found)["shortest lease"].endswith(" s")
        (end,) = rows(found["ended"])
        expected = {"handoff": "one", "state": "DONE", "from": "p", "to": "d", "by": "slices"}
        assert end | expected == end
        assert found["ended"]["rows"][0]["amounts"]["read"] > 0
        (live,) = rows(found["under_way"])
        assert live["handoff"] == "two"
        assert live["waits for"]
        assert sum(one["count"] for one in found["lines"]) == 1
        assert figures(found)["under way"] == "1"
        asked.cancel()


async def test_engines_and_pairs_are_known_after_many_other_ends(shown: RunningBroker) -> None:
    async with (
        pair(shown.address, 1, 1) as both,
        engine(shown.address, "p2") as (seldom, agents_of_p2),
        engine(shown.address, "idle", agents=False),
    ):
        released = seldom.publish("its own", P_BLOCKS, POSITION)
        await agents_of_p2[0].fence("its own")
        assert (await both.d.request("its own", D_BLOCKS)).done
        await released
        for number in range(3):
            await both.hand_over(f"another-{number}")
        found = look(shown, Bounds(kept_s=0.0, ends=2))
    assert "p2" not in {one["from"] for one in rows(found["ended"])}
    assert {one["name"]: (one["publishes"], one["asks"]) for one in found["engines"]} == {
        "p": (True, False),
        "d": (False, True),
        "p2": (True, False),
        "idle": (False, False),
    }
    done = {(one["from"], one["to"]): one["done"] for one in found["pairs"]}
    assert done == {("p2", "d"): "1", ("p", "d"): "3"}
    assert all(one["bytes"] > 0 and one["p99"].endswith("s") for one in found["pairs"])
    assert found["pairs_left_out"] == 0


async def test_traffic_has_a_text_for_each_value(shown: RunningBroker) -> None:
    async with pair(shown.address, 1, 1) as both:
        for number in range(3):
            await both.hand_over(f"h-{number}")
        traffic = look(shown)["traffic"]
    steps = len(traffic["ago"])
    assert 1 <= steps <= 90
    assert set(traffic["lines"]) == {"ended", "read", "p50", "p99", "failed"}
    for line in traffic["lines"].values():
        assert len(line["values"]) == len(line["texts"]) == steps
    ended = traffic["lines"]["ended"]
    assert max(ended["values"]) > 0
    assert ended["top"] == f"top {max(ended['values']):.1f}/s"


async def test_one_handoff_with_its_spans_and_its_timeline(shown: RunningBroker) -> None:
    async with pair(shown.address, 1, 2) as both:
        await both.hand_over("one/of these?")
        both.p.publish("waits", P_BLOCKS, POSITION)
        await look_until(shown, lambda now: figures(now)["under way"] == "1")
        asked = urlencode({"id": "one/of these?", "tenant": "default"})
        status, headers, body = await fetch(shown, f"/handoff.json?{asked}")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        one = json.loads(body)
        assert (one["id"], one["state"]) == ("one/of these?", "DONE")
        whole, ranks = ([bar["label"] for bar in chart["bars"]] for chart in one["charts"])
        assert (whole, ranks) == (["wait", "grant", "read"], ["read rank 0", "read rank 1"])
        assert all(bar["over"] for chart in one["charts"] for bar in chart["bars"])
        assert one["charts"][0]["ticks"][0] == "0 us"
        assert one["timeline"][-1][1] == "ended"
        _, _, body = await fetch(shown, "/handoff.json?id=waits")
        (chart,) = json.loads(body)["charts"]
        assert [bar["label"] for bar in chart["bars"]] == ["wait"]
        for query in ("", "?id=nobody", "?id=waits&tenant=another", "?id=" + "x" * 10_000):
            assert (await fetch(shown, f"/handoff.json{query}"))[0] in (400, 404)


async def test_names_travel_as_they_are(shown: RunningBroker) -> None:
    # The page receives names as text, and inserts them as text.
    async with engine(shown.address, HOSTILE):
        (one,) = look(shown)["engines"]
    assert one["name"] == HOSTILE
    _, _, page = await fetch(shown, "/")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "on="):
        assert way not in page


def test_the_page_is_read_as_it_was_written_wherever_the_broker_runs() -> None:
    program = (
        "from restow.broker.server.observe.web import status_page_html as page; "
        "assert '\\u2026' in page()"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **plain}, check=True)


async def test_a_browser_may_run_nothing_else(shown: RunningBroker) -> None:
    # The page loads nothing from elsewhere, and only its own scripts and styles may run.
    _, headers, page = await fetch(shown, "/")
    policy = headers["Content-Security-Policy"]
    for tag in ("style", "script"):
        ((text),) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\b(?:src|href)=", page)


async def test_a_look_is_bounded(shown: RunningBroker) -> None:
    bounds = Bounds(engines=1, counted=4, listed=3, ends=2, kept_s=0.0)
    async with pair(shown.address, 1, 1) as both:
        for index in range(3):
            await both.hand_over(f"done-{index}")
        for index in range(6):
            both.p.publish(f"live-{index}", P_BLOCKS, POSITION)
        found = await look_until(shown, lambda now: figures(now)["under way"] == "6", bounds)
    assert (len(found["engines"]), found["engines_left_out"]) == (1, 1)
    # The figures are those of all engines.
    assert (figures(found)["engines ready"], figures(found)["agents"]) == ("2 of 2", "2")
    assert sum(one["count"] for one in found["lines"]) == 4
    assert [one["handoff"] for one in rows(found["under_way"])] == ["live-0", "live-1", "live-2"]
    assert found["under_way"]["note"] == "the oldest 3 of 6"
    assert [one["handoff"] for one in rows(found["ended"])] == ["done-2", "done-1"]


async def test_many_who_look_cost_no_more(shown: RunningBroker) -> None:
    page = StatusPage(shown.hub, Bounds(kept_s=60.0))
    first = page.look({})
    async with pair(shown.address, 1, 1):
        assert page.look({}) is first
