"""The status page in a real browser: what people see, with 0, 1 and 500 handoffs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlencode

import pytest
import pytest_asyncio

from agent_harness.waiting import until
from broker.content.holders import heard, hold
from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, engine, pair, silent
from deployment.browser import Browser, found
from restow.broker.server.observe.status import StatusPage
from restow.broker.server.observe.web import status_page_html
from restow.broker.server.serve import RunningBroker

CHROMIUM = found()
HOSTILE = "<script>document.title='owned'</script>"
MANY = 500
PATIENT_S = 600.0
"""A browser may take its time: nothing that is under way may end before it has looked."""
PATIENT_MS = int(PATIENT_S * 1000)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO BROWSER: tests/deployment/install_browser.sh installs Chromium"
)


@pytest_asyncio.fixture
async def shown() -> AsyncIterator[RunningBroker]:
    async with broker(
        http_listen="127.0.0.1:0",
        status_page=True,
        lease_s=PATIENT_S,
        timeout_s=PATIENT_S,
        grant_s=PATIENT_S,
    ) as running:
        yield running


async def seen(running: RunningBroker, profile: Path, view: str = "") -> str:
    """Return the page after its script has asked the broker at least once."""
    assert CHROMIUM is not None
    browser = Browser(CHROMIUM, profile)
    page = await asyncio.to_thread(browser.dom, f"http://{running.http_address}/{view}")
    assert re.search(r'<span id="trouble" role="status"></span>', page), "something is wrong there"
    assert '<span class="soft" id="about">broker ' in page, "its script has not run"
    assert "<title>Restow</title>" in page
    return page


def figure(page: str, name: str) -> str:
    """Return one of the figures above the picture."""
    found_ = re.search(rf"<dt>{name}</dt><dd[^>]*>([^<]*)</dd>", page)
    assert found_ is not None, page[:3000]
    return found_[1]


def rows(page: str, table: str) -> int:
    (body,) = re.findall(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    return len(re.findall(r'<td class=""[^>]*><a ', body))


async def test_nothing_yet(shown: RunningBroker, tmp_path: Path) -> None:
    page = await seen(shown, tmp_path)
    for words in ("No engine is registered.", "Nothing is under way.", "Nothing has ended yet."):
        assert f">{words}<" in page


async def test_one_handoff_and_one_agent_missing(shown: RunningBroker, tmp_path: Path) -> None:
    async with pair(shown.address, 2, 4) as both:
        await both.hand_over("before")
        await both.p_agents[1].drop()
        engines = shown.hub.directory.members.engines
        await until(lambda: sum(len(one.agents) for one in engines.values()) == 5)
        both.p.publish("request-1", P_BLOCKS, POSITION, lease_ms=PATIENT_MS)
        page = await seen(shown, tmp_path)
    assert figure(page, "engines ready") == "1 of 2"
    assert figure(page, "agents") == "5"
    assert (figure(page, "under way"), figure(page, "DONE")) == ("1", "1")
    assert (rows(page, "under-way"), rows(page, "ends")) == (1, 1)
    assert len(re.findall(r'<circle class="there"', page)) == 5
    assert len(re.findall(r'<circle class="missing"', page)) == 1
    assert len(re.findall(r'<rect class="engine lost"', page)) == 1


async def test_what_engines_and_a_store_hold(shown: RunningBroker, tmp_path: Path) -> None:
    async with (
        engine(shown.address, "p") as (p, _),
        engine(shown.address, "store", on_keep=lambda _: None) as (store, _),
        engine(shown.address, "d"),
    ):
        hold(p, 6, [2, 4])
        hold(store, 10, [10])
        for name in ("p", "store"):
            await heard(shown, name, 2)
        page = await seen(shown, tmp_path)
    assert ">store, holds 160 tokens, 1 snapshot<" in page
    for title in ("p: m, holds 96 tokens, 2 snapshots", "d: m, holds nothing"):
        assert f"<title>{title}</title>" in page


async def test_five_hundred(shown: RunningBroker, tmp_path: Path) -> None:
    # A line with the count joins each pair that hands over; the oldest 100 handoffs are listed.
    async with AsyncExitStack() as stack:
        sides = [
            [await stack.enter_async_context(engine(shown.address, f"{s}{i}", 2)) for i in range(2)]
            for s in "pd"
        ]
        for _, agents in sides[1]:
            for agent in agents:
                agent.answers = silent
        for index in range(MANY):
            (p, p_agents), (d, _) = sides[0][index % 2], sides[1][index // 2 % 2]
            name = f"chat-{index}"
            p.publish(name, P_BLOCKS, POSITION, lease_ms=PATIENT_MS)
            d.request(name, D_BLOCKS, timeout_ms=PATIENT_MS)
            for agent in p_agents:
                await agent.fence(name)
        page = await seen(shown, tmp_path)
    assert figure(page, "under way") == str(MANY)
    assert rows(page, "under-way") == 100
    assert "the oldest 100 of 500" in page
    assert re.findall(r'<text class="count"[^>]*>(\d+)</text>', page) == ["125"] * 4


async def test_names_are_text(shown: RunningBroker, tmp_path: Path) -> None:
    async with engine(shown.address, HOSTILE, 1) as (session, _):
        session.publish(HOSTILE, P_BLOCKS, POSITION)
        page = await seen(shown, tmp_path)
    assert page.count("&lt;script&gt;document.title") >= 2
    assert len(re.findall(r"<script", page)) == 1


async def test_what_ended_is_drawn_over_time_and_by_pairs(
    shown: RunningBroker, tmp_path: Path
) -> None:
    async with pair(shown.address, 1, 1) as both:
        for number in range(3):
            await both.hand_over(f"done-{number}")
        page = await seen(shown, tmp_path)
    for name in ("ended", "bytes", "transfer", "failures"):
        chart = re.search(rf'<figure id="chart-{name}">.*?</figure>', page, re.DOTALL)
        assert chart is not None
        assert re.search(r'role="img"[^>]*aria-label="[^"]+the last quarter of an hour', chart[0])
        assert '<path class="' in chart[0]
    (table,) = re.findall(r'<table id="pairs">(.*?)</table>', page, re.DOTALL)
    assert '<th scope="row" title="p">p</th>' in table
    assert re.search(r"<span>3 done, p99 [\d.]+ [mu]?s</span>", table)
    assert "<b>" in table


async def test_a_view_is_filtered_and_sorted_by_its_address(
    shown: RunningBroker, tmp_path: Path
) -> None:
    async with pair(shown.address, 1, 1) as both:
        for number in (2, 0, 1, 10):
            await both.hand_over(f"done-{number}")
        page = await seen(shown, tmp_path, "#filter=DONE+done-1&sort-ends=-handoff")
    (body,) = re.findall(r'<table id="ends">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    assert re.findall(r"<a [^>]*>([^<]*)</a>", body) == ["done-10", "done-1"]
    assert "2 of these 4 match" in page
    assert len(re.findall(r'<th [^>]*aria-sort="descending"', page)) == 1


async def test_one_handoff_as_a_gantt_chart(shown: RunningBroker, tmp_path: Path) -> None:
    async with pair(shown.address, 1, 2) as both:
        await both.hand_over(HOSTILE)
        page = await seen(shown, tmp_path, f"#{urlencode({'handoff': HOSTILE})}")
    (dialog,) = re.findall(r"<dialog .*?</dialog>", page, re.DOTALL)
    assert ' open=""' in dialog
    assert dialog.count("<svg") == 2
    for words in ("wait", "grant", "read rank 0", "read rank 1"):
        assert f">{words}</text>" in dialog
    assert re.search(r'aria-label="[^"]*read rank 1: ', dialog)
    assert '<td class="">ended</td>' in dialog
    assert "<script" not in dialog
    assert "&lt;script&gt;" in dialog


async def test_a_dialog_that_is_closed_while_it_is_asked_for_stays_closed(
    shown: RunningBroker, tmp_path: Path
) -> None:
    assert CHROMIUM is not None
    async with pair(shown.address, 1, 1) as both:
        await both.hand_over("one")
        drawn = StatusPage(shown.hub)
        status, handoff = drawn.look({}), drawn.handoff({"id": "one"})
    # The second time that it is asked for, it is closed before the answer comes.
    first = f"""
    let looks = 0;
    const real = {json.dumps({"status.json": status, "handoff.json": handoff})};
    window.fetch = async (path) => {{
      const name = path.split("?")[0];
      if (name === "handoff.json" && ++looks === 2) {{
        paused = true;
        byId("handoff").close();
        change({{handoff: null, of: null}});  // as the page does when it hears of that
      }}
      return new Response(JSON.stringify(real[name]));
    }};
    """
    page = tmp_path / "page.html"
    page.write_text(status_page_html().replace('<script>\n"use strict";', f"<script>{first}", 1))
    dom = Browser(CHROMIUM, tmp_path / "profile").dom(f"file://{page}#handoff=one")
    (dialog,) = re.findall(r"<dialog [^>]*>", dom)
    assert '<h2 id="handoff-title">one</h2>' in dom
    assert "open" not in dialog


@pytest.mark.parametrize("how", ["select", "address"])
async def test_another_tenant_is_asked_for_also_while_paused(
    shown: RunningBroker, tmp_path: Path, how: str
) -> None:
    # Otherwise the tenant's name would stand above the figures of the one before.
    assert CHROMIUM is not None
    status = (StatusPage(shown.hub).look({}) or {}) | {"tenants": ["a", "b"]}
    chosen = {
        "select": "byId('tenant').value = 'b'; byId('tenant').dispatchEvent(new Event('change'));",
        "address": "location.hash = '#tenant=b';",
    }
    first = f"""
    const asked = [];
    function turnToOther() {{
      if (!seen) return setTimeout(turnToOther);
      paused = true;
      {chosen[how]}
    }}
    window.fetch = async (path) => {{
      asked.push(path);
      document.title = asked.join(" ");
      if (asked.length === 1) setTimeout(turnToOther);
      return new Response({json.dumps(json.dumps(status))});
    }};
    """
    page = tmp_path / "page.html"
    page.write_text(status_page_html().replace('<script>\n"use strict";', f"<script>{first}", 1))
    dom = Browser(CHROMIUM, tmp_path / "profile").dom(f"file://{page}")
    (title,) = re.findall("<title>(.*?)</title>", dom)
    assert title == "status.json status.json?tenant=b"
