"""The server of metrics and probes: many connections, wrong requests, and pages that fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest
from aiohttp import ClientSession, web

from restow.broker.http.server import (
    MAX_OPEN,
    Answer,
    HttpPages,
    Page,
    Query,
    healthy_page,
    http_server,
)


@asynccontextmanager
async def serving(pages: HttpPages) -> AsyncIterator[str]:
    async def answering(request: web.BaseRequest) -> Answer:
        return await pages.answer(request.method, request.path, request.query)

    async with http_server("127.0.0.1:0", answering, {"X-Own": "1"}) as address:
        yield address


def pages(more: Mapping[str, Page] | None = None, answer_s: float = 5.0) -> HttpPages:
    return HttpPages("process", {"/healthz": healthy_page, **(more or {})}, {}, answer_s)


async def ask(address: str, path: str = "/healthz", method: str = "GET") -> tuple[int, str]:
    async with ClientSession() as http, http.request(method, f"http://{address}{path}") as answer:
        assert answer.headers["Server"] == "restow"
        assert answer.headers["X-Own"] == "1"
        return answer.status, await answer.text()


async def test_a_probe_is_answered_whoever_holds_connections() -> None:
    async with serving(pages()) as address:
        host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2 * MAX_OPEN)]
        assert await ask(address) == (200, "ok\n")
        # The oldest have been closed, the newest are still there.
        assert await silent[0][0].read() == b""
        assert not silent[-1][0].at_eof()
        for _, writer in silent:
            writer.close()


async def test_what_is_no_http_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(pages()) as address:
        host, port = address.split(":")
        for words in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"GET /" + b"x" * 10_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(words)
            assert b" 400 Bad Request" in await reader.readline()
            writer.close()
        assert await ask(address) == (200, "ok\n")
    assert not caplog.records


async def test_a_page_that_fails_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def page(_: Query) -> Answer:
        raise LookupError("a fault of ours")

    async with serving(pages({"/broken": page})) as address:
        async with ClientSession() as http, http.get(f"http://{address}/broken") as answer:
            assert answer.status == 500
        assert await ask(address) == (200, "ok\n")
    assert [one.levelno for one in caplog.records] == [logging.ERROR]
    assert "a fault of ours" in caplog.text


async def test_it_ends_whoever_reads_slowly() -> None:
    def page(_: Query) -> Answer:
        return Answer(HTTPStatus.OK, "text/plain", bytes(64 << 20))

    async with asyncio.timeout(20):
        async with serving(pages({"/large": page})) as address:
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_methods_and_paths() -> None:
    async with serving(pages()) as address:
        assert await ask(address, method="HEAD") == (200, "")
        assert (await ask(address, method="POST"))[0] == 405
        assert await ask(address, "/etc/passwd") == (404, "the pages are /healthz\n")
        assert (await ask(address, "/healthz/.%2e"))[0] == 404


async def test_a_busy_process_is_told_within_a_bounded_time() -> None:
    async with serving(pages(answer_s=0.2)) as address:
        asked = asyncio.create_task(asyncio.to_thread(_get, address))
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - the loop is to be busy
        assert b"503" in await asked
        assert await ask(address) == (200, "ok\n")


def _get(address: str) -> bytes:
    import socket

    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return one.makefile("rb").read()


async def test_a_page_is_made_once_for_queries_that_say_the_same_to_it() -> None:
    made: list[Query] = []

    def page(query: Query) -> Answer:
        made.append(query)
        return healthy_page(query)

    shown = HttpPages("broker", {"/one": page}, {"/one": ("tenant",)})
    queries = [{"tenant": "a", "x": str(number)} for number in range(20)] + [{"tenant": "b"}]
    await asyncio.gather(*(shown.answer("GET", "/one", query) for query in queries))
    assert made == [{"tenant": "a"}, {"tenant": "b"}]
