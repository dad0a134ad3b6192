"""What a request costs when engines are gone, stopped, busy, or send it elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agent_harness.waiting import until
from forked.ports import free_port
from router.fake_engine import (
    FakeEngine,
    fake_engine,
    house,
    never,
    says,
    streams,
    well,
)

SOON_S = 20
TOKEN = {"choices": [{"text": "stone"}]}
SERVER = """
import asyncio, sys
from aiohttp import web

async def answer(request):
    if request.path == "/health":
        return web.Response()
    if not (await request.json()).get("stream"):
        return web.json_response({"base": "stopped"})
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await out.prepare(request)
    await out.write(b'data: {"choices": [{"text": "one"}]}\\n\\n')
    await asyncio.Event().wait()

app = web.Application()
app.router.add_route("*", "/{path:.*}", answer)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


@contextlib.asynccontextmanager
async def process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An engine in a process of its own, whose streams are silent after a token."""
    port = free_port()
    started = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, str(port))
    try:
        while True:
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        yield started, f"http://127.0.0.1:{port}"
    finally:
        started.kill()
        await started.wait()


async def test_a_d_that_is_gone_costs_no_prefill() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with house([well], [], others=(gone,)) as one:
        assert (await one.ask())[0] == 502
        assert not one.p[0].bodies
    async with house([well], [well], others=(gone,), look_s=60.0, aside_s=0.0) as one:
        for _ in range(20):
            assert (await one.ask())[0] == 200
        assert len(one.p[0].bodies) == 20


async def test_a_d_that_is_stopped_holds_no_request_while_another_one_is_idle() -> None:
    async with (
        process() as (d, base),
        house([well], [well], others=(base,), health_s=0.2, look_s=0.05) as one,
    ):
        os.kill(d.pid, signal.SIGSTOP)
        found = await asyncio.wait_for(asyncio.gather(*(one.ask() for _ in range(8))), SOON_S)
        assert {body["base"] for _, body in found} == {one.d[0].base}


async def test_a_p_that_is_stopped_holds_no_request() -> None:
    async with (
        process() as (p, base),
        house([], [d_alone], more_p=(base,), health_s=0.2, look_s=0.05) as one,
    ):
        os.kill(p.pid, signal.SIGSTOP)
        assert (await asyncio.wait_for(one.ask(), SOON_S))[0] == 200


async def d_alone(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
    waits = "kv_transfer_params" in engine.bodies[-1]
    return await (never if waits else well)(engine, request)


async def test_a_d_that_is_not_well_is_waited_for_where_there_is_no_other() -> None:
    go_on = asyncio.Event()

    async def waits(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await well(engine, request)

    async with house([well], [waits]) as one:
        asked = asyncio.create_task(one.ask())
        await until(one.d[0].came.is_set)
        one.d[0].healthy = False
        await one.sees(one.d[0])
        for _ in range(10):
            await one.health()
        go_on.set()
        assert (await asyncio.wait_for(asked, SOON_S))[0] == 200


async def test_a_stream_that_falls_silent_ends_with_an_error() -> None:
    async with house([well], [streams(TOKEN, then=never)], silence_s=0.2) as one:
        url = one.router + "/v1/completions"
        async with asyncio.timeout(SOON_S), one.http.post(url, json={"stream": True}) as response:
            text = await response.text()
        assert "stone" in text
        assert "it was silent for 0.2 s" in text
        await until(one.d[0].left.is_set)


async def test_an_answer_that_does_not_begin_in_time_is_asked_of_another_d() -> None:
    async with house([well], [never, well], answer_s=0.2, aside_s=0.0) as one:
        while not one.d[0].bodies:
            assert (await asyncio.wait_for(one.ask(), SOON_S))[0] == 200


async def test_no_redirect_is_followed() -> None:
    async with fake_engine(well) as third:

        async def sends_on(*_: Any) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": third.base + "/v1/completions"})

        async with house([sends_on], [sends_on, d_alone], aside_s=0.0) as one:
            for _ in range(8):
                status, body = await one.ask(**{"x-api-key": "k"})
                assert (status, body["base"]) == (200, one.d[1].base)
            one.d[1].answer = sends_on
            assert (await one.ask())[0] == 502
        assert not third.headers


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("code", [429, 503])
async def test_what_one_engine_has_no_room_for_is_asked_of_another(side: str, code: int) -> None:
    busy = [says(code), well]
    async with house(busy, [well]) if side == "p" else house([well], busy) as one:
        if side == "p":
            one.d[0].answer = waits_for(one.p[1])
        engines = one.p if side == "p" else one.d
        while not engines[0].bodies:
            assert (await asyncio.wait_for(one.ask(), SOON_S))[0] == 200


def waits_for(p: FakeEngine) -> Any:
    async def answer(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        handoff_id = engine.ids[-1]
        await until(lambda: handoff_id in p.ids)
        return await well(engine, request)

    return answer


async def test_busy_p_s_leave_their_work_to_nobody() -> None:
    """D would have to compute what there are P's for; the client hears that they are busy."""
    async with house([says(429), says(429)], [d_alone]) as one:
        assert await one.ask() == (429, {"error": {"message": "from 429"}})


async def test_an_engine_s_cookies_reach_no_other_client() -> None:
    async def bakes(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"Set-Cookie": "session=mine"})

    # By its name: of an address aiohttp keeps no cookies.
    async with fake_engine(bakes) as d:
        name = d.base.replace("127.0.0.1", "localhost")
        async with house([well], [], others=(name,)) as one:
            for _ in range(2):
                assert (await one.ask())[0] == 200
        assert all("cookie" not in headers for headers in d.headers)


async def test_a_request_has_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with house([well], [says(500), says(500), says(500)]) as one:
        assert (await one.ask({"prompt": "x" * 10_000}))[0] == 500
    (line,) = [one for one in caplog.messages if "health" not in one]
    assert "tries=3" in line
    assert len(line) < 1000
