"""Take the pictures of docs/pictures anew: the status page, and `restow top` at two widths.

    PYTHONPATH=tests python docs/pictures/shoot.py

With 0, 1 and 500 handoffs, of a real broker to which fake engines speak. Needs Chromium.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from broker.fakes import D_BLOCKS, P_BLOCKS, POSITION, FakeAgent, broker, engine, silent
from deployment.browser import Browser, found
from restow.broker.cli.commands.top import look_at
from restow.broker.cli.views.top_screen import Top
from restow.broker.client import AdminClient, EngineSession
from restow.broker.server.serve import RunningBroker

PICTURES = Path(__file__).resolve().parent
SIZES = ((80, 24), (200, 50))
MANY = 500
PATIENT: dict[str, Any] = {"lease_s": 600.0, "timeout_s": 600.0, "grant_s": 600.0}
"""Nothing that is under way ends while pictures are taken."""
Side = list[tuple[EngineSession, list[FakeAgent]]]


async def shoot(running: RunningBroker, browser: Browser, count: int) -> None:
    """Take all pictures of what there is now."""
    url = f"http://{running.http_address}/"
    height = 1500 if count > 1 else 900
    file = PICTURES / f"status-page-{count}.png"
    await asyncio.to_thread(browser.picture, url, file, 1280, height)
    for columns, lines in SIZES:
        with AdminClient(running.address) as client:
            app = Top(partial(look_at, client), every_s=0.5)
            async with app.run_test(size=(columns, lines)) as pilot:
                await pilot.pause(1.5)
                svg = app.export_screenshot()
        await asyncio.to_thread(draw, browser, svg, PICTURES / f"top-{count}-at-{columns}.png")


def draw(browser: Browser, svg: str, file: Path) -> None:
    """Draw a terminal's picture without the fonts that it would fetch from elsewhere."""
    svg = re.sub(r"@font-face\s*{[^}]*}", "", svg).replace("Fira Code", "DejaVu Sans Mono")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is None:
        raise ValueError("a picture without a size")
    width, height = (int(float(one)) + 1 for one in box.groups())
    with tempfile.NamedTemporaryFile("w", suffix=".html") as page:
        style = "body{margin:0;background:#111} svg{width:100vw;display:block}"
        page.write(f"<style>{style}</style>{svg}")
        page.flush()
        browser.picture(f"file://{page.name}", file, width, height)


async def begin(stack: AsyncExitStack, address: str, name: str, sizes: tuple[int, ...]) -> Side:
    """Start engines of these tensor parallelisms."""
    return [
        await stack.enter_async_context(engine(address, f"{name}-{n}", tp))
        for n, tp in enumerate(sizes)
    ]


async def fill(p: Side, d: Side) -> None:
    """Begin many handoffs in every state."""
    for _, agents in d:
        for agent in agents:
            agent.answers = silent
    for index in range(MANY - 1):
        (source, fencing), (destination, _) = p[index % 3], d[index // 3 % 3]
        name = f"chatcmpl-{index:04d}"
        source.publish(name, P_BLOCKS, POSITION)
        if index % 4:
            destination.request(name, D_BLOCKS)
        if index % 5:
            for agent in fencing:
                await agent.fence(name)
    await asyncio.sleep(1)


async def main() -> None:
    """Take the pictures."""
    path = found()
    if path is None:
        raise SystemExit("no browser: tests/deployment/install_browser.sh installs one")
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(path, Path(profile))
        async with broker(http_listen="127.0.0.1:0", status_page=True, **PATIENT) as running:
            await shoot(running, browser, 0)
            async with AsyncExitStack() as stack:
                p = await begin(stack, running.address, "prefill", (2, 2, 4))
                d = await begin(stack, running.address, "decode", (4, 2, 8))
                ended = []
                for index in range(30):
                    (source, fencing), (destination, _) = p[index % 3], d[index % 3]
                    source.publish(f"done-{index}", P_BLOCKS, POSITION)
                    ended.append(destination.request(f"done-{index}", D_BLOCKS))
                    for agent in fencing:
                        await agent.fence(f"done-{index}")
                await asyncio.gather(*ended)
                p[0][0].publish("chatcmpl-first", P_BLOCKS, POSITION)
                await asyncio.sleep(0.5)
                await shoot(running, browser, 1)
                url = f"http://{running.http_address}/#handoff=done-2"
                file = PICTURES / "status-page-handoff.png"
                await asyncio.to_thread(browser.picture, url, file, 1000, 620)
                await fill(p, d)
                await d[1][1][1].drop()
                await asyncio.sleep(0.5)
                await shoot(running, browser, MANY)


if __name__ == "__main__":
    asyncio.run(main())
