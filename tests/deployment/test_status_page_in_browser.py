"""The status page in a real browser: what people see, with 0, 1 and 500 handoffs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, broker, called, engine, pair, silent
from deployment.browser import Browser, found
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


async def seen(running: RunningBroker, profile: Path) -> str:
    """The page after its script has asked the broker at least once."""
    assert CHROMIUM is not None
    browser = Browser(CHROMIUM, profile)
    page = await asyncio.to_thread(browser.dom, f"http://{running.http_address}/")
    assert re.search(r'<span id="trouble" role="status"></span>', page), "something is wrong there"
    assert '<span class="soft" id="about">broker ' in page, "its script has not run"
    assert "<title>Restow</title>" in page
    return page


def figure(page: str, name: str) -> str:
    """One of the figures above the picture."""
    found_ = re.search(rf"<dt>{name}</dt><dd[^>]*>([^<]*)</dd>", page)
    assert found_ is not None, page[:3000]
    return found_[1]


def rows(page: str, table: str) -> int:
    (body,) = re.findall(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    return len(re.findall(r"<tr>", body))


async def test_nothing_yet(shown: RunningBroker, tmp_path: Path) -> None:
    page = await seen(shown, tmp_path)
    for words in ("No engine is registered.", "Nothing is under way.", "Nothing has ended yet."):
        assert f">{words}<" in page


async def test_one_handoff_and_one_agent_missing(
    shown: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(shown.address, 2, 4) as both:
        await both.hand_over("before")
        lost = called(shown.hub.directory.connections, "remove", monkeypatch)
        await both.p_agents[1].drop()
        await lost.get()
        both.p.publish("request-1", P_BLOCKS, POSITION, lease_ms=PATIENT_MS)
        page = await seen(shown, tmp_path)
    assert figure(page, "engines ready") == "1 of 2"
    assert figure(page, "agents") == "5"
    assert (figure(page, "under way"), figure(page, "done")) == ("1", "1")
    assert (rows(page, "under-way"), rows(page, "ends")) == (1, 1)
    assert len(re.findall(r'<circle class="there"', page)) == 5
    assert len(re.findall(r'<circle class="missing"', page)) == 1
    assert len(re.findall(r'<rect class="engine lost"', page)) == 1


async def test_five_hundred(shown: RunningBroker, tmp_path: Path) -> None:
    """Lines between all that hand over, as many as they are under way; the oldest are listed."""
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
