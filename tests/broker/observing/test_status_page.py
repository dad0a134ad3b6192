"""The status page and what it shows, over HTTP, beside real handoffs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from email.message import Message
from typing import Any
from urllib.parse import urlencode

import pytest
import pytest_asyncio

from broker.content.test_prefixes import heard, hold
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine, pair
from restow.broker.http.pages import Pages, Query, healthy_page
from restow.broker.http.server import Answer, Request
from restow.broker.server.observe import overview
from restow.broker.server.serve import RunningBroker

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest_asyncio.fixture
async def shown() -> AsyncIterator[RunningBroker]:
    async with broker(http_listen="127.0.0.1:0", status_page=True) as running:
        yield running


@pytest.fixture(autouse=True)
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "KEPT_S", 0.0)


async def fetch(running: RunningBroker, path: str) -> tuple[int, Message, str]:
    """Status, headers and body."""

    def ask() -> tuple[int, Message, str]:
        try:
            with urllib.request.urlopen(f"http://{running.http_address}{path}", timeout=10) as one:
                return one.status, one.headers, one.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    return await asyncio.to_thread(ask)


async def look(running: RunningBroker) -> dict[str, Any]:
    status, headers, body = await fetch(running, "/status.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    found: dict[str, Any] = json.loads(body)
    return found


async def look_until(
    running: RunningBroker, enough: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """What is shown when it is so; events take their way through streams."""
    for _ in range(1000):
        found = await look(running)
        if enough(found):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found)


def agents(seen: dict[str, Any]) -> int:
    """How many are connected."""
    return sum(rank["agent"] for one in seen["engines"] for rank in one["ranks"])


async def test_by_default_no_name_is_told() -> None:
    async with broker(http_listen="127.0.0.1:0") as running:
        for path in ("/", "/status.json", "/handoff.json"):
            status, _, body = await fetch(running, path)
            assert status == 404
            assert "/metrics" in body


async def test_an_empty_house(shown: RunningBroker) -> None:
    found = await look(shown)
    assert (found["engines"], found["handoffs"], found["ends"], found["pairs"]) == ([], [], [], [])
    assert found["live"] == found["quarantined"] == found["bytes_read"] == 0
    assert found["ended"] == {"DONE": 0, "FAILED": 0, "EXPIRED": 0, "CANCELLED": 0}
    assert not found["draining"]
    assert found["fleet"] is None, "it is alone"


async def test_what_engines_hold_and_who_is_a_store(shown: RunningBroker) -> None:
    async with (
        engine(shown.address, "p") as (p, _),
        engine(shown.address, "store", on_keep=lambda _: None),
    ):
        hold(p, 6, [2, 4])
        await heard(shown, "p", 2)
        found = {
            one["name"]: (one["keeps"], one["held_tokens"], one["held_snapshots"])
            for one in (await look(shown))["engines"]
        }
        assert found == {"p": (False, 96, 2), "store": (True, None, None)}


async def test_engines_their_agents_and_what_is_under_way(shown: RunningBroker) -> None:
    async with pair(shown.address, 2, 1) as both:
        await both.hand_over("one")
        await both.p_agents[1].drop()
        await look_until(shown, lambda now: agents(now) == 2)
        both.p.publish("two", P_BLOCKS, POSITION)
        asked = both.d.request("two", D_BLOCKS)
        found = await look_until(
            shown, lambda now: [one["source"] for one in now["handoffs"]] == ["p"]
        )
        assert {one["name"]: one["session"] for one in found["engines"]} == {"p": True, "d": True}
        ranks = {one["name"]: one["ranks"] for one in found["engines"]}
        assert ranks["p"] == [{"rank": 0, "agent": True}, {"rank": 1, "agent": False}]
        assert ranks["d"] == [{"rank": 0, "agent": True}]
        (end,) = found["ends"]
        assert (end["handoff_id"], end["state"], end["source"], end["destination"]) == (
            *("one", "DONE", "p"),
            "d",
        )
        assert end["bytes"] > 0
        assert end["strategies"] == ["slices"]
        (live,) = found["handoffs"]
        assert live["handoff_id"] == "two"
        assert live["waits_for"]
        assert sum(one["count"] for one in found["pairs"]) == found["live"] == 1
        asked.cancel()


async def test_who_has_worked_is_known_after_many_other_ends(
    shown: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_ENDS", 2)
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
        found = await look(shown)
        assert "p2" not in {one["source"] for one in found["ends"]}
        assert {one["name"]: (one["publishes"], one["asks"]) for one in found["engines"]} == {
            "p": (True, False),
            "d": (False, True),
            "p2": (True, False),
            "idle": (False, False),
        }


async def test_a_pair_is_known_after_many_other_ends(
    shown: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "MAX_ENDS", 2)
    async with pair(shown.address, 1, 1) as both, engine(shown.address, "p2") as (seldom, agents_):
        released = seldom.publish("its own", P_BLOCKS, POSITION)
        await agents_[0].fence("its own")
        assert (await both.d.request("its own", D_BLOCKS)).done
        await released
        for number in range(3):
            await both.hand_over(f"another-{number}")
        traffic = (await look(shown))["traffic"]
    pairs = {(one["source"], one["destination"]): one for one in traffic["pairs"]}
    assert {key: one["done"] for key, one in pairs.items()} == {("p2", "d"): 1, ("p", "d"): 3}
    assert all(one["bytes"] > 0 and one["p99_s"] > 0 for one in pairs.values())
    assert traffic["pairs_left_out"] == 0
    assert sum(one["done"] for one in traffic["steps"]) == 4
    assert len(traffic["steps"]) <= 90


async def test_one_handoff_with_its_spans_and_its_timeline(shown: RunningBroker) -> None:
    async with pair(shown.address, 1, 2) as both:
        await both.hand_over("one/of these?")
        both.p.publish("waits", P_BLOCKS, POSITION)
        await look_until(shown, lambda now: now["live"] == 1)
        asked = urlencode({"id": "one/of these?", "tenant": "default"})
        status, headers, body = await fetch(shown, f"/handoff.json?{asked}")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        one = json.loads(body)
        assert (one["handoff_id"], one["state"]) == ("one/of these?", "DONE")
        kinds = [(span["kind"], span["rank"]) for span in one["spans"]]
        assert kinds == [("wait", None), ("grant", None), ("read", 0), ("read", 1)]
        assert all(span["over"] for span in one["spans"])
        assert one["timeline"][-1]["event"] == "ended"
        _, _, body = await fetch(shown, "/handoff.json?id=waits")
        assert [span["kind"] for span in json.loads(body)["spans"]] == ["wait"]
        for query in ("", "?id=nobody", "?id=waits&tenant=another", "?" + "a=1&" * 20 + "id=waits"):
            assert (await fetch(shown, f"/handoff.json{query}"))[0] in (400, 404)


async def test_names_travel_as_they_are(shown: RunningBroker) -> None:
    """They are text there, and put into the page as text."""
    async with engine(shown.address, HOSTILE):
        (one,) = (await look(shown))["engines"]
    assert one["name"] == HOSTILE
    _, _, page = await fetch(shown, "/")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "on="):
        assert way not in page


def test_the_page_is_read_as_it_was_written_wherever_the_broker_runs() -> None:
    program = (
        "from restow.broker.server.observe.status_page import status_page_html as page; "
        "assert '\\u2026' in page()"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program], env={**os.environ, **plain}, check=True)


async def test_a_browser_may_run_nothing_else(shown: RunningBroker) -> None:
    """Nothing is loaded from elsewhere, and scripts and styles are those of the page alone."""
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


async def test_a_look_is_bounded(shown: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_ENGINES", 1), ("MAX_COUNTED", 4), ("MAX_LISTED", 3), ("MAX_ENDS", 2)):
        monkeypatch.setattr(overview, name, most)
    async with pair(shown.address, 1, 1) as both:
        for index in range(3):
            await both.hand_over(f"done-{index}")
        for index in range(6):
            both.p.publish(f"live-{index}", P_BLOCKS, POSITION)
        found = await look_until(shown, lambda now: now["live"] == 6)
    assert (len(found["engines"]), found["engines_left_out"]) == (1, 1)
    # The figures are those of all engines.
    assert (found["engines_ready"], found["agents"]) == (2, 2)
    assert sum(one["count"] for one in found["pairs"]) == 4
    assert [one["handoff_id"] for one in found["handoffs"]] == ["live-0", "live-1", "live-2"]
    assert [one["handoff_id"] for one in found["ends"]] == ["done-2", "done-1"]
    assert len(found["traffic"]["steps"]) <= 90


async def test_a_page_is_made_once_for_queries_that_say_the_same_to_it() -> None:
    made: list[Query] = []

    def page(query: Query) -> Answer:
        made.append(query)
        return healthy_page(query)

    pages = Pages("broker", {"/one": page}, {"/one": ("tenant",)})
    queries = [{"tenant": "a", "x": str(number)} for number in range(20)] + [{"tenant": "b"}]
    asked = [Request("GET", "/one", {}, "", query) for query in queries]
    await asyncio.gather(*map(pages.answer, asked))
    assert made == [{"tenant": "a"}, {"tenant": "b"}]


async def test_many_who_look_cost_no_more(
    shown: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "KEPT_S", 60.0)
    first = await look(shown)
    async with pair(shown.address, 1, 1):
        assert await look(shown) == first
