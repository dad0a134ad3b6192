"""What clients can take of the router: connections, memory, time and lines of its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from agent_harness.waiting import until
from forked.ports import free_port
from router.fake_engine import FakeEngine, House, fake_engine, house, well

SOON_S = 20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Streams]]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@contextlib.asynccontextmanager
async def clients() -> AsyncIterator[Connect]:
    """Opens connections that say something, and closes them in the end."""
    opened: list[asyncio.StreamWriter] = []

    async def connect(router: str, said: bytes = b"", limit: int = 1 << 16) -> Streams:
        host, port = router.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
        opened.append(writer)
        writer.write(said)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in opened:
            writer.transport.abort()


async def is_let_go(reader: asyncio.StreamReader) -> None:
    """Wait until the router has closed a connection without a word."""
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), SOON_S) == b""


async def is_served(one: House) -> None:
    assert (await asyncio.wait_for(one.ask(), SOON_S))[0] == 200


async def test_the_oldest_idle_connection_makes_room_for_a_new_one() -> None:
    async with house([well], [well], max_connections=5) as one, clients() as connect:
        idle = [await connect(one.router) for _ in range(5)]
        await is_served(one)
        await is_let_go(idle[0][0])
        assert not idle[-1][0].at_eof()
        for _ in range(30):
            await connect(one.router)
        await is_served(one)


async def test_a_connection_with_a_request_makes_no_room() -> None:
    async def waits(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await well(engine, request)

    go_on = asyncio.Event()
    async with house([well], [waits], max_connections=2) as one, clients() as connect:
        asked = asyncio.create_task(one.ask())
        await until(one.d[0].came.is_set)
        for _ in range(10):
            await connect(one.router)
        go_on.set()
        assert (await asyncio.wait_for(asked, SOON_S))[0] == 200


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"X: y"], ids=["nothing", "a line", "half"])
async def test_a_client_that_sends_no_request_is_let_go(said: bytes) -> None:
    async with house([well], [well], client_s=0.2) as one, clients() as connect:
        reader, _ = await connect(one.router, said)
        await is_let_go(reader)


async def test_a_body_that_does_not_come_is_waited_for_no_longer() -> None:
    async with house([well], [well], client_s=0.2) as one, clients() as connect:
        reader, _ = await connect(one.router, HEAD + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), SOON_S)
        assert not one.p[0].bodies


async def test_a_client_that_does_not_read_is_let_go_with_its_request() -> None:
    async def floods(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        event = json.dumps({"choices": [{"text": "x" * (1 << 16)}]}).encode()
        while True:
            await out.write(b"data: " + event + b"\n\n")

    async with house([well], [floods], client_s=0.2) as one, clients() as connect:
        body = b'{"stream": true}'
        said = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        reader, _ = await connect(one.router, said, limit=1)
        await reader.read(1)
        await asyncio.wait_for(until(one.d[0].left.is_set), SOON_S)
        one.d[0].answer = well
        await is_served(one)


async def test_bodies_under_way_have_a_limit_together() -> None:
    limits = house([well], [well], client_s=1.0, max_body_bytes=1000, max_bodies_bytes=5000)
    async with limits as one, clients() as connect:
        unfinished = HEAD + b"Content-Length: 1000\r\n\r\n" + b" " * 999
        held = [await connect(one.router, unfinished) for _ in range(5)]
        while (await one.ask({"prompt": "x" * 100}))[0] != 503:
            pass
        for reader, _ in held:
            assert await asyncio.wait_for(reader.readline(), SOON_S)
        await is_served(one)


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with house([well], [well]) as one, clients() as connect:
        reader, _ = await connect(one.router, HEAD + b"Content-Length: 5000000\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), SOON_S)
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        reader, writer = await connect(one.router, chunked)
        for _ in range(5):
            writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), SOON_S)
        assert not one.p[0].bodies


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with house([well], [well]) as one, clients() as connect:
        said = HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        reader, writer = await connect(one.router, said)
        assert b" 100 " in await asyncio.wait_for(reader.readline(), SOON_S)
        assert await reader.readline() == b"\r\n"
        writer.write(b"{}")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), SOON_S)


@pytest.mark.parametrize("words", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": ' + b"1" * 5000])
async def test_odd_json_is_the_client_s_fault(words: bytes) -> None:
    async with house([well], [well]) as one:
        async with one.http.post(one.router + "/v1/completions", data=words) as response:
            assert response.status == 400
        assert not one.p[0].bodies


async def test_json_nested_as_deeply_as_can_be_read_costs_no_more_than_its_request() -> None:
    async with house([well], [well]) as one:
        for depth in range(900, 1000, 3):
            words = b'{"a":' * depth + b"1" + b"}" * depth
            async with one.http.post(one.router + "/v1/completions", data=words) as response:
                assert response.status in (200, 400), await response.text()


async def test_a_compressed_body_is_refused() -> None:
    async with house([well], [well]) as one:
        url, headers = one.router + "/v1/completions", {"Content-Encoding": "gzip"}
        async with one.http.post(url, data=b"{}", headers=headers) as response:
            assert response.status == 415


def few_files() -> None:
    """Let the process have as many files open as a shell often has."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


async def test_a_thousand_idle_clients_take_no_file_and_no_line_of_the_log(tmp_path: Path) -> None:
    """More than the process may have files; garbage too has few lines."""
    async with fake_engine(well) as p, fake_engine(well) as d, clients() as connect:
        address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
        words = ["router", "--listen", address, "--prefill", p.base, "--decode", d.base]
        with log.open("wb") as err:
            router = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "restow.broker.cli.main", *words),
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                preexec_fn=few_files,
            )
        try:
            assert router.stdout
            line = await asyncio.wait_for(router.stdout.readline(), SOON_S)
            assert f"http://{address}" in line.decode()
            async with House.of(f"http://{address}", [p], [d]) as one:
                for _ in range(1024):
                    await connect(one.router)
                await is_served(one)
                for _ in range(200):
                    reader, _ = await connect(
                        one.router, b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"
                    )
                    await asyncio.wait_for(reader.readline(), SOON_S)
                await is_served(one)
            router.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(router.wait(), SOON_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                router.kill()
        events = [line for line in log.read_text().splitlines() if line.startswith("20")]
        assert len(events) < 50
